"""Converter: a learned unitary filter in the place of attention, synvolution or kernelution, linear in the tokens.

Source: Zhang et al., "Converting Transformers into DGNNs Form" (preprint, 2025), Eq. 4-15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .. import functional
from ..errors import GraphFilterError, shown
from ..functional import Kernel
from ..ops.polynomials import recurrence
from ..ops.unitary import Permutation, filter_tokens
from ..shift import AttentionShift, repeat_heads
from .base import LARGEST_ORDER, AttentionSite
from .build import register_filter
from .fields import check_counts
from .replacing import ReplacingConfig, ReplacingFilter
from .spectrum import Spectrum, damped_polynomial, real_form, reflected

CITATION = """@article{zhang2025converter,
  title   = {Converting Transformers into DGNNs Form},
  author  = {Jie Zhang and Mao-Hsuan Mao and Bo-Wei Chiu and Min-Te Sun},
  journal = {arXiv preprint arXiv:2502.00585},
  year    = {2025}
}"""


class Synvolution(ReplacingFilter):
    """``zeta Re z + (1 - zeta) Im z`` of ``z = Phi^-1 [exp(i Lambda) * (Phi value)]``: O(n d) time and memory.

    ``Phi`` is unitary, of full rank and dense, a product of Givens rotations of neighbouring tokens (Eq. 7); the child
    ``spectrum`` makes their angles and the eigenvalues Lambda of the module's input. Query and key are not used. D of
    Eq. 7 meets its inverse, so it is left out.

    ``zeta``, one a head, starts at 1. Where the authors clamp it to [0, 1], and beyond a bound its gradient is lost, a
    step out of the interval is reflected into it.

    For encoders: every token reaches every other, so there is no causal form.
    """

    config: SynvolutionConfig
    causal_form: ClassVar[bool] = False
    w: nn.Parameter | None

    def __init__(self, config: SynvolutionConfig, site: AttentionSite):
        super().__init__(config, site)
        assert site.hidden_size is not None
        self.sets = site.heads if config.per_head else 1
        hidden = config.hidden or site.hidden_size
        self.spectrum = Spectrum(site.hidden_size, hidden, sets=self.sets, orders=config.orders, phase=False)
        self.zeta = nn.Parameter(torch.empty(site.heads))
        self.w = self.polynomial()
        self.reset_parameters()

    def polynomial(self) -> nn.Parameter | None:
        """Its coefficients, (K+1,) or (heads, K+1), not yet set; None where the eigenvalues are taken as they are."""
        return None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.spectrum.reset_parameters()
        nn.init.ones_(self.zeta)

    def coefficients(self) -> dict[str, Tensor]:
        """``zeta`` in [0, 1], ``w_0`` ... ``w_K``, (1,) or (heads,), and the ``gate`` of a blend."""
        by_name = {**super().coefficients(), "zeta": reflected(self.zeta.detach())}
        w = by_name.pop("w", None)
        if w is None:
            return by_name
        # by index: FSDP2 may have sharded the dimension that unbind would go along
        return {**by_name, **{f"w_{k}": w[..., k].reshape(-1) for k in range(w.shape[-1])}}

    def response(self, eigenvalues: Tensor) -> Tensor:
        """The argument of the filter at the eigenvalues (batch, sets, tokens), radians."""
        return eigenvalues

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        assert shift.hidden is not None
        if torch.onnx.is_in_onnx_export():
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__} computes with complex numbers, which ONNX has not; use "
                "torch.export"
            )
        if value.shape[2] != shift.hidden.shape[1]:
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__} rotates the {shift.hidden.shape[1]} tokens of the module's "
                f"input, and the values are of {value.shape[2]}"
            )
        eigenvalues, angles = self.spectrum(shift.hidden)
        _, there = shift.visible()
        value, response = repeat_heads(value, self.heads), self.response(eigenvalues)
        out = filter_tokens(value, response, angles, there=there, permutation=self.config.permutation)
        return real_form(out, self.zeta.view(-1, 1, 1)).to(value.dtype)


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


@register_filter("synvolution")
@dataclass(frozen=True)
class SynvolutionConfig(ReplacingConfig):
    """Synvolution, a unitary filter with learned eigenvalues and eigenvectors, with linear cost; for encoders.

    Args:
        per_head: eigenvalues and eigenvectors of its own for each head, else one set a layer, the paper's.
        orders: pairs of Hessenberg factors, L of Eq. 7, 1 to 64; the paper's is 1, and cost grows with it.
        permutation: of the tokens before each pair, P of Eq. 7: ``"identity"``, the paper's; ``"stride"``, every second
            token behind the others; or ``"bit_reversal"``, by the reversed binary digits of the places. Learned ones
            are not there.
        hidden: features of the layers of the two networks that make eigenvalues and angles, 1 to 16384; ``None`` for
            the features of the module's input.
        init, window, sinks, far, position_bias: as for every filter in the place of attention, see ``ReplacingConfig``.

    Example:
        >>> SynvolutionConfig(orders=2, permutation="stride").starts_as_original
        False
    """

    module = Synvolution
    citation = CITATION
    formula = "Phi^-1 exp(i Lambda) Phi V, Phi of Givens rotations"
    cost = "linear in the tokens"

    per_head: bool = False
    orders: int = 1
    permutation: Permutation = "identity"
    hidden: int | None = None

    def validate(self) -> None:
        super().validate()
        check_counts(self, orders=64, hidden=16_384)


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
        if not 0 <= self.K <= LARGEST_ORDER:
            limit = ">= 0" if self.K < 0 else f"at most {LARGEST_ORDER}"
            raise GraphFilterError(f"KernelutionConfig: K must be {limit}, got {shown(self.K)}")
        if self.M > LARGEST_ORDER:
            raise GraphFilterError(f"KernelutionConfig: M must be at most {LARGEST_ORDER}, got {shown(self.M)}")
        if self.gamma_kernel < 0:
            raise GraphFilterError(f"KernelutionConfig: gamma_kernel must be >= 0, got {shown(self.gamma_kernel)}")
        try:
            self.damping()
        except GraphFilterError as error:
            raise GraphFilterError(f"KernelutionConfig: {str(error).removeprefix('gibbs_damping: ')}") from None
