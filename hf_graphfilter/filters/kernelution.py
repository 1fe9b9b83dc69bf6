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
    """Synvolution with a learned Chebyshev polynomial of the eigenvalues: ``exp(i p(Lambda))``, ``p = sum_k g_k w_k
    T_k`` (Eq. 12).

    The coefficients ``w`` start at 2 / (K+1), the zeroth at half of that, as in the authors' code; ``g_k`` is the
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
    """Kernelution, Synvolution with a learned polynomial of the eigenvalues, with linear cost; for encoders.

    Eq. 14 of the paper weighs the loss of the task by 1 - eta and the kernel polynomial loss by eta. Divided by 1 - eta
    that is the task plus ``gamma_kernel`` times the loss, with the same minimum: ``gamma_kernel = eta / (1 - eta)``.

    Args:
        K: order of the Chebyshev polynomial, 0 to 1000; the paper's is 2.
        kernel: the damping of its coefficients: ``"dirichlet"`` (none), ``"fejer"``, ``"jackson"``, ``"lanczos"`` (with
            M), ``"lorentz"`` (xi), ``"vekic"`` or ``"wang"`` (a and b); see ``functional.gibbs_damping``.
        M: power, 1 to 1000.
        xi: resolution, not 0.
        a, b: >= 0 and > 0.
        gamma_kernel: weight of the kernel polynomial loss (Eq. 11) that ``RegularizerCallback`` adds; the paper's eta
            is 0.001 to 0.1.
        per_head, orders, permutation, hidden: as of ``SynvolutionConfig``; ``per_head`` the coefficients too.
        init, window, sinks, far, position_bias: as for every filter in the place of attention, see ``ReplacingConfig``.

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
        """``g_0 ... g_K``."""
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
