"""The gradients of the losses that filters declare, which are added during the Trainer's own backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..filters import GraphFilter
from ..filters.core.base import Loss

Weights = Mapping[str, float]
Options = Mapping[str, Mapping[str, Any]]


def choose_weights(graph_filter: GraphFilter, losses: Iterable[str], weights: Weights) -> dict[str, float]:
    """Return the weights of the losses of one filter, without those of weight 0.

    A loss of weight 0 is not computed, and does not enter a mean.
    """
    all_weights = {**graph_filter.config.penalties, **weights}
    return {name: all_weights[name] for name in losses if all_weights[name]}


def find_rerun(model: nn.Module) -> list[nn.Module]:
    """Return the layers with reentrant gradient checkpointing, whose first forward pass has no gradients."""
    functions = {m: getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()}
    return [m for m, f in functions.items() if f is not None and getattr(f, "keywords", {}).get("use_reentrant", True)]


class GradientAdder:
    """The recorder of all filters of a model in training: it adds the gradients, and sums what is logged."""

    def __init__(self, weights: Weights, options: Options, rerun: Sequence[nn.Module] = ()):
        self.weights, self.options, self.scale, self.rerun = weights, options, 1.0, rerun
        self.applications = Counter[str]()  # number of times each loss occurred in the last forward pass
        self.others = Counter[str]()  # the same without gradients, such as for extra passes of compute_loss
        self.backward_began = False
        self.sums: dict[str, Tensor] = {}
        self.counts = Counter[str]()

    def __call__(self, graph_filter: GraphFilter, out: Tensor, losses: dict[str, Loss]) -> Tensor:
        weights = choose_weights(graph_filter, losses, self.weights)
        if torch._C._current_graph_task_id() == -1:  # checkpointing runs a layer again, during the backward pass
            if self.backward_began:
                self.applications, self.others, self.backward_began = Counter(), Counter(), False
            # a forward pass of a reference model switches checkpointing off
            counts = torch.is_grad_enabled() or any(getattr(m, "gradient_checkpointing", True) for m in self.rerun)
            counter = self.applications if counts else self.others
            counter.update(weights.keys())
        if torch.is_grad_enabled():
            for name, weight in weights.items():
                loss = losses[name](**self.options.get(name, {}))
                out = _AddGradient.apply(out, loss, name, weight, self)
        return out

    def record(self, name: str, loss: Tensor) -> None:
        self.backward_began = True
        total = self.sums.get(name)
        self.sums[name] = loss.clone() if total is None else total + loss.to(total.device)
        self.counts[name] += 1


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, name: str, weight: float, added: GradientAdder) -> Tensor:  # type: ignore[override]
        ctx.loss, ctx.rest = loss.detach(), (name, weight, added)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        name, weight, adder = ctx.rest
        adder.record(name, ctx.loss)
        count = adder.applications[name] or adder.others[name]  # `others` if checkpointing is not the model's own
        share = torch.full_like(ctx.loss, weight * adder.scale / count)
        return grad, share, None, None, None
