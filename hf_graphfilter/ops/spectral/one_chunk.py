"""The causal filter over a single chunk of tokens, without a state before or after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gradients import first_order
from ..polynomials import Recurrence
from .blocks import blocks, to_float32
from .factors import Left

TINY = 1e-30  # smallest running mass, relative to its chunk's, that is divided by


class OneChunk(torch.autograd.Function):
    """``(W E^T, lower triangle) value`` with ``W_t = (U Sigma)_t / mass_t`` and ``E = e^v``."""

    @staticmethod
    def forward(u: Tensor, sigma: Tensor | None, theta: Tensor, steps: Recurrence, v: Tensor, value: Tensor) -> Tensor:
        left, out = Left(u, sigma, theta, steps), torch.empty_like(value)
        for (block,) in blocks(v, v.shape[2]):
            weights, inverse = _exponentials(v[block])
            scores = (left.rows(block).mul_(inverse) @ weights.mT).tril_()
            out[block] = scores @ to_float32(value[block])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        u, sigma, theta, ctx.steps, v, value = inputs
        ctx.save_for_backward(u, sigma, theta, v, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(_gradients, grad, ctx.steps, *ctx.saved_tensors)
        return *grads[:3], None, *grads[3:]


def _exponentials(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``e^v`` relative to each feature's largest, and one over its sum so far; 0 before the first token."""
    v = to_float32(v)
    weights = (v - v.amax(2, keepdim=True)).exp_()
    mass = weights.cumsum(2)
    return weights, torch.where(mass < TINY, 0.0, mass.reciprocal())


def _gradients(
    grad: Tensor, steps: Recurrence, u: Tensor, sigma: Tensor | None, theta: Tensor, v: Tensor, value: Tensor
) -> tuple[Tensor | None, ...]:
    left = Left(u, sigma, theta, steps)
    grads, grad_v, grad_value = left.room(), torch.empty_like(v), torch.empty_like(value)
    for (block,) in blocks(v, v.shape[2]):
        grad_out, (weights, inverse) = to_float32(grad[block]), _exponentials(v[block])
        pairs = (grad_out @ to_float32(value[block]).mT).tril_()
        grad_w = (pairs @ weights).mul_(inverse)
        queries = left.backward(block, grad_w, grads).mul_(inverse)
        grad_value[block] = (queries @ weights.mT).tril_().mT @ grad_out
        # of the mass so far, from the end: earlier terms can be larger by many orders of magnitude
        returned = grad_w.mul_(queries).flip(2).cumsum(2).flip(2)
        grad_v[block] = (pairs.mT @ queries).sub_(returned).mul_(weights)
    return *grads[:3], grad_v, grad_value
