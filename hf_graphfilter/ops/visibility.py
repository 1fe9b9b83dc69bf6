"""The content of an attention mask for a linear-time filter: which tokens exist, and whether attention is causal."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import GraphFilterError
from .heads import repeat_heads
from .mask_readings import read_once

_FORBIDDEN = -1e4  # additive masks hold 0 and the lowest number of their dtype, at least -65504
_FORBIDDEN_BY_BIAS = -50.0  # where a bias was added to the mask: that of shifted windows holds -100
BIAS = (
    "the attention mask carries a bias (numbers other than 0 and -inf), which a linear-time filter cannot add to "
    "scores that it never forms; exclude these modules with layers="
)
OTHER = (
    "is neither padding nor causal (a sliding window, shifted windows, packed sequences, a prefix?), and a linear-time "
    "filter supports no other; exclude these modules with layers="
)
_READING = "_graph_filter_reading"  # of a mask, which all layers of a model share


def visibility(
    mask: Tensor | None, causal: bool, queries: int, biased: bool = False, declared_causal: bool = False
) -> tuple[bool, Tensor | None]:
    """Reduce a mask to (causal, keys).

    Every query sees the keys that are True; if causal, only those up to its own position.

    Args:
        mask: None; (batch, keys), True or 1 for a token; or (batch or 1, heads or 1, queries, keys), bool with True
            for visible, or additive. A causal mask counts the queries as the last of the keys.
        causal: whether attention is causal if the mask does not say: it is None or (batch, keys), or fits both.
        queries: number of query tokens.
        biased: whether the mask holds a bias of positions, which is ignored.
        declared_causal: whether a compiled or exported graph expects a causal mask, since it cannot branch on the
            values of the mask. Another mask is an error when the graph runs.

    Returns:
        causal, and keys: bool (batch or 1, keys), or None where all are visible.

    Raises:
        GraphFilterError: a mask of another structure (a window, blocks, a position bias), named.
    """
    if mask is None:
        return causal, None
    if not isinstance(mask, Tensor):
        raise GraphFilterError(
            f"a {type(mask).__name__} cannot be read by this filter; load the model with attn_implementation='sdpa'"
        )
    if mask.dim() == 2:
        return causal, mask.bool()
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return declared_causal, _expect(mask, declared_causal, queries, biased)
    reading: tuple[bool, Tensor | None] = read_once(
        mask, _READING, lambda: _reduce(mask, queries, biased, causal), biased, causal
    )
    return reading


def average(signal: Tensor, causal: bool, keys: Tensor | None) -> Tensor:
    """Return the mean of a signal (batch, heads, keys, features) over the tokens that exist.

    Its shape is (batch, heads, 1, features). If ``causal``, it is the mean over the tokens up to each one, (batch,
    heads, keys, features).
    """
    values = signal.float() if signal.element_size() < 4 else signal
    weights = values.new_ones(1, values.shape[2]) if keys is None else keys.to(values.dtype)
    weights = weights[:, None, :, None]
    terms, count = values * weights, weights
    sums = (terms.cumsum(2), count.cumsum(2)) if causal else (terms.sum(2, keepdim=True), count.sum(2, keepdim=True))
    return (sums[0] / sums[1].clamp(min=1)).to(signal.dtype)


def average_of_seen(signal: Tensor, seen: Tensor) -> Tensor:
    """Return the mean of a signal over what each query sees, bool (batch or 1, heads or 1, queries, keys or 1)."""
    values = signal.float() if signal.element_size() < 4 else signal
    values = values if seen.shape[1] == 1 else repeat_heads(values, seen.shape[1])
    weights = seen.to(values.dtype).expand(-1, -1, -1, values.shape[2])
    with torch.autocast(signal.device.type, enabled=False):
        return (weights @ values / weights.sum(-1, keepdim=True).clamp(min=1)).to(signal.dtype)


def seen_by_mask(mask: Tensor | None, batch: int) -> Tensor:
    """Return where a mask of queries by keys, bool or additive, lets a query see a key.

    A mask of three dimensions, (windows, queries, keys), is repeated for the windows of every image.
    """
    assert mask is not None
    visible = mask if mask.dtype == torch.bool else mask > _FORBIDDEN_BY_BIAS
    return visible[:, None].repeat(batch // visible.shape[0], 1, 1, 1) if visible.dim() == 3 else visible


def _reduce(mask: Tensor, queries: int, biased: bool, expected: bool) -> tuple[bool, Tensor | None]:
    """Return (causal, keys) of a mask; if both kinds fit (a single token, no padding), causal is as ``expected``."""
    allowed, unbiased = _allowed(mask, biased)
    if not unbiased:
        raise GraphFilterError(BIAS)
    keys = allowed.any(-2)[:, 0]
    partial = None if keys.all() else keys
    for causal in (expected, not expected):
        if torch.equal(allowed, _structure(keys, allowed, causal, queries)):
            return causal, partial
    raise GraphFilterError(f"an attention mask of shape {tuple(mask.shape)} {OTHER}")


def _expect(mask: Tensor, causal: bool, queries: int, biased: bool) -> Tensor:
    """Reduce a mask as ``_reduce`` does, without a branch: the structure is asserted when the graph runs."""
    allowed, unbiased = _allowed(mask, biased)
    torch._assert_async(torch.as_tensor(unbiased), BIAS)
    keys = allowed.any(-2)[:, 0]
    kind = "causal" if causal else "bidirectional"
    message = f"this graph was compiled for {kind} attention, and its mask {OTHER}"
    torch._assert_async((allowed == _structure(keys, allowed, causal, queries)).all(), message)
    return keys


def _allowed(mask: Tensor, biased: bool) -> tuple[Tensor, Tensor | bool]:
    """Return (where attention is allowed, whether the mask holds no bias)."""
    if mask.dtype == torch.bool:
        return mask, True
    allowed = mask > (_FORBIDDEN_BY_BIAS if biased else _FORBIDDEN)
    return allowed, True if biased else ((mask == 0) == allowed).all()


def _structure(keys: Tensor, allowed: Tensor, causal: bool, queries: int) -> Tensor:
    """Return the mask that ``keys`` alone would give, in the shape of ``allowed``."""
    visible = keys[:, None, None, :].expand_as(allowed)
    if not causal:
        return visible
    count = allowed.shape[-1]
    return visible & torch.ones(queries, count, dtype=torch.bool, device=allowed.device).tril(count - queries)
