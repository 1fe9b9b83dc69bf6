"""Kernelution: Synvolution with a learned polynomial of the eigenvalues.

Source: Zhang et al., "Converting Transformers into DGNNs Form" (preprint, 2025), Eq. 10-15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import functional
from ..errors import GraphFilterError
from ..functional import Kernel
from ..ops.polynomials import recurrence
from ..shift.attention import AttentionShift
from .core.base import LARGEST_ORDER
from .core.build import register_filter
from .core.fields import check_limits
from .core.unitary_spectrum import damped_polynomial
from .synvolution import Synvolution, SynvolutionConfig


class Kernelution(Synvolution):
    """Synvolution with ``exp(i p(Lambda))``, where ``p = sum_k g_k w_k T_k`` is a Chebyshev polynomial (Eq. 12).

    The coefficients ``w`` start at 2 / (K+1), the zeroth at half of that, as in the authors' code. ``g_k`` is the
    damping of the kernel (Table 6).
    """

    config: KernelutionConfig

    def polynomial(self) -> nn.Parameter:
        K, shape = self.config.K, (self.sets,) if self.config.per_head else ()
        self.steps, self.factors = recurrence("chebyshev", K), self.config.damping()
        return nn.Parameter(torch.empty(*shape, K + 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        assert self.w is not None
        nn.init.constant_(self.w, 2 / self.w.shape[-1])
        nn.init.constant_(self.w[..., :1], 1 / self.w.shape[-1])

    def response(self, eigenvalues: Tensor) -> Tensor:
        assert self.w is not None
        return damped_polynomial(eigenvalues, self.w, self.factors, self.steps)

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        assert self.w is not None
        rows = self.w.view(-1, self.w.shape[-1])
        return self.penalised(
            super().filtered(shift, value),
            kernel_polynomial=lambda: torch.stack([functional.kernel_polynomial_loss(w) for w in rows]).mean(),
        )


@register_filter("kernelution")
@dataclass(frozen=True)
class KernelutionConfig(SynvolutionConfig):
    """Kernelution, Synvolution with a learned polynomial of the eigenvalues, for encoders.

    Kernelution (Zhang et al., 2025) adds to Synvolution a Chebyshev polynomial of the eigenvalues with learned
    coefficients, so it learns a frequency response. A fixed factor damps each coefficient against oscillations. It
    replaces attention at linear cost and has no causal form.

    Departures from the paper: those of ``SynvolutionConfig``, and the weight of the loss. Eq. 14 weighs the loss of the
    task by 1 - eta and the kernel polynomial loss by eta. Here the first has weight 1 and the second ``gamma_kernel``.
    With ``gamma_kernel = eta / (1 - eta)``, both have the same minimum.

    Args:
        K (int, default 2): Order of the Chebyshev polynomial, 0 to 1000. The paper uses 2.
        kernel (str, default "dirichlet"): Damping of the coefficients: ``"dirichlet"`` (none), ``"fejer"``,
            ``"jackson"``, ``"lanczos"``, ``"lorentz"``, ``"vekic"`` or ``"wang"``; see ``functional.gibbs_damping``.
        M (int, default 3): Power of the ``"lanczos"`` kernel, 1 to 1000.
        xi (float, default 4.0): Resolution of the ``"lorentz"`` kernel, not 0.
        a (float, default 0.5): Factor in the ``"wang"`` kernel exp(-(a k / (K+1))^b), >= 0.
        b (float, default 2.0): Exponent in the ``"wang"`` kernel, > 0.
        gamma_kernel (float, default 0.001): Weight of the kernel polynomial loss (Eq. 11), which
            ``RegularizerCallback`` adds in training. The paper's eta is 0.001 to 0.1.
        per_head (bool, default False): Give each head its own eigenvalues, eigenvectors and coefficients. If False, a
            layer has one set, as in the paper.
        orders, permutation, hidden: Options of the rotations, see ``SynvolutionConfig``.
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> KernelutionConfig(K=3, kernel="jackson").penalties
        {'kernel_polynomial': 0.001}
    """

    module = Kernelution
    formula = "Phi^-1 exp(i sum_k w_k T_k(Lambda)) Phi V"

    K: int = 2
    kernel: Kernel = "dirichlet"
    M: int = 3
    xi: float = 4.0
    a: float = 0.5
    b: float = 2.0
    gamma_kernel: float = 1e-3

    @property
    def penalties(self) -> dict[str, float]:
        return {"kernel_polynomial": self.gamma_kernel}

    def damping(self) -> tuple[float, ...]:
        """Return the damping factors ``g_0 ... g_K``."""
        with torch.device("cpu"):  # filters are built on the meta device
            g = functional.gibbs_damping(self.kernel, self.K, M=self.M, xi=self.xi, a=self.a, b=self.b)
        return tuple(g.tolist())

    def validate(self) -> None:
        super().validate()
        check_limits(self, "K", "gamma_kernel", least=0)
        check_limits(self, "K", "M", most=LARGEST_ORDER)
        try:
            self.damping()
        except GraphFilterError as error:
            raise GraphFilterError(f"KernelutionConfig: {str(error).removeprefix('gibbs_damping: ')}") from None
