"""A polynomial of softmax attention, ``sum_k c_k A^k V``, with one matrix A for all applications, on the CPU.

K calls of scaled_dot_product_attention form the scores K times. Here they are formed once per pass, and the backward
pass does not form them at all. Intermediate results stay in the processor's cache and in memory that all layers share
(``ops.attention_pieces``). That saves more time than the smaller number of products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_pieces import (
    Piece,
    Workspace,
    add_product,
    allocate,
    by_head,
    cut,
    find_workspace,
    flatten_signal,
    part_of_batch,
    part_of_block,
    part_of_mask,
    split_batch,
    split_rows,
    take,
    write_product,
    write_sum,
)
from .combine import Coefficients
from .gradients import first_order
from .random_masks import draw_masks, drop, scale_of_kept
from .scores import has_empty_rows, softmax_backward_

KEPT = 1 << 23  # entries of A that one call may keep for its backward pass; with more, A is formed again
AS_NUMBERS = 1 << 22  # entries up to which a dropout mask is kept as floats: faster to multiply, four times the memory


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
        causal: whether a token sees only itself and earlier tokens (then without ``mask``).
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
    holds: bool  # whether A is kept for the backward pass
    empties: bool  # whether A may have rows that attend to nothing


class _Polynomial(torch.autograd.Function):
    """The sum ``c_0 V + S(W)`` with ``W = sum_k c_k X_{k-1}`` and ``X_k = S^k(V)``: K applications.

    Let ``g`` be the gradient of the sum. The gradient of W is ``S^T(g)``, and the gradient of ``X_k`` is ``c_{k+1}
    S^T(g)`` plus what application k+1 passes back. The gradient of A is a sum of products of these gradients with the
    signals that A was applied to. The gradient of the scores, through the softmax, is also that of an additive mask.
    """

    @staticmethod
    def forward(
        ctx: Any, options: _Options, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *coefficients: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.options = scale, causal, dropout, holds, empties = options
        K, (batch, heads, tokens, width) = len(coefficients) - 1, value.shape
        keep = draw_masks((K, batch * heads, tokens, tokens), dropout) if dropout else None
        if keep is not None and keep[0].numel() <= AS_NUMBERS:
            keep = keep.to(value.dtype)
        queries, keys = (x.reshape(batch * heads, tokens, x.shape[-1]) for x in (query, key))
        x_0 = flatten_signal(value)
        signals = [x_0, *(allocate(value.new_empty, x_0.shape) for _ in range(K))]  # X_0 ... X_{K-1} and W
        factors = [None if c is None else c.to(value.dtype).repeat(batch).view(-1, 1, 1) for c in coefficients]
        out = _empty_by_tokens(value, value.shape)
        saved_matrices: list[Tensor] = []
        for piece, space in _spaces(query.shape, width, K, causal, query.dtype):
            q, k, *inputs = (take(x, piece) for x in (queries, keys, *signals))
            terms = [None if c is None else take(c, piece) for c in factors]
            for block in space.blocks:
                matrix = space.form_matrix(block, q, k, mask, piece, scale, holds, empties)
                if holds:
                    saved_matrices.append(matrix)
                rows = [*(cut(x, block.rows) for x in inputs), block.last]
                for step in range(K):
                    source, target = inputs[step], rows[step + 1]
                    if step == K - 1:
                        source, target = inputs[K], rows[K + 1]
                        write_sum(rows[K], None, terms[1:], rows[:K])
                    applied = matrix if keep is None else drop(matrix, part_of_block(keep[step], piece, block), dropout)
                    write_product(target, applied, cut(source, block.seen))
            write_sum(space.last, space.last, terms[:1], inputs[:1])
            part_of_batch(out, piece).copy_(by_head(space.last, piece))
        ctx.save_for_backward(queries, keys, mask, keep, *factors, *signals, *saved_matrices)
        ctx.shapes, ctx.dtypes = (query.shape, value.shape), [None if c is None else c.dtype for c in coefficients]
        return out, *(x.view(value.shape) for x in signals[1:K])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return _Polynomial._differentiate(ctx, *grads)
        # Second derivatives must be an error also where the gradients that come in are constant.
        anchor = torch.zeros((), requires_grad=True)
        return first_order(lambda _, *grads: _Polynomial._differentiate(ctx, *grads), anchor, *grads)

    @staticmethod
    def _differentiate(ctx: Any, grad: Tensor | None, *grad_powers: Tensor | None) -> tuple[Any, ...]:
        (scale, causal, dropout, holds, empties), K, needs = ctx.options, len(grad_powers) + 1, ctx.needs_input_grad[5:]
        queries, keys, mask, keep, *tensors = ctx.saved_tensors
        factors, signals, saved_matrices = tensors[: K + 1], tensors[K + 1 : 2 * K + 2], iter(tensors[2 * K + 2 :])
        shape, shape_of_value = ctx.shapes
        grad = queries.new_zeros(shape_of_value) if grad is None else grad
        grad_query, grad_key, grad_value = (_empty_by_tokens(queries, x) for x in (shape, shape, shape_of_value))
        grad_mask, changes, is_broadcast = None, None, mask is not None and mask.shape != (*shape[:3], shape[2])
        if ctx.needs_input_grad[4]:
            grad_mask = mask.new_zeros(mask.shape) if is_broadcast else mask.new_empty(mask.shape)
            changes = None if is_broadcast or mask.dtype != queries.dtype else grad_mask.flatten(0, 1)
        dots: list[list[Tensor]] = [[] for _ in factors]
        for piece, space in _spaces(shape, shape_of_value[3], K, causal, queries.dtype):
            q, k, *inputs = (take(x, piece) for x in (queries, keys, *signals))
            terms = [None if c is None else take(c, piece) for c in factors]
            by_head(space.g, piece).copy_(part_of_batch(grad, piece))
            # only a row itself and later rows read it: going back from the last block, its gradient is complete in time
            matrices = [next(saved_matrices) for _ in space.blocks] if holds else None
            for number in range(len(space.blocks) - 1, -1, -1):
                block, first = space.blocks[number], number == len(space.blocks) - 1
                if matrices is None:
                    matrix = space.form_matrix(block, q, k, mask, piece, scale, False, empties)
                else:
                    matrix = matrices[number]
                change = block.change if changes is None else take(changes, piece)
                for step in range(K - 1, -1, -1):
                    is_last, stay = step == K - 1, None if keep is None else part_of_block(keep[step], piece, block)
                    output = block.g if is_last else block.grads[step + 1]
                    if not is_last:
                        write_sum(output, None if step == K - 2 else output, [terms[step + 2]], [block.grad_sum])
                        if (grad_power := grad_powers[step]) is not None:
                            output += part_of_batch(grad_power, piece).flatten(0, 1)[:, block.rows]
                    applied = matrix if stay is None else drop(matrix, stay, dropout)
                    add_product(block.grad_sum_seen if is_last else block.grads_seen[step], first, applied.mT, output)
                    source = cut(inputs[K if is_last else step], block.seen).mT
                    if is_last:
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
                softmax_backward_(change, matrix)
                if grad_mask is not None and changes is None:
                    part, added = part_of_mask(grad_mask, piece), by_head(change, piece)
                    part.add_(added.sum_to_size(part.shape)) if is_broadcast else part.copy_(added)
                write_product(block.grad_q, change, cut(k, block.seen), scale)
                add_product(block.grad_k, first, change.mT, cut(q, block.rows), scale)
            pairs = (inputs[0], space.g), *((x, space.grad_sum) for x in inputs[:K])
            for (x, y), dot, need in zip(pairs, dots, needs, strict=True):
                if need:
                    dot.append(torch.mul(x, y, out=space.last).sum((1, 2)))
            g_value = space.grads[0]
            write_sum(g_value, g_value if K > 1 else None, [terms[1], terms[0]], [space.grad_sum, space.g])
            for target, source in ((grad_query, space.grad_q), (grad_key, space.grad_k), (grad_value, g_value)):
                part_of_batch(target, piece).copy_(by_head(source, piece))
        grads = [
            torch.cat(dot).view(shape[:2]).sum(0).to(dtype) if need else None
            for dot, dtype, need in zip(dots, ctx.dtypes, needs, strict=True)
        ]
        return None, grad_query, grad_key, grad_value, grad_mask, *grads


def _empty_by_tokens(like: Tensor, shape: torch.Size) -> Tensor:
    """Return an empty tensor (batch, heads, tokens, features), stored by tokens as projections read and write it."""
    batch, heads, tokens, features = shape
    return like.new_empty(batch, tokens, heads, features).transpose(1, 2)


def _spaces(
    shape: torch.Size, width: int, K: int, causal: bool, dtype: torch.dtype
) -> Iterator[tuple[Piece, Workspace]]:
    batch, heads, tokens, features = shape
    rows = split_rows(tokens, causal)[0][0].stop
    for piece in split_batch(batch, heads, tokens, rows, K * width):
        yield piece, find_workspace(piece, tokens, features, width, K, causal, dtype)
