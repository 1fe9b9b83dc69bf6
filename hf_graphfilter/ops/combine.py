"""Linear combinations of signals with one coefficient per head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Coefficients = Sequence[Tensor | None]  # one per term, (heads,), or None where the term is left out


def combine(terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ``sum_k c_k x_k`` for terms (c_k, x_k): c_k (heads,), x_k (batch, heads, tokens, features).

    Computed in the wider of the two dtypes and returned in that of the signals. Fewer passes over memory than the
    separate operations, forward and backward; a term whose coefficient is 1 while the others are 0 comes out bit for
    bit.
    """
    coefficients, signals = zip(*terms, strict=True)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a compiler fuses them itself, a trace keeps no others
        out = sum(per_head(c, x) * x for c, x in terms)
        return out.to(signals[0].dtype)  # type: ignore[union-attr]
    apply = _Combine.apply if torch.is_grad_enabled() else _Combine.forward  # the latter without autograd's overhead
    return apply(len(terms), *coefficients, *signals)


def per_head(coefficient: Tensor, signal: Tensor) -> Tensor:
    """Shape a coefficient (heads,) to multiply a signal (batch, heads, tokens, features) without losing precision."""
    return coefficient.to(torch.promote_types(coefficient.dtype, signal.dtype)).view(-1, 1, 1)


def _by_tokens(signal: Tensor) -> bool:
    """Return whether a signal on the CPU stores the heads of a token together, as projections leave them.

    Loops over whole tokens are then faster than loops over the features of a head.
    """
    return signal.device.type == "cpu" and signal.stride(-3) < signal.stride(-2)


def _spread(coefficient: Tensor, signal: Tensor) -> Tensor:
    """Return the numbers of ``per_head``, repeated per feature for loops over tokens."""
    c = per_head(coefficient, signal)
    return c.expand(-1, 1, signal.shape[-1]).contiguous() if _by_tokens(signal) else c


class _Combine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Tensor:
        coefficients, signals = tensors[:count], tensors[count:]
        out = _spread(coefficients[0], signals[0]) * signals[0]
        for c, x in zip(coefficients[1:], signals[1:], strict=True):
            out.addcmul_(x, _spread(c, x))
        return out.to(signals[0].dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing allows a single unpacking
        count = len(saved) // 2
        coefficients, signals = saved[:count], saved[count:]
        needs = ctx.needs_input_grad[1:]
        grads: list[Tensor | None] = [None] * (2 * count)
        for k, (c, x) in enumerate(zip(coefficients, signals, strict=True)):
            if needs[k]:
                products = grad.to(c.dtype) * x.to(c.dtype)
                grads[k] = products.sum((0, 2)).sum(-1) if _by_tokens(products) else products.sum(-1).sum((0, 2))
            if needs[count + k]:
                grads[count + k] = (_spread(c, grad) * grad).to(x.dtype)
        return None, *grads
