"""Dropout masks for the entries of attention matrices.

PyTorch's CPU attention draws its mask one number at a time, which costs more than the attention itself. Here four
decisions share one random word, and one byte per entry is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scratch import scratch


def draw_masks(shape: tuple[int, ...], dropout: float) -> Tensor:
    """Draw which entries stay (bool), with 16 random bits each from the default generator."""
    count = torch.Size(shape).numel()
    bits = (
        torch.empty((count + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None).view(torch.int16)[:count]
    )
    return (bits >= _count_dropped(dropout) - 2**15).view(shape)


def drop(matrix: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """Return a matrix with the dropped entries set to 0 and the others scaled, so that the mean stays.

    The result lies in scratch memory, and the next call overwrites it.
    """
    return torch.mul(matrix, keep, out=scratch("dropped", matrix.shape, matrix.dtype)).mul_(scale_of_kept(dropout))


def scale_of_kept(dropout: float) -> float:
    """Return the factor of the entries that stay."""
    return 1 / (1 - _count_dropped(dropout) / 2**16)


def _count_dropped(dropout: float) -> int:
    return min(round(dropout * 2**16), 2**16 - 1)
