"""The singular value filter in which every token sees every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gradients import first_order, one_by_one
from ..polynomials import Recurrence
from .blocks import blocks, hide, no_past, to_float32
from .factors import Left


def filter_all(left: Left, v: Tensor, value: Tensor, keys: Tensor | None) -> Tensor:
    """Return ``U Sigma (V^T value)``, where every token sees every token, in O(n d^2) time and O(n d + d^2) memory.

    Args:
        left: what makes ``U Sigma``.
        v: (batch, heads, tokens, features), before the softmax.
        value: (batch, heads, tokens, value features).
        keys: bool (batch, tokens), or None.

    Returns:
        (batch, heads, tokens, value features), dtype of ``value``.
    """
    if torch.jit.is_tracing():  # which keeps operations of PyTorch only, and blocks for the number of tokens it saw
        logits, signal = hide(to_float32(v), value, keys)
        mean = logits.softmax(-2).to(value.dtype).mT @ signal
        return left.rows().to(value.dtype) @ mean
    return _All.apply(*left, v, value, keys)[0]


class _All(torch.autograd.Function):
    @staticmethod
    def forward(
        u: Tensor,
        sigma: Tensor | None,
        theta: Tensor,
        steps: Recurrence,
        v: Tensor,
        value: Tensor,
        keys: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, out = Left(u, sigma, theta, steps), torch.empty_like(value)
        masses, means = no_past(v, value)
        for group in blocks(v):
            for block in group:
                logits, signal = hide(
                    to_float32(v[block]), value[block], None if keys is None else keys[block[0], block[2]]
                )
                weights = logits.softmax(-2)
                mass, old_mass = logits.amax(-2) - weights.amax(-2).log_(), masses[block[:2]]
                total = torch.logaddexp(old_mass, mass)
                mean = (weights.to(value.dtype).mT @ signal) * (mass - total).exp_()[..., None]
                means[block[:2]] = mean.addcmul_(means[block[:2]], (old_mass - total).exp_()[..., None])
                masses[block[:2]] = total
            for block in group:
                out[block] = left.rows(block).to(value.dtype) @ means[block[:2]].to(value.dtype)
        return out, masses, means

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        u, sigma, theta, ctx.steps, *others = inputs
        ctx.save_for_backward(u, sigma, theta, *others, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        return one_by_one(_All, info.batch_size, in_dims, inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        by_u, by_sigma, by_theta, by_v, by_value = first_order(_gradients, grad, ctx.steps, *ctx.saved_tensors)
        return by_u, by_sigma, by_theta, None, by_v, by_value, None


def _gradients(
    grad: Tensor,
    steps: Recurrence,
    u: Tensor,
    sigma: Tensor | None,
    theta: Tensor,
    v: Tensor,
    value: Tensor,
    keys: Tensor | None,
    masses: Tensor,
    means: Tensor,
) -> tuple[Tensor | None, ...]:
    left = Left(u, sigma, theta, steps)
    grads = left.room()
    grad_v, grad_value = torch.empty_like(v), torch.empty_like(value)
    for group in blocks(v):
        grad_mean = torch.zeros_like(means[group[0][:2]])
        for block in group:
            g = grad[block]
            rows = left.backward(block, to_float32(g @ means[block[:2]].to(g.dtype).mT), grads)
            grad_mean += rows.to(g.dtype).mT @ g
        for block in group:
            present = None if keys is None else keys[block[0], block[2]]
            logits, signal = hide(to_float32(v[block]), value[block], present)
            weights = (logits - masses[block[:2]][:, :, None]).exp_()
            by_feature = (grad_mean * means[block[:2]]).sum(-1)[:, :, None]
            cast_grad = grad_mean.to(value.dtype)
            by_value = weights.to(value.dtype) @ cast_grad
            by_v = weights.mul_(signal @ cast_grad.mT - by_feature)
            if present is not None:
                for x in (by_v, by_value):
                    x.masked_fill_(~present[:, None, :, None], 0.0)
            grad_v[block], grad_value[block] = by_v, by_value
    return *grads[:3], grad_v, grad_value
