"""The filter where every token sees every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tokens import BLOCK, blocks, hide, no_past, wide


def filter_all(w: Tensor, v: Tensor, value: Tensor, keys: Tensor | None) -> Tensor:
    """``w (V^T value)``, every token seeing every token: O(n d^2) time, O(n d + d^2) memory.

    Args:
        w: rows of ``U Sigma``, (batch, heads, tokens, features).
        v: (batch, heads, tokens, features), before the softmax.
        value: (batch, heads, tokens, value features).
        keys: bool (batch, tokens), or None.

    Returns:
        (batch, heads, tokens, value features), dtype of ``value``.
    """
    v, value = hide(v, value, keys)
    return _All.apply(w, v, value)[0]


class _All(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, v: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mass, mean = no_past(v, value)
        for part in blocks(v, BLOCK):
            logits = wide(v[:, :, part])
            total = torch.logaddexp(mass, logits.logsumexp(-2))
            weights = (logits - total[:, :, None]).exp_().to(value.dtype)
            mean = mean * (mass - total).exp_()[..., None] + weights.mT @ value[:, :, part]
            mass = total
        return w.to(value.dtype) @ mean.to(value.dtype), mass, mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, ...]:
        w, v, value, mass, mean = ctx.saved_tensors
        toward = torch.zeros_like(mean)
        for part in blocks(w, BLOCK):
            toward += w[:, :, part].to(grad.dtype).mT @ grad[:, :, part]
        taken = (toward * mean).sum(-1)[:, :, None]
        grad_v, grad_value = torch.empty_like(v), torch.empty_like(value)
        across = toward.to(value.dtype)
        for part in blocks(v, BLOCK):
            weights = (wide(v[:, :, part]) - mass[:, :, None]).exp_()
            grad_value[:, :, part] = weights.to(value.dtype) @ across
            grad_v[:, :, part] = weights.mul_(value[:, :, part] @ across.mT - taken)
        return (grad @ mean.to(grad.dtype).mT).to(w.dtype), grad_v, grad_value
