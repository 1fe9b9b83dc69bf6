"""Value residual: attention over each layer's values plus those of the first layer.

Source: Zhou et al., "Value Residual Learning" (arXiv 2410.17897).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import GraphFilterError
from ..shift.attention import AttentionShift
from .core.build import register_filter
from .core.power_series import FromFirstLayer, FromFirstLayerConfig
from .core.site import AttentionSite

CITATION = """@article{zhou2024valueresidual,
  title   = {Value Residual Learning},
  author  = {Zhanchao Zhou and Tianyi Wu and Zhiyun Jiang and Fares Obeid and Zhenzhong Lan},
  journal = {arXiv preprint arXiv:2410.17897},
  year    = {2024}
}"""


class ValueResidual(FromFirstLayer):
    """The filter ``A ((1 + l_1) V + l_2 V_0)``, with V_0 the values of the first layer.

    l_1 and l_2 are numbers per head, 0 at the start. Heads that share keys and values take the mean of their numbers.
    """

    per_head = ("l_1", "l_2")
    l_1: Tensor
    l_2: Tensor

    def forward(self, shift: AttentionShift, value: Tensor) -> Tensor:  # type: ignore[override]
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        first_values, groups = self.first(shift, value), value.shape[1]
        own_weight, first_weight = (
            c.view(groups, -1).mean(1).to(value.dtype).view(-1, 1, 1) for c in (self.l_1, self.l_2)
        )
        return shift(value + own_weight * value + first_weight * first_values)


@register_filter("value-residual")
@dataclass(frozen=True)
class ValueResidualConfig(FromFirstLayerConfig):
    """Value residual: attention over each layer's values plus those of the first layer.

    Deep layers may lose what the first layer knew of each token. Value residual learning (Zhou et al., 2024) lets
    attention read the first layer's values too, weighted by learned numbers.

    The numbers l_1 and l_2, per head, start at 0, so the patched model equals the original. Heads that share keys and
    values use the mean of their numbers.

    The first layer must be among the chosen layers. Two cases raise a ``GraphFilterError``: models whose layers
    exchange nothing but hidden states (timm), and attention within windows of an image. There are no options.

    Example:
        >>> ValueResidualConfig().formula
        'A ((1+l_1) V + l_2 V_0)'
    """

    module = ValueResidual
    citation = CITATION
    formula = "A ((1+l_1) V + l_2 V_0)"
    cost = "1 application of A"

    def check_sites(self, sites: Sequence[AttentionSite]) -> None:
        super().check_sites(sites)
        first_of_group = {site.group: site for site in sites if site.index == 0}
        for site in sites:
            first = first_of_group[site.group]
            if first.key_heads not in (1, site.key_heads):  # the values of a single head are added to all
                raise GraphFilterError(
                    f"{self.filter!r} adds the values of the first layer, {first.key_heads} key heads, but {site.name} "
                    f"has {site.key_heads}: choose layers of the same shape"
                )
