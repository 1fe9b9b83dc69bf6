"""Near and far field of attention over blocks of tokens: softmax over near blocks, running means over the far ones.

All functions consist of PyTorch operations, so that gradients, compilers and exports work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .eager_cpu import on_plain_cpu
from .exporting import is_exporting
from .nearby import first_present, weigh
from .spectral.blocks import NEVER

CHUNK = 32  # blocks whose running means are one product


class FarMeans(NamedTuple):
    """Weighted means of values, one per feature, and the weight that they stand for.

    Attributes:
        mass: (batch, key heads, blocks, features), logarithm of the summed weights; float32 or wider.
        mean: (batch, key heads, blocks, features, value features), of the same dtype.
    """

    mass: Tensor
    mean: Tensor


def split_blocks(x: Tensor, block: int) -> Tensor:
    """Split the tokens, the dimension before the last: (..., tokens, features) to (..., blocks, block, features)."""
    return x.unflatten(-2, (-1, block))


def pad_tokens(x: Tensor, before: int, after: int) -> Tensor:
    """Add zeros before and after the tokens of x (batch, heads, tokens, features).

    ``torch.nn.functional.pad`` is not used: if it adds nothing, it stores its result in another order, and a compiled
    graph for any number of tokens does not expect that.
    """
    if not before and not after and on_plain_cpu(x):
        return x
    zeros = (x.new_zeros(*x.shape[:2], count, x.shape[3]) for count in (before, after))
    return torch.cat([next(zeros), x, next(zeros)], 2)


def group_queries(x: Tensor, *, groups: int, before: int, after: int, block: int) -> Tensor:
    """Bring rows of the queries into the order of the blocks of keys.

    Args:
        x: (batch, heads, tokens, features).
        groups: number of key heads.
        before, after: number of rows of zeros to add on both sides.
        block: number of tokens in a block.

    Returns:
        (batch, key heads, blocks, heads per key head, block, features).
    """
    return split_blocks(pad_tokens(x, before, after).unflatten(1, (groups, -1)), block).transpose(2, 3)


def list_neighbours(blocks: Tensor, dim: int, causal: bool) -> list[Tensor]:
    """Return, for each block, the one before it, the block itself and, unless ``causal``, the one after it.

    Args:
        blocks: blocks along ``dim``.
        dim: 1 or more.
        causal: whether later blocks are left out.

    Returns:
        Tensors of the shape of ``blocks``. Neighbours that do not exist are zero.
    """
    zeros, count = torch.zeros_like(blocks.narrow(dim, 0, 1)), blocks.shape[dim]
    padded = torch.cat([zeros, blocks] if causal else [zeros, blocks, zeros], dim)
    return [padded.narrow(dim, 0, count), blocks, *([] if causal else [padded.narrow(dim, 2, count)])]


def summarize_blocks(logits: Tensor, value: Tensor) -> FarMeans:
    """Return the mean of the values of each block, with weights ``exp(logits)``.

    Args:
        logits: (batch, key heads, blocks, block, features), float32 or wider; ``NEVER`` for tokens to leave out.
        value: (batch, key heads, blocks, block, value features), zeros for these tokens.
    """
    weights, mass = weigh(logits, 3)
    return FarMeans(mass, weights.mT @ value.to(weights.dtype))


def accumulate_blocks(blocks: FarMeans, past: FarMeans | None = None) -> FarMeans:
    """Return running means: for each block, the mean over itself, all blocks before it, and ``past``.

    ``past`` has one block. All factors are at most 1, so nothing overflows however far the weights lie apart.
    """
    mass, mean = blocks
    if past is None:
        start, start_mean = torch.full_like(mass[:, :, :1], NEVER), torch.zeros_like(mean[:, :, :1])
    else:
        start, start_mean = past.mass.to(mass.dtype), past.mean.to(mean.dtype)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a graph would be bound to the number of chunks
        return _accumulate_chunk(mass, mean, start, start_mean)
    parts = []
    for chunk, chunk_mean in zip(mass.split(CHUNK, 2), mean.split(CHUNK, 2), strict=True):
        parts.append(_accumulate_chunk(chunk, chunk_mean, start, start_mean))
        start, start_mean = (x[:, :, -1:] for x in parts[-1])
    return FarMeans(*(torch.cat(x, 2) for x in zip(*parts, strict=True)))


def _accumulate_chunk(mass: Tensor, mean: Tensor, start: Tensor, start_mean: Tensor) -> FarMeans:
    """Return running means by one product, whose work grows with the square of the number of blocks."""
    count = mass.shape[2]
    mask = torch.ones(count, count + 1, dtype=torch.bool, device=mass.device).tril(1)
    # a softmax over blocks, with the features last: over a short last dimension PyTorch takes several times as long
    logits = torch.where(mask[..., None], torch.cat([start, mass], 2)[:, :, None], NEVER)
    weights, masses = weigh(logits, 3)
    means = weights.permute(0, 1, 4, 2, 3) @ torch.cat([start_mean, mean], 2).transpose(2, 3)
    return FarMeans(masses, means.transpose(2, 3))


def far_of_blocks(blocks: FarMeans, past: FarMeans | None, causal: bool) -> FarMeans:
    """Return for each block the means of all blocks that are not its neighbours.

    Args:
        blocks: means of each block alone.
        past: means of the tokens before the first block, as one block, in a causal module.
        causal: whether later blocks are left out.
    """
    before = accumulate_blocks(_shift(blocks, 2), past)
    if causal:
        return before
    mirrored = FarMeans(*(x.flip(2) for x in blocks))
    after = FarMeans(*(x.flip(2) for x in accumulate_blocks(_shift(mirrored, 2))))
    share = torch.sigmoid(after.mass - before.mass).unsqueeze(-1).to(before.mean.dtype)  # narrower under autocast
    return FarMeans(torch.logaddexp(before.mass, after.mass), torch.lerp(before.mean, after.mean, share))


def _shift(blocks: FarMeans, by: int) -> FarMeans:
    """Return the means of the block ``by`` blocks before each; there is nothing before the first."""
    mass = functional.pad(blocks.mass, (0, 0, by, 0), value=NEVER)[:, :, : blocks.mass.shape[2]]
    mean = functional.pad(blocks.mean, (0, 0, 0, 0, by, 0))[:, :, : blocks.mean.shape[2]]
    return FarMeans(mass, mean)


def count_far(is_far: Tensor, causal: bool) -> Tensor:
    """Count, for each block, the far tokens outside its neighbours: (batch, blocks, block) to (batch, blocks)."""
    counts = is_far.sum(-1).float()
    if causal:
        return functional.pad(counts.cumsum(-1), (2, 0))[:, : counts.shape[-1]]
    near_counts = counts + functional.pad(counts, (1, 0))[:, :-1] + functional.pad(counts, (0, 1))[:, 1:]
    return counts.sum(-1, keepdim=True) - near_counts


def see_neighbours(is_token: Tensor, sinks: Tensor, causal: bool) -> Tensor:
    """Return which keys each query sees near it.

    Args:
        is_token: bool (batch, blocks, block).
        sinks: bool (batch, blocks, sinks), whether a block sees each of the first tokens beside its neighbours.
        causal: whether later tokens are left out.

    Returns:
        Bool (batch, blocks, block, sinks + keys), the keys as ``list_neighbours`` orders them.
    """
    block = is_token.shape[-1]
    visible = torch.cat(list_neighbours(is_token, 1, causal), 2)[:, :, None].expand(-1, -1, block, -1)
    if causal:
        is_past = torch.ones(block, 2 * block, dtype=torch.bool, device=visible.device).tril(block)
        visible = visible & is_past
    return torch.cat([sinks[:, :, None].expand(-1, -1, block, -1), visible], -1)


class Sinks(NamedTuple):
    """The first tokens of a text.

    Attributes:
        is_present: bool (batch or 1, sinks), False for those that the text does not have.
        at: (batch or 1, sinks), their positions, counted from the first token of the oldest block that is at hand.
        key: (batch, key heads, sinks, features).
        value: (batch, key heads, sinks, value features).
    """

    is_present: Tensor
    at: Tensor
    key: Tensor
    value: Tensor

    def flags(self, batch: int | None = None) -> dict[str, Tensor]:
        """Return what a state keeps beside keys and values, for a whole batch."""
        is_present, at = (x if batch is None else x.expand(batch, -1).clone() for x in (self.is_present, self.at))
        return {"sink_present": is_present, "sink_at": at}

    def seen(self, blocks: int, block: int, causal: bool) -> Tensor:
        """Return whether each block sees a sink beside its neighbours: bool (batch or 1, blocks, sinks)."""
        distance = torch.arange(blocks, device=self.at.device)[:, None] - self.at[:, None] // block
        return ((distance if causal else distance.abs()) >= 2) & self.is_present[:, None]


def find_sinks(
    count: int, key: Tensor, value: Tensor, is_token: Tensor, begin: int, earlier: Sinks | None = None
) -> Sinks:
    """Return the first ``count`` tokens among ``earlier`` ones and those of this call, which start at ``begin``."""
    positions = begin + torch.arange(is_token.shape[1], device=key.device).expand(key.shape[0], -1)
    rows: tuple[Tensor, ...] = is_token.expand(key.shape[0], -1), positions, key, value
    if earlier is not None:
        rows = tuple(torch.cat([x, y], x.dim() // 2) for x, y in zip(earlier, rows, strict=True))
    rows = first_present(count, *rows)
    missing = count - rows[0].shape[1]
    return Sinks(*(functional.pad(x, (0, 0) * (x.dim() // 2 - 1) + (0, missing)) for x in rows))


def leading_sinks(count: int, key: Tensor, value: Tensor) -> Sinks:
    """Return the first ``count`` tokens of a text without padding."""
    missing = count if is_exporting() else max(0, count - key.shape[2])
    rows = (functional.pad(x, (0, 0, 0, missing))[:, :, :count] for x in (key, value))
    positions = torch.arange(count, device=key.device)[None]
    return Sinks(positions < key.shape[2], positions, *rows)


def past_sinks(key: Tensor, value: Tensor, block: int) -> Sinks:
    """Return sinks that lie before all blocks at hand."""
    positions = torch.full((1, key.shape[2]), -2 * block, device=key.device)
    return Sinks(torch.ones_like(positions, dtype=torch.bool), positions, key, value)
