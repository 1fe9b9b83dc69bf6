"""ARMA, a rational filter of the attention matrix, computed by fixed-point steps.

Source: Isufi et al., "Autoregressive Moving Average Graph Filtering" (IEEE TSP 2017); Bianchi et al., "Graph Neural
Networks with Convolutional ARMA Filters" (TPAMI 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import GraphFilterError, shown
from .core.base import LARGEST_ORDER, FilterConfig
from .core.build import register_filter
from .core.fields import check_counts
from .core.power_series import PowerSeries
from .core.site import AttentionSite

CITATION = """@article{isufi2017arma,
  title   = {Autoregressive Moving Average Graph Filtering},
  author  = {Elvin Isufi and Andreas Loukas and Andrea Simonetto and Geert Leus},
  journal = {IEEE Transactions on Signal Processing},
  volume  = {65},
  number  = {2},
  year    = {2017}
}"""


class ARMA(PowerSeries):
    """The filter ``H = A + sum_p r_p (I - b_p A)^-1``, with ``order`` poles per head and residues r that start at 0.

    ``(I - b A)^-1 V`` is the limit of ``x <- b A x + V``. The filter stops after ``steps`` steps, at ``sum_k b^k A^k
    V``, so all poles share the applications of ``S``. Rows of A sum to 1, so the error is at most ``|b|^(steps+1) / (1
    - |b|)`` of V in the infinity norm. ``b = bound tanh(...)`` keeps the poles within ``bound`` < 1. A pole b > 0 lets
    low frequencies pass, b < 0 high ones. A single pole starts at bound / 2. Several start evenly spread between -bound
    and bound.
    """

    per_head = ("residue", "shift_of_pole")
    sources: ClassVar[dict[str, str]] = {"r": "residue", "b": "shift_of_pole"}
    residue: Tensor
    shift_of_pole: Tensor
    config: ARMAConfig

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        return (self.config.order,)

    @property
    def poles(self) -> Tensor:
        """The poles b_p, (heads, order)."""
        starts = map(math.atanh, self.config.spread())
        # column by column: numbers add to the shards of FSDP2 too
        raw_poles = [shift + start for shift, start in zip(self.shift_of_pole.unbind(1), starts, strict=True)]
        return self.config.bound * torch.stack(raw_poles, 1).tanh()

    def coefficients(self) -> dict[str, Tensor]:
        """Return ``r_1``, ``b_1`` and so on, each (heads,)."""
        coefficients: dict[str, Tensor] = {}
        for p, (r, b) in enumerate(zip(self.residue.detach().unbind(1), self.poles.detach().unbind(1), strict=True), 1):
            coefficients |= {f"r_{p}": r, f"b_{p}": b}
        return coefficients

    def series(self, dtype: torch.dtype) -> Tensor:
        k = torch.arange(self.config.steps + 1, device=self.residue.device)
        return (self.residue[..., None].to(dtype) * self.poles[..., None].to(dtype) ** k).sum(1)


@register_filter("arma")
@dataclass(frozen=True)
class ARMAConfig(FilterConfig):
    """ARMA, a rational filter of the attention matrix: attention plus learned poles.

    A pole weighs all powers of A by a geometric series, so two numbers per pole shape the response far beyond the order
    of a short polynomial. The filter is the autoregressive moving average filter of Isufi et al. (IEEE TSP 2017), which
    Bianchi et al. (TPAMI 2021) bring to graph neural networks. Fixed-point steps compute it without a matrix inverse.

    The residues start at 0, so the patched model equals the original.

    Args:
        order (int, default 1): Number of poles per head, 1 to 8.
        steps (int, default 4): Number of fixed-point steps, each of which applies A once; 1 to 1000.
        bound (float, default 0.9): Limit of the magnitude of the poles, in (0, 1), within which the steps converge.

    Example:
        >>> ARMAConfig(order=2, bound=0.8).spread()
        [-0.5, 0.5]
    """

    module = ARMA
    citation = CITATION
    formula = "A V + sum_p r_p (I - b_p A)^-1 V"
    cost = "`steps` applications of A"

    order: int = 1
    steps: int = 4
    bound: float = 0.9

    def validate(self) -> None:
        check_counts(self, order=8, steps=LARGEST_ORDER)
        if not 0 < self.bound < 1:
            raise GraphFilterError(f"ARMAConfig: bound must lie between 0 and 1, got {shown(self.bound)}")

    def spread(self) -> list[float]:
        """Return the poles at the start, as fractions of ``bound``."""
        if self.order == 1:
            return [0.5]
        return [(2 * p + 1) / self.order - 1 for p in range(self.order)]
