"""The shared parts of both forms: blocks of tensors, absent tokens, the state of past tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 18  # numbers of a tensor that one core takes at once; with fewer, others wait longer for a busy core
FEW = 128  # tokens; matrix products over fewer are slow
NEVER = -1e30  # logit of a token that is not there; finite, so that no inf - inf can arise

Block = tuple[slice, slice, slice]  # of batch, heads, tokens


class CausalState(NamedTuple):
    """The memory of the causal filter, of constant size for any number of past tokens.

    Attributes:
        mass: (batch, heads, features), logarithm of the running denominators of ``V``; float32 or wider.
        mean: (batch, heads, features, value features), ``V^T x`` over the past; of the same dtype.
    """

    mass: Tensor
    mean: Tensor


def no_past(v: Tensor, value: Tensor) -> CausalState:
    """Return the state before the first token."""
    batch, heads, _, features = v.shape
    mass = torch.full((batch, heads, features), NEVER, dtype=to_float32(v).dtype, device=v.device)
    return CausalState(mass, mass.new_zeros(batch, heads, features, value.shape[-1]))


def to_float32(x: Tensor) -> Tensor:
    """Convert to float32 unless the tensor has that precision or more."""
    return x.float() if x.element_size() < 4 else x


def blocks(x: Tensor, multiple: int = 1) -> list[list[Block]]:
    """Split x (batch, heads, tokens, features) into blocks of about ``BLOCK`` numbers per core.

    There is one list for every part of batch and heads. It holds the blocks of that part; their token counts are
    multiples of ``multiple``.

    Short sequences are kept whole. Heads stay together as long as a block has ``FEW`` tokens, since projections store
    the heads of a token side by side. A GPU gets a single block. So does a compiler, or its graph would fit only one
    number of blocks.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return [[(slice(None), slice(None), slice(None))]]
    batch, heads, tokens, features = x.shape
    rows = max(1, BLOCK * torch.get_num_threads() // max(1, features))
    at_least = min(tokens, FEW)
    head_step = max(1, min(heads, rows // max(1, at_least)))
    token_step = max(rows // head_step // multiple, 1) * multiple
    batch_step = max(1, rows // max(1, heads * tokens))
    return [
        [(b, h, t) for t in _slices(tokens, token_step)]
        for b in _slices(batch, batch_step)
        for h in _slices(heads, head_step)
        if tokens
    ]


def _slices(count: int, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, count, step)]


def hide(v: Tensor, value: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Remove the weight of absent tokens, and set their values to zero in case no token is present."""
    if keys is None:
        return v, value
    gone = ~keys[:, None, :, None]
    return v.masked_fill(gone, absent(v.dtype)), value.masked_fill(gone, 0.0)


def absent(dtype: torch.dtype) -> float:
    """Return the logit of an absent token, within the range of ``dtype``."""
    return max(NEVER, torch.finfo(dtype).min / 2)
