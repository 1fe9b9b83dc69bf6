"""Hedgehog: linear attention whose feature map is learned to mimic a softmax.

Source: Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry" (ICLR 2024),
Eq. 5; with a window beside it in Zhang et al., "LoLCATs: On Low-Rank Linearizing of Large Language Models" (ICLR 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..ops.heads import HeadPart
from .core.build import register_filter
from .core.feature_map import FeatureMapFilter
from .core.head_map import HeadMap
from .core.replacing import ReplacingConfig
from .core.site import AttentionSite

CITATION = """@inproceedings{zhang2024hedgehog,
  title     = {The Hedgehog \\& the Porcupine: Expressive Linear Attentions with Softmax Mimicry},
  author    = {Michael Zhang and Kush Bhatia and Hermann Kumbong and Christopher R{\\'e}},
  booktitle = {International Conference on Learning Representations},
  year      = {2024}
}"""


class FeatureMap(HeadMap):
    """The logarithm of ``softmax over features [x W, -x W]``, where W starts as the identity."""

    def forward(self, x: Tensor, part: HeadPart | None = None) -> Tensor:
        """Map ``x`` (batch, heads, tokens, features) to twice as many features, in float32 or wider."""
        mapped = super().forward(x, part)
        return torch.cat([mapped, -mapped], -1).log_softmax(-1)


class Hedgehog(FeatureMapFilter):
    """Linear attention with one learned feature map per head for the query and one for the key."""

    def __init__(self, config: HedgehogConfig, site: AttentionSite):
        super().__init__(config, site)
        self.map_query, self.map_key = (FeatureMap(site.heads, site.head_dim) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.map_query.reset_parameters()
        self.map_key.reset_parameters()

    def query_features(self, query: Tensor) -> Tensor:
        return self.map_query(query)

    def key_features(self, key: Tensor) -> Tensor:
        return self.map_key(key)


@register_filter("hedgehog")
@dataclass(frozen=True)
class HedgehogConfig(ReplacingConfig):
    """Hedgehog, linear attention with a learned feature map that replaces attention at linear cost.

    Hedgehog (Zhang et al., ICLR 2024) replaces the softmax of scores by a product of feature maps of query and key.
    Each map is a softmax over learned features, which can mimic the original. It has fewer parameters than AGF.
    Decoding keeps a state of constant size.

    Right after patching, a model is far from the original, except with ``init="blend"``; ``linearize`` or
    ``transfer_attention`` fits it. With ``window=64`` it is the linear attention of LoLCATs (Zhang et al., ICLR 2025).

    Args:
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> HedgehogConfig.for_conversion().sinks
        0
    """

    module = Hedgehog
    citation = CITATION
    formula = "phi(Q) phi(K)^T / rows, phi(x) = softmax([x W, -x W])"
    cost = "linear in the tokens"

    @classmethod
    def for_conversion(cls, **options: Any) -> Self:
        return super().for_conversion(**{"sinks": 0, **options})
