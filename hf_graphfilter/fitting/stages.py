"""A linearization: its stages on one model, and the measurements at the end."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor

from ..analysis.branches import switch_off
from ..analysis.model_inputs import longest_text
from ..devices import device_of
from ..errors import GraphFilterError
from ..filters.core.attached import CHILD
from ..hosts import host_of
from .batches import inputs_of
from .checkpoint import Checkpoint
from .choice import GREEDY, Choose, Losses, count_kept, restore
from .fit import Fit, Step
from .objectives import (
    DISTANCES,
    Batch,
    Original,
    Squares,
    always,
    attending,
    backward_through,
    errors_by_context,
    fit_end_to_end,
    mean_loss,
)
from .probes import make_probes, problem_of
from .processes import mean_of
from .quality import BOUNDS, RANGES, compare, parts_of
from .report import ConversionReport, Measure
from .run import Stage, StageRun
from .transfer_report import TransferReport, mean

TEXTS = 2  # largest number of held-out batches for the choice of layers
P = ParamSpec("P")
R = TypeVar("R")


class Linearization(Fit):
    """A fit whose budgets count tokens, with a report and a folder of progress per stage.

    Attributes:
        tokens: the budget of each stage, in their order.
        evaluations: how often a stage is measured, at most.
        precision: None or ``"bf16"``.
        reports: a report of each stage.
        causal: whether the model has one stack and none of its filters sees later tokens.
        predicts: whether the model's logits predict the next token.
        probes: batches of retrieval probes, if these decide which layers keep their attention.
    """

    def __init__(self, *args: Any, evaluations: int, precision: str | None, **options: Any):
        super().__init__(*args, **options)
        self.evaluations, self.precision = evaluations, precision
        self.tokens: dict[str, int] = {}
        self.reports: dict[str, TransferReport] = {}
        self.predicts, self.probes = False, list[Batch]()
        patched_sites = [site for site in host_of(self.model).find(self.model)[0] if hasattr(site.module, CHILD)]
        config: Any = self.model.config
        self.causal = all(site.causal for site in patched_sites) and not config.is_encoder_decoder

    def begin(self, reach: int) -> None:
        """Measure the filters before the first step; attention is exact for the last ``reach`` tokens.

        Raises:
            GraphFilterError: exact attention spans all held-out inputs.
        """
        with self.autocast():
            before, (_, far_errors) = errors_by_context(self.model, self.modules, self.batches.held_out, [reach + 1])
        if reach and all(map(math.isnan, far_errors.values())):
            raise GraphFilterError(
                f"the longest held-out input has {self._longest(self.batches.held_out)} tokens, which the window spans "
                f"(it reaches {reach} tokens back), so that the filter beyond it would learn nothing: give longer "
                "ones, or a smaller window= (or memory=, which counts too)"
            )
        self.report = TransferReport(before)

    def finish(self, original: Original) -> None:
        """Run the stages that fit the whole model."""
        for name, budget in self.tokens.items():
            if name == "task":
                self.fit_loss(name, budget, self._fit_task)
            elif name != "attention":
                self.fit_outputs(name, budget, original, name)

    def _fit_task(self, batch: Batch) -> dict[str, float]:
        loss = _task_loss(self.model(**batch))
        backward_through(self.model, loss, self.size(batch))
        return {"loss": loss.item()}

    def _run(self, stage: Stage) -> None:
        self.reports[stage.name] = self.run_stage(stage, self.batches.stream(), stage.name)

    def run_stage(self, stage: Stage, batches: Iterator[Batch], folder: str) -> TransferReport:
        """Run a stage or a part of one, and keep its progress in its own ``folder``."""
        stage.step, stage.measure, stage.size = self._cast(stage.step), self._cast(stage.measure), self.size
        stage.unit, stage.betas = "token", (0.9, 0.95)  # 0.999 would average over more steps than short stages have
        stage.clip = math.inf if stage.name == "attention" else 1.0
        report, checkpoint = TransferReport(self.report.before), None
        if self.checkpoint is not None:
            stage_tokens = {name: self.tokens[name] for name in [*self.reports, stage.name]}
            checkpoint = Checkpoint(self.checkpoint / folder, {**self.settings, "tokens": stage_tokens})
        held_out_tokens = sum(map(self.size, self.batches.held_out))  # measure no more tokens than are fitted
        interval = max(1, stage.budget // self.evaluations, held_out_tokens)
        StageRun(stage, report, checkpoint).fit(batches, interval, None, self.progress)
        self.report.before |= report.before  # errors from the first call, if this one resumes
        return report

    def prepare_choice(self, choose: Choose | None, reach: int) -> Choose:
        """Return the losses that the layers are chosen by, and make the retrieval probes; ``check`` must run before.

        Raises:
            GraphFilterError: ``choose`` asks for retrieval, but the model or the batches do not allow probes.
        """
        if choose == "text":
            return choose
        kind = type(self.model).__name__
        if not self.predicts or "labels" not in inspect.signature(self.model.forward).parameters:
            problem = f"retrieval needs a decoder with a loss of the next token, and {kind} gives none"
        else:
            problem = problem_of(self.batches.held_out)
        if not problem:
            probes = make_probes(self.batches.held_out, reach, longest_text(self.model) or sys.maxsize)
            self.probes = [inputs_of(self.model, probe, labels=True) for probe in probes]
            problem = "" if probes else "the held-out batches are too short for probes of retrieval"
        if not problem:
            for probe in self.probes:  # raise now rather than after the first stage
                _task_loss(self.original()(probe))
            return choose or "both"
        if choose is not None:
            raise GraphFilterError(f"choose={choose!r}: {problem}; use choose='text'")
        return "text"

    def restore(self, choose: Choose, share: float, distance: str) -> tuple[list[str], dict[str, float]]:
        """Return the modules that keep their attention if a share is linearized, and the gain of every module."""
        count = count_kept(share, len(self.modules))
        rounds = range(min(count, GREEDY + 1))
        samples = {"text": self.batches.held_out[:TEXTS], "retrieval": self.probes}
        samples = {kind: batches for kind, batches in samples.items() if choose in (kind, "both")}
        total = sum(map(len, samples.values())) * (bool(count) + sum(len(self.modules) - i for i in rounds))
        bar = tqdm(total=total, desc="choice of layers", unit=" batches", disable=not (self.progress and count))

        def measure(restored: list[list[str]]) -> list[Losses]:
            losses: dict[str, list[float]] = {kind: [0.0] * len(restored) for kind in samples}
            for kind, batches in samples.items():
                for batch in batches:
                    step: Step = self._fit_task
                    if kind == "text":
                        with self.autocast():
                            step = partial(fit_end_to_end, self.model, always(self.original()(batch)), distance)
                    for i, names in enumerate(restored):
                        with self.autocast(), attending({name: self.modules[name] for name in names}):
                            losses[kind][i] += mean_loss(step, [batch]) / len(batches)
                        bar.update()
            return [tuple(map(mean_of, row)) for row in zip(*losses.values(), strict=True)]

        with bar:
            return restore(list(self.modules), count, measure)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a new context for each step, since it keeps copies of the weights."""
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(device_of(self.model).type, torch.bfloat16)

    def _cast(self, run: Callable[P, R]) -> Callable[P, R]:
        def run_cast(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.autocast():
                return run(*args, **kwargs)

        return run_cast

    def size(self, batch: Batch) -> int:
        """Return the number of tokens in a batch without padding; for images and audio, those that attention sees."""
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        unmasked = int(mask.bool().sum()) if isinstance(mask, Tensor) and mask.dim() == 2 else None
        inputs = ids if ids is not None else next(x for x in batch.values() if isinstance(x, Tensor))
        if ids is None and inputs.dim() == 2:  # audio and its mask have more entries than attention has tokens
            count = round((inputs.numel() if unmasked is None else unmasked) * self.tokens_of_one / self.numbers_of_one)
        elif unmasked is not None:
            count = unmasked
        else:
            count = inputs.numel() if inputs.dim() == 2 else len(inputs) * self.tokens_of_one
        decoder, mask = batch.get("decoder_input_ids"), batch.get("decoder_attention_mask")
        return count + (0 if decoder is None else decoder.numel() if mask is None else int(mask.sum()))

    @cached_property
    def tokens_of_one(self) -> int:
        """The number of tokens that attention sees for an image, or for the longest audio of the first batch."""
        return self._longest(self.batches.held_out[:1])

    @cached_property
    def numbers_of_one(self) -> int:
        """The number of samples in the longest audio of the first batch."""
        mask = self.batches.held_out[0].get("attention_mask")
        inputs = next(x for x in self.batches.held_out[0].values() if isinstance(x, Tensor))
        return int(inputs.shape[-1] if mask is None else mask.sum(-1).max())

    def _longest(self, batches: Iterable[Batch]) -> int:
        """Return the largest number of tokens that a token sees in a filter."""
        contexts: list[int] = []

        def observe(name: str, squares: Squares) -> None:
            contexts.append(int(squares.context.max()))

        with torch.no_grad(), attending(self.modules, observe):
            for batch in batches:
                self.model(**batch)
        return max(contexts)

    @torch.no_grad()
    def measured(self, original: Original) -> ConversionReport:
        """Return the errors of the layers and the measures of the model, whole and without each part of the filters."""
        held_out = self.batches.held_out
        with self.autocast():
            after, by_context = errors_by_context(self.model, self.modules, held_out, BOUNDS)
            quality, by_position = compare(self.model, original, held_out, self.causal)
            errors: dict[str, float] = {}
            ablations: dict[str, dict[str, dict[str, float]]] = {}
            for part in parts_of(self.modules):
                with switch_off(part, [f for f in self.modules.values() if part in f.branches()]):
                    ablations[part] = compare(self.model, original, held_out, self.causal).measures
                    errors[part] = mean(self.errors())
        missing = {"converted": math.nan}  # where all embeddings are equal, no rank correlation
        measures = [
            Measure(name, **values, without={k: m.get(name, missing)["converted"] for k, m in ablations.items()})
            for name, values in quality.items()
        ]
        return ConversionReport(
            before=self.report.before,
            after=after,
            by_context=_mean_by_context(by_context),
            by_position=by_position,
            measures=measures,
            errors_without=errors,
            stages=self.reports,
        )

    def check(self, stages: Iterable[str]) -> str:
        """Check the model's outputs before long work, and return which are compared: ``"logits"`` or ``"hidden"``.

        Raises:
            GraphFilterError: the original gives NaN, or lacks an output that a stage or the final measures need.
        """
        original, batch, kind = self.original(), self.batches.held_out[0], type(self.model).__name__
        outputs = original(batch)
        output = outputs.get("logits", next(iter(outputs.values())))
        if not output.isfinite().all():
            raise GraphFilterError(
                f"the original model gives NaN or infinity in {output.dtype}, before anything is linearized: load it "
                "in float32 or bfloat16"
            )
        if "logits" in stages and "logits" not in outputs:
            raise GraphFilterError(f"the stage 'logits' needs logits, and {kind} gives none: use 'hidden'")
        if "task" in stages:
            _task_loss(outputs)
        final_stage = "logits" if "logits" in outputs else "hidden"
        del outputs, output  # logits of a large vocabulary take much memory
        # raise now rather than in the last stage
        self.predicts = "perplexity" in compare(self.model, original, [batch], self.causal).measures
        fitted = {*stages} or {final_stage}
        for stage in (fitted | {final_stage} - {"logits"}) & {*DISTANCES}:  # `compare` has just used the logits
            self.check_outputs(original, stage)
        return final_stage


def _mean_by_context(by_context: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean error over the modules by the number of tokens that a token sees, up to each of ``BOUNDS``."""
    # the stacks of a model differ in length
    finite_errors = ({name: error for name, error in errors.items() if not math.isnan(error)} for errors in by_context)
    return {label: mean(errors) for label, errors in zip(RANGES, finite_errors, strict=True) if errors}


def _task_loss(outputs: Any) -> Tensor:
    loss: Tensor | None = getattr(outputs, "loss", None)
    if loss is None:
        raise GraphFilterError("the stage 'task' needs a model and batches with labels, which give a loss")
    return loss
