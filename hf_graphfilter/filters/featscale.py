"""FeatScale: the output of attention, with its mean over the tokens and the rest scaled separately.

Source: Wang et al., "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis" (ICLR 2022). The
authors' code adds the terms twice; here they are added once, as in the paper.
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
    """The filter ``y + s DC(y) + t (y - DC(y))`` with y = A V.

    DC is the mean over the tokens that a query sees. s and t are vectors of the features of a head, which start at 0.
    """

    linear = spectral = False
    reads_mask = True
    per_head = ("low", "high")
    low: Tensor
    high: Tensor

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        return (site.value_dim,)

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        out = shift(value)
        mean = shift.mean(shift.all_rows(out))
        low, high = (c[:, None].to(out.dtype) for c in (self.low, self.high))
        return out + low * mean + high * (out - mean)


@register_filter("featscale")
@dataclass(frozen=True)
class FeatScaleConfig(FilterConfig):
    """FeatScale: the output of attention, with its mean over the tokens and the rest scaled per feature.

    The mean over the tokens is frequency 0. Repeated attention leaves nothing else. FeatScale (Wang et al., ICLR 2022)
    gives the mean and the rest learned weights s and t for each feature, so a layer can pass more of the higher
    frequencies.

    The weights start at 0, so the patched model equals the original. Under a mask the mean is over the tokens that a
    query sees. There are no options.

    Departures: the paper applies it to the features of all heads at the end of the layer; here it acts on each head.
    The authors' code adds the terms twice; here they are added once, as in the paper.

    Example:
        >>> FeatScaleConfig().starts_as_original
        True
    """

    module = FeatScale
    citation = CITATION
    formula = "y + s mean(y) + t (y - mean(y)), y = A V"
    cost = "1 application of A"
