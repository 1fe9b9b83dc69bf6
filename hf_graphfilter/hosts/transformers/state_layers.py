"""Layers of a key/value cache that keep the state of a replacement filter.

Such a filter keeps past tokens in a state of constant size, and needs no keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ...errors import GraphFilterError
from .layer_memory import LayerMemory


class KeyedStateLayer(LayerMemory, DynamicLayer):
    """A ``DynamicLayer`` that also keeps the state of a filter, for a filter that is blended with attention."""

    is_croppable = False
    announced = False  # by ``announce``, before every update: the state lacks what another module adds

    def begin_update(self) -> None:
        super().begin_update()
        self.missed |= not self.announced
        self.announced = False

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        if (args or tuple(kwargs.values()))[0] in (0, self.get_seq_length()):
            return
        raise GraphFilterError(
            "this graph filter keeps one state for all past tokens and cannot take the last ones out again (crop): "
            "assisted decoding does not work with it; start with a new cache"
        )


class StateLayer(KeyedStateLayer):
    """A layer that keeps the state of a filter and the number of tokens, but no keys and values: constant size."""

    length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.announced:
            raise GraphFilterError(
                "this cache was filled through a graph filter and holds no keys and values for a module without it: "
                "start with a new cache"
            )
        self.begin_update()
        return self._change(self._count, key_states, value_states)  # type: ignore[no-any-return]

    def _count(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            # what other code reads of a cache: batch, heads, features, of zero tokens; a slice would hold all of them
            self.keys, self.values = (x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (key_states, value_states))
        self.length += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        super().reset()
        self.length = 0


STATEFUL: dict[str, type[KeyedStateLayer]] = {"state": StateLayer, "state and keys": KeyedStateLayer}
