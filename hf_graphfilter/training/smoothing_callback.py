"""A callback that logs over-smoothing by layer during training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from ..analysis.model_inputs import check_batches, to_device
from ..analysis.observing import observe
from ..analysis.smoothing import SmoothingReader
from ..analysis.spectrum import SpectrumReader
from ..errors import GraphFilterError, is_number, shown
from .callbacks import LoggingCallback

LOGGED = "cosine", "high_frequency", "effective_rank"


class SmoothingCallback(LoggingCallback):
    """A callback that logs how alike tokens are by layer during training.

    The names are ``cosine/encoder/3``, ``high_frequency/...`` and ``effective_rank/...`` (see ``analysis.smoothing``
    and ``analysis.spectrum``). They appear in ``log_history`` and wherever the Trainer reports, but not on the console.

    It measures with the first log, and then with the first log at least ``every`` steps later. A measurement costs a
    forward pass of the batches and a singular value decomposition of each layer's tokens. Each of several processes
    measures its own copy. FSDP and ZeRO-3 are not supported.

    Args:
        batches: a few batches, which stay in memory: dicts of the model's arguments, or tensors.
        every: number of steps between two measurements. Default: 500.

    Raises:
        GraphFilterError: ``every`` is not a whole number of 1 or more, or there are no batches.

    Example:
        ``Trainer(model, args, callbacks=[SmoothingCallback(batches, every=500)])``
    """

    console: ClassVar[bool] = False

    def __init__(self, batches: Iterable[Any], every: int = 500):
        if not is_number(every, whole=True) or not every:
            raise GraphFilterError(f"SmoothingCallback: every is a number of steps, 1 or more, got {shown(every)}")
        self.batches, self.every = list(check_batches(batches)), every
        for batch in self.batches:
            to_device(batch, torch.device("cpu"))  # raises before training if a batch is invalid
        self.due = 0  # first step at which a log measures again

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.model: nn.Module = model
        self.due = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step

    def values(self) -> dict[str, float]:
        if self.step < self.due:
            return {}
        self.due = self.step + self.every
        smooth, ranks = SmoothingReader(dirichlet=False), SpectrumReader(attention=0)
        observe(self.model, self.batches, [smooth, ranks])
        bands = smooth.result(self.model).bands | ranks.result(self.model).bands
        return {
            f"{name}/{layer.stack}/{layer.index}": band.mean.item()
            for (layer, name), band in bands.items()
            if name in LOGGED
        }
