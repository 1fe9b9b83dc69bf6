"""The second application ``S(S(V))`` of softmax attention, and a joint backward pass of both applications.

The first application stays PyTorch's, whose bits a model must keep while its filter is the identity. Backward,
8 matrix products replace 10, and A is formed twice rather than four times: with ``z = A y``, ``y = A v``,

    dy += A^T dz;    dA = dy v^T + dz y^T;    dS = A * (dA - rows(dy * y + dz * z));    dv = A^T dy

A tile of A is ``exp(scores - peak) * inverse``. Peak and inverse of a row are kept apart: where a mask holds the lowest
number of its dtype in a whole row, their sum on a logarithmic scale would lose the second.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..gradients import first_order
from ..heads import repeat_heads
from .tiles import dot, fits, like, load, options, power, precision, store, strided, tile

# Tokens of a program, other tokens at a time, warps and stages, forward and backward, by (bytes per number, whether
# there are more than 64 features). With these, registers suffice, as the compiler reports for sm_80 and sm_90, and so
# do 99 KB of shared memory, the limit of sm_86 and sm_89.
BLOCKS = {
    (2, False): ((128, 64, 8, 2), (128, 32, 8, 2)),
    (2, True): ((64, 64, 8, 2), (64, 32, 8, 1)),
    (4, False): ((64, 32, 4, 1), (32, 32, 4, 1)),
}


@triton.jit
def _masked(scores, mask, batch, head, queries, keys, count, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """Apply the mask to scores, -inf where nothing is seen; queries and keys are indices that broadcast to the tile.

    EDGE: the tile may reach over the diagonal, where CAUSAL, or over the last key.
    """
    if mask is not None:
        head_start = mask[0] + batch.to(tl.int64) * mask[1] + head.to(tl.int64) * mask[2]
        pointers = head_start + queries.to(tl.int64) * mask[3] + keys.to(tl.int64) * mask[4]
        values = tl.load(pointers, mask=(queries < count) & (keys < count), other=0)
        if mask[0].dtype.element_ty == tl.int1:
            scores = tl.where(values != 0, scores, float("-inf"))
        else:
            scores += values.to(tl.float32)
    if EDGE:
        visible = keys < count
        if CAUSAL:
            visible = visible & (queries >= keys)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _apply(
    Q, K, Y, Z, Peak, Inverse, mask, scale, heads, group, count,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, SIGNAL: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute z = A y for M queries of a head, N keys at a time."""
    first, batch, head = tl.program_id(0) * M, tl.program_id(1) // heads, tl.program_id(1) % heads
    queries = first + tl.arange(0, M)
    q = load(Q, batch, head, queries, count, WIDTH, D)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    z = tl.zeros((M, V), tl.float32)
    end = tl.minimum(first + M, count) if CAUSAL else count
    inner = (first if CAUSAL else count) // N * N
    for EDGE in tl.static_range(2):
        for start in range(inner if EDGE else 0, end if EDGE else inner, N):
            keys = start + tl.arange(0, N)
            k = load(K, batch, head // group, keys, count, WIDTH, D)
            scores = dot(q, tl.trans(k), PRECISION) * scale
            scores = _masked(scores, mask, batch, head, queries[:, None], keys[None, :], count, CAUSAL, EDGE)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights, decay = tl.exp(scores - finite_peak[:, None]), tl.exp(peak - finite_peak)
            y = load(Y, batch, head, keys, count, SIGNAL, V)
            z = dot(weights.to(y.dtype), y, PRECISION, z * decay[:, None])
            total = total * decay + tl.sum(weights, 1)
            peak = new_peak
    inverse = tl.where(total > 0, 1 / tl.maximum(total, 1e-30), 0.0)  # rows that see nothing are zero
    store(Z, batch, head, queries, count, SIGNAL, V, z * inverse[:, None])
    places = tl.program_id(1).to(tl.int64) * count + queries
    tl.store(Peak + places, tl.where(peak == float("-inf"), 0.0, peak), mask=queries < count)
    tl.store(Inverse + places, inverse, mask=queries < count)


@triton.jit
def _weights(
    k, q, Peak, Inverse, mask, scale, batch, head, heads, queries, keys, count,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of A^T, keys x queries; it is zero for queries past the last."""
    scores = dot(k, tl.trans(q), PRECISION) * scale
    scores = _masked(scores, mask, batch, head, queries[None, :], keys[:, None], count, CAUSAL, EDGE)
    places = (batch * heads + head).to(tl.int64) * count + queries
    peak = tl.load(Peak + places, mask=queries < count, other=float("inf"))
    inverse = tl.load(Inverse + places, mask=queries < count, other=0.0)
    return tl.exp(scores - peak[None, :]) * inverse[None, :]


@triton.jit
def _toward_first(
    Q, K, Y, Z, Dy, Dz, Total, Rows, Peak, Inverse, mask, scale, heads, group, count,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, SIGNAL: tl.constexpr,
    V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute Total = dy + A^T dz for N keys of a head, and Rows, the sums over features of Total * y + dz * z."""
    first, batch, head = tl.program_id(0) * N, tl.program_id(1) // heads, tl.program_id(1) % heads
    keys = first + tl.arange(0, N)
    k = load(K, batch, head // group, keys, count, WIDTH, D)
    total = load(Dy, batch, head, keys, count, SIGNAL, V).to(tl.float32)
    begin = first // M * M if CAUSAL else 0
    inner = tl.minimum(tl.cdiv(first + N, M) * M, count) if CAUSAL else 0
    for PLAIN in tl.static_range(2):
        for start in range(inner if PLAIN else begin, count if PLAIN else inner, M):
            queries = start + tl.arange(0, M)
            q = load(Q, batch, head, queries, count, WIDTH, D)
            weights = _weights(
                k, q, Peak, Inverse, mask, scale, batch, head, heads, queries, keys, count,
                CAUSAL and not PLAIN, RAGGED or (CAUSAL and not PLAIN), PRECISION,
            )  # fmt: skip
            dz = load(Dz, batch, head, queries, count, SIGNAL, V)
            total = dot(weights.to(dz.dtype), dz, PRECISION, total)
    y, z, dz = (
        load(Y, batch, head, keys, count, SIGNAL, V),
        load(Z, batch, head, keys, count, SIGNAL, V),
        load(Dz, batch, head, keys, count, SIGNAL, V),
    )
    total = total.to(y.dtype)
    store(Total, batch, head, keys, count, SIGNAL, V, total)
    rows = total.to(tl.float32) * y.to(tl.float32) + dz.to(tl.float32) * z.to(tl.float32)
    tl.store(Rows + tl.program_id(1).to(tl.int64) * count + keys, tl.sum(rows, 1), mask=keys < count)


@triton.jit
def _gradients(
    Q, K, Value, Y, Dy, Dz, Dq, Dk, Dv, Rows, Peak, Inverse, mask, scale, heads, group, count,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, SIGNAL: tl.constexpr,
    V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of N keys, whose queries add to dq; Dy is the Total of ``_toward_first``."""
    groups = heads // group
    first, batch, key_head = tl.program_id(0) * N, tl.program_id(1) // groups, tl.program_id(1) % groups
    keys = first + tl.arange(0, N)
    k, v = load(K, batch, key_head, keys, count, WIDTH, D), load(Value, batch, key_head, keys, count, SIGNAL, V)
    dk, dv = tl.zeros((N, D), tl.float32), tl.zeros((N, V), tl.float32)
    begin = first // M * M if CAUSAL else 0
    inner = tl.minimum(tl.cdiv(first + N, M) * M, count) if CAUSAL else 0
    for member in range(group):
        head = key_head * group + member
        y = load(Y, batch, head, keys, count, SIGNAL, V)
        for PLAIN in tl.static_range(2):
            for start in range(inner if PLAIN else begin, count if PLAIN else inner, M):
                queries = start + tl.arange(0, M)
                q = load(Q, batch, head, queries, count, WIDTH, D)
                weights = _weights(
                    k, q, Peak, Inverse, mask, scale, batch, head, heads, queries, keys, count,
                    CAUSAL and not PLAIN, RAGGED or (CAUSAL and not PLAIN), PRECISION,
                )  # fmt: skip
                dy = load(Dy, batch, head, queries, count, SIGNAL, V)
                dv = dot(weights.to(dy.dtype), dy, PRECISION, dv)
                slope = dot(v, tl.trans(dy), PRECISION)
                dz = load(Dz, batch, head, queries, count, SIGNAL, V)
                slope = dot(y, tl.trans(dz), PRECISION, slope)
                places = (batch * heads + head).to(tl.int64) * count + queries
                rows = tl.load(Rows + places, mask=queries < count, other=0.0)
                slope = (weights * (slope - rows[None, :])).to(q.dtype)
                dk = dot(slope, q, PRECISION, dk)
                dq, inside = tile(Dq, batch, head, queries, count, WIDTH, D)
                tl.atomic_add(dq, dot(tl.trans(slope), k, PRECISION) * scale, inside, sem="relaxed")
    store(Dk, batch, key_head, keys, count, WIDTH, D, dk * scale)
    store(Dv, batch, key_head, keys, count, SIGNAL, V, dv)


# ----------------------------------------------------------------------------------------------------- the two of them


class _ApplyTwice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        keys, values, grouped = key, value, key.shape[1] != query.shape[1]
        if grouped and mask is not None:  # as transformers has it: the bits depend on it
            keys, values, grouped = *(repeat_heads(x, query.shape[1]) for x in (key, value)), False
        first = F.scaled_dot_product_attention(query, keys, values, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        query, key, value, first = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, first))
        second = like(first, first.dtype)
        peak, inverse = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
        ctx.options = scale, causal
        ctx.save_for_backward(query, key, value, first, second, peak, inverse, mask)
        heads, group, count, *sizes = _sizes(query, key, value)
        outer, inner, settings = _blocks(0, query, value)
        _apply[triton.cdiv(count, outer), query.shape[0] * heads](
            *map(strided, (query, key, first, second)),
            *(peak, inverse, _spread(mask, query), scale, heads, group, count, causal, *sizes, outer, inner),
            **settings,
        )
        return first, second

    @staticmethod
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(_backward, grad_first, grad_second, *ctx.options, *ctx.saved_tensors)
        return *grads, None, None, None


def _backward(grad_first: Tensor, grad_second: Tensor, scale: float, causal: bool, *saved: Any) -> tuple[Tensor, ...]:
    query, key, value, first, second, peak, inverse, mask = saved
    grad_first, grad_second = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_first, grad_second))
    heads, group, count, *sizes = _sizes(query, key, value)
    outer, inner, settings = _blocks(1, query, value)
    total, grad_query = like(first, first.dtype), like(query, torch.float32).zero_()
    grad_key, grad_value = like(key, key.dtype), like(value, value.dtype)
    rows = torch.empty_like(peak)
    spread, ragged = _spread(mask, query), count % outer > 0
    common = (peak, inverse, spread, scale, heads, group, count, causal, ragged, *sizes, inner, outer)
    blocks = triton.cdiv(count, outer)
    _toward_first[blocks, query.shape[0] * heads](
        *map(strided, (query, key, first, second, grad_first, grad_second, total)), rows, *common, **settings
    )
    _gradients[blocks, query.shape[0] * heads // group](
        *map(strided, (query, key, value, first, total, grad_second, grad_query, grad_key, grad_value)),
        *(rows, *common),
        **settings,
    )
    return grad_query.to(query.dtype), grad_key, grad_value


def apply_twice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Apply softmax attention twice on the GPU; see ``ops.triton.apply_twice``."""
    with torch.cuda.device_of(query):
        return _ApplyTwice.apply(query, key, value, mask, scale, causal)


def _spread(mask: Tensor | None, query: Tensor) -> tuple[Any, ...] | None:
    if mask is None:
        return None
    mask = mask.expand(*query.shape[:3], query.shape[2])
    return mask, *mask.stride()


def _blocks(backward: int, query: Tensor, value: Tensor) -> tuple[int, int, dict[str, Any]]:
    outer, inner, warps, stages = BLOCKS[query.element_size(), max(query.shape[-1], value.shape[-1]) > 64][backward]
    outer, inner = (min(tokens, power(query.shape[2])) for tokens in (outer, inner))
    return outer, inner, {"PRECISION": precision(query), **options(warps, stages)}


def can_apply(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the kernels take these tensors."""
    tensors = query, key, value
    widest = max(query.shape[-1], value.shape[-1])
    kind = query.device.type
    return (
        query.is_floating_point()
        and (query.element_size(), widest > 64) in BLOCKS
        and widest <= 128
        and all(x.dtype == query.dtype and x.shape[0] == query.shape[0] for x in tensors)
        and all(x.shape[2] == query.shape[2] and query.shape[1] % x.shape[1] == 0 for x in tensors)
        and any(x.requires_grad for x in tensors)
        and fits(query)
        and (mask is None or (mask.dim() == 4 and not mask.requires_grad))
        # the first application would come out in another dtype
        and (not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == query.dtype)
        and not torch.are_deterministic_algorithms_enabled()  # gradients of queries are summed in any order
    )


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return heads, heads per group, tokens, features of keys, their block, features of signals, their block."""
    heads, features, signal = query.shape[1], query.shape[-1], value.shape[-1]
    return heads, heads // key.shape[1], query.shape[2], features, power(features), signal, power(signal)
