"""The matrix of an operator that is known only by its action."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def matrix_of(linear: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return the matrix (batch, heads, query tokens, tokens) of a linear map of values.

    The map is applied to the unit vectors, as many at a time as values have features. ``like`` is such a value, (batch,
    key heads, tokens, features).
    """
    batch, heads, tokens, width = like.shape
    unit = torch.eye(tokens, tokens + -tokens % width, dtype=like.dtype, device=like.device)
    blocks = [linear(columns.expand(batch, heads, -1, -1)) for columns in unit.split(width, dim=1)]
    return torch.cat(blocks, -1)[..., :tokens]
