"""Dex: attention minus a learned linear map of its output, per head.

Source: Kong et al., "Understanding Differential Transformer Unchains Pretrained Self-Attentions" (arXiv 2505.16333).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..shift.operator import ShiftOperator
from .core.base import FilterConfig
from .core.build import register_filter
from .core.power_series import PerHead
from .core.site import AttentionSite

CITATION = """@article{kong2025dex,
  title   = {Understanding Differential Transformer Unchains Pretrained Self-Attentions},
  author  = {Chaerin Kong and Jiho Jang and Nojun Kwak},
  journal = {arXiv preprint arXiv:2505.16333},
  year    = {2025}
}"""


class Dex(PerHead):
    """The filter ``y - lambda f(y)`` with y = A V.

    f is a linear map of the features of a head, and lambda is one number per head that starts at 0. The paper chooses
    some heads; here lambda says how much each takes part.
    """

    linear = spectral = False
    per_head = ("strength", "weight")
    strength: Tensor
    weight: Tensor

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        return () if name == "strength" else (site.value_dim, site.value_dim)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.strength)
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def coefficient_names(self) -> set[str]:
        return {"strength"}

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        out = shift(value)
        # one matrix: lambda = 0 takes away nothing, whatever f(y) comes to
        return out - out @ (self.strength.view(-1, 1, 1) * self.weight).to(out.dtype)


@register_filter("dex")
@dataclass(frozen=True)
class DexConfig(FilterConfig):
    """Dex: attention minus a learned linear map of its output, per head.

    The Differential Transformer subtracts a second attention matrix, but it must be trained from scratch. Dex (Kong et
    al., 2025) brings the difference to pretrained models: it subtracts lambda f(y) from the output y of attention,
    where f is a learned linear map of the features of a head.

    The strength lambda is one number per head. It starts at 0, so the patched model equals the original. There are no
    options.

    Departure from the paper: the paper applies f to some heads only. Here every head has a lambda, which says how much
    it takes part.

    Example:
        >>> DexConfig().formula
        'y - lambda f(y), y = A V, f linear'
    """

    module = Dex
    citation = CITATION
    formula = "y - lambda f(y), y = A V, f linear"
    cost = "1 application of A"
