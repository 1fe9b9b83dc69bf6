"""The callbacks of every Trainer, and the base class of callbacks that log numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_callback import CallbackHandler, TrainerState

from ..filters.core.attached import filters_of, read_whole
from .learning_rate import find_caller, find_rate_problem, given_rate, report_problem
from .reference import check_reference
from .resuming import check_when_resuming


class FilterCallback(TrainerCallback):
    """The callback that every Trainer has: it gives the filter its learning rate and reports a filter left untrained.

    It also makes the Trainer raise an error when a run would resume from a checkpoint of another filter.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from .optimizer import give_filter_rate  # here, since the Trainer imports this file

        if trainer := find_caller(Trainer):
            give_filter_rate(type(trainer))
            check_when_resuming(type(trainer))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if isinstance(model, nn.Module):
            for problem in (
                find_rate_problem(model, optimizer, state.max_steps, given_rate(args)),
                check_reference(find_caller(Trainer)),
            ):
                report_problem(problem, state.is_world_process_zero)


class LoggingCallback(TrainerCallback):
    """A callback whose numbers appear in ``log_history`` and in every reporter, as the Trainer's own do.

    The Trainer passes its logs to the callbacks one after the other, the reporters first, and no callback can add to
    them. So this one moves to the front of the list when training begins, and also writes into ``log_history``.

    Class attributes:
        console: whether the callbacks that print the logs get the numbers too.
    """

    console: ClassVar[bool] = True

    def values(self) -> dict[str, float]:
        """Return the numbers for a training log, by name."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if handler := find_caller(CallbackHandler):
            callbacks = handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)
            self.logged: dict[str, float] = {}
            for printer in callbacks:
                on_log = printer.on_log
                while isinstance(on_log, _Without) and on_log.other is not self:  # of another callback
                    on_log = on_log.on_log
                quiet = self.console or isinstance(on_log, _Without)
                if isinstance(printer, (PrinterCallback, ProgressCallback)) and not quiet:
                    printer.on_log = _Without(self, printer.on_log)  # type: ignore[method-assign]

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is None or "loss" not in logs:  # a log of an evaluation, or the last one
            return
        self.logged = self.values()
        logs.update(self.logged)
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(self.logged)


class _Without:
    """The ``on_log`` of a callback that prints, without the numbers of another callback."""

    def __init__(self, other: LoggingCallback, on_log: Callable[..., Any]):
        self.other, self.on_log = other, on_log

    def __call__(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        printed = {k: v for k, v in (logs or {}).items() if k not in self.other.logged}
        return self.on_log(args, state, control, logs=printed, **kwargs)


class CoefficientCallback(LoggingCallback):
    """A callback that logs the learned coefficients of every patched layer.

    They appear in ``log_history`` and wherever the Trainer reports (TensorBoard, W&B ...). They are not printed on the
    console, since there are hundreds.

    A coefficient with one value per head is logged as its mean, ``filter/LAYER/w_K``, where LAYER counts the patched
    modules from 0 in the order of ``filter_status``.

    Example:
        ``Trainer(model, args, callbacks=[CoefficientCallback()])``
    """

    console = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.model = model

    def values(self) -> dict[str, float]:
        return coefficient_values(self.model)


def coefficient_values(model: nn.Module) -> dict[str, float]:
    """Return the learned coefficients by layer, means over the heads, as ``CoefficientCallback`` logs them."""
    values: dict[str, float] = {}
    for i, (_, graph_filter) in enumerate(filters_of(model)):
        for name, value in read_whole(graph_filter, type(graph_filter).learned_coefficients).items():
            parts = {"_real": value.real, "_imag": value.imag} if value.is_complex() else {"": value}
            values |= {f"filter/{i}/{name}{part}": x.float().mean().item() for part, x in parts.items()}
    return values


DEFAULT_CALLBACKS.append(FilterCallback)  # type: ignore[arg-type]  # this file is imported right after the Trainer's
