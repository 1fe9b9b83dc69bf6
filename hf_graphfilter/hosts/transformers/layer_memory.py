"""The memory of a filter on a layer of a key/value cache, and what can happen to the layer without the filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ...errors import UNSEEN, GraphFilterError

TWICE = (
    "the module computes attention several times in a pass, or keeps keys in several layers of the cache, and a graph "
    "filter keeps past tokens in one layer: use use_cache=False"
)

REPLACED = (
    "the keys and values in the cache were replaced without the filter (pruned, compressed, sorted), and what it "
    "keeps of past tokens no longer belongs to them: leave the cache as the model fills it, or use use_cache=False"
)

MISSED = f"the key/value cache holds tokens that the filter has not seen: {UNSEEN}"

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
        self.missed |= len(self.kept) > 0 and not self.is_read
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
        self.known = None, None  # until the layer has changed them, see `__setattr__`
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
        # changes by the layer itself do not come to `is_set_to`, which graphs, vmap and the meta device lack
        is_by_others = not torch.compiler.is_compiling() and any(known is old_value for known in self.known)
        if is_new_tensor and is_by_others and not value.requires_grad and value.is_set_to(old_value):
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
