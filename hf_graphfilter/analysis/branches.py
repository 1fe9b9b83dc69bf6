"""What each part of the filters does for a measure: parts switched off one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..filters.core.attached import filters_of
from ..hosts import unwrapped
from .model_inputs import to_device
from .observing import evaluate

Measure = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Branch:
    """A part of the filters: ``value`` of the measure without it, and by how much that differs from the whole."""

    name: str
    value: float
    change: float
    modules: int


def branch_report(model: nn.Module, measure: Measure | Iterable[Any]) -> list[Branch]:
    """The measure of a patched model with all parts of its filters, and without each, one at a time.

    Parts are what a filter declares (``GraphFilter.branches``): the term of ``w_K``, a window, what is far, a gate.
    Hybrids of a window and a linear branch are known to pass the linear one by (arXiv 2510.05901): then nothing changes
    without it.

    Args:
        model: a patched model; its coefficients and its mode are as before afterwards.
        measure: a function of the model, or batches, of which the mean loss is measured (they hold labels).

    Returns:
        First the whole, named ``"all"``, with the change 0.

    Raises:
        GraphFilterError: the model is not patched, no filter has a part, or the batches give no loss.
    """
    measured = measure if callable(measure) else _mean_loss(list(measure))
    filters = filters_of(model, required=True)
    parts: dict[str, list[GraphFilter]] = {}
    for _, graph_filter in filters:
        for name in graph_filter.branches():
            parts.setdefault(name, []).append(graph_filter)
    if not parts:
        kinds = ", ".join(sorted({graph_filter.config.filter for _, graph_filter in filters}))
        raise GraphFilterError(f"the filters of the model ({kinds}) have no parts that can be switched off")
    with evaluate(model):
        with_all = measured(model)
        branches = [Branch("all", with_all, 0.0, len(filters))]
        for name, having in parts.items():
            with switch_off(name, having):
                value = measured(model)
            branches.append(Branch(name, value, value - with_all, len(having)))
    return branches


@contextlib.contextmanager
def switch_off(name: str, filters: Iterable[GraphFilter]) -> Iterator[None]:
    with contextlib.ExitStack() as back:
        for graph_filter in filters:
            back.enter_context(graph_filter.branches()[name]())
        yield


def _mean_loss(batches: list[Any]) -> Measure:
    def measure(model: nn.Module) -> float:
        total, count = 0.0, 0
        device = next(model.parameters()).device
        with torch.no_grad():
            for batch in batches:
                arguments = to_device(batch, device)
                if not isinstance(arguments, dict):
                    raise GraphFilterError("a tensor has no labels: hand in dicts, or a function of the model")
                loss = getattr(model(**arguments), "loss", None)
                if loss is None:
                    raise GraphFilterError("the batches give no loss: hand in labels, or a function of the model")
                if terms := _terms(model, arguments):
                    total, count = total + float(loss) * terms, count + terms
        if not count:
            raise GraphFilterError("there are no batches to measure on")
        return total / count

    return measure


def _terms(model: nn.Module, batch: dict[str, Any]) -> int:
    """Of how many terms a batch's loss is the mean: labels of tokens that count, or sequences."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
        return len(next(x for x in batch.values() if isinstance(x, Tensor)))
    inner: Any = unwrapped(model)
    shifted = hasattr(inner, "can_generate") and inner.can_generate() and not inner.config.is_encoder_decoder
    return int((labels[..., 1:] if shifted else labels).ne(-100).sum())
