"""Gated attention: the output of attention times a gate that the layer's input opens or closes.

Source: Qiu et al., "Gated Attention for Large Language Models" (arXiv 2505.06708).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError
from ..shift.attention import AttentionShift
from .core.base import FilterConfig
from .core.build import register_filter
from .core.power_series import PerHead
from .core.site import AttentionSite

CITATION = """@article{qiu2025gated,
  title   = {Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free},
  author  = {Zihan Qiu and Zekun Wang and Bo Zheng and Zeyu Huang and Kaiyue Wen and Songlin Yang and Rui Men and
             Le Yu and Fei Huang and Suozhi Huang and Dayiheng Liu and Jingren Zhou and
             Junyang Lin},
  journal = {arXiv preprint arXiv:2505.06708},
  year    = {2025}
}"""


class Gated(PerHead):
    """The filter ``y * 2 sigmoid(X W)`` with y = A V and X the input of the attention module.

    W = 0 at the start, where the gate is 1.
    """

    reads_hidden = True
    linear = spectral = False
    per_head = ("weight",)
    weight: Tensor
    config: GatedConfig

    def __init__(self, config: GatedConfig, site: AttentionSite):
        if site.hidden_size is None:
            raise GraphFilterError(
                f"{site.name} ({type(site.module).__name__}) does not pass its input on to the attention function, but "
                "'gated' needs it for its gates; choose other layers with layers=, or another filter"
            )
        super().__init__(config, site)

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        assert site.hidden_size is not None
        return (site.value_dim if self.config.gate == "element" else 1, site.hidden_size)

    def coefficient_names(self) -> set[str]:
        return set()

    def forward(self, shift: AttentionShift, value: Tensor) -> Tensor:  # type: ignore[override]
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        out, hidden = shift(value), shift.hidden
        assert hidden is not None
        scores = torch.einsum("bti,hfi->bhtf", hidden.to(self.weight.dtype), self.weight)
        return out * (2 * scores.sigmoid()).to(out.dtype)


@register_filter("gated")
@dataclass(frozen=True)
class GatedConfig(FilterConfig):
    """Gated attention: the output of attention times a gate that the layer's input opens or closes.

    The gate is a sigmoid of a learned projection of the input of the attention module. In the paper (Qiu et al., 2025)
    it makes attention non-linear and sparse, and attention sinks disappear.

    Here the gate is 2 sigmoid(X W), and W starts at 0. So the gate starts at 1, and the patched model equals the
    original.

    Args:
        gate (str, default "element"): How many gates a token has. ``"element"``: one per feature of each head, the
            paper's best. ``"head"``: one per head.

    Example:
        >>> GatedConfig(gate="head").starts_as_original
        True
    """

    module = Gated
    citation = CITATION
    formula = "y * 2 sigmoid(X W), y = A V"
    cost = "1 application of A, a projection"

    gate: Literal["element", "head"] = "element"
