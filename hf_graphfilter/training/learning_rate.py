"""The learning rate of the filter: assignment in an optimizer, and a check that it was not forgotten.

AdamW moves a scalar by at most about the learning rate per step. At 2e-5 a coefficient ends a fine-tuning run within
about 0.01 of where it began, and the filter does almost nothing. Weight decay would pull it back to 0.

This file imports no Trainer: it is loaded with accelerate, long before one is needed.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from accelerate.accelerator import Accelerator
from torch import nn

from ..errors import GraphFilterError, is_number, shown
from ..filters.core.attached import filters_of
from ..logs import logger
from ..patching.status import filter_parameters, has_moved
from ..wrappers import Function, wrap

FILTER_LR = 1e-2
FAST = 1e-3  # at this rate a coefficient can move as far in 1,000 steps as trained filters were seen to move
VARIABLE = "HF_GRAPHFILTER_LR"  # environment variable, set by `hf-graphfilter run --filter-lr`
REMEDY = "use FilterTrainingArguments(filter_lr=1e-2), filter_optimizer or parameter_groups"
C = TypeVar("C")


def check_rates(**rates: float) -> None:
    """Raise unless every rate is a finite number >= 0."""
    for name, rate in rates.items():
        if not is_number(rate):
            raise GraphFilterError(f"{name} must be a finite learning rate >= 0, got {shown(rate)}")


def rate_from_environment() -> float | None:
    """Return the rate that ``hf-graphfilter run --filter-lr`` set, or None.

    Raises:
        GraphFilterError: the variable does not hold a rate.
    """
    if not (text := os.environ.get(VARIABLE)):
        return None
    try:
        rate = float(text)
    except ValueError:
        raise GraphFilterError(f"the environment variable {VARIABLE} must be a number, got {shown(text)}") from None
    check_rates(**{VARIABLE: rate})
    return rate


def given_rate(args: Any) -> float | None:
    """Return the rate from the environment, or else that of the Trainer's arguments, or None."""
    rate = rate_from_environment()
    return getattr(args, "filter_lr", None) if rate is None else rate


def coefficient_ids(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter that is a coefficient of a filter.

    The weights of a filter (``sigma`` of AGF ...) are not coefficients.
    """
    return {id(p) for _, graph_filter in filters_of(model) for p in graph_filter.coefficient_tensors().values()}


def split_by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in lists, one per device mesh.

    A fused or foreach kernel takes either tensors of one mesh or ordinary tensors. Expert parallelism gives a model
    both.
    """
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [*meshes.values()]


def split_filter_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, filter_lr: float, others: Iterable[Any] = ()
) -> None:
    """Move the filter's coefficients into optimizer groups of their own, in place, before the first step.

    The new groups keep the other options of the group that the coefficients came from, and have no weight decay.
    ``others`` are optimizers that may train the rest.

    Raises:
        GraphFilterError: a coefficient that is trained is in no group.
    """
    filter_ids = coefficient_ids(model)
    missing = {id(p) for p in filter_parameters(model) if p.requires_grad} & filter_ids
    missing -= {number for other in others if other is not optimizer for number in _parameter_ids(other)}
    weight_groups: list[dict[str, Any]] = []
    filter_groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        coefficients = [p for p in group["params"] if id(p) in filter_ids]
        missing -= {id(p) for p in coefficients}
        lr = group["lr"]  # a tensor in optimizers of torchao, which must stay one
        rate = torch.full_like(lr, filter_lr) if isinstance(lr, torch.Tensor) else filter_lr
        options = {**group, "lr": rate, "weight_decay": 0.0}
        filter_groups += [_select(options, parameters) for parameters in split_by_mesh(coefficients)]
        if weights := [p for p in group["params"] if id(p) not in filter_ids]:
            weight_groups.append(_select(group, weights))
    if missing:
        raise GraphFilterError(
            f"{len(missing)} trained parameters of the graph filter are in no group of {type(optimizer).__name__}: "
            "patch the model before the optimizer is made, and choose an optim that makes no groups of its own"
        )
    optimizer.param_groups[:] = [*weight_groups, *filter_groups]


def _select(group: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Return a group with only these of its parameters, and with their names if the group has names."""
    selected, ids = {**group, "params": parameters}, {id(p) for p in parameters}
    if names := group.get("param_names"):
        selected["param_names"] = [name for name, p in zip(names, group["params"], strict=True) if id(p) in ids]
    return selected


def find_rate_problem(
    model: nn.Module, optimizer: Any, steps: int | None = None, filter_lr: float | None = None
) -> str | None:
    """Return a sentence that describes the problem if this training would not move the filter, else None.

    Args:
        model: any model, wrapped or not. For a model without a filter the result is None.
        optimizer: an optimizer with ``param_groups``.
        steps: the number of steps that training takes, if it is known.
        filter_lr: the rate that the filter should have, if one was given.
    """
    parameters = [*filter_parameters(model)]
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", None) or []
    if not parameters or not groups:
        return None
    if not any(p.requires_grad for p in parameters):
        if has_moved(model):
            return None  # it was trained before, and is kept
        return (
            "the graph filter is frozen at its start values, so that training does not change it: with PEFT pass "
            "modules_to_save=['graph_filter'], else call requires_grad_() on filter_parameters(model)"
        )
    grouped = {id(p) for group in groups for p in group["params"]}
    if not any(id(p) in grouped for p in model.parameters()):
        return None  # DeepSpeed's optimizers hold other tensors than the model
    if missing := [p for p in parameters if p.requires_grad and id(p) not in grouped]:
        return (
            f"{len(missing)} of {len(parameters)} parameters of the graph filter are not in the optimizer, so training "
            "leaves them as they are: patch the model before the optimizer is made"
        )
    filter_ids = coefficient_ids(model)
    filter_groups = [group for group in groups if any(id(p) in filter_ids for p in group["params"])]
    if filter_lr is not None and any(id(p) not in filter_ids for group in filter_groups for p in group["params"]):
        return (
            f"filter_lr={filter_lr:g} is not applied to the optimizer that was passed to the Trainer, or that a "
            "schedule reads already: make it with parameter_groups(model, lr=..., filter_lr=...), or let the Trainer "
            "make it"
        )
    weight_rates = {_peak(group) for group in groups if any(id(p) not in filter_ids for p in group["params"])}
    if filter_lr is not None and not weight_rates:
        return None  # the rate that was asked for, and no weights are trained
    shared_rates = {rate for group in filter_groups if (rate := _peak(group)) in weight_rates or not weight_rates}
    if not shared_rates or (rate := min(shared_rates)) >= FAST or rate * (steps or 0) >= 1:
        return None
    movement = f"moves them by at most about {rate * steps:.1g} in {steps} steps" if steps else "barely moves them"
    return (
        f"the coefficients of the graph filter share the learning rate of the weights, {rate:.2g}, which {movement}: "
        f"{REMEDY}"
    )


def _peak(group: dict[str, Any]) -> float:
    """Return the peak learning rate of a group; an optimizer that sets its own rate counts as infinitely fast."""
    rate = group.get("initial_lr", group["lr"])
    return math.inf if rate is None else float(rate)


def find_caller(kind: type[C]) -> C | None:
    """Return the nearest object of a class that is ``self`` in the call stack, or None."""
    # The Trainer passes callbacks neither itself nor their handler; to store it, its __init__ would have to be wrapped.
    # Start at the frame of the caller: once the locals of our own frame are read, it would keep all others alive.
    frame = inspect.currentframe().f_back  # type: ignore[union-attr]
    while frame is not None and not isinstance(frame.f_locals.get("self"), kind):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def prepare_with_rate(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``Accelerator.prepare``, and log one line if the optimizer would not move the filter.

    With ``hf-graphfilter run --filter-lr``, also set that rate in an optimizer that has no schedule yet.
    """
    optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
    models = [arg for arg in args if isinstance(arg, nn.Module)] or self._models
    if optimizers and not _is_called_by_trainer():  # the callback of the Trainer reports more exactly
        rate = rate_from_environment()
        for model in filter(coefficient_ids, models):
            model_ids = {id(p) for p in model.parameters()}
            model_optimizers = [optimizer for optimizer in optimizers if model_ids & _parameter_ids(optimizer)]
            if not model_optimizers:  # they train another model, or copies
                continue
            all_optimizers = [*model_optimizers, *self._optimizers]  # each may train a part, as Muon and AdamW do
            for optimizer in model_optimizers:
                if rate is not None and not any("initial_lr" in group for group in optimizer.param_groups):
                    split_filter_groups(optimizer, model, rate, all_optimizers)
            groups = [group for optimizer in all_optimizers for group in optimizer.param_groups]
            problem = find_rate_problem(model, SimpleNamespace(param_groups=groups), filter_lr=rate)
            report_problem(problem, self.is_main_process)
    return original(self, *args, **kwargs)


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _is_called_by_trainer() -> bool:
    module = sys.modules.get("transformers.trainer")
    return module is not None and find_caller(module.Trainer) is not None


def report_problem(problem: str | None, on_this_process: bool) -> None:
    """Log the problem as one line, if there is one and this process logs."""
    if problem and on_this_process:
        logger.warning("hf_graphfilter: %s", problem)


wrap(Accelerator, "prepare", prepare_with_rate)  # this file is imported right after accelerate's
