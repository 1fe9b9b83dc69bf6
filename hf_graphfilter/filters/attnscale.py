"""AttnScale: attention whose deviation from the mean over the tokens is scaled.

Source: Wang et al., "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis" (ICLR 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.combine import combine
from ..ops.heads import repeat_heads
from ..shift.operator import ShiftOperator
from .core.base import FilterConfig
from .core.build import register_filter
from .core.power_series import PerHead

CITATION = """@inproceedings{wang2022antioversmoothing,
  title = {Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis: From Theory to Practice},
  author    = {Peihao Wang and Wenqing Zheng and Tianlong Chen and Zhangyang Wang},
  booktitle = {International Conference on Learning Representations},
  year      = {2022}
}"""


class AttnScale(PerHead):
    """The filter ``H V = (1 + lambda) A V - lambda mean(V)``.

    A is a mean over the tokens that a query sees (frequency 0), plus a rest. lambda, one number per head that starts at
    0, scales the rest.
    """

    spectral = False
    reads_mask = True
    per_head = ("scale",)
    scale: Tensor

    def coefficients(self) -> dict[str, Tensor]:
        """Return ``lambda``, (heads,)."""
        return {"lambda": self.scale.detach()}

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        attended, mean = shift(value), repeat_heads(shift.mean(value), len(self.scale))
        ones = torch.ones_like(self.scale)
        return combine([(ones, attended), (self.scale, attended - mean)])


@register_filter("attnscale")
@dataclass(frozen=True)
class AttnScaleConfig(FilterConfig):
    """AttnScale: attention whose deviation from the mean over the tokens is scaled by 1 + lambda.

    Attention is a mean over the tokens, which is its frequency 0, plus a rest. Repeated attention leaves only the mean.
    AttnScale (Wang et al., ICLR 2022) scales the rest by one learned number per head, so attention can pass more of the
    higher frequencies.

    The number starts at 0, so the patched model equals the original. Under a mask the mean is over the tokens that a
    query sees. There are no options.

    Example:
        >>> AttnScaleConfig().formula
        '(1+lambda) A V - lambda mean(V)'
    """

    module = AttnScale
    citation = CITATION
    formula = "(1+lambda) A V - lambda mean(V)"
    cost = "1 application of A"
