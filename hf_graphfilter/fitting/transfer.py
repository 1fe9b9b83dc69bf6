"""``transfer_attention``: what is asked, checked and put together."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..analysis.model_inputs import name_mistakes
from ..errors import GraphFilterError, is_number, shown
from ..filters import GraphFilter
from ..filters.core.attached import filters_of
from ..training.learning_rate import check_rates
from .batches import repeated, set_aside, split_holdout
from .checkpoint import Checkpoint, exclusive, fitted_to
from .objectives import DISTANCES, filter_errors, fit_end_to_end, mean_loss, original_of, regress
from .run import Stage, StageRun, filter_groups
from .transfer_report import TransferReport, mean


def transfer_attention(
    model: nn.Module,
    dataloader: Iterable[Any],
    *,
    steps: int = 1000,
    lr: float = 3e-3,
    filter_lr: float = 3e-2,
    end_to_end: Literal["hidden", "logits"] | None = None,
    end_to_end_steps: int | None = None,
    end_to_end_lr: float = 3e-4,
    holdout: int | Iterable[Any] = 4,
    eval_every: int = 100,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> TransferReport:
    """Fit the filters of a patched model to the original attention of their modules, in place.

    In one forward pass every module computes its original attention, which the model goes on with, and its filter,
    whose relative squared error to it is minimised: a regression in each layer, without labels. Only filter parameters
    change. A second, end-to-end stage lets the filters act and fits the hidden states or the logits of the original
    model.

    Args:
        model: a patched model, in any precision, on any device. With ``init="blend"`` the filter's branch is fitted and
            the gate stays. AGF needs ``correction=True`` to fit well, since query and key stay as they are.
        dataloader: batches, gone through again when they end (unless they come from an iterator): mappings of model
            inputs, from which labels are left out, or tensors, the model's main input.
        steps: batches of the regression; 0 leaves it out, for the second stage alone.
        lr: peak learning rate of AdamW; linear warm-up, then a cosine to zero.
        filter_lr: learning rate of the filter coefficients (``theta`` ...).
        end_to_end: ``"hidden"`` (relative squared error, mean over the hidden states of all layers) or ``"logits"``
            (Kullback-Leibler divergence); ``None`` leaves the second stage out.
        end_to_end_steps, end_to_end_lr: of the second stage; ``None`` for a quarter of ``steps``.
        holdout: batches to measure on: how many to set aside from the start of ``dataloader``, or the batches. Of a
            ``DataLoader`` that shuffles, as many rows are set aside.
        eval_every: steps between measurements.
        patience: stop a stage after so many measurements without improvement (of 0.1 %); ``None`` never.
        checkpoint: a directory that keeps the progress at every measurement; a later call with the same settings goes
            on from there.
        progress: show a progress bar with the error of each module.

    Where a process group is there (torchrun, ``accelerate launch``), all its processes must call this together: they
    share the batches and step by the mean of their gradients.

    Returns:
        ``TransferReport``: the errors before and after on the held-out batches. The model has the parameters of the
        best measurement.

    Raises:
        GraphFilterError: no filter in the model, filters that equal their attention already, no batches, batches of
            labels only, a checkpoint of another run or one that another call is writing.
        KeyboardInterrupt: with ``checkpoint`` at the end of the step, whose progress is kept; at once if asked twice.
            After every exception the model is as it was.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf", correction=True)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (4, 16))} for _ in range(6)]
        >>> report = transfer_attention(model, batches, steps=2, progress=False)
        >>> report.mean_after <= report.mean_before
        True

    Source: the regression is that of "attention transfer" in Zhang et al., LoLCATs (2024), here for AGF.
    """
    second = end_to_end is not None
    if not is_number(steps, whole=True) or steps < (not second):
        raise GraphFilterError(f"steps must be a whole number >= 1, got {shown(steps)}")
    if second and end_to_end_steps is not None and not is_number(end_to_end_steps, whole=True):
        raise GraphFilterError(f"end_to_end_steps must be a whole number >= 0, got {shown(end_to_end_steps)}")
    if eval_every != math.inf and (not is_number(eval_every) or eval_every < 1):
        raise GraphFilterError(f"eval_every must be a number of steps >= 1, got {shown(eval_every)}")
    check_rates(lr=lr, filter_lr=filter_lr)
    if second:
        check_rates(end_to_end_lr=end_to_end_lr)
        if not lr:  # of which the coefficients' rate there is a multiple
            raise GraphFilterError("lr must be > 0 where a second stage follows, got 0")
    modules = dict(filters_of(model, required=True))
    dataloader, holdout = split_holdout(dataloader, holdout)
    held, skip = set_aside(model, dataloader, holdout)
    started = time.monotonic()
    with only_filters(model, modules):
        with name_mistakes(model, held[0]):
            report = TransferReport(before=filter_errors(model, modules, held))
        _refuse_equal(model, modules, report.before)
        # "coefficient_lr": progress that was kept under this name can be resumed
        settings = {"steps": steps, "lr": lr, "coefficient_lr": filter_lr, "modules": sorted(modules)}
        settings |= {**fitted_to(model, held), "filters": [f.config.to_dict() for f in modules.values()]}
        stages, groups = [], filter_groups(modules, lr, filter_lr)
        if steps:
            fit_batch, measure = partial(regress, model, modules), lambda: mean(filter_errors(model, modules, held))
            stages += [Stage("attention", steps, groups, fit_batch, measure, report.mean_before)]
        if end_to_end is not None:
            if end_to_end not in DISTANCES:
                raise GraphFilterError(f"end_to_end={end_to_end!r}: use 'hidden', 'logits' or None")
            more = steps // 4 or 1 if end_to_end_steps is None else end_to_end_steps
            settings |= {"end_to_end": end_to_end, "end_to_end_steps": more, "end_to_end_lr": end_to_end_lr}
            groups = filter_groups(modules, end_to_end_lr, end_to_end_lr * filter_lr / lr)
            fit = partial(fit_end_to_end, model, original_of(model, modules), end_to_end)
            with torch.no_grad():
                fit(held[0])  # what it lacks is said before the first stage
            stages += [Stage("end to end", more, groups, fit, partial(mean_loss, fit, held))]
        kept = Checkpoint(checkpoint, settings) if checkpoint is not None else None
        with exclusive(checkpoint):
            for stage in stages:
                batches = repeated(model, dataloader, skip)
                StageRun(stage, report, kept).fit(batches, eval_every, patience, progress)
                if report.stopped.startswith("non-finite"):
                    break
        report.after = filter_errors(model, modules, held)
    report.seconds = time.monotonic() - started
    return report


def _refuse_equal(model: nn.Module, modules: dict[str, GraphFilter], errors: dict[str, float]) -> None:
    """A function of the attention that has not left its start cannot come closer to it."""
    rounding = 4 * torch.finfo(next(p.dtype for p in model.parameters() if p.is_floating_point())).eps
    if all(
        type(f).approximate is GraphFilter.approximate and f.config.starts_as_original and errors[name] <= rounding
        for name, f in modules.items()
    ):
        raise GraphFilterError(
            f"nothing to fit: every filter ({', '.join(sorted({f.config.filter for f in modules.values()}))}) equals "
            "the attention of its module already; transfer is for filters in the place of attention, such as agf"
        )


@contextlib.contextmanager
def restored_on_error(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """After an exception inside, tensors have the given values again."""
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


@contextlib.contextmanager
def only_filters(model: nn.Module, modules: dict[str, GraphFilter]) -> Iterator[None]:
    """Freeze all but the filters, in evaluation mode, and hold these in float32, as half precision would lose small
    steps; afterwards all is as it was, after an exception the filters too."""
    modes = [(module, module.training) for module in model.modules()]
    before = [(p, p.requires_grad, p.dtype) for p in model.parameters()]
    values = [(p, p.detach().clone()) for graph_filter in modules.values() for p in graph_filter.parameters()]
    model.eval().requires_grad_(False)
    for graph_filter in modules.values():
        for parameter in graph_filter.requires_grad_(True).parameters():
            if parameter.element_size() < 4:
                parameter.data = parameter.data.float()
    try:
        with restored_on_error(values):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, required, dtype in before:
            if parameter.requires_grad:
                parameter.grad = None
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(required)
