"""The contribution of each part of the filters to a measure, with one part switched off at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import device_of
from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..filters.core.attached import filters_of
from ..hosts import unwrapped
from .model_inputs import check_batches, evaluate, to_device

Measure = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Branch:
    """The measure of a model without one part of its filters.

    Attributes:
        name: name of the part, or ``"all"`` for the whole model.
        value: the measure without the part.
        change: ``value`` minus the measure of the whole model.
        modules: number of patched modules that have the part.
    """

    name: str
    value: float
    change: float
    modules: int


def branch_report(model: nn.Module, measure: Measure | Iterable[Any]) -> list[Branch]:
    """Measure a patched model as it is, and then without each part of its filters, one part at a time.

    A filter declares its parts (``GraphFilter.branches``): the term of ``w_K``, the window, the tokens outside of it,
    the gate. Hybrids of a window and a linear branch are known to ignore the linear one (arXiv 2510.05901). Then the
    measure does not change without it.

    Args:
        model: a patched model; it is left as it was.
        measure: a function of the model that returns a number, or batches with labels, whose mean loss is the measure.

    Returns:
        One entry per part. The first entry is the whole model, named ``"all"``, with the change 0.

    Raises:
        GraphFilterError: the model is not patched, no filter has a part, or the batches give no loss.
    """
    measure_model = measure if callable(measure) else _mean_loss(list(check_batches(measure)))
    filters = filters_of(model, required=True)
    parts: dict[str, list[GraphFilter]] = {}
    for _, graph_filter in filters:
        for name in graph_filter.branches():
            parts.setdefault(name, []).append(graph_filter)
    if not parts:
        kinds = ", ".join(sorted({graph_filter.config.filter for _, graph_filter in filters}))
        raise GraphFilterError(f"the filters of the model ({kinds}) have no parts that can be switched off")
    with evaluate(model):
        full_value = measure_model(model)
        branches = [Branch("all", full_value, 0.0, len(filters))]
        for name, part_filters in parts.items():
            with switch_off(name, part_filters):
                value = measure_model(model)
            branches.append(Branch(name, value, value - full_value, len(part_filters)))
    return branches


@contextlib.contextmanager
def switch_off(name: str, filters: Iterable[GraphFilter]) -> Iterator[None]:
    """Switch a part of the filters off inside the ``with`` block."""
    with contextlib.ExitStack() as exit_stack:
        for graph_filter in filters:
            exit_stack.enter_context(graph_filter.branches()[name]())
        yield


def _mean_loss(batches: list[Any]) -> Measure:
    def measure(model: nn.Module) -> float:
        total, count = 0.0, 0
        device = device_of(model)
        with torch.no_grad():
            for batch in batches:
                arguments = to_device(batch, device)
                if not isinstance(arguments, dict):
                    raise GraphFilterError(
                        "a batch is a tensor, which has no labels: pass dicts with labels, or a function of the model"
                    )
                loss = getattr(model(**arguments), "loss", None)
                if loss is None:
                    raise GraphFilterError(
                        "the model returned no loss: pass batches with labels, or a function of the model"
                    )
                if terms := _terms(model, arguments):
                    total, count = total + float(loss) * terms, count + terms
        if not count:
            raise GraphFilterError("there is nothing to measure: the batches are empty, or none of their labels count")
        return total / count

    return measure


def _terms(model: nn.Module, batch: dict[str, Any]) -> int:
    """Return the number of terms in a batch's mean loss: labels that are not missing or masked, or sequences."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.is_floating_point():
        return int(labels.isnan().logical_not().sum())
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return len(next(x for x in batch.values() if isinstance(x, Tensor)))
    inner: Any = unwrapped(model)
    shifted = hasattr(inner, "can_generate") and inner.can_generate() and not inner.config.is_encoder_decoder
    return int((labels[..., 1:] if shifted else labels).ne(-100).sum())
