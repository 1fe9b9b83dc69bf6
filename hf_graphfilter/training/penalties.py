"""The losses that a filter declares (``GraphFilter.penalised``), in the Trainer or in your own loop.

The callback does not touch the loss that the Trainer computes. Instead, the output of a filter passes through an
identity whose backward pass adds the gradient of weight * loss / applications. So the loss reaches the gradients
exactly once, whoever computes the loss of the task (the model, label smoothing, ``compute_loss_func``), under both
kinds of gradient checkpointing, and under DDP. Without the callback or ``collect_penalties`` no loss is computed or
kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from ..errors import GraphFilterError, is_number, shown
from ..filters import GraphFilter
from ..filters.core.attached import filters_of
from ..filters.core.base import Loss
from .callbacks import LoggingCallback
from .learning_rate import find_caller
from .loss_gradients import GradientAdder, Options, Weights, choose_weights, find_rerun

LOGGED = {"orthogonality": "ortho_loss"}  # its name since the first release; others are NAME_loss


class RegularizerCallback(LoggingCallback):
    """A callback that adds the losses declared by the filters to what the Trainer minimises.

    Each loss is a mean over the layers times its weight. It is logged as ``NAME_loss`` (AGF's as ``ortho_loss``),
    without its weight, as a mean over the batches since the last log. The Trainer's own ``loss`` stays that of the
    task. Evaluation costs nothing more.

    Args:
        weights: weights by name of the loss. Default: those in the filters' configs (``FilterConfig.penalties``).
        options: keyword arguments for a loss, by its name. Default: none.

    Raises:
        GraphFilterError: a weight is negative. When training begins: no filter declares such a loss, every weight is 0,
            the Trainer has another such callback, or the run uses ``torch.nn.DataParallel`` or DeepSpeed, which would
            count the loss wrongly.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[RegularizerCallback({"orthogonality": 1e-2})]).train()``
    """

    def __init__(self, weights: Weights | None = None, options: Options | None = None):
        self.weights, self.options = _check_weights(type(self).__name__, weights), options or {}
        self.added = GradientAdder(self.weights, self.options)

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control)
        filters, name = penalised_filters(model, self.weights, self.options), type(self).__name__
        if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED and args.n_gpu > 1:
            raise GraphFilterError(f"{name}: torch.nn.DataParallel is not supported; use torchrun (DDP)")
        if args.deepspeed or args.deepspeed_plugin:  # from the arguments or by `accelerate launch`
            raise GraphFilterError(f"{name}: DeepSpeed scales the loss where a callback cannot see it; use DDP or FSDP")
        self.added = GradientAdder(self.weights, self.options, find_rerun(model))
        if trainer := find_caller(Trainer):
            callbacks = trainer.callback_handler.callbacks
            if sum(isinstance(callback, RegularizerCallback) for callback in callbacks) > 1:
                raise GraphFilterError(
                    f"{name}: the Trainer has several callbacks that add losses of the filters; pass one "
                    "RegularizerCallback with the weights of all losses"
                )
            step = trainer.training_step
            inner = step.inner if isinstance(step, _Step) else step  # left over from an interrupted training
            trainer.training_step = _Step(inner, filters, self, callbacks)  # type: ignore[method-assign]
        else:
            record(filters, self.added)

    def on_step_begin(
        self, args: TrainingArguments, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        scaler = getattr(optimizer, "scaler", None)  # float16: the gradients are scaled until the optimizer's step
        scale = 1.0 if scaler is None else scaler.get_scale()
        # number of batches in this step; the last step of an epoch may have fewer
        batches = getattr(find_caller(Trainer), "current_gradient_accumulation_steps", args.gradient_accumulation_steps)
        self.added.scale = scale / batches

    def values(self) -> dict[str, float]:
        sums, counts = self.added.sums, self.added.counts
        self.added.sums, self.added.counts = {}, Counter()
        return {LOGGED.get(name, f"{name}_loss"): total.item() / counts[name] for name, total in sums.items()}

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trainer = find_caller(Trainer)
        if trainer and isinstance(trainer.training_step, _Step):
            trainer.training_step = trainer.training_step.inner  # type: ignore[method-assign]
        record(penalised_filters(model, self.weights, self.options), None)


class _Step:
    """A Trainer's ``training_step`` with the losses of the filters; outside of a step the filters record nothing."""

    def __init__(
        self,
        inner: Callable[..., Tensor],
        filters: list[GraphFilter],
        callback: RegularizerCallback,
        callbacks: list[TrainerCallback],
    ):
        self.inner, self.filters, self.callback, self.callbacks = inner, filters, callback, callbacks

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.callback not in self.callbacks:  # it was removed after an interrupted training
            return self.inner(*args, **kwargs)
        record(self.filters, self.callback.added)
        try:
            return self.inner(*args, **kwargs)
        finally:
            record(self.filters, None)


def record(filters: Iterable[GraphFilter], recorder: Any) -> None:
    """Set the recorder of the filters."""
    for graph_filter in filters:
        graph_filter.recorder = recorder


class Penalties:
    """The losses of the forward passes within ``collect_penalties``."""

    def __init__(self, weights: Weights, options: Options):
        self._weights, self._options = weights, options
        self._recorded_losses: dict[str, list[tuple[float, Loss]]] = {}
        self._called = False

    def _record(self, graph_filter: GraphFilter, out: Tensor, losses: dict[str, Loss]) -> Tensor:
        if torch.is_grad_enabled():
            self._called = True
            for name, weight in choose_weights(graph_filter, losses, self._weights).items():
                self._recorded_losses.setdefault(name, []).append((weight, losses[name]))
        return out

    def losses(self) -> dict[str, Tensor]:
        """Return each loss by name, without its weight: scalars, means over the layers.

        There is no loss if no filter took part because its window spans the text (``far="beyond"``).

        Raises:
            GraphFilterError: there was no training forward pass with gradients. Reentrant gradient checkpointing makes
                none: use ``use_reentrant=False``, or ``RegularizerCallback``.
        """
        return {name: _mean([loss for _, loss in pairs]) for name, pairs in self._compute().items()}

    def total(self) -> Tensor:
        """Return the sum of the losses times their weights, a scalar to add to the loss of the task.

        Raises:
            GraphFilterError: one of the errors of ``losses``.
        """
        terms = [_mean([weight * loss for weight, loss in pairs]) for pairs in self._compute().values()]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum() if terms else torch.zeros(())

    def _compute(self) -> dict[str, list[tuple[float, Tensor]]]:
        if not self._called:
            raise GraphFilterError(
                "collect_penalties(model) saw no training forward pass with gradients: call model.train() before it, "
                "and with reentrant gradient checkpointing use use_reentrant=False or RegularizerCallback"
            )
        options = self._options
        return {
            name: [(weight, loss(**options.get(name, {}))) for weight, loss in pairs]
            for name, pairs in self._recorded_losses.items()
        }


@contextmanager
def collect_penalties(
    model: nn.Module, weights: Weights | None = None, options: Options | None = None
) -> Iterator[Penalties]:
    """Collect the losses that the filters declare, during the forward passes inside the ``with`` block.

    This is for your own training loop; in a Trainer use ``RegularizerCallback``.

    Args:
        model: a model with such filters, wrapped or not, in training mode.
        weights: weights by name of the loss. Default: those in the filters' configs (``FilterConfig.penalties``).
        options: keyword arguments for a loss, by its name. Default: none.

    Yields:
        ``Penalties``. Call ``total()`` or ``losses()`` after the forward pass, inside or outside the block. Layers that
        run several times (ALBERT) count with the mean of their runs.

    Raises:
        GraphFilterError: no filter of the model declares such a loss, every weight is 0, or one is negative.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import collect_penalties, patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf").train()
        >>> with collect_penalties(model) as penalties:
        ...     out = model(torch.randint(0, 1000, (2, 8))).last_hidden_state
        >>> (out.square().mean() + penalties.total()).backward()
    """
    weights, options = _check_weights("collect_penalties", weights), options or {}
    penalties, filters = Penalties(weights, options), penalised_filters(model, weights, options)
    before = [(graph_filter, graph_filter.recorder) for graph_filter in filters]
    for graph_filter, _ in before:
        graph_filter.recorder = penalties._record
    try:
        yield penalties
    finally:
        for graph_filter, recorder in before:
            graph_filter.recorder = recorder


def penalised_filters(model: nn.Module, weights: Weights, options: Options) -> list[GraphFilter]:
    """Return the filters of a model that declare losses.

    Raises:
        GraphFilterError: no filter declares a loss, or one that ``weights`` or ``options`` name, or every weight is 0.
    """
    filters = [f for _, f in filters_of(model, copies=True) if f.config.penalties]
    declared = sorted({name for f in filters for name in f.config.penalties})
    if unknown := [name for name in (*weights, *(options if filters else ())) if name not in declared]:
        raise GraphFilterError(
            f"no filter of {type(model).__name__} declares a loss {unknown[0]!r}; declared are: "
            f"{', '.join(declared) or 'none'}"
        )
    if not filters:
        raise GraphFilterError(
            f"{type(model).__name__} has no filter that declares a loss (FilterConfig.penalties): patch it with one "
            "that does, such as 'agf'"
        )
    if not any(choose_weights(f, f.config.penalties, weights) for f in filters):
        raise GraphFilterError(
            f"every loss that the filters of {type(model).__name__} declare has weight 0: pass a weight, such as 1e-2"
        )
    return filters


def _check_weights(caller: str, weights: Weights | None) -> Weights:
    if not isinstance(weights, Mapping | None):
        raise GraphFilterError(f"{caller}: weights are numbers by the name of a loss, got {shown(weights)}")
    for name, weight in (weights or {}).items():
        if not is_number(weight):
            raise GraphFilterError(f"{caller}: the weight of {name} must be a number >= 0, got {shown(weight)}")
    return weights or {}


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack([value.to(values[0].device) for value in values]).mean()
