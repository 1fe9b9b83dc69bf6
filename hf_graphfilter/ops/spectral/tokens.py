"""What both forms of the filter share: tokens taken block by block, tokens that are not there, what is past."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 18  # numbers that matrix products on the CPU take at once
NEVER = -1e30  # logit of a token that is not there; finite, so that no inf - inf can arise


class CausalState(NamedTuple):
    """All that the causal filter remembers of the past: constant size, whatever the number of tokens.

    Attributes:
        mass: (batch, heads, features), logarithm of the running denominators of ``V``; float32 or wider.
        mean: (batch, heads, features, value features), ``V^T x`` over the past; of the same dtype.
    """

    mass: Tensor
    mean: Tensor


def no_past(v: Tensor, value: Tensor) -> CausalState:
    """The state before the first token."""
    batch, heads, _, features = v.shape
    mass = torch.full((batch, heads, features), NEVER, dtype=wide(v).dtype, device=v.device)
    return CausalState(mass, mass.new_zeros(batch, heads, features, value.shape[-1]))


def wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def blocks(x: Tensor, size: int, multiple: int = 1) -> list[slice]:
    """Parts of the tokens of x (batch, heads, tokens, features) with about ``size`` numbers; a GPU takes all, and so
    does a compiler, whose graph would be bound to their number."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    count = x.shape[2]
    step = count if x.device.type != "cpu" else size * count // max(1, x.numel())
    step = max(step // multiple, 1) * multiple
    return [slice(i, i + step) for i in range(0, count, step)]


def hide(v: Tensor, value: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without the tokens that are not there: no weight, and no value should none be there at all."""
    if keys is None:
        return v, value
    gone = ~keys[:, None, :, None]
    return v.masked_fill(gone, absent(v.dtype)), value.masked_fill(gone, 0.0)


def absent(dtype: torch.dtype) -> float:
    """The logit of a token that is not there, in the range of ``dtype``."""
    return max(NEVER, torch.finfo(dtype).min / 2)
