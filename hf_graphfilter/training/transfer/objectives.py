"""What is minimised: the distance between filters (students) and the attention that they replace (teachers)."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import GraphFilterError
from ...filters import GraphFilter
from ...shift import AttentionShift

Batch = dict[str, Any]
Outputs = Mapping[str, Any]
Distance = Callable[[Outputs, Outputs, Tensor | None], Tensor]


@contextlib.contextmanager
def _attending(
    modules: dict[str, GraphFilter], observe: Callable[[str, Tensor, Tensor], None] | None = None, fit: bool = False
) -> Iterator[None]:
    """Let the modules compute their original attention; ``observe(name, squared error, squared attention)`` sees how
    far the filters are from it, with gradients where ``fit``."""

    def attend(name: str, graph_filter: GraphFilter, shift: AttentionShift, value: Tensor) -> Tensor:
        fresh = copy.copy(shift)
        with torch.no_grad():
            attention = shift(value)
        if observe is not None:
            with torch.set_grad_enabled(fit):
                observe(name, *_squares(fresh, graph_filter.approximate(fresh, value), attention))
            fresh.earlier.detach()  # each layer is fitted by itself
        return attention

    for name, graph_filter in modules.items():
        vars(graph_filter)["forward"] = partial(attend, name, graph_filter)
    try:
        yield
    finally:
        for graph_filter in modules.values():
            del graph_filter.forward


def _squares(shift: AttentionShift, approximation: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares of the error and of what is wanted, over the tokens that are there."""
    error, wanted = (approximation.float() - wanted.float()).square(), wanted.float().square()
    _, keys = shift.visible()
    if keys is not None:
        there = keys[:, None, -approximation.shape[2] :, None]
        error, wanted = error * there, wanted * there
    return error.sum(), wanted.sum()


def regress(model: nn.Module, modules: dict[str, GraphFilter], batch: Batch) -> dict[str, float]:
    """One batch: the gradients of all filters, each formed as soon as its module has run, and their errors."""
    losses: dict[str, Tensor] = {}

    def observe(name: str, error: Tensor, norm: Tensor) -> None:
        loss = error / norm.clamp(min=1e-12)
        if loss.requires_grad:
            loss.backward()
        losses[name] = loss.detach()

    with torch.no_grad(), _attending(modules, observe, fit=True):
        model(**batch)
    return {name: loss.sqrt().item() for name, loss in losses.items()}


@torch.no_grad()
def filter_errors(model: nn.Module, modules: dict[str, GraphFilter], batches: list[Batch]) -> dict[str, float]:
    """Of each filter over all batches: ``|filter - attention| / |attention|``."""
    sums = {name: [0.0, 0.0] for name in modules}

    def observe(name: str, *squares: Tensor) -> None:
        for i, total in enumerate(squares):
            sums[name][i] += total.item()

    with _attending(modules, observe):
        for batch in batches:
            model(**batch)
    return {name: math.sqrt(error / norm) if norm else math.nan for name, (error, norm) in sums.items()}


def fit_end_to_end(model: nn.Module, modules: dict[str, GraphFilter], of: str, batch: Batch) -> dict[str, float]:
    """The second stage, one batch: the model with its filters against the model with its attention."""
    with torch.no_grad(), _attending(modules):
        wanted = model(**batch, output_hidden_states=True)
    loss = DISTANCES[of](model(**batch, output_hidden_states=True), wanted, batch.get("attention_mask"))
    if loss.requires_grad:
        loss.backward()
    return {"loss": loss.item()}


def _hidden_distance(output: Outputs, wanted: Outputs, mask: Tensor | None) -> Tensor:
    names = [f"{stack}hidden_states" for stack in ("", "encoder_", "decoder_")]
    pairs = [pair for n in names if output.get(n) is not None for pair in zip(output[n], wanted[n], strict=True)]
    if not pairs:
        raise GraphFilterError("end_to_end='hidden': the model returns no hidden states; use 'logits'")
    losses = []
    for f, w in pairs:
        there = mask[..., None].to(f.dtype) if mask is not None and mask.shape == f.shape[:2] else 1
        losses.append(((f - w) * there).square().sum() / (w * there).square().sum().clamp(min=1e-12))
    return torch.stack(losses).mean()


def _logits_distance(output: Outputs, wanted: Outputs, mask: Tensor | None) -> Tensor:
    if "logits" not in output:
        raise GraphFilterError("end_to_end='logits': the model returns no logits; use 'hidden'")
    f, w = (x["logits"].float().log_softmax(-1) for x in (output, wanted))
    divergence = (w.exp() * (w - f)).sum(-1)
    if mask is not None and mask.shape == divergence.shape:
        return (divergence * mask).sum() / mask.sum()
    return divergence.mean()


DISTANCES: dict[str, Distance] = {"hidden": _hidden_distance, "logits": _logits_distance}
