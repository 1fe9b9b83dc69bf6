"""The matrix of an operator that is known by what it does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def matrix_of(linear: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The matrix (batch, heads, query tokens, tokens) of a linear map of values that are shaped ``like``, (batch, key
    heads, tokens, features), found by handing it the unit vectors, as many at a time as values have features."""
    batch, heads, tokens, width = like.shape
    unit = torch.eye(tokens, tokens + -tokens % width, dtype=like.dtype, device=like.device)
    blocks = [linear(columns.expand(batch, heads, -1, -1)) for columns in unit.split(width, dim=1)]
    return torch.cat(blocks, -1)[..., :tokens]
