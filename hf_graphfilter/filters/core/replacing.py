"""Replacement filters: they read query, key, value and the module's input, and no attention matrix."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ...errors import GraphFilterError, shown
from ...logs import logger
from ...ops.combine import combine
from ...ops.filled import filled
from ...shift.attention import AttentionShift
from ...shift.operator import ShiftOperator
from .base import Decoding, FilterConfig, GraphFilter
from .fields import check_limits
from .site import AttentionSite
from .window import mix_window

WIDEST = 1_000_000  # window
MOST_SINKS = 1000
_NO_CAUSAL_FORM = "mixes all tokens and has no causal form; choose other layers with stack= or layers="


class ReplacingFilter(GraphFilter):
    """Base class of replacement filters, which never apply ``S``; a subclass defines ``filtered``.

    Blend, window, attention transfer and the checks for unsupported models are inherited.

    ``filtered(shift, value)`` reads ``shift.query``, ``shift.key``, ``shift.hidden`` and ``shift.visible()``; its
    shapes are those of ``forward``. When decoding, ``shift.state`` is a dict, in which ``filtered`` must store what it
    needs to know about the tokens so far.

    ``reset_parameters`` of a subclass must call ``super().reset_parameters()``, which sets the gate and the window's
    weights.

    Class attributes:
        causal_form: whether the filter can keep a token from seeing later ones. If not, causal modules raise a
            ``GraphFilterError``.
    """

    spectral: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = True
    reads_mask: ClassVar[bool] = True
    causal_form: ClassVar[bool] = True
    config: ReplacingConfig
    gate: Tensor | None
    switched_off: str | None = None  # "window", or "far" for all but the window

    def __init__(self, config: ReplacingConfig, site: AttentionSite):
        super().__init__(config, site)
        if type(self).filtered is ReplacingFilter.filtered:
            raise GraphFilterError(f"{site.name}: {type(self).__name__} has no filtered(shift, value)")
        _refuse(config, site, self.causal_form)
        assert site.hidden_size is not None
        self.outside = nn.Linear(site.hidden_size, site.heads) if config.window else None
        self.register_buffer("gate", torch.empty(site.heads) if config.init == "blend" else None)

    def reset_parameters(self) -> None:
        if self.gate is not None:
            nn.init.zeros_(self.gate)
        if self.outside is not None:
            nn.init.zeros_(self.outside.weight)
            nn.init.zeros_(self.outside.bias)

    @property
    def decoding(self) -> Decoding:
        return "state" if self.gate is None else "state and keys"

    def branches(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Return the window and what is beyond it; for a blend also the filter and the attention."""
        parts: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        if self.outside is not None:
            parts |= {name: partial(self._switch_off, name) for name in ("window", "far")}
        if self.gate is not None:
            parts |= {"filter": partial(filled, self.gate, 0.0), "attention": partial(filled, self.gate, 1.0)}
        return parts

    @contextmanager
    def _switch_off(self, part: str) -> Iterator[None]:
        self.switched_off = part
        try:
            yield
        finally:
            self.switched_off = None

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        if self.gate is None:
            return self.approximate(shift, value)
        original = shift(value)
        return combine([(1 - self.gate, original), (self.gate, self.approximate(shift, value))])

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        """Return the output of the filter alone, with the shapes of ``forward``."""
        raise NotImplementedError

    def approximate(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Return what replaces ``S(value)``: ``filtered``, with the window mixed in."""
        name = _name(self.config)
        if not isinstance(shift, AttentionShift) or shift.hidden is None:
            raise GraphFilterError(
                f"{self.site_name}: {name} needs the model's projections and input, and not an attention matrix"
            )
        if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():  # of TorchScript, which loses what blocks write
            raise GraphFilterError(
                f"{self.site_name}: {name} can be exported by torch.onnx.export(..., dynamo=True) only"
            )
        if not self.causal_form and shift.visible()[0]:
            raise GraphFilterError(f"{self.site_name}: the attention mask is causal, and {name} {_NO_CAUSAL_FORM}")
        if not self.causal_form and shift.state is not None:
            raise GraphFilterError(f"{self.site_name} got a cache of past tokens, and {name} {_NO_CAUSAL_FORM}")
        if shift.state is not None and shift.query.shape[2] > 1 and not shift.visible()[0]:
            raise GraphFilterError(
                f"{self.site_name}: the attention mask is not causal, and the state that {name} keeps in a cache is: "
                "pass use_cache=False"
            )
        if self._spans_all(shift):
            return self.penalised(self._add_zero_gradients(shift(value)))
        out = self.filtered(shift, value)
        if shift.state is not None and not shift.state:
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__}.filtered left shift.state empty, but a replacement filter "
                "knows of past tokens only what it keeps there: fill it, or use use_cache=False"
            )
        return self.add_window(out, shift, shift.hidden, value)

    def add_window(self, out: Tensor, shift: AttentionShift, hidden: Tensor, value: Tensor) -> Tensor:
        """Return ``out``, which ``filtered`` gave, with the window mixed in."""
        if self.outside is None or self.switched_off == "window":
            return out
        return mix_window(self, out, self.outside, shift, hidden, value)

    @property
    def span(self) -> int:
        """The largest number of tokens at which the window of each token covers the whole text."""
        return self.config.window and self.config.window + 1

    @property
    def exact_span(self) -> int:
        """The largest number of tokens at which a text gets exact attention, whatever the filter has learned."""
        return self.span

    def _spans_all(self, shift: AttentionShift) -> bool:
        """Return whether the window covers all tokens, so that the model's own attention is enough, and faster."""
        config = self.config
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a graph would be bound to the number of tokens
            return False
        if not shift.query.shape[2]:  # nothing to filter
            return True
        same_scores = not self.position_bias or config.position_bias == "window"
        no_part = self.switched_off is None and shift.state is None
        return config.far == "beyond" and same_scores and no_part and shift.key.shape[2] <= self.span

    def _add_zero_gradients(self, out: Tensor) -> Tensor:
        """Return ``out`` with a zero gradient for each parameter; DistributedDataParallel waits for all of them."""
        if not torch.is_grad_enabled():
            return out
        return out + sum(p.flatten()[:0].sum().to(out.dtype) for p in self.parameters() if p.requires_grad)


@dataclass(frozen=True, kw_only=True)
class ReplacingConfig(FilterConfig):
    """Options that every replacement filter has.

    Args:
        init (str, default "copy"): How the filter starts. ``"copy"``: it replaces attention at once. ``"blend"``: the
            output is (1 - g) attention + g filter with one gate g per head that starts at 0, so the patched model
            equals the original. ``BlendSchedule`` raises g to 1, and ``drop_blend`` then removes the attention.
        window (int, default 0): Number of tokens on each side over which softmax attention is mixed in, at most a
            million; 0 for no window. A window longer than the text costs as much as one that spans it, except in a
            compiled model.
        sinks (int, default 0): Number of first tokens of the text to which all other tokens attend too, at most a
            thousand. Decoders leave most of their attention beyond the window there (Xiao et al., Efficient Streaming
            Language Models with Attention Sinks, ICLR 2024). Sinks need a window.
        far (str, default "all"): Which tokens the filter is responsible for. ``"all"``: every token, including those in
            the window. ``"beyond"``: only tokens outside the window and the sinks, so an input that fits into them gets
            exactly the original attention. If such an input has at most window + 1 tokens, it also runs at the
            original's speed (except in a compiled model or with a cache), and the filter adds no loss for it.
        position_bias (str, default "refuse"): What happens to a learned bias of positions in the scores (T5), which a
            replacement filter cannot compute. ``"refuse"``: raise an error. ``"drop"``: leave it out. ``"window"``: add
            it in the window and for the sinks only, in encoders.
    """

    untrained: ClassVar[tuple[str, ...]] = ()  # options that no coefficient depends on

    init: Literal["copy", "blend"] = "copy"
    window: int = 0
    sinks: int = 0
    far: Literal["all", "beyond"] = "all"
    position_bias: Literal["refuse", "drop", "window"] = "refuse"

    @property
    def starts_as_original(self) -> bool:
        return self.init == "blend"

    @classmethod
    def for_conversion(cls, **options: Any) -> Self:
        """Return the config that fits pretrained attention best (docs/linearize.md); ``options`` override it."""
        sinks = 4 if options.get("window", 64) else 0
        return cls.from_options(**{"window": 64, "sinks": sinks, "far": "beyond", **options})  # type: ignore[return-value]

    def validate(self) -> None:
        check_limits(self, "window", least=0, most=WIDEST)
        if not 0 <= self.sinks <= MOST_SINKS:
            raise GraphFilterError(
                f"{type(self).__name__}: sinks must be between 0 and {MOST_SINKS}, got {shown(self.sinks)}"
            )
        if self.sinks and not self.window:
            raise GraphFilterError(f"{type(self).__name__}: sinks need a window: give window= too")
        if self.position_bias == "window" and not self.window:
            raise GraphFilterError(f"{type(self).__name__}: position_bias='window' needs a window: give window= too")


def _name(config: FilterConfig) -> str:
    return config.filter.upper()


@functools.cache  # once for all layers
def _warn_of_caps(module: str, name: str) -> None:
    logger.warning(
        "%s caps its attention scores (attn_logit_softcapping), which the window of %s does not: near attention "
        "differs from the original's where scores are near the cap",
        *(module, name),
    )


def _refuse(config: ReplacingConfig, site: AttentionSite, causal_form: bool) -> None:
    where, name = f"{site.name} ({type(site.module).__name__})", _name(config)
    if site.causal and not causal_form:
        raise GraphFilterError(f"{where} is causal, and {name} {_NO_CAUSAL_FORM}")
    if site.hidden_size is None:
        raise GraphFilterError(
            f"{where} does not pass its input on to the attention function, but {name} needs it; choose other layers "
            "with layers=, or an attention filter such as 'gfsa'"
        )
    if site.sliding_window is not None:
        raise GraphFilterError(
            f"{where} sees a sliding window of {site.sliding_window} tokens, but {name} sees all; choose other layers "
            "with layers=, if there are any"
        )
    if site.other_scores:
        raise GraphFilterError(
            f"{where} makes its attention scores from more than query and key ({site.other_scores}), but {name} has no "
            "scores; choose other layers with layers=, or an attention filter such as 'gfsa'"
        )
    if config.window and getattr(site.module, "attn_logit_softcapping", None) is not None:
        _warn_of_caps(type(site.module).__name__, name)
    if site.position_bias and config.position_bias == "refuse":
        raise GraphFilterError(
            f"{where} adds a learned bias of positions to its attention scores, but {name} has no scores to add it to. "
            "Use position_bias='drop' to leave it out (the model then knows positions only from other layers) or, in "
            "filters that have it, 'window' to keep it within a window, or choose other layers with layers="
        )
    has_bias_argument = "position_bias" in inspect.signature(type(site.module).forward).parameters
    if site.position_bias and config.position_bias == "window" and (site.causal or not has_bias_argument):
        reason = "keeps no bias for the tokens of a cache" if site.causal else "has the bias within its mask or scores"
        raise GraphFilterError(
            f"{where} {reason}, so position_bias='window' cannot be used: use position_bias='drop', or choose other "
            "layers with layers= or stack="
        )
