"""Filters in the place of attention: made of query, key, value and the module's input, not of an attention matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..ops.combine import combine
from ..shift import AttentionShift, ShiftOperator
from .base import AttentionSite, Decoding, FilterConfig, GraphFilter


class ReplacingFilter(GraphFilter):
    """A filter that never applies ``S``. A subclass defines ``approximate``; the blend with the original attention,
    transfer, and refusals of what such a filter cannot honour come with it.

    ``approximate(shift, value)`` reads ``shift.query``, ``shift.key``, ``shift.hidden`` and ``shift.visible()``. When
    decoding, ``shift.state`` is a dict that it must fill with what it is to remember of the tokens so far.

    ``reset_parameters`` of a subclass calls that of this class, which sets the gate.
    """

    reads_hidden: ClassVar[bool] = True
    config: ReplacingConfig
    gate: Tensor | None

    def __init__(self, config: ReplacingConfig, site: AttentionSite):
        super().__init__(config, site)
        if type(self).approximate is ReplacingFilter.approximate:
            raise GraphFilterError(f"{site.name}: {type(self).__name__} has no approximate(shift, value)")
        _refuse(config, site)
        self.register_buffer("gate", torch.empty(site.heads) if config.init == "blend" else None)

    def reset_parameters(self) -> None:
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    @property
    def decoding(self) -> Decoding:
        return "state" if self.gate is None else "state and keys"

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        if self.gate is None:
            return self._replaced(shift, value)
        original = shift(value)
        return combine([(1 - self.gate, original), (self.gate, self._replaced(shift, value))])

    def _replaced(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        out = self.approximate(shift, value)
        if isinstance(shift, AttentionShift) and shift.state is not None and not shift.state:
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__}.approximate left shift.state empty, and of past tokens a "
                "filter in the place of attention knows what it keeps there only: fill it, or use use_cache=False"
            )
        return out

    def approximate(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        raise NotImplementedError

    def operands(self, shift: ShiftOperator) -> tuple[AttentionShift, Tensor]:
        """``shift`` and ``shift.hidden``, which a host has set.

        Raises:
            GraphFilterError: an operator that is not made of a model's projections (``DenseShift``).
        """
        if not isinstance(shift, AttentionShift) or shift.hidden is None:
            raise GraphFilterError(
                f"{self.site_name}: {_name(self.config)} is made of the model's projections and its input, not of an "
                "attention matrix"
            )
        return shift, shift.hidden


@dataclass(frozen=True, kw_only=True)
class ReplacingConfig(FilterConfig):
    """Options of every filter in the place of attention.

    Args:
        init: ``"copy"`` puts the filter in the place of attention; ``"blend"`` computes (1 - g) attention + g filter
            with a gate g a head that starts at 0, so that the patched model equals the original; ``BlendSchedule``
            carries it to 1 and ``drop_blend`` then takes the attention out.
        position_bias: ``"refuse"`` modules with a learned bias of positions (T5), which such a filter cannot honour,
            or ``"drop"`` it.
    """

    init: Literal["copy", "blend"] = "copy"
    position_bias: Literal["refuse", "drop"] = "refuse"

    @property
    def starts_as_original(self) -> bool:
        return self.init == "blend"


def _name(config: FilterConfig) -> str:
    return config.filter.upper()


def _refuse(config: ReplacingConfig, site: AttentionSite) -> None:
    where, name = f"{site.name} ({type(site.module).__name__})", _name(config)
    if site.hidden_size is None:
        raise GraphFilterError(
            f"{where} does not hand its input on to the attention function, which {name} is made of; choose other "
            "layers with layers=, or a filter of the attention matrix such as 'gfsa'"
        )
    if site.sliding_window is not None:
        raise GraphFilterError(
            f"{where} sees a sliding window of {site.sliding_window} tokens, and {name} sees all; choose other layers "
            "with layers="
        )
    if site.other_scores:
        raise GraphFilterError(
            f"{where} makes its attention scores of more than query and key ({site.other_scores}), and {name} has no "
            "scores; choose other layers with layers=, or a filter of the attention matrix such as 'gfsa'"
        )
    if site.position_bias and config.position_bias == "refuse":
        raise GraphFilterError(
            f"{where} adds a learned bias of positions to its attention scores, and {name} has no scores to add it to; "
            "position_bias='drop' leaves it out of the filter (the model then knows of positions only what other "
            "layers tell it), or choose other layers with layers="
        )
