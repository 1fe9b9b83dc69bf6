"""Softmax attention applied twice, ``S(V)`` and ``S(S(V))``, with one joint backward pass, for training on the CPU.

The backward passes of two calls of scaled_dot_product_attention form the attention matrix twice and run 10 matrix
products; jointly there are 7. With dropout PyTorch's CPU attention draws its mask one number at a time, which costs
more than the attention itself; here four decisions share one random word, and one byte an entry is kept. Work goes
through the batch and heads in pieces, so that no more than a few MB of matrix exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 1 << 18  # entries of A handled at a time, 1 MB in float32: they stay in the processor's cache
JOINT_TOKENS = 1024  # beyond, PyTorch's blocked kernel wins


def can_apply_twice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> bool:
    """Whether ``apply_twice`` is the faster form here: training on the CPU, with a mask that needs no gradient.

    With dropout the answer is the same with and without gradients: checkpointing runs the forward pass in both ways and
    must draw the same masks.
    """
    tensors = (query, key, value)
    return (
        all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not (mask is not None and mask.requires_grad)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[2] == key.shape[2] == value.shape[2]
        and (
            0 < dropout < 1
            or (
                dropout == 0
                and torch.is_grad_enabled()
                and any(t.requires_grad for t in tensors)
                and query.shape[2] <= JOINT_TOKENS
                and not causal  # PyTorch's causal kernel skips half the work
            )
        )
    )


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
    """``(S(V), S(S(V)))`` for ``S = dropout(softmax(scale Q K^T + mask))``; the two dropout masks are independent.

    Args:
        query, key, value: (batch, heads, tokens, features), float32 or float64 on the CPU.
        mask: bool (True: may attend) or additive, broadcastable to (batch, heads, tokens, tokens); no gradient.
        scale: of the scores, 1 / sqrt(features) by default.
        causal: whether a token sees only earlier ones (then without ``mask``).
        dropout: probability with which an entry of A is dropped, in steps of 2^-16.

    Returns:
        Two tensors of the shape of ``value``; without dropout they are bit for bit what two calls of
        ``scaled_dot_product_attention`` return.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _ApplyTwice.apply(query, key, value, mask, scale, causal, dropout)


class _ApplyTwice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor]:
        scale, causal, dropout = ctx.options = options
        if not dropout:
            first = F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)
            second = F.scaled_dot_product_attention(query, key, first, mask, 0.0, causal, scale=scale)
            ctx.save_for_backward(query, key, value, first, mask, None)
            return first, second
        first, second = _like(value), _like(value)
        keep = _random_masks((2, *query.shape[:3], key.shape[2]), dropout)
        for piece in _pieces(query, key):
            matrix = _matrix(query, key, mask, scale, causal, piece)
            for signal, out, entries in ((value, first, keep[0]), (first, second, keep[1])):
                out[piece] = (_dropped(matrix, entries, dropout, piece) @ _flat(signal, piece)).view_as(out[piece])
        ctx.save_for_backward(query, key, value, first, mask, keep)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Any, ...]:
        query, key, value, first, mask, keep = ctx.saved_tensors
        scale, causal, dropout = ctx.options
        grads = _like(query), _like(key), _like(value)
        for piece in _pieces(query, key):
            q, k, v, y, grad_y, grad_z = (_flat(x, piece) for x in (query, key, value, first, grad_first, grad_second))
            matrix = once = twice = _matrix(query, key, mask, scale, causal, piece)
            if keep is not None:
                once, twice = (_dropped(matrix, entries, dropout, piece) for entries in keep)
            grad_y = torch.baddbmm(grad_y, twice.mT, grad_z)  # y is what the second application was given
            grad_v = once.mT @ grad_y
            if keep is None:
                grad = (grad_y @ v.mT).baddbmm_(grad_z, y.mT)
            else:
                grad = _dropped(grad_y @ v.mT, keep[0], dropout, piece)
                grad += _dropped(grad_z @ y.mT, keep[1], dropout, piece)
            grad = torch._softmax_backward_data(grad, matrix, -1, matrix.dtype)
            of_piece = _scaled_bmm(grad, k, scale), _scaled_bmm(grad.mT, q, scale), grad_v
            for whole, part in zip(grads, of_piece, strict=True):
                whole[piece] = part.view_as(whole[piece])
        return *grads, None, None, None, None


Piece = tuple[slice, slice]


def _like(x: Tensor) -> Tensor:
    """An empty tensor stored as (batch, tokens, heads, features), the layout that the model's projections use."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _pieces(query: Tensor, key: Tensor) -> Iterator[Piece]:
    """Parts of (batch, heads); one sequence at a time is cheapest, as its heads need no copy, unless they are short."""
    batch, heads, tokens = query.shape[:3]
    one_head = tokens * key.shape[2]
    sequences, together = max(1, PIECE // (heads * one_head)), max(1, PIECE // one_head)
    for b in range(0, batch, sequences):
        for h in range(0, heads, together):
            yield slice(b, b + sequences), slice(h, h + together)


def _flat(x: Tensor, piece: Piece) -> Tensor:
    return x[piece].flatten(0, 1)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _matrix(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool, piece: Piece) -> Tensor:
    """A of a piece: (sequences x heads, tokens, tokens)."""
    scores = _scaled_bmm(_flat(query, piece), _flat(key, piece).mT, scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
    elif mask is not None:
        mask = mask.broadcast_to(*query.shape[:2], *scores.shape[-2:])[piece].flatten(0, 1)
    return masked_softmax(scores, mask)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of ``scores``, which it may overwrite; ``mask`` bool (True: may attend) or additive, broadcastable."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        # rows that may attend to nothing are zero, as PyTorch has them
        hidden = ~mask
        return scores.masked_fill_(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill_(hidden, 0.0)
    return scores.add_(mask).softmax(-1).nan_to_num_()


def _random_masks(shape: tuple[int, ...], dropout: float) -> Tensor:
    """Which entries stay: 16 random bits each, from the default generator."""
    count = torch.Size(shape).numel()
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    return (bits >= round(dropout * 2**16) - 2**15).view(shape)


def _dropped(matrix: Tensor, keep: Tensor, dropout: float, piece: Piece) -> Tensor:
    return (matrix * _flat(keep, piece)).mul_(1 / (1 - round(dropout * 2**16) / 2**16))
