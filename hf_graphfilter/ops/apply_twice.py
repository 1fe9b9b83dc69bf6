"""Softmax attention applied twice, ``S(V)`` and ``S(S(V))``, with one matrix A for both, on the CPU.

The backward pass shares the matrix, too.

Two calls of scaled_dot_product_attention form the scores twice and run 4 matrix products, their backward passes 10;
here there are 3 and 7, of half the size where A is causal. With dropout PyTorch's CPU attention draws its mask one
number at a time, which costs more than the attention itself; here four decisions share one random word, and one byte
per entry is kept. Work goes through the batch and heads in pieces, so that no more than a few MB of matrix exist at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import triton
from .heads import repeat_heads

PIECE = 1 << 20  # entries of A handled at a time, 4 MB in float32: they stay in the processor's cache
ROWS = 64  # of a causal A formed at a time, up to their last visible column
# Where two calls of scaled_dot_product_attention are slower, forward and with backward: measured with 12 heads of 64
# on AVX-512, AVX2 and SSE; short sequences of few heads do not repay the calls that a piece takes.
FASTER = {False: range(64, 1025), True: range(64, 4097)}  # tokens, by whether A is causal
FEWEST_ROWS = 768  # heads x tokens of one sequence


def can_apply_twice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, exact: bool
) -> bool:
    """Return whether ``apply_twice`` is the faster form: on the CPU, with a mask that needs no gradient.

    Without dropout it equals two calls up to rounding, so that it is not for where results are to be ``exact``.

    The answer is the same with and without gradients: checkpointing runs the forward pass in both ways, and must find
    the same numbers and draw the same masks.
    """
    tensors = (query, key, value)
    return (
        all(on_plain_cpu(t) and t.dtype in (torch.float32, torch.float64) for t in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not (mask is not None and mask.requires_grad)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[2] == key.shape[2] == value.shape[2]
        and (0 < dropout < 1 or (dropout == 0 and not exact and _is_faster(query, causal)))
    )


def on_plain_cpu(x: Tensor) -> bool:
    """Return whether code may branch on the values of ``x`` and choose another form for it than the model's.

    On the CPU that costs no synchronisation. No compiler, tracer or transform may be active.
    """
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


def _is_faster(query: Tensor, causal: bool) -> bool:
    heads, tokens = query.shape[1:3]
    return tokens in FASTER[causal] and heads * tokens >= FEWEST_ROWS


def joint_form(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    exact: bool,
) -> tuple[Tensor, Tensor] | None:
    """Return ``apply_twice`` from a GPU kernel or the CPU, or None if the caller must apply ``S`` twice.

    Keys and values may have fewer heads than queries.
    """
    if both := triton.apply_twice(query, key, value, mask, scale=scale, causal=causal, dropout=dropout):
        return both
    if not can_apply_twice(query, key, value, mask, causal, dropout, exact):
        return None
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    return apply_twice(query, key, value, mask, scale=scale, causal=causal, dropout=dropout)


def apply_twice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return ``(S(V), S(S(V)))`` for ``S = dropout(softmax(scale Q K^T + mask))``.

    The two applications draw independent dropout masks.

    Args:
        query, key, value: (batch, heads, tokens, features), float32 or float64 on the CPU.
        mask: bool (True: may attend) or additive, broadcastable to (batch, heads, tokens, tokens); no gradient.
        scale: of the scores, 1 / sqrt(features) by default.
        causal: whether a token sees only earlier ones (then without ``mask``).
        dropout: probability with which an entry of A is dropped, in steps of 2^-16.

    Returns:
        Two tensors of the shape of ``value``; without dropout they are what two calls of
        ``scaled_dot_product_attention`` return, up to rounding.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _ApplyTwice.apply(query, key, value, mask, scale, causal, dropout)


class _ApplyTwice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor]:
        scale, causal, dropout = ctx.options = options
        keep = _random_masks((2, *query.shape[:3], key.shape[2]), dropout) if dropout else None
        first, second = _like(value), _like(value)
        for piece, bias in _pieces(query, mask, causal):
            q, k, v, y, z = (x[piece] for x in (query, key, value, first, second))
            for rows, seen in _blocks(q, causal):
                once = twice = _matrix(q, k, rows, seen, bias, scale, causal)
                if keep is not None:
                    once, twice = (_dropped(once, drawn[piece][:, rows, seen], dropout) for drawn in keep)
                y[:, rows] = once @ v[:, seen]
                z[:, rows] = twice @ y[:, seen]
        ctx.save_for_backward(query, key, value, first, mask, keep)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Any, ...]:
        query, key, value, first, mask, keep = ctx.saved_tensors
        scale, causal, dropout = ctx.options
        grads = _like(query), _like(key), _like(value)
        for piece, bias in _pieces(query, mask, causal):
            q, k, v, y, grad_y, grad_z = (x[piece] for x in (query, key, value, first, grad_first, grad_second))
            grad_k = grad_v = None
            # a row of y is read by itself and later rows: from the last block on, its gradient is complete in time
            for rows, seen in reversed(_blocks(q, causal)):
                matrix = once = twice = _matrix(q, k, rows, seen, bias, scale, causal)
                if keep is not None:
                    once, twice = (_dropped(matrix, drawn[piece][:, rows, seen], dropout) for drawn in keep)
                z_part = grad_z[:, rows]
                if seen.stop == q.shape[1]:
                    grad_y = torch.baddbmm(grad_y, twice.mT, z_part)
                else:
                    grad_y[:, seen] += twice.mT @ z_part
                y_part = grad_y[:, rows]
                grad_v = _added(grad_v, seen, once.mT @ y_part)
                if keep is None:
                    grad = (y_part @ v[:, seen].mT).baddbmm_(z_part, y[:, seen].mT)
                else:
                    grad = _dropped(y_part @ v[:, seen].mT, keep[0][piece][:, rows, seen], dropout)
                    grad += _dropped(z_part @ y[:, seen].mT, keep[1][piece][:, rows, seen], dropout)
                grad = torch._softmax_backward_data(grad, matrix, -1, matrix.dtype)
                grads[0][piece][:, rows] = _scaled_bmm(grad, k[:, seen], scale)
                grad_k = _added(grad_k, seen, _scaled_bmm(grad.mT, q[:, rows], scale))
                if rows.start == 0:  # the last to add
                    grads[1][piece], grads[2][piece] = grad_k, grad_v
        return *grads, None, None, None, None


def _like(x: Tensor) -> Tensor:
    """Return an empty tensor stored as (batch, tokens, heads, features), the layout of the model's projections."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _pieces(query: Tensor, mask: Tensor | None, causal: bool) -> Iterator[tuple[tuple[int, slice], Tensor | None]]:
    """Yield the index of one sequence and some of its heads, and their additive mask.

    An index gives views of shape (heads, tokens, features), which no product has to copy. The mask has the shape (heads
    or 1, tokens or 1, tokens).
    """
    batch, heads, tokens = query.shape[:3]
    together = max(1, PIECE // (tokens * min(tokens, ROWS) if causal else tokens**2))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    shared = mask is None or mask.shape[1] == 1  # by the heads: made once a sequence
    for b in range(batch):
        sequence_mask = None if mask is None else mask[b if len(mask) > 1 else 0]
        bias = additive(sequence_mask, query.dtype) if shared else None
        for h in range(0, heads, together):
            part = slice(h, h + together)
            yield (b, part), bias if sequence_mask is None or shared else additive(sequence_mask[part], query.dtype)


def _blocks(q: Tensor, causal: bool) -> list[tuple[slice, slice]]:
    """Return the blocks of rows of A, and the columns that they see: under a causal mask half of A is never formed."""
    tokens = q.shape[1]
    size = ROWS if causal else tokens
    ends = [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
    return [(slice(start, end), slice(0, end)) for start, end in ends]


def _matrix(q: Tensor, k: Tensor, rows: slice, seen: slice, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return some rows of A, (heads, rows, columns that they see)."""
    scores = _scaled_bmm(q[:, rows], k[:, seen].mT, scale)
    if causal:
        size = rows.stop - rows.start
        scores[..., rows].masked_fill_(torch.ones(size, size, dtype=torch.bool).triu_(1), -torch.inf)
    return biased_softmax(scores, bias)


def biased_softmax(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Return the softmax of ``scores + bias``, written into the memory of ``scores``.

    Rows of -inf, which attend to nothing, become zero, as in PyTorch.
    """
    if bias is None:
        return torch.softmax(scores, -1, out=scores)
    scores += bias
    matrix = torch.softmax(scores, -1, out=scores)
    empty = bias.amax(-1, keepdim=True) == -torch.inf
    return matrix.masked_fill_(empty, 0.0) if empty.any() else matrix


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask that is bool (True: may attend) to one that is added to scores; others stay as they are."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _added(total: Tensor | None, seen: slice, part: Tensor) -> Tensor:
    """Add one block to a running sum; the last block, whose rows see all tokens, comes first and begins it."""
    if total is None:
        return part
    total[:, seen] += part
    return total


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _random_masks(shape: tuple[int, ...], dropout: float) -> Tensor:
    """Draw which entries stay, with 16 random bits each from the default generator."""
    count = torch.Size(shape).numel()
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    return (bits >= _of_bits(dropout) - 2**15).view(shape)


def _dropped(matrix: Tensor, keep: Tensor, dropout: float) -> Tensor:
    return (matrix * keep).mul_(1 / (1 - _of_bits(dropout) / 2**16))


def _of_bits(dropout: float) -> int:
    return min(round(dropout * 2**16), 2**16 - 1)
