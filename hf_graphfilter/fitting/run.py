"""Run one stage: steps, measurements, the best state, interruptions, and the progress on disk."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..logs import logger
from ..text import printable
from .checkpoint import Checkpoint
from .objectives import Batch
from .processes import average_gradients, mean_of, share, total
from .transfer_report import TransferReport

MOST_SKIPPED = 10  # steps in a row without finite gradients, after which a stage ends
Group = tuple[dict[str, nn.Parameter], float]  # parameters by name, and their peak learning rate


@dataclass(frozen=True)
class Rates:
    """Peak learning rates.

    Attributes:
        attention: for the filters' weights in the first stage, the regression of each layer to its attention.
        end_to_end: for the filters' weights in later stages.
        filter_lr: for the filter coefficients in the first stage; None for three times ``attention``. Later stages keep
            the ratio of the two.
        weights: for the model's own weights, or their adapters.
    """

    attention: float = 1e-2
    end_to_end: float = 1e-3
    filter_lr: float | None = None
    weights: float = 1e-4

    @property
    def ratio(self) -> float:
        """The rate of the coefficients over that of the filters' weights."""
        return 3.0 if self.filter_lr is None else self.filter_lr / self.attention

    def groups(self, modules: dict[str, GraphFilter], regression: bool) -> list[Group]:
        """Return the parameters of the filters with their rates, in the regression of each layer or a later stage.

        Raises:
            GraphFilterError: there are no parameters.
        """
        coefficients = {id(p) for f in modules.values() for p in f.coefficient_tensors().values()}
        parameters = {f"{n}.{k}": p for n, f in modules.items() for k, p in f.named_parameters()}
        if not parameters:
            raise GraphFilterError("the filters have no parameters that could be fitted")
        lr = self.attention if regression else self.end_to_end
        filter_lr = self.filter_lr if regression and self.filter_lr is not None else lr * self.ratio
        return [
            ({k: p for k, p in parameters.items() if (id(p) in coefficients) == are_coefficients}, rate)
            for are_coefficients, rate in ((False, lr), (True, filter_lr))
        ]


@dataclass
class Stage:
    """The parameters that one stage fits, how it fits them, and for how long.

    Attributes:
        budget: number of steps or tokens of the stage; the schedule of the learning rates spans it.
        groups: the parameters, with their learning rates.
        step: a function that computes the gradients of a batch and returns its errors by name.
        measure: a function that returns the held-out error.
        start: the held-out error before the first step, if it is known.
        size: a function that returns how much of the budget a batch uses.
        clip: the largest norm of the gradient.
        unit: what the budget counts, for the progress bar.
        betas: the moments of AdamW.
    """

    name: str
    budget: int
    groups: list[Group]
    step: Callable[[Batch], dict[str, float]]
    measure: Callable[[], float]
    start: float | None = None
    size: Callable[[Batch], int] = lambda batch: 1
    clip: float = math.inf
    unit: str = "step"
    betas: tuple[float, float] = (0.9, 0.999)


class StageRun:
    """The run of one stage: its optimizer, schedule, measurements, and best state so far."""

    def __init__(self, stage: Stage, report: TransferReport, checkpoint: Checkpoint | None):
        self.stage, self.report, self.checkpoint = stage, report, checkpoint
        report.stopped = TransferReport.stopped  # an earlier stage may have ended otherwise
        self.parameters = {name: p for parameters, _ in stage.groups for name, p in parameters.items()}
        groups = [{"params": [*parameters.values()], "lr": lr, "peak": lr} for parameters, lr in stage.groups]
        share(self.parameters.values())
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=stage.betas)
        self.step, self.used, self.stale, self.skipped = 0, 0, 0, 0
        self.before = report.history[-1][0] if report.history else 0
        self.best, self.best_state = math.inf, self._state()

    def fit(self, batches: Iterator[Batch], eval_every: float, patience: int | None, progress: bool) -> None:
        """Train until the budget is used, the batches end or nothing improves, and keep the best state."""
        if self.checkpoint is not None and self._restore(self.checkpoint):
            next(islice(batches, self.step, self.step), None)  # skip seen batches; the next stage may use the rest
            if self.stage.name in self.checkpoint.finished:
                self.report.steps += self.step
                return
        else:
            self._measure(self.stage.start)
        bar_options = {"desc": self.stage.name, "unit": f" {self.stage.unit}s", "disable": not progress}
        bar = tqdm(total=self.stage.budget, initial=self.used, **bar_options)
        with bar, _interruptions(self.checkpoint is not None) as interrupted:
            while self.used < self.stage.budget:
                evaluations, problem = self.used // eval_every, None
                batch = next(batches, None)
                ended = bool(total(batch is None))
                if batch is not None and not ended:
                    problem = self._advance(batch, bar)
                due = ended or self.used // eval_every > evaluations or self.used >= self.stage.budget
                if problem is None and due and not math.isfinite(self._measure()):
                    problem = f"non-finite error on the held-out batches at step {self.step}"
                if problem is not None:
                    self.report.stopped = f"{problem}, best state kept"
                    break
                is_interrupted = total(interrupted())
                if due or is_interrupted:
                    self._save()
                if is_interrupted:
                    raise KeyboardInterrupt
                if ended:
                    self.report.stopped = f"the batches ended at step {self.step} (an iterator gives them once)"
                    break
                if due and patience is not None and self.stale >= patience:
                    self.report.stopped = "no improvement"
                    break
        self._load(self.best_state)
        self.report.steps += self.step
        self._save(finished=True)

    def _advance(self, batch: Batch, bar: Any) -> str | None:
        """Make one step, and return a description of the problem if it fails."""
        self.optimizer.zero_grad()
        with torch.enable_grad():
            errors = self.stage.step(batch)
        size = total(self.stage.size(batch))
        progress, warm_up = self.used / self.stage.budget, max(1, self.stage.budget // 20)
        factor = min(1.0, (self.used + size) / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.step, self.used = self.step + 1, self.used + size
        if total(not all(map(math.isfinite, errors.values()))):
            return f"non-finite loss at step {self.step}"
        average_gradients(self.parameters.values())
        bar.update(size)
        bar.set_postfix_str(" ".join(f"{e:.3f}" for e in errors.values()), refresh=False)
        if nn.utils.clip_grad_norm_(self.parameters.values(), self.stage.clip).isfinite():
            self.optimizer.step()
            self.skipped = 0
            return None
        self.skipped += 1  # one infinite gradient would make the moments of AdamW infinite for good
        logger.warning("step %d of the stage %r is skipped: its gradients are not finite", self.step, self.stage.name)
        return f"non-finite gradients up to step {self.step}" if self.skipped == MOST_SKIPPED else None

    def _measure(self, error: float | None = None) -> float:
        """Record and return the held-out error; measure it unless it is given."""
        error = mean_of(self.stage.measure() if error is None else error)
        self.report.history.append((self.before + self.used, error))
        self.stale = 0 if error < 0.999 * self.best else self.stale + 1
        if error < self.best:
            self.best, self.best_state = error, self._state()
        return error

    def _state(self) -> dict[str, Tensor]:
        return {k: p.detach().clone() for k, p in self.parameters.items()}

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])

    def _save(self, finished: bool = False) -> None:
        if self.checkpoint is None:
            return
        tensors = {f"now.{k}": p.detach() for k, p in self.parameters.items()}
        tensors |= {f"best.{k}": p for k, p in self.best_state.items()}
        state = self.optimizer.state
        tensors |= {f"{moment}.{k}": t for k, p in self.parameters.items() for moment, t in state.get(p, {}).items()}
        progress = {
            "step": self.step,
            "used": self.used,
            "before_it": self.before,
            "earlier_steps": self.report.steps - finished * self.step,
            "best": self.best,
            "stale": self.stale,
            "history": self.report.history,
            "stopped": self.report.stopped,
            "before": self.report.before,
        }
        self.checkpoint.write(self.stage.name, finished, progress, tensors)

    def _restore(self, checkpoint: Checkpoint) -> bool:
        """Resume from the checkpoint; return False if it holds no progress of this stage."""
        if (state := checkpoint.read()) is None:
            return False
        progress, tensors = state
        finished = self.stage.name in checkpoint.finished
        if progress["stage"] != self.stage.name:
            if finished:  # the progress of a later stage includes its result
                self.step = progress["earlier_steps"]
            return finished
        if any(f"best.{k}" not in tensors for k in self.parameters):  # earlier code chose layers by another rule
            directory = printable(checkpoint.directory)
            warnings.warn(f"progress of other layers is ignored, and the stage begins again: {directory}", stacklevel=2)
            return False
        self.report.before, self.report.history = progress["before"], [tuple(pair) for pair in progress["history"]]
        if finished:
            self.report.stopped = progress.get("stopped", self.report.stopped)
        self.step, self.best, self.stale = progress["step"], progress["best"], progress["stale"]
        self.used, self.before = progress.get("used", self.step), progress.get("before_it", progress["earlier_steps"])
        self.best_state = {k: tensors[f"best.{k}"] for k in self.parameters}
        self._load({k: tensors[f"{'best' if finished else 'now'}.{k}"] for k in self.parameters})
        for name, parameter in self.parameters.items():
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                if (t := tensors.get(f"{moment}.{name}")) is not None:
                    self.optimizer.state[parameter][moment] = t if moment == "step" else t.to(parameter)
        directory = printable(checkpoint.directory)
        logger.info("resumed the stage %r at step %d from %s", self.stage.name, self.step, directory)
        return True


@contextlib.contextmanager
def _interruptions(deferred: bool) -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C, so that a step ends and is kept first, and yield a function that says whether it was pressed.

    A second Ctrl-C ends the program at once.
    """
    was_pressed = False

    def note(*_: Any) -> None:
        nonlocal was_pressed
        was_pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if not (deferred and is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if was_pressed:  # after the last step
        raise KeyboardInterrupt
