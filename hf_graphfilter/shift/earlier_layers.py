"""The tensors that the layers of a stack pass on to each other in one forward pass, besides the hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import GraphFilterError


class _Entry(NamedTuple):
    name: str  # name of the layer
    kind: str
    call: int  # number of the call of its attention
    tensor: Tensor
    with_gradient: bool


class EarlierLayers:
    """The tensors that the filters of a stack leave for later layers in one forward pass, in order.

    If gradient checkpointing runs a layer again, the layer finds the same tensors as before, and leaves none. Some
    modules apply their attention several times, such as vision towers, once per image. There each call finds the
    tensors that the calls with the same number left.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._begun_in = _backward_pass()
        self._calls: dict[tuple[str, int], int] = {}  # number of calls so far, by layer and pass
        self._call = 0

    def begin_layer(self, name: str) -> None:
        """Start to count the calls of this layer's attention."""
        self._calls.pop((name, _backward_pass()), None)

    def begin_call(self, name: str) -> None:
        layer = name, _backward_pass()
        self._call = self._calls[layer] = self._calls.get(layer, 0) + 1

    def leave(self, name: str, tensor: Tensor, kind: str) -> None:
        """Leave a tensor of layer ``name`` (``GraphFilter.site_name``) for later layers with this kind of filter."""
        if not self._runs_again(name):
            self._entries.append(_Entry(name, kind, self._call, tensor, torch.is_grad_enabled()))

    def left_before(self, name: str, kind: str) -> list[Tensor]:
        """Return the tensors that layers before ``name`` with this kind of filter left; the nearest layer comes last.

        Raises:
            GraphFilterError: this layer or an earlier one first ran without gradients, so that a gradient would be
                lost; or the layer is run again, but has several places.
        """
        entries = [entry for entry in self._entries if (entry.call, entry.kind) == (self._call, kind)]
        end = len(entries)
        if self._runs_again(name):
            places = [i for i, entry in enumerate(entries) if entry.name == name]
            if len(places) > 1:
                raise GraphFilterError(
                    f"{name} is applied {len(places)} times in one forward pass, so that gradient checkpointing cannot "
                    "know which layer came before: train it without gradient checkpointing"
                )
            end = places[0]
        before, this_layer = entries[:end], entries[end : end + 1]
        if before and torch.is_grad_enabled() and not all(entry.with_gradient for entry in before + this_layer):
            raise GraphFilterError(
                f"{name} reads a tensor of the layer before, whose gradient reentrant checkpointing loses: use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return [entry.tensor for entry in before]

    def copy(self) -> EarlierLayers:
        other = EarlierLayers()
        other._entries, other._calls, other._call = list(self._entries), dict(self._calls), self._call
        return other

    def detach(self) -> None:
        """Stop gradients from flowing back into the layers so far."""
        self._entries = [entry._replace(tensor=entry.tensor.detach()) for entry in self._entries]

    def _runs_again(self, name: str) -> bool:
        matches = (entry.name == name and entry.call == self._call for entry in self._entries)
        return _backward_pass() != self._begun_in and any(matches)


def _backward_pass() -> int:
    """Return the number of the backward pass that runs this code, or -1 outside of any.

    Layers under gradient checkpointing run again within a backward pass.
    """
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
