"""A polynomial of the attention matrix, in a basis of choice.

Source: Defferrard et al. (2016), Chebyshev; He et al. (2021), Bernstein; Wang and Zhang (ICML 2022), Jacobi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError
from ..functional.matrix_polynomial import known_zero
from ..ops.combine import combine
from ..ops.polynomials import applied, highest_order, identity_coefficients, monomials, recurrence
from ..shift.operator import ShiftOperator
from .core.base import LARGEST_ORDER, FilterConfig
from .core.build import register_filter
from .core.fields import check_counts
from .core.power_series import PowerSeries
from .core.site import AttentionSite

CITATION = """@inproceedings{defferrard2016chebnet,
  title     = {Convolutional Neural Networks on Graphs with Fast Localized Spectral Filtering},
  author    = {Micha{\\"e}l Defferrard and Xavier Bresson and Pierre Vandergheynst},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2016}
}"""


class Polynomial(PowerSeries):
    """``H = sum_k theta_k T_k(A)``, ``theta_k`` = those of A itself plus what is learned, ``theta`` (heads, K+1), 0 at
    the start, so that H is A bit for bit in every basis."""

    per_head = ("theta",)
    theta: Tensor
    config: PolynomialConfig

    def __init__(self, config: PolynomialConfig, site: AttentionSite):
        super().__init__(config, site)
        in_powers = config.basis in ("monomial", "bernstein")
        self.steps = () if in_powers else recurrence(config.basis, *config.parameters)
        self.rows = monomials(config.basis, *config.parameters)

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        return (self.config.K + 1,)

    @property
    def learned(self) -> Tensor:
        return self.theta.tanh() if self.config.theta == "tanh" else self.theta

    def coefficients(self) -> dict[str, Tensor]:
        """``theta_0`` ... ``theta_K`` as they enter the formula, (heads,)."""
        theta = self.learned.detach() + self.theta.new_tensor(self.config.start())
        return {f"theta_{k}": column for k, column in enumerate(theta.unbind(1))}

    def series(self, dtype: torch.dtype) -> Tensor:
        if self.config.basis == "monomial":
            return self.learned.to(dtype)
        rows = torch.tensor(self.rows, dtype=dtype, device=self.theta.device)
        return (self.learned.to(dtype)[..., None] * rows).sum(-2)  # autocast would round a product of matrices

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        if not self.steps:
            return super().forward(shift, value)
        learned = self.learned
        shift.exact = known_zero(learned)
        attended = shift(value)
        terms = zip(learned.unbind(1), applied(shift, attended, shift.identity(value), self.steps), strict=True)
        return combine([(torch.ones_like(learned[:, 0]), attended), *terms])


@register_filter("polynomial")
@dataclass(frozen=True)
class PolynomialConfig(FilterConfig):
    """A polynomial of the attention matrix, sum_k theta_k T_k(A); it starts as A.

    Args:
        K: order, the applications of A; 1 to 1000 of monomials, at most 12 to 15 of others, of Jacobi by a and b.
        basis: ``"monomial"``, ``"chebyshev"``, ``"legendre"``, ``"jacobi"`` or ``"bernstein"``.
        a, b: of the Jacobi basis, 1 by default; no other basis has any.
        theta: what is learned is ``"free"``, or bounded by 1 with ``"tanh"``.

    Example:
        >>> PolynomialConfig(K=2, basis="bernstein").start()
        [0.0, 0.5, 1.0]
    """

    module = Polynomial
    citation = CITATION
    formula = "sum_k theta_k T_k(A) V"
    cost = "K applications of A"

    K: int = 3
    basis: Literal["monomial", "chebyshev", "legendre", "jacobi", "bernstein"] = "chebyshev"
    a: float | None = None
    b: float | None = None
    theta: Literal["free", "tanh"] = "free"

    def validate(self) -> None:
        check_counts(self, K=LARGEST_ORDER)
        if self.basis != "jacobi" and (self.a, self.b) != (None, None):
            raise GraphFilterError(f"PolynomialConfig: a and b are of the Jacobi basis, and basis is {self.basis!r}")
        self.start()  # raises where a basis has no A
        highest = highest_order(self.basis, *self.parameters)
        if highest < self.K:
            other = f"K <= {highest}, or basis='monomial'" if highest else "a and b nearer to 0"
            raise GraphFilterError(
                f"PolynomialConfig: K={self.K} is too high for the {self.basis} basis, whose terms cancel to less than "
                f"float32 resolves: choose {other}"
            )

    @property
    def parameters(self) -> tuple[int, float, float]:
        return self.K, 1.0 if self.a is None else self.a, 1.0 if self.b is None else self.b

    def start(self) -> list[float]:
        """``theta_0 ... theta_K`` of A itself."""
        return identity_coefficients(self.basis, *self.parameters)
