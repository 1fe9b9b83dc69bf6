"""Centered attention: attention minus the rank-one part that is equal for all tokens.

Source: Saada et al., "Mind the Gap: a Spectral Analysis of Rank Collapse and Signal Propagation in Attention Layers"
(ICML 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.combine import combine
from ..shift.operator import ShiftOperator
from .core.base import FilterConfig
from .core.build import register_filter
from .core.power_series import PerHead

CITATION = """@inproceedings{saada2025gap,
  title     = {Mind the Gap: a Spectral Analysis of Rank Collapse and Signal Propagation in Attention Layers},
  author    = {Thiziri Nait Saada and Alireza Naderi and Jared Tanner},
  booktitle = {International Conference on Machine Learning},
  year      = {2025}
}"""


class Centered(PerHead):
    """The filter ``H V = A V - g mean(A V)``, with one number g per head that starts at 0.

    g = 1 removes the outlier in the spectrum of A that makes tokens alike. The mean is over the tokens that a query
    sees.
    """

    spectral = False
    reads_mask = True
    per_head = ("g",)
    g: Tensor

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        out = shift(value)
        return combine([(torch.ones_like(self.g), out), (-self.g, shift.mean(shift.all_rows(out)).contiguous())])


@register_filter("centered")
@dataclass(frozen=True)
class CenteredConfig(FilterConfig):
    """Attention minus a learned part of its mean over the tokens.

    One direction of the attention matrix, the one that is equal for all tokens, outweighs all others. It makes tokens
    alike with depth (Saada et al., ICML 2025). This filter subtracts g times the mean of the attention output over the
    tokens; g = 1 removes the direction completely.

    Departure from the paper: each head learns its own g, which starts at 0, so the patched model equals the original.
    Under a mask the mean is over the tokens that a query sees. There are no options.

    Example:
        >>> CenteredConfig().formula
        'y - g mean(y), y = A V'
    """

    module = Centered
    citation = CITATION
    formula = "y - g mean(y), y = A V"
    cost = "1 application of A"
