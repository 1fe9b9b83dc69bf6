"""Exclusive self-attention: attention without the part that points along a token's own value.

Source: Zhai, "Exclusive Self Attention" (arXiv 2603.09078).
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

CITATION = """@article{zhai2026exclusive,
  title   = {Exclusive Self Attention},
  author  = {Shuangfei Zhai},
  journal = {arXiv preprint arXiv:2603.09078},
  year    = {2026}
}"""


class XSA(PerHead):
    """The filter ``y - alpha (y . v) v / (v . v)``, row by row, with y = A V and v the token's own value.

    There is one number alpha per head, 0 at the start; 1 takes the whole part away.
    """

    linear = spectral = False
    per_head = ("alpha",)
    alpha: Tensor

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        out, own_values = shift(value), shift.identity(value)
        v = own_values.float() if own_values.element_size() < 4 else own_values
        # v . v may overflow, so v is first divided by its largest entry, which does not change the result
        unit = v / v.detach().abs().amax(-1, keepdim=True).clamp(min=1e-6)
        share = (out.to(v.dtype) * unit).sum(-1, keepdim=True) / unit.square().sum(-1, keepdim=True).clamp(min=1)
        return combine([(torch.ones_like(self.alpha), out), (-self.alpha, (share * unit).to(out.dtype))])


@register_filter("xsa")
@dataclass(frozen=True)
class XSAConfig(FilterConfig):
    """Exclusive self-attention: attention without the part that points along a token's own value.

    Exclusive self-attention (Zhai, 2026) subtracts from the output of attention its projection on the token's own
    value. What is left is orthogonal to that value, so attention adds only what other tokens know.

    Here alpha, one learned number per head, says how much is subtracted; 1 is all of it. It starts at 0, so the patched
    model equals the original. There are no options.

    Example:
        >>> XSAConfig().starts_as_original
        True
    """

    module = XSA
    citation = CITATION
    formula = "y - alpha (y·v) v / (v·v), y = A V"
    cost = "1 application of A"
