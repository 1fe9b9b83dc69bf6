"""A context in which a tensor holds other values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def filled(tensor: Tensor, value: float) -> Iterator[None]:
    """Set every entry of a tensor to ``value`` within the context, and restore the entries afterwards."""
    original = tensor.detach().clone()
    with torch.no_grad():
        tensor.fill_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(original)
