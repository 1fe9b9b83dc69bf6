"""Fit the filters of a patched model to its attention: check what is asked, and run the stages."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from ..analysis.model_inputs import name_mistakes
from ..errors import GraphFilterError, is_number, shown
from ..filters import GraphFilter, ReplacingFilter
from ..filters.core.attached import filters_of
from ..hosts import encoder_of
from ..training.learning_rate import check_rates
from .batches import Batches
from .checkpoint import check_directory
from .fit import Fit
from .objectives import DISTANCES
from .run import Rates
from .transfer_report import TransferReport


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

    In one forward pass every module computes its original attention, with which the model continues, and its filter.
    The relative squared error between the two is minimised: a regression in each layer, without labels. Only the
    parameters of the filters change. An optional second stage lets the filters act, and fits the hidden states or the
    logits to those of the original model.

    Args:
        model: a patched model, in any precision, on any device; also a model of sentence-transformers. With
            ``init="blend"`` the branch of the filter is fitted and the gate stays; ``set_blend`` must open it before
            ``end_to_end``. AGF needs ``correction=True`` to fit well, since query and key do not change.
        dataloader: batches: mappings of model inputs, or tensors that are the model's main input. Labels are left out.
            The batches are repeated when they end, unless ``dataloader`` is an iterator.
        steps: number of batches for the regression, over all processes together; 0 skips it and runs the second stage
            alone.
        lr: peak learning rate of AdamW, with a linear warm-up and a cosine decay to zero.
        filter_lr: peak learning rate of the filter coefficients (``theta`` ...).
        end_to_end: what the second stage compares: ``"hidden"`` (relative squared error, mean over the hidden states of
            all layers), ``"logits"`` (Kullback-Leibler divergence), or ``None`` for no second stage.
        end_to_end_steps: number of batches of the second stage; ``None`` for a quarter of ``steps``.
        end_to_end_lr: peak learning rate of the second stage.
        holdout: batches to measure on: how many to take from the start of ``dataloader``, or the batches themselves.
            If it is a ``DataLoader`` that shuffles, the rows of so many batches are drawn at random and held out.
        eval_every: number of batches between two measurements.
        patience: number of measurements without an improvement of 0.1 % after which a stage ends; ``None`` for no
            limit.
        checkpoint: a directory that keeps the progress at every measurement. The same call resumes from it.
        progress: whether to show a progress bar with the error of each module.

    In a process group (torchrun, ``accelerate launch``), all processes must call this together. They share the batches
    and step by the mean of their gradients.

    Returns:
        ``TransferReport``: the errors before and after on the held-out batches. The model has the parameters of the
        best measurement.

    Raises:
        GraphFilterError: the model has no filter, the filters equal their attention already, all gates of a blend are 0
            with ``end_to_end``, there are no batches or only labels in them, or the checkpoint belongs to another run
            or is in use.
        KeyboardInterrupt: after Ctrl-C. With ``checkpoint`` the step is finished and kept first; a second Ctrl-C ends
            at once. After every exception the model is as it was.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf", correction=True)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (4, 16))} for _ in range(6)]
        >>> report = transfer_attention(model, batches, steps=2, progress=False)
        >>> report.mean_after <= report.mean_before
        True

    Source: the regression is "attention transfer" of Zhang et al., LoLCATs (2024), applied to graph filters.
    """
    _check_arguments(steps, end_to_end, end_to_end_steps, eval_every, patience)
    check_directory(checkpoint)
    check_rates(lr=lr, filter_lr=filter_lr)
    if end_to_end is not None:
        check_rates(end_to_end_lr=end_to_end_lr)
        if not lr:  # the second stage scales the rate of the coefficients by filter_lr / lr
            raise GraphFilterError("lr must be > 0 where a second stage follows, got 0")
    model = encoder_of(model)
    started = time.monotonic()
    rates = Rates(attention=lr, end_to_end=end_to_end_lr, filter_lr=filter_lr)
    # under the name "coefficient_lr", so that progress of earlier versions can be resumed
    settings: dict[str, Any] = {"steps": int(steps), "lr": float(lr), "coefficient_lr": float(filter_lr)}
    settings["filters"] = [graph_filter.config.to_dict() for _, graph_filter in filters_of(model, required=True)]
    extra_steps = 0
    if end_to_end is not None:
        _check_gates(model, end_to_end)
        extra_steps = int(steps // 4 or 1 if end_to_end_steps is None else end_to_end_steps)
        settings |= {"end_to_end": end_to_end, "end_to_end_steps": extra_steps, "end_to_end_lr": float(end_to_end_lr)}
    batches = Batches(model, dataloader, holdout)
    fit = Fit(model, batches, rates, settings, checkpoint, progress, eval_every, patience)
    report = fit.report
    with fit.only_filters(), name_mistakes(model):
        report.before = fit.errors()
        _refuse_equal(fit)
        original = fit.original()
        if end_to_end is not None:
            fit.check_outputs(original, end_to_end)
        with fit.exclusive():
            if steps:
                fit.fit_attention(steps)
            if end_to_end is not None and not report.stopped.startswith("non-finite"):
                fit.fit_outputs("end to end", extra_steps, original, end_to_end)
        fit.round_filters()
        report.after = fit.errors()
    report.seconds = time.monotonic() - started
    return report


def _check_arguments(steps: Any, end_to_end: Any, end_to_end_steps: Any, eval_every: Any, patience: Any) -> None:
    if not is_number(steps, whole=True) or steps < (end_to_end is None):
        raise GraphFilterError(f"steps must be a whole number >= 1, got {shown(steps)}")
    if end_to_end not in (None, *DISTANCES):
        raise GraphFilterError(f"end_to_end={shown(end_to_end)}: use 'hidden', 'logits' or None")
    if end_to_end is not None and end_to_end_steps is not None and not is_number(end_to_end_steps, whole=True):
        raise GraphFilterError(f"end_to_end_steps must be a whole number >= 0, got {shown(end_to_end_steps)}")
    if eval_every != math.inf and (not is_number(eval_every) or eval_every < 1):
        raise GraphFilterError(f"eval_every must be a number of steps >= 1, got {shown(eval_every)}")
    if patience is not None and (not is_number(patience) or patience < 1):
        raise GraphFilterError(f"patience must be a number of measurements >= 1 or None, got {shown(patience)}")


def _check_gates(model: nn.Module, end_to_end: str) -> None:
    """Raise an error if all filters are blends whose gates are 0, so that the outputs do not depend on them."""
    if all(isinstance(f, ReplacingFilter) and f.gate is not None and not f.gate.any() for _, f in filters_of(model)):
        raise GraphFilterError(
            f"end_to_end={end_to_end!r} would change nothing, since all gates of this blend are 0: open them with "
            "set_blend(model, 0.5) before, or leave end_to_end out"
        )


def _refuse_equal(fit: Fit) -> None:
    """Raise an error if all filters equal their attention already, so that there is nothing to fit."""
    rounding = 4 * torch.finfo(next(p.dtype for p in fit.model.parameters() if p.is_floating_point())).eps
    if all(
        type(f).approximate is GraphFilter.approximate
        and f.config.starts_as_original
        and fit.report.before[name] <= rounding
        for name, f in fit.modules.items()
    ):
        names = ", ".join(sorted({f.config.filter for f in fit.modules.values()}))
        raise GraphFilterError(
            f"nothing to fit: every filter ({names}) equals the attention of its module already; transfer is for "
            "filters that replace attention, such as agf"
        )
