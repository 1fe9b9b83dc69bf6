"""The cost of a model: its parameters, and the time of a forward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...devices import device_of, wait_for
from ...filters.core.attached import filters_of
from ..model_inputs import evaluate, to_device

RUNS = 3


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        parameters: number of all parameters.
        filter_parameters: number of those in filters.
        seconds: median time of three forward passes of one batch; it is rough on a shared machine.
        device: where the model ran.
    """

    parameters: int
    filter_parameters: int
    seconds: float
    device: str


def cost_of(model: nn.Module, batch: Any) -> Cost:
    """Count the parameters of a model, and time its forward pass on one batch."""
    device = device_of(model)
    batch = to_device(batch, device)
    times = []
    with evaluate(model), torch.no_grad():
        for _ in range(RUNS):
            wait_for(device)
            start = time.perf_counter()
            model(**batch) if isinstance(batch, Mapping) else model(batch)
            wait_for(device)
            times.append(time.perf_counter() - start)
    filter_count = sum(p.numel() for _, graph_filter in filters_of(model) for p in graph_filter.parameters())
    return Cost(sum(p.numel() for p in model.parameters()), filter_count, statistics.median(times), str(device))
