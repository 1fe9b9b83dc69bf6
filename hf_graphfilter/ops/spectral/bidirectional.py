"""The filter where every token sees every token, and what the other kernels share with it: tokens taken block by block,
tokens that are not there, what is past."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 18  # numbers that matrix products on the CPU take at once
NEVER = -1e30  # logit of a token that is not there; finite, so that no inf - inf can arise


class CausalState(NamedTuple):
    """All that the causal filter remembers of the past: constant size, whatever the number of tokens.

    Attributes:
        mass: (batch, heads, features), logarithm of the running denominators of ``V``; float32 or wider.
        mean: (batch, heads, features, value features), ``V^T x`` over the past; of the same dtype.
    """

    mass: Tensor
    mean: Tensor


def no_past(v: Tensor, value: Tensor) -> CausalState:
    """The state before the first token."""
    batch, heads, _, features = v.shape
    mass = torch.full((batch, heads, features), NEVER, dtype=wide(v).dtype, device=v.device)
    return CausalState(mass, mass.new_zeros(batch, heads, features, value.shape[-1]))


def wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def blocks(x: Tensor, size: int, multiple: int = 1) -> list[slice]:
    """Parts of the tokens of x (batch, heads, tokens, features) with about ``size`` numbers; a GPU takes all, and so
    does a compiler, whose graph would be bound to their number."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    count = x.shape[2]
    step = count if x.device.type != "cpu" else size * count // max(1, x.numel())
    step = max(step // multiple, 1) * multiple
    return [slice(i, i + step) for i in range(0, count, step)]


def hide(v: Tensor, value: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without the tokens that are not there: no weight, and no value should none be there at all."""
    if keys is None:
        return v, value
    gone = ~keys[:, None, :, None]
    return v.masked_fill(gone, absent(v.dtype)), value.masked_fill(gone, 0.0)


def absent(dtype: torch.dtype) -> float:
    """The logit of a token that is not there, in the range of ``dtype``."""
    return max(NEVER, torch.finfo(dtype).min / 2)


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
