"""Decoding with a key/value cache: the past rows of every signal that S was applied to, kept beside keys and values.

Row t of ``S(S(V))`` needs all earlier rows of ``S(V)``: O(n d) memory and work a token. The rows live on the cache
layer itself, so that beam search, cropping and batch selection treat them as they treat keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from ..errors import GraphFilterError

ARGUMENT = "graph_filter_cache"

if TYPE_CHECKING:
    _Layer = DynamicLayer
else:
    _Layer = object


class SignalRows(_Layer):
    """Mixin for a cache layer: signal rows (batch, heads, tokens, features) by application number."""

    signals: dict[int, Tensor]

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.signals = {application: change(rows) for application, rows in self.signals.items()}

    def reset(self) -> None:
        super().reset()
        if self.get_seq_length():  # transformers up to 5.17 keeps the tokens, as zeros
            self._each(torch.zeros_like)
        else:
            self.signals = {}

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = self.get_seq_length()
        super().crop(*args, **kwargs)
        removed = before - self.get_seq_length()
        self._each(lambda rows: rows[..., : rows.shape[-2] - removed, :])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._each(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda rows: rows[indices, ...])

    def offload(self) -> None:
        super().offload()
        self._each(lambda rows: rows.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        self._each(lambda rows: rows.to(self.device, non_blocking=True))


class FilteredDynamicLayer(SignalRows, DynamicLayer):
    """A ``DynamicLayer`` that also keeps signal rows."""


class FilteredSlidingWindowLayer(SignalRows, DynamicSlidingWindowLayer):
    """A ``DynamicSlidingWindowLayer`` that also keeps signal rows."""


_FILTERED: dict[type, type] = {
    DynamicLayer: FilteredDynamicLayer,
    DynamicSlidingWindowLayer: FilteredSlidingWindowLayer,
}


class _Memory:
    """The ``ShiftMemory`` of one forward: ``keys`` rows are visible to this call."""

    def __init__(self, layer: SignalRows, keys: int):
        self.layer, self.keys = layer, keys

    def extend(self, application: int, signal: Tensor) -> Tensor:
        past = self.layer.signals.get(application)
        rows = signal if past is None else torch.cat([past, signal], dim=-2)
        rows = rows[..., -self.keys :, :]
        self.layer.signals[application] = rows
        return rows


def memory(past: Any, module: Any, key: Tensor) -> _Memory | None:
    """The memory of ``module`` in the cache ``past``, whose layer becomes one that keeps signal rows.

    Raises:
        GraphFilterError: a kind of cache that cannot keep them (static, quantized ...).
    """
    if past is None:
        return None
    if isinstance(past, EncoderDecoderCache):
        past = past.self_attention_cache
    layers = getattr(past, "layers", [])  # some models keep a cache of their own
    layer = layers[module.layer_idx] if layers else None
    if type(layer) in _FILTERED:
        filtered: SignalRows = object.__new__(_FILTERED[type(layer)])
        filtered.__dict__ = {**layer.__dict__, "signals": {}}
        layer = layers[module.layer_idx] = filtered
    if not isinstance(layer, SignalRows):
        raise GraphFilterError(
            f"decoding through a graph filter keeps rows of S(V) in the cache, and {type(past).__name__} "
            f"({type(layer).__name__}) cannot hold them: use a DynamicCache (the default) or use_cache=False"
        )
    return _Memory(layer, key.shape[2])


def _pass_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the attention function is not told of the cache, but is given further keyword arguments."""
    past = kwargs.get("past_key_values")
    if past is None and args:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        past = dict(zip(names, args, strict=False)).get("past_key_values")
    return args, kwargs if past is None else {**kwargs, ARGUMENT: past}


def follow(module: nn.Module) -> None:
    """Let ``memory`` see the cache that ``module`` is called with, where it takes one."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if any(p.name == "past_key_values" for p in parameters) and any(p.kind is p.VAR_KEYWORD for p in parameters):
        module.register_forward_pre_hook(_pass_cache, with_kwargs=True)


def unfollow(module: nn.Module) -> None:
    """Undo ``follow``."""
    for key in [k for k, hook in module._forward_pre_hooks.items() if hook is _pass_cache]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
