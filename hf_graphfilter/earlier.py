"""What the layers of a stack hand on to each other in one forward pass, besides the hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import GraphFilterError


class EarlierLayers:
    """What the filters of a stack's layers leave for those of later ones in one forward pass, in its order.

    A layer that gradient checkpointing runs once more finds what it found before, and leaves nothing.
    """

    def __init__(self) -> None:
        self._left: list[tuple[str, Tensor, bool]] = []
        self._begun_in = _backward_pass()

    def leave(self, name: str, tensor: Tensor) -> None:
        """For the layers that follow the one of that ``name``, ``GraphFilter.site_name``."""
        if not self._runs_again(name):
            self._left.append((name, tensor, torch.is_grad_enabled()))

    def left_before(self, name: str) -> list[Tensor]:
        """What the layers before left, the nearest one's last.

        Raises:
            GraphFilterError: a gradient would be lost, of this layer or of one before, that first ran without; or the
                layer is run again, and has several places.
        """
        left, end = self._left, len(self._left)
        if self._runs_again(name):
            places = [i for i, entry in enumerate(left) if entry[0] == name]
            if len(places) > 1:
                raise GraphFilterError(
                    f"{name} is applied {len(places)} times in one forward pass, with gradient checkpointing: which "
                    "layer came before cannot be told; train it without"
                )
            end = places[0]
        before, itself = left[:end], left[end : end + 1]
        if before and torch.is_grad_enabled() and not all(with_gradient for *_, with_gradient in before + itself):
            raise GraphFilterError(
                f"{name} reads what the layer before made, whose gradient reentrant checkpointing loses: use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return [tensor for _, tensor, _ in before]

    def copy(self) -> EarlierLayers:
        other = EarlierLayers()
        other._left = list(self._left)
        return other

    def detach(self) -> None:
        """No gradient flows back into the layers so far."""
        self._left = [(name, tensor.detach(), with_gradient) for name, tensor, with_gradient in self._left]

    def _runs_again(self, name: str) -> bool:
        return _backward_pass() != self._begun_in and any(entry[0] == name for entry in self._left)


def _backward_pass() -> int:
    """Number of the backward pass that this code runs in, as checkpointed layers do again; -1 outside of any."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
