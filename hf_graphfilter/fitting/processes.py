"""Let several processes fit the same filters to different batches (torchrun, ``accelerate launch``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import distributed, nn

from ..devices import default_device, process


def total(number: int) -> int:
    """Return the sum of a number over the processes."""
    if process()[1] == 1:
        return int(number)
    summed = torch.tensor(int(number), device=_device())
    distributed.all_reduce(summed)
    return int(summed)


def _device() -> torch.device:
    """Return the device whose tensors the process group can add."""
    on_accelerator = distributed.get_backend() in ("nccl", "xccl", "hccl")
    return default_device() if on_accelerator else torch.device("cpu")


def mean_of(number: float) -> float:
    """Return the mean of a number over the processes; NaN in one gives NaN in all, so that all decide the same."""
    count = process()[1]
    if count == 1:
        return number
    summed = torch.tensor(number, dtype=torch.float64, device=_device())
    distributed.all_reduce(summed)
    return summed.item() / count


def share(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the parameters of the first process to all others, since filters start at random values."""
    if process()[1] > 1:
        for parameter in parameters:
            distributed.broadcast(parameter.data, 0)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients over the processes, in place; a missing gradient counts as zeros."""
    count = process()[1]
    if count == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)
        parameter.grad /= count
