"""Exact memory beside a far field: the tokens that its means reproduce worst keep their keys and values.

All functions consist of PyTorch operations. They loop over the blocks, so a compiled graph fits one number of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .block_attention import FarMeans, accumulate_blocks, count_far, summarize_blocks
from .spectral.blocks import NEVER


class ExactTokens(NamedTuple):
    """Far tokens that keep their keys and values.

    Attributes:
        is_present: bool (batch or 1, places), False for places that are free; they come last.
        key: (batch, key heads, places, features).
        value: (batch, key heads, places, value features).
        logits: (batch, key heads, places, mapped features), with which a token would enter the means.
    """

    is_present: Tensor
    key: Tensor
    value: Tensor
    logits: Tensor


def take(x: Tensor, places: Tensor) -> Tensor:
    """Return the tokens of x (batch, heads, tokens, features) at places (batch, heads, count)."""
    return x.gather(2, places[..., None].expand(-1, -1, -1, x.shape[3]))


def recall_errors(value: Tensor, means: FarMeans) -> Tensor:
    """Return how far each value is from what the means answer to a query that weighs all features equally.

    Args:
        value: (batch, key heads, tokens, value features).
        means: of one block.

    Returns:
        (batch, key heads, tokens), squared distances.
    """
    mean = means.mean.masked_fill(means.mass[..., None] < NEVER / 2, 0.0)  # nothing has entered it
    return (value - mean.mean(3)).square().sum(-1)


def remember_blocks(
    size: int,
    key: Tensor,
    value: Tensor,
    logits: Tensor,
    is_far: Tensor,
    past: FarMeans | None = None,
    exact: ExactTokens | None = None,
) -> tuple[FarMeans, ExactTokens]:
    """Choose, as each block becomes far, which tokens stay exact; all others enter the means.

    Candidates are the tokens that were exact so far and those of this block. The ``size`` tokens per key head that the
    means so far reproduce worst stay exact.

    Args:
        size: 1 or more.
        key: (batch, key heads, blocks, block, features), of a causal module.
        value: (batch, key heads, blocks, block, value features).
        logits: (batch, key heads, blocks, block, mapped features), float32 or wider.
        is_far: bool (batch or 1, blocks, block), False for sinks and padding.
        past: means of what came before the first block; one block.
        exact: tokens from before the first block that are exact.

    Returns:
        What the queries of each block attend to: the means, and the exact tokens. In the latter, blocks are a further
        dimension before the tokens.
    """
    batch, heads, _, block, _ = key.shape
    counts = count_far(is_far, True)
    key, value, logits, is_far = (x.flatten(-3, -2) for x in (key, value, logits, is_far.unsqueeze(-1)))
    is_far, exact_count = is_far.squeeze(-1), 0
    if exact is not None:
        rows = ((exact.key, key), (exact.value, value), (exact.logits.to(logits.dtype), logits))
        key, value, logits = (torch.cat(pair, 2) for pair in rows)
        is_far = torch.cat([exact.is_present, is_far.expand(len(exact.is_present), -1)], 1)
        counts, exact_count = counts + exact.is_present.sum(-1, keepdim=True), exact.is_present.shape[1]
    if past is None:
        mass = logits.new_full((batch, heads, 1, logits.shape[3]), NEVER)
        past = FarMeans(mass, logits.new_zeros(*mass.shape, value.shape[3]))
    is_candidate = is_far.expand(batch, -1)[:, None].expand(-1, heads, -1)
    places = torch.arange(exact_count, device=key.device).expand(batch, heads, -1)
    means, chosen = [past, past], [places, places]  # the first two blocks have no new far tokens
    for begin in range(exact_count, key.shape[2] - 2 * block, block):
        new_places = torch.arange(begin, begin + block, device=key.device)
        places = torch.cat([places, new_places.expand(batch, heads, -1)], 2)
        errors = recall_errors(take(value, places).to(logits.dtype), past)
        errors = errors.masked_fill(~is_candidate.gather(2, places), -1.0)  # free places come last
        places = places.gather(2, errors.argsort(stable=True, dim=-1, descending=True))
        if places.shape[2] > size:
            places, evicted = places[..., :size], places[..., size:]
            weights = take(logits, evicted).masked_fill(~is_candidate.gather(2, evicted)[..., None], NEVER)
            past = accumulate_blocks(summarize_blocks(weights[:, :, None], take(value, evicted)[:, :, None]), past)
        means.append(past)
        chosen.append(places)
    most, blocks = places.shape[2], counts.shape[1]
    indices = torch.cat([functional.pad(x, (0, most - x.shape[2])) for x in chosen[:blocks]], 2)
    entries = (take(x, indices).unflatten(2, (blocks, most)) for x in (key, value, logits))
    is_present = torch.arange(most, device=key.device) < counts[..., None]
    return FarMeans(*(torch.cat(x, 2) for x in zip(*means[:blocks], strict=True))), ExactTokens(is_present, *entries)
