"""A polynomial of the attention matrix, in a basis of your choice.

Source: Defferrard et al. (2016), Chebyshev; He et al. (2021), Bernstein; Wang and Zhang (ICML 2022), Jacobi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError
from ..functional.matrix_polynomial import known_zero
from ..ops.combine import combine
from ..ops.polynomials import (
    applied,
    bernstein_in_chebyshev,
    highest_order,
    identity_coefficients,
    monomials,
    recurrence,
)
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
    """The filter ``H = sum_k theta_k T_k(A)``.

    ``theta_k`` is the coefficient that A itself has in the basis, plus a learned number. The learned numbers ``theta``
    (heads, K+1) start at 0, so H is A bit for bit in every basis.
    """

    per_head = ("theta",)
    theta: Tensor
    config: PolynomialConfig

    def __init__(self, config: PolynomialConfig, site: AttentionSite):
        super().__init__(config, site)
        self.steps = () if config.basis == "monomial" else recurrence(config.basis, *config.parameters)
        self.rows = monomials(config.basis, *config.parameters)
        # sums of powers of A are the faster form; up to this bound, float32 loses less than six of its 24 bits
        self.in_powers = max(sum(map(abs, row)) for row in self.rows) <= 2**5
        # the Bernstein polynomials have no recurrence of three terms: beyond the bound they are summed in another basis
        self.expansion = bernstein_in_chebyshev(config.K) if config.basis == "bernstein" else None

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        return (self.config.K + 1,)

    @property
    def learned(self) -> Tensor:
        return self.theta.tanh() if self.config.theta == "tanh" else self.theta

    def coefficients(self) -> dict[str, Tensor]:
        """Return ``theta_0`` ... ``theta_K`` as they enter the formula, each (heads,)."""
        columns = zip(self.learned.detach().unbind(1), self.config.start(), strict=True)
        return {f"theta_{k}": column + start for k, (column, start) in enumerate(columns)}  # numbers add to shards too

    def series(self, dtype: torch.dtype) -> Tensor:
        return self.learned.to(dtype) if self.config.basis == "monomial" else self._expand(self.rows, dtype)

    def _expand(self, rows: list[list[float]], dtype: torch.dtype) -> Tensor:
        """Return the learned coefficients (heads, K+1) in the basis in which row k of ``rows`` is T_k."""
        basis_change = torch.tensor(rows, dtype=dtype, device=self.theta.device)
        return (self.learned.to(dtype)[..., None] * basis_change).sum(-2)  # autocast would round a product of matrices

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        if not self.steps or (self.in_powers and value.dtype in (torch.float32, torch.float64)):
            return super().forward(shift, value)
        dtype = torch.promote_types(value.dtype, torch.float32)
        coefficients = self.learned if self.expansion is None else self._expand(self.expansion, dtype)
        shift.exact = known_zero(coefficients)
        attended = shift(value)
        theta = coefficients.t().contiguous().unbind()
        terms = zip(theta, applied(shift, attended, shift.identity(value), self.steps), strict=True)
        return combine([(torch.ones_like(theta[0]), attended), *terms])


@register_filter("polynomial")
@dataclass(frozen=True)
class PolynomialConfig(FilterConfig):
    """A polynomial of the attention matrix in a basis of your choice, sum_k theta_k T_k(A).

    Each head learns K+1 coefficients, so it can learn any frequency response of order K. The basis decides how the
    coefficients are scaled against each other. The Chebyshev basis comes from Defferrard et al. (2016), the Bernstein
    basis from He et al. (2021), the Jacobi basis from Wang and Zhang (ICML 2022).

    Departure from the papers: the filter starts as A itself in every basis, so the patched model equals the original.
    The learned numbers are added to the coefficients of A.

    Args:
        K (int, default 3): Order, which is also the number of applications of A. 1 to 1000 in the monomial basis. In
            the other bases terms cancel, so K is at most 15 (Legendre), 14 (Chebyshev) or 12 (Bernstein). In the Jacobi
            basis the limit depends on a and b.
        basis (str, default "chebyshev"): The polynomials T_k: ``"monomial"``, ``"chebyshev"``, ``"legendre"``,
            ``"jacobi"`` or ``"bernstein"``.
        a (float or None, default None): First parameter of the Jacobi basis; ``None`` is 1. No other basis has it.
        b (float or None, default None): Second parameter of the Jacobi basis; ``None`` is 1. No other basis has it.
        theta (str, default "free"): What is added to the coefficients of A. ``"free"``: the parameter itself.
            ``"tanh"``: its tanh, which lies between -1 and 1.

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
            raise GraphFilterError(f"PolynomialConfig: a and b belong to the Jacobi basis, but basis is {self.basis!r}")
        self.start()  # raises where a basis has no A
        highest = highest_order(self.basis, *self.parameters)
        if highest < self.K:
            advice = f"K <= {highest}, or basis='monomial'" if highest else "a and b nearer to 0"
            raise GraphFilterError(
                f"PolynomialConfig: K={self.K} is too high for the {self.basis} basis, whose terms cancel to less than "
                f"float32 resolves: choose {advice}"
            )

    @property
    def parameters(self) -> tuple[int, float, float]:
        return self.K, 1.0 if self.a is None else self.a, 1.0 if self.b is None else self.b

    def start(self) -> list[float]:
        """Return ``theta_0 ... theta_K`` of A itself."""
        return identity_coefficients(self.basis, *self.parameters)
