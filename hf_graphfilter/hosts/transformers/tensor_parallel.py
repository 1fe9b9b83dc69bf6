"""Tensor parallelism: each process computes some of the heads, with the coefficients of these heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...errors import GraphFilterError
from ...filters import GraphFilter
from ...shift.operator import ShiftOperator
from ..base import describe_site


def with_local_heads(
    graph_filter: GraphFilter, module: nn.Module, query: Tensor
) -> Callable[[ShiftOperator, Tensor], Tensor]:
    """Return ``graph_filter`` for the heads of ``query`` (batch, local heads, tokens, features) in this process.

    Raises:
        GraphFilterError: the heads are not split by tensor parallelism, or the filter cannot be split with them.
    """
    # it may be PEFT's wrapper, which holds one filter per adapter
    local, names = query.shape[1], graph_filter.per_head if isinstance(graph_filter, GraphFilter) else ()
    mesh = next((p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")), None)
    site = describe_site(module)
    if mesh is None:
        raise GraphFilterError(
            f"{site}: the filter has {graph_filter.heads} heads, the query {local} (shape {tuple(query.shape)})"
        )
    if not names:
        raise GraphFilterError(
            f"{site}: tensor parallelism splits the {graph_filter.heads} heads, and {type(graph_filter).__name__} has "
            "no values per head: use FSDP2 or DDP, or a filter that has them"
        )
    if mesh.ndim > 1 or local * mesh.size() != graph_filter.heads:
        raise GraphFilterError(
            f"{site}: {graph_filter.heads} heads are split into {local} on each of {mesh.size()} processes; a filter "
            "follows tensor parallelism alone, with as many heads on each: choose another tp_size, or FSDP2 or DDP"
        )
    begin = mesh.get_local_rank() * local
    group, part = mesh.get_group(), slice(begin, begin + local)
    coefficients = {name: _SumOfGradients.apply(getattr(graph_filter, name), group)[part] for name in names}
    return lambda shift, value: functional_call(graph_filter, coefficients, (shift, value))


class _SumOfGradients(torch.autograd.Function):
    """The sum of the gradients of a coefficient that all processes hold and of which each uses a part."""

    @staticmethod
    def forward(ctx: Any, coefficient: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return coefficient.view_as(coefficient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None
