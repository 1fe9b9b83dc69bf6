"""FeatScale: what attention gives, its mean over the tokens and the rest scaled apart.

Source: Wang et al., "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis" (ICLR 2022).
The authors' code adds the terms twice; here they are added once, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..shift.operator import ShiftOperator
from .attnscale import CITATION
from .core.base import FilterConfig
from .core.build import register_filter
from .core.power_series import PerHead
from .core.site import AttentionSite


class FeatScale(PerHead):
    """``y + s DC(y) + t (y - DC(y))`` with y = A V, DC the mean over the tokens that a query sees, and vectors s and t
    of the features of a head, which start at 0."""

    linear = spectral = False
    reads_mask = True
    per_head = ("low", "high")
    low: Tensor
    high: Tensor

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        return (site.value_dim,)

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        out = shift(value)
        mean = shift.mean(shift.all_rows(out))
        low, high = (c[:, None].to(out.dtype) for c in (self.low, self.high))
        return out + low * mean + high * (out - mean)


@register_filter("featscale")
@dataclass(frozen=True)
class FeatScaleConfig(FilterConfig):
    """FeatScale (Wang et al., 2022): mean and rest of what attention gives, scaled a feature; it starts as A."""

    module = FeatScale
    citation = CITATION
    formula = "y + s mean(y) + t (y - mean(y)), y = A V"
    cost = "1 application of A"
