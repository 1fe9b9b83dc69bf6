"""Attention transfer: fit every filter to the attention that it replaces, on unlabelled data."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..filters.attached import patched_modules
from ..shift import AttentionShift

LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions", "next_sentence_label")
STATE_FILE, PROGRESS_FILE = "transfer.safetensors", "transfer.json"


@dataclass
class TransferReport:
    """What ``transfer_attention`` did; prints as a table.

    Attributes:
        before, after: relative L2 error ``|filter - attention| / |attention|`` of each module on the held-out batches.
        steps: of optimisation that were made, both stages together.
        seconds: of wall-clock time.
        stopped: why it ended: ``"all steps made"``, ``"no improvement"``, or what became non-finite.
        history: (step, mean held-out error) pairs.
    """

    before: dict[str, float]
    after: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    stopped: str = "all steps made"
    history: list[tuple[int, float]] = field(default_factory=list)

    @property
    def mean_before(self) -> float:
        return sum(self.before.values()) / len(self.before)

    @property
    def mean_after(self) -> float:
        return sum(self.after.values()) / len(self.after)

    def __str__(self) -> str:
        width = max(map(len, [*self.after, "module"]))
        rows = [f"{name:<{width}}  {self.before[name]:6.3f}  {error:6.3f}" for name, error in self.after.items()]
        mean = f"{'mean':<{width}}  {self.mean_before:6.3f}  {self.mean_after:6.3f}"
        head = f"{'module':<{width}}  before   after"
        return "\n".join([head, *rows, mean, f"{self.steps} steps, {self.seconds:.0f} s, {self.stopped}"])


def transfer_attention(
    model: nn.Module,
    dataloader: Iterable[Any],
    *,
    steps: int = 1000,
    lr: float = 3e-3,
    coefficient_lr: float = 3e-2,
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
        coefficient_lr: of the coefficients (theta ...).
        end_to_end: ``"hidden"`` (relative squared error, mean over the hidden states of all layers) or ``"logits"``
            (Kullback-Leibler divergence); ``None`` leaves the second stage out.
        end_to_end_steps, end_to_end_lr: of the second stage; ``None`` for a quarter of ``steps``.
        holdout: batches to measure on: how many to set aside from the start of ``dataloader``, or the batches.
        eval_every: steps between measurements.
        patience: stop a stage after so many measurements without improvement (of 0.1 %); ``None`` never.
        checkpoint: a directory that keeps the progress at every measurement; a later call with the same settings goes
            on from there.
        progress: show a progress bar with the error of each module.

    Returns:
        ``TransferReport``: the errors before and after on the held-out batches. The model has the parameters of the
        best measurement.

    Raises:
        GraphFilterError: no filter in the model, filters that equal their attention already, no batches, batches of
            labels only, a checkpoint of another run.
        KeyboardInterrupt: with ``checkpoint`` at the end of the step, whose progress is kept; at once if asked twice.

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
    if steps < (end_to_end is None) or eval_every < 1:
        raise GraphFilterError(f"steps and eval_every must be >= 1, got {steps} and {eval_every}")
    modules = {name: module.graph_filter for name, module in patched_modules(model)}
    held, source = _set_aside(model, dataloader, holdout)
    started = time.monotonic()
    with _only_filters(model, modules), _full_precision(modules):
        report = TransferReport(before=_errors(model, modules, held))
        _refuse_equal(model, modules, report.before)
        settings = {"steps": steps, "lr": lr, "coefficient_lr": coefficient_lr, "modules": sorted(modules)}
        stages = []
        if steps:
            stages += [_Stage("attention", steps, lr, coefficient_lr, lambda batch: _regress(model, modules, batch))]
        if end_to_end is not None:
            distance = {"hidden": _hidden_distance, "logits": _logits_distance}.get(end_to_end)
            if distance is None:
                raise GraphFilterError(f"end_to_end={end_to_end!r}: use 'hidden', 'logits' or None")
            more = steps // 4 or 1 if end_to_end_steps is None else end_to_end_steps
            settings |= {"end_to_end": end_to_end, "end_to_end_steps": more, "end_to_end_lr": end_to_end_lr}
            fit = _EndToEnd(model, modules, distance)
            stages.append(
                _Stage("end to end", more, end_to_end_lr, end_to_end_lr * coefficient_lr / lr, fit, fit.error)
            )
        keep = _Checkpoint(checkpoint, settings) if checkpoint is not None else None
        for stage in stages:
            run = _Run(stage, model, modules, held, report, keep)
            run.fit(_batches(model, source), eval_every, patience, progress)
            if report.stopped.startswith("non-finite"):
                break
        report.after = _errors(model, modules, held)
    report.seconds = time.monotonic() - started
    return report


def _refuse_equal(model: nn.Module, modules: dict[str, GraphFilter], errors: dict[str, float]) -> None:
    """A function of the attention that has not left its start cannot come closer to it."""
    rounding = 4 * torch.finfo(next(p.dtype for p in model.parameters() if p.is_floating_point())).eps
    names = set()
    for name, graph_filter in modules.items():
        of_attention = type(graph_filter).approximate is GraphFilter.approximate
        if not (of_attention and graph_filter.config.starts_as_original and errors[name] <= rounding):
            return
        names.add(graph_filter.config.filter)
    raise GraphFilterError(
        f"nothing to fit: every filter ({', '.join(sorted(names))}) equals the attention of its module already; "
        "transfer is for filters in the place of attention, such as agf"
    )


# ------------------------------------------------------------------------------------------------------- batches


def _set_aside(
    model: nn.Module, dataloader: Iterable[Any], holdout: int | Iterable[Any]
) -> tuple[list[dict[str, Any]], Iterable[Any]]:
    if not isinstance(holdout, int):
        return [_inputs(model, batch) for batch in holdout], dataloader
    held = [_inputs(model, batch) for batch in islice(dataloader, holdout)]
    if len(held) < holdout or holdout < 1:
        raise GraphFilterError(f"the dataloader yields {len(held)} batches, holdout={holdout} asks for more")
    return held, dataloader if _is_iterator(dataloader) else _Rest(dataloader, holdout)


def _is_iterator(source: Iterable[Any]) -> bool:
    """Whether batches come once, as from a generator."""
    return iter(source) is source


@dataclass
class _Rest:
    source: Iterable[Any]
    skip: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.source, self.skip, None)


def _batches(model: nn.Module, source: Iterable[Any]) -> Iterator[dict[str, Any]]:
    empty = True
    while empty or not _is_iterator(source):
        for batch in source:
            empty = False
            yield _inputs(model, batch)
        if empty:
            raise GraphFilterError("the dataloader yields no batch that is not held out (or is exhausted)")


def _inputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        batch = {model.main_input_name: batch}
    if not isinstance(batch, Mapping):
        raise GraphFilterError(f"a batch must be a mapping of model inputs or a tensor, got {type(batch).__name__}")
    kept = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if k not in LABELS}
    if not kept:
        raise GraphFilterError(f"a batch holds {list(batch) or 'nothing'} and no input of the model")
    if "use_cache" in inspect.signature(model.forward).parameters:
        kept["use_cache"] = False
    return kept


# ------------------------------------------------------------------------------------------------ teacher, student


@contextlib.contextmanager
def _only_filters(model: nn.Module, modules: dict[str, GraphFilter]) -> Iterator[None]:
    """Freeze all but the filters, in evaluation mode; afterwards all is as it was."""
    training = {m: m.training for m in model.modules()}
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    model.eval().requires_grad_(False)
    for graph_filter in modules.values():
        graph_filter.requires_grad_(True)
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, required in frozen:
            if parameter.requires_grad:
                parameter.grad = None
            parameter.requires_grad_(required)


@contextlib.contextmanager
def _full_precision(modules: dict[str, GraphFilter]) -> Iterator[None]:
    """Half-precision weights of the filters are fitted in float32: small steps would be lost."""
    half = [
        (p, p.dtype) for f in modules.values() for p in f.parameters() if p.is_floating_point() and p.element_size() < 4
    ]
    for parameter, _ in half:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in half:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _attending(modules: dict[str, GraphFilter], observe: Callable[..., None] | None = None) -> Iterator[None]:
    """Let the modules compute their original attention; ``observe(name, filter, shift, value, attention)`` sees it."""

    def replaced(name: str, graph_filter: GraphFilter) -> Callable[[AttentionShift, Tensor], Tensor]:
        def forward(shift: AttentionShift, value: Tensor) -> Tensor:
            fresh = copy.copy(shift)
            with torch.no_grad():
                attention = shift(value)
            if observe is not None:
                observe(name, graph_filter, fresh, value, attention)
            return attention

        return forward

    for name, graph_filter in modules.items():
        graph_filter.forward = replaced(name, graph_filter)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for graph_filter in modules.values():
            del graph_filter.forward


def _squares(shift: AttentionShift, found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares of the error and of what is wanted, over the tokens that are there."""
    error, wanted = (found.float() - wanted.float()).square(), wanted.float().square()
    _, keys = shift.visible()
    if keys is not None:
        there = keys[:, None, -found.shape[2] :, None]
        error, wanted = error * there, wanted * there
    return error.sum(), wanted.sum()


def _regress(model: nn.Module, modules: dict[str, GraphFilter], batch: dict[str, Any]) -> dict[str, float]:
    """One batch: the gradients of all filters, each formed as soon as its module has run."""
    found: dict[str, Tensor] = {}

    def observe(name: str, graph_filter: GraphFilter, shift: AttentionShift, value: Tensor, attention: Tensor) -> None:
        with torch.enable_grad():
            error, norm = _squares(shift, graph_filter.approximate(shift, value), attention)
            loss = error / norm.clamp(min=1e-12)
            if loss.requires_grad:
                loss.backward()
        found[name] = loss.detach()

    with torch.no_grad(), _attending(modules, observe):
        model(**batch)
    return {name: loss.sqrt().item() for name, loss in found.items()}


@torch.no_grad()
def _errors(model: nn.Module, modules: dict[str, GraphFilter], batches: list[dict[str, Any]]) -> dict[str, float]:
    sums = {name: [0.0, 0.0] for name in modules}

    def observe(name: str, graph_filter: GraphFilter, shift: AttentionShift, value: Tensor, attention: Tensor) -> None:
        for i, total in enumerate(_squares(shift, graph_filter.approximate(shift, value), attention)):
            sums[name][i] += total.item()

    with _attending(modules, observe):
        for batch in batches:
            model(**batch)
    return {name: math.sqrt(error / norm) if norm else math.nan for name, (error, norm) in sums.items()}


class _EndToEnd:
    """The second stage: the model with its filters against the model with its attention."""

    def __init__(self, model: nn.Module, modules: dict[str, GraphFilter], distance: Callable[..., Tensor]):
        self.model, self.modules, self.distance = model, modules, distance

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        with torch.no_grad(), _attending(self.modules):
            wanted = self.model(**batch, output_hidden_states=True)
        return self.distance(self.model(**batch, output_hidden_states=True), wanted, batch.get("attention_mask"))

    def __call__(self, batch: dict[str, Any]) -> dict[str, float]:
        loss = self._loss(batch)
        loss.backward()
        return {"loss": loss.item()}

    @torch.no_grad()
    def error(self, batches: list[dict[str, Any]]) -> float:
        return sum(self._loss(batch).item() for batch in batches) / len(batches)


def _hidden_distance(found: Any, wanted: Any, mask: Tensor | None) -> Tensor:
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    pairs = [
        pair for name in names if found.get(name) is not None for pair in zip(found[name], wanted[name], strict=True)
    ]
    if not pairs:
        raise GraphFilterError("end_to_end='hidden': the model returns no hidden states; use 'logits'")
    losses = []
    for f, w in pairs:
        there = (
            torch.ones_like(f[..., :1]) if mask is None or mask.shape != f.shape[:2] else mask[..., None].to(f.dtype)
        )
        losses.append(((f - w) * there).square().sum() / (w * there).square().sum().clamp(min=1e-12))
    return torch.stack(losses).mean()


def _logits_distance(found: Any, wanted: Any, mask: Tensor | None) -> Tensor:
    if "logits" not in found:
        raise GraphFilterError("end_to_end='logits': the model returns no logits; use 'hidden'")
    f, w = (x["logits"].float().log_softmax(-1) for x in (found, wanted))
    divergence = (w.exp() * (w - f)).sum(-1)
    if mask is not None and mask.shape == divergence.shape:
        return (divergence * mask).sum() / mask.sum()
    return divergence.mean()


# ---------------------------------------------------------------------------------------------------------- a run


@dataclass
class _Stage:
    name: str
    steps: int
    lr: float
    coefficient_lr: float
    step: Callable[[dict[str, Any]], dict[str, float]]
    measure: Callable[[list[dict[str, Any]]], float] | None = None


class _Run:
    """One stage: optimiser, schedule, measurements, the best state so far."""

    def __init__(
        self,
        stage: _Stage,
        model: nn.Module,
        modules: dict[str, GraphFilter],
        held: list[dict[str, Any]],
        report: TransferReport,
        keep: _Checkpoint | None,
    ):
        self.stage, self.model, self.modules, self.held, self.report = stage, model, modules, held, report
        self.keep = keep
        self.parameters = {f"{n}.{k}": p for n, f in modules.items() for k, p in f.named_parameters()}
        if not self.parameters:
            raise GraphFilterError("the filters have no parameters that could be fitted")
        direct = {id(p) for f in modules.values() for p in f.parameters(recurse=False)}
        groups = [
            {"params": [p for p in self.parameters.values() if (id(p) in direct) == own], "lr": rate}
            for own, rate in ((False, stage.lr), (True, stage.coefficient_lr))
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=0.0)
        for group in self.optimizer.param_groups:
            group["peak"] = group["lr"]
        self.step, self.stale = 0, 0
        self.best, self.best_state = math.inf, self._state()

    def fit(self, batches: Iterator[dict[str, Any]], eval_every: int, patience: int | None, progress: bool) -> None:
        if self.keep is not None and self.keep.restore(self):
            if self.stage.name in self.keep.finished:
                self.report.steps += self.step
                return
            next(islice(batches, self.step, self.step), None)
        else:
            self._measure(self.report.before)
        bar = tqdm(total=self.stage.steps, initial=self.step, desc=self.stage.name, disable=not progress)
        with bar, _interruptions(self.keep is not None) as interrupted:
            while self.step < self.stage.steps:
                batch = next(batches, None)
                problem = None if batch is None else self._advance(batch, bar)
                if batch is not None and problem is None and self.step % eval_every and self.step < self.stage.steps:
                    if self.keep is not None and interrupted():
                        self.keep.save(self)
                        raise KeyboardInterrupt
                    continue
                if problem is None and not math.isfinite(self._measure()):
                    problem = f"non-finite error on the held-out batches at step {self.step}"
                if problem is not None:
                    self.report.stopped = f"{problem}, best state kept"
                    break
                if self.keep is not None:
                    self.keep.save(self)
                if interrupted():
                    raise KeyboardInterrupt
                if batch is None:
                    self.report.stopped = f"the batches ended at step {self.step} (an iterator gives them once)"
                    break
                if patience is not None and self.stale >= patience:
                    self.report.stopped = "no improvement"
                    break
        self._load(self.best_state)
        self.report.steps += self.step
        if self.keep is not None and not self.report.stopped.startswith("non-finite"):
            self.keep.save(self, finished=True)

    def _advance(self, batch: dict[str, Any], bar: Any) -> str | None:
        """One step; the name of a problem, if there is one."""
        done, warm_up = self.step / self.stage.steps, max(1, self.stage.steps // 20)
        factor = min(1.0, (self.step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.zero_grad()
        errors = self.stage.step(batch)
        self.step += 1
        if not all(map(math.isfinite, errors.values())):
            return f"non-finite loss at step {self.step}"
        self.optimizer.step()
        bar.update()
        bar.set_postfix_str(" ".join(f"{e:.3f}" for e in errors.values()), refresh=False)
        return None

    def _measure(self, errors: dict[str, float] | None = None) -> float:
        """The held-out error; of the regression it is the mean of ``errors``, where these are known already."""
        if self.stage.measure is None:
            errors = errors or _errors(self.model, self.modules, self.held)
            error = sum(errors.values()) / len(errors)
        else:
            error = self.stage.measure(self.held)
        self.report.history.append((self.report.steps + self.step, error))
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


@contextlib.contextmanager
def _interruptions(deferred: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, so that a step can be finished before what it made is kept; a second one ends it."""
    asked = False

    def note(*_: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    ours = threading.current_thread() is threading.main_thread()
    if deferred and ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
        try:
            yield lambda: asked
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        yield lambda: False


class _Checkpoint:
    """Progress on disk: safetensors for parameters and moments, JSON for the rest."""

    def __init__(self, directory: str | os.PathLike[str], settings: dict[str, Any]):
        self.directory, self.settings = Path(directory), settings
        self.finished: list[str] = []

    def save(self, run: _Run, finished: bool = False) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"now.{k}": p.detach() for k, p in run.parameters.items()}
        tensors |= {f"best.{k}": p for k, p in run.best_state.items()}
        for name, parameter in run.parameters.items():
            for moment, value in run.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        if finished:
            self.finished.append(run.stage.name)
        progress = {
            "settings": self.settings,
            "stage": run.stage.name,
            "step": run.step,
            "earlier_steps": run.report.steps - finished * run.step,
            "best": run.best,
            "stale": run.stale,
            "finished": self.finished,
            "history": run.report.history,
            "before": run.report.before,
        }
        partial = self.directory / f"{STATE_FILE}.part"  # an interrupted write leaves the last state
        save_file({k: t.cpu().contiguous().clone() for k, t in tensors.items()}, partial)
        partial.replace(self.directory / STATE_FILE)
        text = self.directory / f"{PROGRESS_FILE}.part"
        text.write_text(json.dumps(progress))
        text.replace(self.directory / PROGRESS_FILE)

    def restore(self, run: _Run) -> bool:
        """Put the run where the checkpoint left it; False if the checkpoint is not of this stage."""
        file = self.directory / PROGRESS_FILE
        if not file.is_file():
            return False
        progress = json.loads(file.read_text())
        if progress["settings"] != self.settings:
            changed = [k for k in self.settings if progress["settings"].get(k) != self.settings[k]]
            raise GraphFilterError(
                f"{self.directory} holds the progress of another transfer ({', '.join(changed) or 'settings'} differ): "
                "use its settings to go on with it, or another directory"
            )
        self.finished = progress["finished"]
        if run.stage.name in self.finished and progress["stage"] != run.stage.name:
            run.step = progress["earlier_steps"]
            return True  # a later stage has its results
        if progress["stage"] != run.stage.name:
            return False
        tensors = load_file(self.directory / STATE_FILE)
        run.report.before, run.report.history = progress["before"], [tuple(pair) for pair in progress["history"]]
        run.step, run.best, run.stale = progress["step"], progress["best"], progress["stale"]
        device = next(iter(run.parameters.values())).device
        run.best_state = {k: tensors[f"best.{k}"].to(device) for k in run.parameters}
        run._load({k: tensors[f"{'best' if run.stage.name in self.finished else 'now'}.{k}"] for k in run.parameters})
        for name, parameter in run.parameters.items():
            moments = {m: tensors[key] for m in ("step", "exp_avg", "exp_avg_sq") if (key := f"{m}.{name}") in tensors}
            if moments:
                run.optimizer.state[parameter] = {
                    m: t if m == "step" else t.to(device=device, dtype=parameter.dtype) for m, t in moments.items()
                }
        return True
