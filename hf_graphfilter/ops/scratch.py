"""Memory for intermediate results that every layer uses again.

For a new tensor of some MB, the operating system provides memory page by page, and again at each call. For short
sequences that costs more time than the products that fill the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

LARGEST = 1 << 22  # numbers that are held per buffer; more are allocated for one use
MOST = 16  # things made of buffers that are held

_T = TypeVar("_T")


class _Held(threading.local):  # the backward pass may run in another thread than the forward pass
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.made: dict[Hashable, Any] = {}


_held = _Held()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor on the CPU with arbitrary content.

    Its memory is that of earlier calls with this name and dtype in this thread, whose content is lost.
    """
    count = prod(shape)
    if count > LARGEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffer = _held.buffers.get((name, dtype))
    if buffer is None or buffer.shape[0] < count:
        with torch.inference_mode(False):  # a tensor made in that mode cannot be written to outside of it
            _held.buffers[name, dtype] = buffer = torch.empty(count, dtype=dtype, device="cpu")
        _held.made.clear()  # or smaller buffers would stay
    return buffer[:count].view(shape)


def reuse(make: Callable[..., _T], *arguments: Hashable) -> _T:
    """Return ``make(*arguments)``, an object of ``scratch`` tensors, or the one that an earlier call made."""
    key = (make, *arguments)
    result = _held.made.get(key)
    if result is None:
        with torch.inference_mode(False), torch.no_grad():
            result = make(*arguments)
        if len(_held.made) >= MOST:
            _held.made.clear()
        _held.made[key] = result
    return result  # type: ignore[no-any-return]
