"""A cache of what was read from an attention mask, for all layers that share the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def read_once(mask: Tensor, name: str, read: Callable[[], Any], *options: object) -> Any:
    """Return ``read()``, which is kept at the mask under ``name`` until the mask or the ``options`` change.

    Example:
        >>> import torch
        >>> mask, calls = torch.ones(2), []
        >>> for _ in range(3):
        ...     _ = read_once(mask, "_example", lambda: calls.append(1))
        >>> len(calls)
        1
    """
    if mask.is_inference():  # no version tells whether it was changed
        return read()
    version = (id(mask), mask._version, *options)  # a copy of the mask has the attribute too
    old_version, reading = getattr(mask, name, (None, None))
    if old_version != version:
        reading = read()
        setattr(mask, name, (version, reading))
    return reading
