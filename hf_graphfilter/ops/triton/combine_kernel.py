"""Linear combinations of signals with one coefficient per head, and their gradients, in one pass over memory each.

In operations of PyTorch, half precision makes a copy in float32 of every signal and product, forward and backward: a
filter that applies attention twice then takes three times as long for the combination as for the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import load, options, store, strided

ENTRIES = 4096  # of a tile
WIDEST = 512  # features
MOST = 8  # signals, which a kernel is written out for
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (Tensor, torch.nn.Parameter)


@triton.jit
def _place(heads, chunks, ROWS: tl.constexpr):
    """Return the batch, head, rows and number of a program among those of its head."""
    chunk, number = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    batch, head = number // heads, number % heads
    return batch, head, chunk * ROWS + tl.arange(0, ROWS), batch * chunks + chunk


@triton.jit
def _combine(
    signals, coefficients, Out, heads, chunks, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    batch, head, rows, _ = _place(heads, chunks, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.static_range(len(signals)):
        c = tl.load(coefficients[k] + head).to(tl.float32)
        total += c * load(signals[k], batch, head, rows, count, WIDTH, BLOCK).to(tl.float32)
    store(Out, batch, head, rows, count, WIDTH, BLOCK, total)


@triton.jit
def _gradients(
    Grad, signals, coefficients, grads, Sums, heads, chunks, programs, count,
    SIGNALS: tl.constexpr, COEFFICIENTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the signals, and the sums of each program for the gradients of the coefficients.

    SIGNALS, COEFFICIENTS: bit masks of the tensors that need a gradient.
    """
    batch, head, rows, program = _place(heads, chunks, ROWS)
    g = load(Grad, batch, head, rows, count, WIDTH, BLOCK).to(tl.float32)
    for k in tl.static_range(len(signals)):
        if SIGNALS >> k & 1:
            c = tl.load(coefficients[k] + head).to(tl.float32)
            store(grads[k], batch, head, rows, count, WIDTH, BLOCK, c * g)
        if COEFFICIENTS >> k & 1:
            x = load(signals[k], batch, head, rows, count, WIDTH, BLOCK).to(tl.float32)
            tl.store(Sums + (k * heads + head) * programs + program, tl.sum(tl.sum(g * x, 1), 0))


def can_combine(coefficients: Sequence[Tensor], signals: Sequence[Tensor]) -> bool:
    """Return whether the kernels take these tensors."""
    first = signals[0]
    shape, device = first.shape, first.device
    return (
        all(type(x) is Tensor and x.dtype in DTYPES and x.shape == shape and x.stride(3) == 1 for x in signals)
        and all(
            type(c) in PLAIN and c.dtype in DTYPES and c.shape == shape[1:2] and c.stride(0) == 1 for c in coefficients
        )
        and all(x.device == device for x in (*coefficients, *signals))
        and 0 < first.numel() < 1 << 40
        and shape[3] <= WIDEST
        and len(signals) <= MOST
    )


def combine(coefficients: Sequence[Tensor], signals: Sequence[Tensor]) -> Tensor:
    """Return ``sum_k c_k x_k``; see ``ops.combine``."""
    out = torch.empty_like(signals[0])
    grid, numbers, sizes = _plan(*out.shape)
    with torch.cuda.device_of(out):
        _combine[grid](tuple(map(strided, signals)), tuple(coefficients), strided(out), *numbers, **sizes)
    return out


def differentiate(
    grad: Tensor, coefficients: Sequence[Tensor], signals: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the coefficients and the signals that are needed."""
    grad, count = grad if grad.stride(3) == 1 else grad.contiguous(), len(signals)
    grid, (heads, chunks, tokens), sizes = _plan(*grad.shape)
    coefficient_needs, signal_needs = needs[:count], needs[count:]
    grads = [torch.empty_like(x) if need else None for x, need in zip(signals, signal_needs, strict=True)]
    programs = grad.shape[0] * chunks
    sums = grad.new_empty((count, heads, programs), dtype=torch.float32)
    bits = [sum(need << k for k, need in enumerate(part)) for part in (signal_needs, coefficient_needs)]
    view = strided(grad)
    places = tuple(view if x is None else strided(x) for x in grads)
    with torch.cuda.device_of(grad):
        _gradients[grid](
            view, tuple(map(strided, signals)), tuple(coefficients), places, sums,
            heads, chunks, programs, tokens, *bits, **sizes,
        )  # fmt: skip
    totals: Sequence[Tensor] = sums.sum(-1).unbind() if any(coefficient_needs) else ()
    coefficient_grads = [
        t.to(c.dtype) if need else None for t, c, need in zip(totals, coefficients, coefficient_needs, strict=False)
    ]
    return [*(coefficient_grads or [None] * count), *grads]


@functools.lru_cache(1024)
def _plan(batch: int, heads: int, tokens: int, width: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Return the grid, the numbers and the constants of a launch."""
    block = triton.next_power_of_2(width)
    rows = max(1, ENTRIES // block)
    chunks = triton.cdiv(tokens, rows)
    return (
        (batch * heads * chunks,),
        (heads, chunks, tokens),
        {"WIDTH": width, "BLOCK": block, "ROWS": rows, **options(4)},
    )
