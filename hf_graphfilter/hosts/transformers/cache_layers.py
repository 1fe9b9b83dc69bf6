"""Layers of a key/value cache that also hold the memory of a filter.

A polynomial of ``S`` needs the past rows of every signal that ``S`` was applied to, besides keys and values. This costs
O(n d) memory, and O(n d) work per token. Since the rows are on the layer, beam search and batch selection treat them
like keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ...errors import UNSEEN, GraphFilterError
from ...ops.exporting import is_exporting

ROOM = 16  # rows are kept in tensors with room for a sixteenth more, and for as many tokens at least

TWICE = (
    "the module computes attention several times in a pass, or keeps keys in several layers of the cache, and a graph "
    "filter keeps past tokens in one layer: use use_cache=False"
)

REPLACED = (
    "the keys and values in the cache were replaced without the filter (pruned, compressed, sorted), and what it "
    "keeps of past tokens no longer belongs to them: leave the cache as the model fills it, or use use_cache=False"
)

MISSED = f"the key/value cache holds tokens that the filter has not seen: {UNSEEN}"

EXPORTED_STEP = (
    "an exported decoding step holds the keys and values of its cache, and not the rows of S(V) that this graph filter "
    "keeps too: compile the step with torch.compile, or export with use_cache=False"
)

if TYPE_CHECKING:
    _Layer = DynamicLayer
else:
    _Layer = object


class LayerMemory(_Layer):
    """A mixin for cache layers that holds further tensors by name, with the batch first."""

    kept: dict[Any, Tensor]
    is_read = False  # the filter has asked for it since the last update
    missed = False  # an update came without the filter, so its tensors lack these tokens
    was_called_twice = False  # the filter asked again for the same tokens, so its rows are of two calls
    known: tuple[Any, Any] = (None, None)  # keys and values as the layer itself left them
    replaced = False  # other code has replaced them since

    def forget(self) -> None:
        """Forget all tensors, and take the keys and values as they are."""
        self.kept = {}
        self.restart()

    def restart(self) -> None:
        """Forget what happened to the layer, and take the keys and values as they are."""
        self.is_read = self.missed = self.was_called_twice = self.replaced = False
        self.known = self.keys, self.values

    def begin_update(self) -> None:
        """Note that tokens come, and whether the filter missed those before them."""
        self.missed |= bool(self.kept) and not self.is_read
        self.is_read = False

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin_update()
        return self._change(super().update, *args, **kwargs)  # type: ignore[no-any-return]

    def _change(self, change: Callable[..., Any], *args: Any, each: Any = None, **kwargs: Any) -> Any:
        """Let the layer ``change`` its keys and values, after a check whether other code replaced them.

        ``each`` makes the same change in a tensor that is kept besides them.
        """
        if not torch.compiler.is_compiling():
            self.replaced |= not (self.keys is self.known[0] and self.values is self.known[1])
        result = change(*args, **kwargs)
        self.known = self.keys, self.values
        if each is not None:
            self._change_kept(each)
        return result

    def check_usable(self, site: str, queries: int, device: torch.device) -> bool:
        """Return whether the filter can use this layer.

        Raises:
            GraphFilterError: the filter needs the layer and cannot use it.
        """
        self.begin_read(site)
        if self.missed:
            raise GraphFilterError(f"{site}: {MISSED}")
        if not torch.compiler.is_compiling():
            self._change_kept(lambda tensor: tensor.to(device))  # from where ``offload`` has put it
        # a compiled step that reads the number of tokens is bound to it, so this one reads it only to raise
        if self.was_called_twice and self.get_seq_length() > queries:
            raise GraphFilterError(f"{site}: {TWICE}")
        return not self.was_called_twice

    def begin_read(self, site: str) -> None:
        """Note that the filter asks for the layer.

        Raises:
            GraphFilterError: the filter's tensors do not belong to the keys and values of the layer.
        """
        if self.replaced and self.kept:
            raise GraphFilterError(f"{site}: {REPLACED}")
        self.was_called_twice |= self.is_read
        self.is_read = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Detach the filter's tensors with the keys: ``layer.keys = layer.keys.detach()`` truncates backpropagation."""
        old_value = self.__dict__.get(name) if name in ("keys", "values") else None
        is_new_tensor = isinstance(old_value, Tensor) and isinstance(value, Tensor) and value is not old_value
        is_new_tensor = is_new_tensor and not torch.compiler.is_compiling()  # no graph has `is_set_to`
        if is_new_tensor and not value.requires_grad and value.is_set_to(old_value):
            self.known = tuple(value if known is old_value else known for known in self.known)  # type: ignore[assignment]
            if name == "keys":
                self._change_kept(Tensor.detach)
        super().__setattr__(name, value)

    def _change_kept(self, change: Callable[[Tensor], Tensor]) -> None:
        self.kept = {name: change(tensor) for name, tensor in self.kept.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(super().reorder_cache, beam_idx, each=lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(super().batch_repeat_interleave, repeats, each=lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(super().batch_select_indices, indices, each=lambda x: x[indices, ...])

    def offload(self) -> None:
        self._change(super().offload, each=lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(super().prefetch, each=lambda x: x.to(self.device, non_blocking=True))


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
        self.buffers -= {application}

    def _write(self, application: int, signal: Tensor, keys: int) -> None:
        """Write rows behind those in use, in another tensor if there is no room left."""
        end, tokens = self.ends[application], signal.shape[2]
        if application not in self.buffers or self.kept[application].shape[2] < end + tokens:
            old_rows = self._in_window(self.rows(application), keys)
            batch, heads, end, features = old_rows.shape
            buffer = old_rows.new_empty(batch, heads, end + max(end // ROOM, tokens, ROOM), features)
            buffer[:, :, :end] = old_rows
            self.kept[application] = buffer
            self.buffers |= {application}
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
