"""Backward passes written by hand, as separate functions for autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphFilterError

Tensors = tuple[Tensor | None, ...]


def first_order(backward: Callable[..., Tensors], *inputs: Any) -> Tensors:
    """Return ``backward(*inputs)``, gradients that must not be differentiated again; call it in ``backward``.

    PyTorch's ``once_differentiable`` does not serve here: ``torch.func`` keeps the graph of every backward pass, so
    even first derivatives would raise. Without any check, second derivatives would be wrong, since backward passes
    compute in place or from saved results.

    A compiled graph is not checked: torch 2.14 cannot trace this function, whose number of inputs varies. Second
    derivatives of a compiled graph are wrong, without an error.
    """
    if torch.compiler.is_dynamo_compiling():
        return backward(*inputs)
    if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return backward(*inputs)  # ordinary training: the check would take 0.1 ms per layer
    return _FirstOrder.apply(backward, *inputs)  # type: ignore[no-any-return]


def one_by_one(function: Any, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a function to the members of a batch one after the other, as the rule of ``torch.func.vmap``."""
    results = [
        function.apply(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(inputs, in_dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(None if x[0] is None else torch.stack(x) for x in zip(*results, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def under_vmap() -> bool:
    """Return whether ``torch.func.vmap`` is active, under which code cannot branch on the values of a tensor."""
    if torch._C._functorch.maybe_current_level() is None:  # which Dynamo can trace, unlike the stack
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(backward: Callable[..., Tensors], *inputs: Any) -> Tensors:
        return backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        raise GraphFilterError(
            "this filter has first derivatives only, and those of its gradients were asked for (create_graph=True, "
            "torch.func.hessian): use the formula with explicit matrices, or a filter of the attention matrix inside "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        return one_by_one(_FirstOrder, info.batch_size, in_dims, inputs)
