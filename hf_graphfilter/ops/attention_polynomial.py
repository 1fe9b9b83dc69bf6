"""A polynomial of softmax attention, ``sum_k c_k A^k V``, with one matrix A for all applications, on the CPU.

K calls of scaled_dot_product_attention form the scores K times. Here they are formed once per pass, and the backward
pass does not form them at all. Intermediate results stay in the processor's cache and in memory that all layers share,
which saves more than the products: see ``ops.attention_pieces``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_pieces import (
    Piece,
    Workspace,
    add_product,
    allocate,
    find_workspace,
    part_of_block,
    part_of_mask,
    split_batch,
    split_rows,
    write_product,
    write_sum,
)
from .combine import Coefficients, per_head
from .random_masks import draw_masks, drop, scale_of_kept
from .scores import has_empty_rows

KEPT = 1 << 23  # entries of A that one call may keep for its backward pass; with more, A is formed again
AS_NUMBERS = 1 << 22  # entries up to which a dropout mask is of numbers: faster to multiply, four times the memory


def apply_polynomial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: Coefficients,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Return ``sum_k c_k S^k(V)`` for ``S = dropout(softmax(scale Q K^T + mask))``, and ``[S(V), ..., S^{K-1}(V)]``.

    Each application draws its own dropout mask.

    Args:
        query, key, value: (batch, heads, tokens, features), float32 or float64 on the CPU.
        coefficients: ``c_0 ... c_K`` with K >= 1, each (heads,) or None for 0; ``c_K`` is not None.
        mask: bool (True: may attend) or additive, broadcastable to (batch, heads, tokens, tokens).
        scale: of the scores, 1 / sqrt(features) by default.
        causal: whether a token sees only earlier ones (then without ``mask``).
        dropout: probability with which an entry of A is dropped, in steps of 2^-16.

    Returns:
        Tensors of the shape of ``value``; without dropout they are what calls of ``scaled_dot_product_attention``
        give, up to rounding.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    inputs = (query, key, value, *(x for x in (mask, *coefficients) if x is not None))
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    entries = query.shape[:3].numel() * query.shape[2]
    holds, empties = trains and entries <= KEPT, mask is not None and has_empty_rows(mask)
    options = _Options(scale, causal, dropout, holds, empties)
    out, *powers = _Polynomial.apply(options, query, key, value, mask, *coefficients)
    return out, powers


class _Options(NamedTuple):
    scale: float
    causal: bool
    dropout: float
    holds: bool  # A from the forward to the backward pass
    empties: bool  # rows of A that attend to nothing


class _Polynomial(torch.autograd.Function):
    """The sum ``c_0 V + S(W)`` with ``W = sum_k c_k X_{k-1}`` and ``X_k = S^k(V)``: K applications.

    With ``g`` the gradient of the sum, that of W is ``S^T(g)``, and that of ``X_k`` is ``c_{k+1} S^T(g)`` plus what
    application k+1 passes back. The gradient of A is a sum of products of these with what A was applied to. That of the
    scores, through the softmax, is the gradient of an additive mask.
    """

    @staticmethod
    def forward(
        ctx: Any, options: _Options, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *coefficients: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.options = scale, causal, dropout, holds, empties = options
        K, (batch, heads, tokens, width) = len(coefficients) - 1, value.shape
        keep = draw_masks((K, batch, heads, tokens, tokens), dropout) if dropout else None
        if keep is not None and keep[0].numel() <= AS_NUMBERS:
            keep = keep.to(value.dtype)
        signals = allocate(value.new_empty, (K + 1, batch, heads, tokens, width))  # X_0 ... X_{K-1} and W
        out = _by_tokens(value, width)
        factors = [None if c is None else per_head(c, value) for c in coefficients]
        held: list[Tensor] = []
        for piece, space in _spaces(query, width, K, causal):
            space.gather(space.q, query, piece)
            space.gather(space.k, key, piece)
            inputs = [x[piece.sequences, piece.heads].flatten(0, 1) for x in signals.unbind()]
            space.gather(inputs[0], value, piece)
            for block in space.blocks:
                matrix = space.form_matrix(block, mask, piece, scale, holds, empties)
                if holds:
                    held.append(matrix)
                rows = [x[:, block.rows] for x in (*inputs, space.last)]
                for step in range(K):
                    source, target = inputs[step], rows[step + 1]
                    if step == K - 1:
                        source, target = inputs[K], rows[K + 1]
                        write_sum(rows[K], None, factors[1:], rows[:K], piece)
                    applied = matrix if keep is None else drop(matrix, part_of_block(keep[step], piece, block), dropout)
                    write_product(target, applied, source[:, block.seen])
            write_sum(out[piece.sequences, piece.heads], space.last, factors[:1], inputs[:1], piece)
        ctx.save_for_backward(query, key, signals, mask, keep, *factors, *held)
        ctx.dtypes = [None if c is None else c.dtype for c in coefficients]
        return out, *signals[1:K].unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grad_powers: Tensor | None) -> tuple[Any, ...]:
        query, key, signals, mask, keep, *rest = ctx.saved_tensors
        (scale, causal, dropout, holds, empties), K, needs = ctx.options, len(grad_powers) + 1, ctx.needs_input_grad[5:]
        factors, held, width = rest[: K + 1], iter(rest[K + 1 :]), signals.shape[-1]
        grad = torch.zeros_like(signals[0]) if grad is None else grad
        sums = [torch.zeros_like(c[:, 0, 0]) if need else None for c, need in zip(factors, needs, strict=True)]
        to_query, to_key, to_value = (_by_tokens(x, n) for x, n in ((query, None), (key, None), (query, width)))
        to_mask, shared = None, mask is not None and mask.shape != query.shape[:3] + key.shape[2:3]
        if ctx.needs_input_grad[4]:
            to_mask = torch.zeros_like(mask) if shared else torch.empty_like(mask)
        for piece, space in _spaces(query, width, K, causal):
            part = piece.sequences, piece.heads
            space.gather(space.q, query, piece)
            space.gather(space.k, key, piece)
            g = space.gather(space.g, grad, piece)
            inputs = [x[part].flatten(0, 1) for x in signals.unbind()]
            # a row is read by itself and later rows: from the last block on, its gradient is complete in time
            matrices = [next(held) for _ in space.blocks] if holds else None
            for number in range(len(space.blocks) - 1, -1, -1):
                block, first = space.blocks[number], number == len(space.blocks) - 1
                if matrices is None:
                    matrix = space.form_matrix(block, mask, piece, scale, False, empties)
                else:
                    matrix = matrices[number]
                change = block.change
                for step in range(K - 1, -1, -1):
                    last, stay = step == K - 1, None if keep is None else part_of_block(keep[step], piece, block)
                    output = block.g if last else block.grads[step + 1]
                    if not last:
                        start = None if step == K - 2 else output
                        write_sum(output, start, [factors[step + 2]], [block.grad_sum], piece)
                        if (more := grad_powers[step]) is not None:
                            output.unflatten(0, piece.shape).add_(more[part][:, :, block.rows])
                    applied = matrix if stay is None else drop(matrix, stay, dropout)
                    add_product(block.grad_sum_seen if last else block.grads_seen[step], first, applied.mT, output)
                    source = inputs[K if last else step][:, block.seen].mT
                    if last:
                        write_product(change, output, source)
                        if stay is not None:
                            change *= stay
                    elif stay is None:
                        torch.baddbmm(change, output, source, out=change)
                    else:
                        write_product(block.more_change, output, source)
                        change.addcmul_(block.more_change, stay)
                if keep is not None:
                    change *= scale_of_kept(dropout)
                torch._softmax_backward_data(change, matrix, -1, matrix.dtype, grad_input=change)
                if to_mask is not None:
                    rows, by_head = part_of_mask(to_mask, piece), change.unflatten(0, piece.shape)
                    if shared:
                        rows += by_head.sum_to_size(rows.shape)
                    else:
                        rows.copy_(by_head)
                write_product(block.grad_q, change, block.k, scale)
                add_product(block.grad_k, first, change.mT, block.q, scale)
            for x, y, total in zip((inputs[0], *inputs[:K]), (g, *[space.grad_sum] * K), sums, strict=True):
                if total is not None:
                    products = torch.mul(x, y, out=space.last).unflatten(0, piece.shape)
                    total[piece.heads] += products.sum((0, 2, 3))
            to_query[part], to_key[part] = (x.unflatten(0, piece.shape) for x in (space.grad_q, space.grad_k))
            write_sum(
                to_value[part], space.grads[0] if K > 1 else None, [factors[1], factors[0]], [space.grad_sum, g], piece
            )
        grads = [None if x is None else x.to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True)]
        return None, to_query, to_key, to_value, to_mask, *grads


def _by_tokens(x: Tensor, width: int | None) -> Tensor:
    """Return an empty tensor, stored as (batch, tokens, heads, features) as projections read and write it."""
    batch, heads, tokens, features = x.shape
    return x.new_empty(batch, tokens, heads, features if width is None else width).transpose(1, 2)


def _spaces(query: Tensor, width: int, K: int, causal: bool) -> Iterator[tuple[Piece, Workspace]]:
    batch, heads, tokens, features = query.shape
    rows = split_rows(tokens, causal)[0][0].stop
    for piece in split_batch(batch, heads, tokens, rows, K * width):
        yield piece, find_workspace(piece, tokens, features, width, K, causal, query.dtype)
