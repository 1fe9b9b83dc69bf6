"""Softmax attention within a window of tokens, and to the first tokens, in linear time and memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .exporting import is_exporting

BLOCK = 32  # queries that share one slice of keys


def attend_nearby(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scaling: float,
    causal: bool,
    keys: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Let every query attend to the keys at most ``window`` tokens away, in O(n (window + BLOCK) d) time.

    Args:
        query: (batch, heads, tokens, features), the last of the key tokens.
        key, value: (batch, heads, key tokens, features).
        window: number of tokens on each side (only the left if ``causal``). One longer than the text costs no
            more, except in a compiled graph.
        scaling: of the scores.
        causal: whether later keys are left out.
        keys: bool (batch, key tokens), True for tokens that are there.
        bias: (batch or 1, heads, tokens, key tokens), added to the scores.

    Returns:
        output, (batch, heads, tokens, value features), zeros where the window is empty; and the logarithm of the sum of
        the exponentiated scores, (batch, heads, tokens, 1), float32 or wider.
    """
    tokens, past = query.shape[2], key.shape[2] - query.shape[2]
    if tokens == 1 and causal:  # a step of decoding
        last = slice(-window - 1, None)
        last_bias = None if bias is None else bias[..., last]
        return attend_few(query, key[:, :, last], value[:, :, last], scaling, keys[:, None, last], last_bias)
    block = max(BLOCK, window)
    if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # a graph would be bound to the number of tokens
        block, window = max(BLOCK, min(window, tokens)), min(window, key.shape[2] - 1)
    missing = -tokens % block
    if is_exporting():  # two blocks at least, and some of it padding: the same graph for any length
        missing = 2 * block - tokens % block
    after = missing if causal else window + missing
    width = block + (window if causal else 2 * window)

    def slices(x: Tensor) -> Tensor:  # (batch, heads, blocks, width, features), one overlapping slice per block
        padded = functional.pad(x, (0, 0, window - past, after))  # negative padding removes tokens
        return padded.unfold(2, width, block).transpose(-1, -2)

    distance = torch.arange(width, device=key.device) - torch.arange(block, device=key.device)[:, None]
    inside = (distance >= 0) & (distance <= (window if causal else 2 * window))
    inside = inside & slices(keys[:, None, :, None]).mT
    queries = functional.pad(query * scaling, (0, 0, 0, missing)).unflatten(2, (-1, block))  # float16 ends at 65,504
    scores = (queries @ slices(key).mT).to(torch.promote_types(query.dtype, torch.float32))
    if bias is not None:
        padded = functional.pad(bias, (window - past, after, 0, missing)).unflatten(2, (-1, block))
        scores = scores + padded.unfold(-1, width, block).diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)
    scores = scores.masked_fill(~inside, -1e30)
    weights, mass = weigh(scores, -1)
    out = (weights * inside).to(value.dtype) @ slices(value)
    return out.flatten(2, 3)[:, :, :tokens], mass.unsqueeze(-1).flatten(2, 3)[:, :, :tokens]


def weigh(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the softmax of ``scores`` along ``dim`` and their logsumexp, without another exponential."""
    weights = scores.softmax(dim)
    return weights, scores.amax(dim) - weights.amax(dim).log()


def count_nearby(keys: Tensor, tokens: int, window: int, causal: bool) -> Tensor:
    """Count the keys that each query of ``attend_nearby`` sees in its window, (batch, tokens); ``keys`` as there."""
    places = torch.arange(tokens, device=keys.device) + keys.shape[1] - tokens
    counts = functional.pad(keys.long().cumsum(-1), (1, 0))  # among the first so many
    last = places + 1 if causal else (places + window + 1).clamp(max=keys.shape[1])
    return counts[:, last] - counts[:, (places - window).clamp(min=0)]


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, seen: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Let every query attend to a few keys that all queries share, in O(n keys d) time.

    Args:
        query, key, value, scaling, bias: as in ``attend_nearby``.
        seen: bool (batch, query tokens, key tokens).

    Returns:
        as ``attend_nearby``; the second is -1e30 where no key is seen.
    """
    scores = ((query * scaling) @ key.mT).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen[:, None], -1e30)
    weights = scores.softmax(-1) * seen[:, None]
    return weights.to(value.dtype) @ value, scores.logsumexp(-1, keepdim=True)


def first_present(count: int, is_present: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Return the entries of the first ``count`` tokens that are present, followed by absent ones if there are too few.

    Args:
        count: number of tokens to return.
        is_present: bool (batch, tokens), True for tokens that are present.
        rows: each (batch, tokens) or (batch, heads, tokens, features).

    Returns:
        The entries of ``is_present`` and of each of ``rows``.
    """
    if is_exporting():  # as many at least: the same graph for any length
        is_present = functional.pad(is_present, (0, count))
        rows = tuple(functional.pad(x, (0, 0) * (x.dim() // 2 - 1) + (0, count)) for x in rows)
    tokens = is_present.shape[1]
    # a stable sort has no form in ONNX
    order = torch.arange(tokens, device=is_present.device) + tokens * (~is_present).long()
    places = order.argsort(-1)[:, :count]

    def choose(x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.gather(1, places)
        return x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    return tuple(map(choose, (is_present, *rows)))
