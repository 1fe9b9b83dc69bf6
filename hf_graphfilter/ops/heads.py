"""Heads that share keys and values."""

from __future__ import annotations

from torch import Tensor


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat grouped heads: (batch, groups, tokens, features) to (batch, heads, tokens, features)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
