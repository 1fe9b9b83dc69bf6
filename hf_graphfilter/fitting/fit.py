"""A fit: stages that bring the filters of a model near the attention that they replace."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import GraphFilterError
from ..filters.core.attached import filters_of
from .batches import Batches
from .checkpoint import Checkpoint, exclusive, fitted_to
from .objectives import Batch, Original, filter_errors, fit_end_to_end, mean_loss, original_of, regress
from .processes import share
from .run import Group, Rates, Stage, StageRun
from .transfer_report import TransferReport, mean
from .weights import only_filters

Step = Callable[[Batch], dict[str, float]]


class Fit:
    """A patched model and the batches that its filters are fitted to, stage by stage; a budget counts steps.

    Args:
        model: a patched model.
        batches: the batches to fit to, and the held-out ones to measure on.
        rates: learning rates.
        settings: all other values that determine the result; a checkpoint with other settings raises an error.
        checkpoint: a directory that keeps the progress.
        progress: whether bars are shown.
        eval_every: steps between two measurements.
        patience: measurements without improvement after which a stage ends; None for no limit.

    Attributes:
        modules: the filters by name.
        weights: what the stages after "attention" train besides the filters, by name.
        report: what the stages did, with the error of each filter before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        rates: Rates,
        settings: dict[str, Any],
        checkpoint: str | os.PathLike[str] | None,
        progress: bool,
        eval_every: float = 1,
        patience: int | None = None,
    ):
        if torch.is_inference_mode_enabled():
            raise GraphFilterError("filters cannot be fitted inside torch.inference_mode(): call this outside of it")
        self.model, self.batches, self.rates = model, batches, rates
        self.modules = dict(filters_of(model, required=True))
        share(p for graph_filter in self.modules.values() for p in graph_filter.parameters())  # before any measurement
        self.settings = {**fitted_to(model, batches.held_out), "modules": sorted(self.modules), **settings}
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.progress, self.eval_every, self.patience = progress, eval_every, patience
        self.weights: dict[str, nn.Parameter] = {}
        self.report = TransferReport(before={})

    def only_filters(self) -> AbstractContextManager[None]:
        """Freeze all but the filters."""
        self._dtypes = [(p, p.dtype) for f in self.modules.values() for p in f.parameters()]
        return only_filters(self.model, self.modules)

    def round_filters(self) -> None:
        """Give the filters the precision that they had, in which the model will be saved."""
        for parameter, dtype in self._dtypes:
            parameter.data = parameter.data.to(dtype)

    def exclusive(self) -> AbstractContextManager[None]:
        """Lock the directory of progress against other calls."""
        return exclusive(self.checkpoint)

    def errors(self) -> dict[str, float]:
        """Return the relative error of each filter on the held-out batches."""
        return filter_errors(self.model, self.modules, self.batches.held_out)

    def original(self) -> Original:
        """Return a function that computes the model's outputs with attention in place of the filters."""
        return original_of(self.model, self.modules)

    def check_outputs(self, original: Original, distance: str) -> None:
        """Raise an error before long work if ``distance`` cannot compare the model's outputs."""
        with torch.no_grad():
            fit_end_to_end(self.model, original, distance, self.batches.held_out[0])

    def fit_attention(self, budget: int) -> None:
        """Fit each layer by itself to its original attention."""
        groups = self.rates.groups(self.modules, regression=True)
        step = partial(regress, self.model, self.modules)
        self._run(Stage("attention", budget, groups, step, lambda: mean(self.errors()), mean(self.report.before)))

    def fit_outputs(self, name: str, budget: int, original: Original, distance: str) -> None:
        """Fit the ``"hidden"`` states or the ``"logits"`` of the model to the original's."""
        self.fit_loss(name, budget, partial(fit_end_to_end, self.model, original, distance))

    def fit_loss(self, name: str, budget: int, step: Step) -> None:
        """Minimise a loss of the whole model; ``step`` computes its gradients."""
        groups: list[Group] = self.rates.groups(self.modules, regression=False)
        if self.weights:
            groups.append((self.weights, self.rates.weights))
        measure = partial(mean_loss, step, self.batches.held_out)
        self._run(Stage(name, budget, groups, step, measure))

    def _run(self, stage: Stage) -> None:
        checkpoint = None if self.checkpoint is None else Checkpoint(self.checkpoint, self.settings)
        run = StageRun(stage, self.report, checkpoint)
        run.fit(self.batches.stream(), self.eval_every, self.patience, self.progress)
