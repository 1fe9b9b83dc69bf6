"""The shared parts of the kernels: tiles of a head, and how tensors are passed to a launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .interpreter import interpreted

# A tensor is handed to a kernel as (pointer, strides of all dimensions but the last, which is 1).


@triton.jit
def tile(x, batch, head, rows, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to rows (all of them WIDTH long) of a head, and which of them exist."""
    columns = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None]
    if WIDTH < BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    head_start = x[0] + batch.to(tl.int64) * x[1] + head.to(tl.int64) * x[2]
    return head_start + rows.to(tl.int64)[:, None] * x[3] + columns[None, :], mask


@triton.jit
def load(x, batch, head, rows, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the rows of a tile; absent rows and the padding of the features are zero."""
    pointers, mask = tile(x, batch, head, rows, count, WIDTH, BLOCK)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store(x, batch, head, rows, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, numbers):
    """Store the rows of a tile."""
    pointers, mask = tile(x, batch, head, rows, count, WIDTH, BLOCK)
    tl.store(pointers, numbers.to(x[0].dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, total=None):
    """Return a b + total.

    ``PRECISION`` is "ieee" only in the interpreter. It would multiply the raw bits of bfloat16, so these are converted.
    """
    if PRECISION == "ieee":
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor stored as (batch, tokens, heads, features), the layout of the model's projections."""
    return x.new_empty(x.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)


def strided(x: Tensor) -> tuple[Any, ...]:
    """Return a tensor and its strides, as ``tile`` takes them."""
    return x, *x.stride()[:3]


def power(count: int) -> int:
    """Return the smallest power of two that holds ``count`` and that a matrix product takes."""
    return max(16, triton.next_power_of_2(count))


def precision(x: Tensor) -> str:
    """Return how products of float32 numbers are computed; "ieee" in the interpreter alone."""
    if interpreted():
        return "ieee"
    return "tf32" if x.element_size() < 4 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def options(warps: int, stages: int = 1) -> dict[str, Any]:
    """Return the options of a launch.

    The last one, which releases of Triton handle differently, avoids a warning.
    """
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def fits(x: Tensor) -> bool:
    """Return whether a launch can have a column of programs for every head."""
    return x.shape[0] * x.shape[1] < 1 << 16
