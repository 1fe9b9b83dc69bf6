"""Linear combinations of signals with one coefficient per head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import triton

Coefficients = Sequence[Tensor | None]  # one per term, (heads,), or None where the term is left out


def combine(terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ``sum_k c_k x_k`` for terms (c_k, x_k): c_k (heads,), x_k (batch, heads, tokens, features).

    The sum is computed in the wider of the two dtypes and returned in that of the signals. It takes fewer passes over
    memory than separate operations, forward and backward. If one coefficient is 1 and the others are 0, the result is
    that signal bit for bit.
    """
    coefficients, signals = zip(*terms, strict=True)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a compiler fuses them itself, a trace keeps no others
        out = sum(per_head(c, x) * x for c, x in terms)
        return out.to(signals[0].dtype)  # type: ignore[union-attr]
    if not torch.is_grad_enabled():
        return _add_up(coefficients, signals)
    transformed = torch._C._are_functorch_transforms_active()
    function = _CombineInTransforms if transformed else _Combine
    return function.apply(len(terms), *coefficients, *signals)  # type: ignore[no-any-return]


def per_head(coefficient: Tensor, signal: Tensor) -> Tensor:
    """Shape a coefficient (heads,) to multiply a signal (batch, heads, tokens, features) without losing precision."""
    return coefficient.to(torch.promote_types(coefficient.dtype, signal.dtype)).view(-1, 1, 1)


def _is_token_major(signal: Tensor) -> bool:
    """Return whether a signal on the CPU stores the heads of a token together, as projections leave them.

    Loops over whole tokens are then faster than loops over the features of a head.
    """
    return signal.device.type == "cpu" and signal.stride(-3) < signal.stride(-2)


def _spread(coefficient: Tensor, signal: Tensor) -> Tensor:
    """Return the numbers of ``per_head``, repeated per feature for loops over tokens."""
    c = per_head(coefficient, signal)
    return c.expand(-1, 1, signal.shape[-1]).contiguous() if _is_token_major(signal) else c


def _add_up(coefficients: Sequence[Tensor], signals: Sequence[Tensor]) -> Tensor:
    if (combined := triton.combine(coefficients, signals)) is not None:
        return combined
    out = _spread(coefficients[0], signals[0]) * signals[0]
    add = torch.addcmul if torch._C._are_functorch_transforms_active() else Tensor.addcmul_  # vmap may have one of them
    for c, x in zip(coefficients[1:], signals[1:], strict=True):
        out = add(out, x, _spread(c, x))
    return out.to(signals[0].dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return _add_up(tensors[:count], tensors[count:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing allows a single unpacking
        count = len(saved) // 2
        coefficients, signals = saved[:count], saved[count:]
        needs = ctx.needs_input_grad[1:]
        if (kernel_grads := triton.differentiate_combination(grad, coefficients, signals, needs)) is not None:
            return None, *kernel_grads
        grads: list[Tensor | None] = [None] * (2 * count)
        for k, (c, x) in enumerate(zip(coefficients, signals, strict=True)):
            if needs[k]:
                products = grad.to(c.dtype) * x.to(c.dtype)
                grads[k] = products.sum((0, 2)).sum(-1) if _is_token_major(products) else products.sum(-1).sum((0, 2))
            if needs[count + k]:
                grads[count + k] = (_spread(c, grad) * grad).to(x.dtype)
        return None, *grads


class _CombineInTransforms(torch.autograd.Function):
    """The same as ``_Combine`` for ``torch.func``, whose check of signatures takes longer than a small combination."""

    generate_vmap_rule = True
    backward = _Combine.backward

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Tensor:
        return _add_up(tensors[:count], tensors[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
