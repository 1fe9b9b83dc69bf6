"""Layers of a key/value cache that also hold the memory of a filter.

A polynomial of ``S`` needs the past rows of every signal that ``S`` was applied to, besides keys and values. This costs
O(n d) memory, and O(n d) work per token. Since the rows are on the layer, beam search and batch selection treat them
like keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ...errors import GraphFilterError
from ...ops.exporting import is_exporting
from .layer_memory import MISSED, TWICE, LayerMemory

ROOM = 16  # rows are kept in tensors with room for a sixteenth more, and for as many tokens at least

EXPORTED_STEP = (
    "an exported decoding step holds the keys and values of its cache, and not the rows of S(V) that this graph filter "
    "keeps too: compile the step with torch.compile, or export with use_cache=False"
)


class SignalRows(LayerMemory):
    """A layer that keeps signal rows (batch, heads, tokens, features) by application number.

    The tensors have room for more rows.
    """

    ends: dict[int, int]  # how many rows of each tensor are in use
    buffers: frozenset[int]  # applications whose tensor was made here; autograd may have saved those of others

    def forget(self) -> None:
        super().forget()
        self.ends, self.buffers = {}, frozenset()

    def rows(self, application: int) -> Tensor:
        """Return the rows of one application that are in use."""
        return self.kept[application][:, :, : self.ends[application]]

    def append(self, application: int, signal: Tensor, keys: int) -> Tensor:
        """Append ``signal`` and return the last ``keys`` rows."""
        if application not in self.kept:
            self._keep(application, signal)
        elif _is_writable(self.kept[application]):
            self._write(application, signal, keys)
        else:
            rows = torch.cat([self.rows(application), signal], dim=2)
            self._keep(application, self._in_window(rows, keys))
        return self.rows(application)[:, :, -keys:]

    def _keep(self, application: int, rows: Tensor) -> None:
        self.kept[application], self.ends[application] = rows, rows.shape[2]
        self.buffers = self.buffers - {application}  # the compiler of torch 2.11 has no -= of frozensets

    def _write(self, application: int, signal: Tensor, keys: int) -> None:
        """Write rows behind those in use, in another tensor if there is no room left."""
        end, tokens = self.ends[application], signal.shape[2]
        if application not in self.buffers or self.kept[application].shape[2] < end + tokens:
            old_rows = self._in_window(self.rows(application), keys)
            batch, heads, end, features = old_rows.shape
            buffer = old_rows.new_empty(batch, heads, end + max(end // ROOM, tokens, ROOM), features)
            buffer[:, :, :end] = old_rows
            self.kept[application] = buffer
            self.buffers = self.buffers | {application}
        self.kept[application][:, :, end : end + tokens] = signal
        self.ends[application] = end + tokens

    def _in_window(self, rows: Tensor, keys: int) -> Tensor:
        """Return the rows within the window, or all rows while the layer keeps all of them for ``crop``."""
        return rows if getattr(self, "record_past", False) else rows[:, :, -keys:]

    def reset(self) -> None:
        super().reset()
        if self.get_seq_length():  # transformers up to 5.17 keeps the tokens, as zeros
            self._change_kept(torch.zeros_like)
        else:
            self.forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        length = self.get_seq_length()
        self._change(super().crop, *args, **kwargs)
        removed = length - self.get_seq_length()
        self.ends = {application: max(end - removed, 0) for application, end in self.ends.items()}
        if not self.get_seq_length():
            self.forget()


def _is_writable(kept: Tensor) -> bool:
    """Return whether rows may be written to an existing tensor.

    They may not if autograd may have saved the tensor. In a compiled step they may not either, since the step would be
    bound to the number of rows.
    """
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and kept.is_inference() == torch.is_inference_mode_enabled()
    )


class FilteredDynamicLayer(SignalRows, DynamicLayer):
    """A ``DynamicLayer`` that also keeps signal rows."""


class FilteredSlidingWindowLayer(SignalRows, DynamicSlidingWindowLayer):
    """A ``DynamicSlidingWindowLayer`` that also keeps signal rows."""


class FilteredStaticLayer(LayerMemory, StaticLayer):
    """A ``StaticLayer`` that also keeps signal rows; it is the ``PastRows`` of every forward with it.

    The rows are in tensors of the full length, which are changed in place.
    """

    begun: frozenset[int] = frozenset()  # applications that have seen the first token since the last reset

    def reset(self) -> None:
        super().reset()
        self._change_kept(Tensor.zero_)
        self.restart()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if not int(self.cumulative_length):
            self.restart()

    def restart(self) -> None:
        super().restart()
        self.begun = frozenset()

    def extend(self, application: int, signal: Tensor) -> Tensor:
        if is_exporting():
            raise GraphFilterError(EXPORTED_STEP)
        batch, heads, tokens, features = signal.shape
        if self.was_called_twice:
            raise GraphFilterError(TWICE)
        if application in self.begun:
            if self.missed:
                raise GraphFilterError(MISSED)
        else:
            if int(self.cumulative_length) != tokens:
                raise GraphFilterError(
                    f"the static cache holds {int(self.cumulative_length)} tokens but the filter has seen {tokens} of "
                    "them: it was filled by an unpatched model; start with a new cache, or reset() this one"
                )
            self.begun |= {application}
            self.missed = False  # these are all tokens; what it keeps from before ``reset`` is zero
        if application not in self.kept:
            self.kept[application] = signal.new_zeros(batch, heads, self.max_cache_len, features)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.kept[application])  # as transformers does for keys and values
        self.kept[application] = self.kept[application].to(signal.device)  # an offloaded cache has moved it
        return self.kept[application].index_copy_(2, self._newest(tokens), signal)

    def newest(self, value: Tensor, tokens: int) -> Tensor:
        return value.index_select(2, self._newest(tokens))

    def _newest(self, tokens: int) -> Tensor:
        """Return the positions of the newest tokens, after ``update``."""
        return torch.arange(tokens, device=self.device) + (self.cumulative_length - tokens)


FILTERED: dict[type, type] = {
    DynamicLayer: FilteredDynamicLayer,
    DynamicSlidingWindowLayer: FilteredSlidingWindowLayer,
    StaticLayer: FilteredStaticLayer,
}
