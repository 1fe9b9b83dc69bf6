"""The stages of a conversion, one after the other on one model, and what is measured at the end."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..analysis.branches import switch_off
from ..errors import GraphFilterError
from ..filters import GraphFilter
from .checkpoint import Checkpoint
from .objectives import (
    DISTANCES,
    Batch,
    Original,
    Squares,
    attending,
    backward,
    errors_by_context,
    filter_errors,
    fit_end_to_end,
    mean_loss,
    original_of,
    regress,
)
from .quality import compare, parts_of
from .report import ConversionReport, Measure
from .run import Group, Stage, StageRun
from .transfer_report import TransferReport, mean

BETAS = (0.9, 0.95)  # 0.999 would remember more steps than short stages have
BOUNDS = [2**i for i in range(4, 17)]  # of the numbers of tokens that a token sees
Step = Callable[[Batch], dict[str, float]]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Conversion:
    """What all stages share.

    Attributes:
        model: patched, its filters trainable.
        modules: its filters by name.
        held: batches to measure on.
        batches: of every stage, from the first on.
        tokens: of each stage.
        evaluations: of each stage, at most.
        precision: None or "bf16".
        checkpoint: where each stage keeps its progress.
        progress: whether bars are shown.
        settings: of the call, which those of a checkpoint must equal.
        ends_in: by what the model's outputs are compared, "logits" or "hidden".
    """

    model: nn.Module
    modules: dict[str, GraphFilter]
    held: list[Batch]
    batches: Callable[[], Iterator[Batch]]
    tokens: dict[str, int]
    evaluations: int
    precision: str | None
    checkpoint: Path | None
    progress: bool
    settings: dict[str, Any]
    ends_in: str
    reports: dict[str, TransferReport] = field(default_factory=dict)

    def attention(self, groups: list[Group], window: int) -> None:
        """The first stage, if there is one: each layer by itself.

        Raises:
            GraphFilterError: a window of that size spans all held-out inputs.
        """
        with self.autocast():
            self.before, (_, beyond) = errors_by_context(self.model, self.modules, self.held, [window + 1])
        if window and all(map(math.isnan, beyond.values())):
            raise GraphFilterError(
                f"the longest held-out input has {self._longest(self.held)} tokens, which a window of {window} spans, "
                "so that the filter beyond it would learn nothing: give longer ones, or a smaller window="
            )
        if "attention" in self.tokens:
            step = partial(regress, self.model, self.modules)
            measure = lambda: mean(filter_errors(self.model, self.modules, self.held))  # noqa: E731
            self._fit("attention", groups, step, measure)
            self.before = self.reports["attention"].before  # of the first call, where this one goes on

    def end_to_end(self, groups: list[Group], original: Original) -> None:
        """The others."""
        for name in self.tokens:
            if name == "task":
                self._fit(name, groups, self._task, partial(mean_loss, self._task, self.held), clip=1.0)
            elif name != "attention":
                step = partial(fit_end_to_end, self.model, original, name)
                self._fit(name, groups, step, partial(mean_loss, step, self.held), clip=1.0)

    def sensitivity(self) -> dict[str, float]:
        """Of each layer: the distance of the model's outputs from the original's, where only it is a filter."""
        step, found = partial(fit_end_to_end, self.model, original_of(self.model, self.modules), self.ends_in), {}
        for name in self.modules:
            with self.autocast(), attending({other: f for other, f in self.modules.items() if other != name}):
                found[name] = mean_loss(step, self.held[:4])
        return found

    def _task(self, batch: Batch) -> dict[str, float]:
        loss = _task_loss(self.model(**batch))
        backward(loss)
        return {"loss": loss.item()}

    def _fit(
        self, name: str, groups: list[Group], step: Step, measure: Callable[[], float], clip: float | None = None
    ) -> None:
        budget, report = self.tokens[name], TransferReport(before=self.before)
        step, measure = self._in_precision(step), self._in_precision(measure)
        stage = Stage(name, budget, groups, step, measure, size=self.size, clip=clip, unit="token", betas=BETAS)
        kept = None
        if self.checkpoint is not None:
            earlier = dict(list(self.tokens.items())[: list(self.tokens).index(name) + 1])
            kept = Checkpoint(self.checkpoint / name, {**self.settings, "tokens": earlier})
        run = StageRun(stage, report, kept)
        measured = sum(map(self.size, self.held))  # a small budget is not for measuring
        run.fit(self.batches(), max(1, budget // self.evaluations, measured), None, self.progress)
        self.reports[name] = report

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Anew for each step, since it keeps copies of the weights."""
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16)

    def _in_precision(self, run: Callable[P, R]) -> Callable[P, R]:
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.autocast():
                return run(*args, **kwargs)

        return within

    def size(self, batch: Batch) -> int:
        """Tokens of a batch, without padding; of images and sounds those that attention sees."""
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        there = int(mask.sum()) if isinstance(mask, Tensor) and mask.dim() == 2 else None
        given = ids if ids is not None else next(x for x in batch.values() if isinstance(x, Tensor))
        if ids is None and given.dim() == 2:  # a sound, and its mask, are longer than its tokens
            count = round((given.numel() if there is None else there) * self.tokens_of_one / self.numbers_of_one)
        elif there is not None:
            count = there
        else:
            count = given.numel() if given.dim() == 2 else len(given) * self.tokens_of_one
        decoder, mask = batch.get("decoder_input_ids"), batch.get("decoder_attention_mask")
        return count + (0 if decoder is None else decoder.numel() if mask is None else int(mask.sum()))

    @cached_property
    def tokens_of_one(self) -> int:
        """That attention sees of an image, or of the longest sound of a batch."""
        return self._longest(self.held[:1])

    @cached_property
    def numbers_of_one(self) -> int:
        """Of which that sound is made."""
        mask = self.held[0].get("attention_mask")
        given = next(x for x in self.held[0].values() if isinstance(x, Tensor))
        return int(given.shape[-1] if mask is None else mask.sum(-1).max())

    def _longest(self, batches: Iterable[Batch]) -> int:
        """The most tokens that a token of theirs sees in a converted module."""
        seen: list[int] = []

        def observe(name: str, squares: Squares) -> None:
            seen.append(int(squares.context.max()))

        with torch.no_grad(), attending(self.modules, observe):
            for batch in batches:
                self.model(**batch)
        return max(seen)

    @torch.no_grad()
    def measured(self, original: Original, causal: bool) -> ConversionReport:
        """The errors of the layers and the measures of the model, whole and without each part of the filters."""
        with self.autocast():
            return self._measured(original, causal)

    def _measured(self, original: Original, causal: bool) -> ConversionReport:
        after, by_context = errors_by_context(self.model, self.modules, self.held, BOUNDS)
        labels = [f"{low + 1} to {high}" for low, high in itertools.pairwise([0, *BOUNDS])] + [f"over {BOUNDS[-1]}"]
        # the stacks of a model differ in length
        seen = ({name: error for name, error in of.items() if not math.isnan(error)} for of in by_context)
        contexts = {label: mean(of) for label, of in zip(labels, seen, strict=True) if of}
        quality = compare(self.model, original, self.held, causal)
        errors = {"": mean(after)}
        switched: dict[str, dict[str, dict[str, float]]] = {}
        for part in parts_of(self.modules):
            with switch_off(part, [f for f in self.modules.values() if part in f.branches()]):
                switched[part] = compare(self.model, original, self.held, causal)
                errors[part] = mean(filter_errors(self.model, self.modules, self.held))
        return ConversionReport(
            before=self.before,
            after=after,
            by_context=contexts,
            measures=[
                Measure(name, **of, without={part: found[name]["converted"] for part, found in switched.items()})
                for name, of in quality.items()
            ],
            errors_without={part: error for part, error in errors.items() if part},
            stages=self.reports,
        )


def check_stages(
    model: nn.Module, modules: dict[str, GraphFilter], batch: Batch, stages: Iterable[str], causal: bool
) -> str:
    """By what the model's outputs are compared, ``"logits"`` or ``"hidden"``; before any long work.

    Raises:
        GraphFilterError: the original gives NaN, or not what one of the stages or the final measures need.
    """
    original = original_of(model, modules)
    outputs = original(batch)
    last = outputs.get("logits", next(iter(outputs.values())))
    if not last.isfinite().all():
        raise GraphFilterError(
            f"the original model gives NaN or infinity in {last.dtype}, before anything is converted: load it in "
            "float32 or bfloat16"
        )
    if "logits" in stages and "logits" not in outputs:
        raise GraphFilterError(f"the stage 'logits' needs logits, and {type(model).__name__} gives none: use 'hidden'")
    if "task" in stages:
        _task_loss(outputs)
    ends_in = "logits" if "logits" in outputs else "hidden"
    with torch.no_grad():  # what would end the last stage after all the others
        compare(model, original, [batch], causal)
        for stage in {ends_in, *stages} & {*DISTANCES}:
            fit_end_to_end(model, original, stage, batch)
    return ends_in


def _task_loss(outputs: Any) -> Tensor:
    loss: Tensor | None = getattr(outputs, "loss", None)
    if loss is None:
        raise GraphFilterError("the stage 'task' needs a model and batches with labels, which give a loss")
    return loss


@contextlib.contextmanager
def recomputed(model: Any, wanted: bool) -> Iterator[None]:
    """Gradient checkpointing, in evaluation mode too, where transformers leaves it out: dropout stays off."""
    if not wanted:
        yield
        return
    later = hasattr(type(model), "is_activation_checkpointing")  # its later name
    earlier = model.is_activation_checkpointing if later else model.is_gradient_checkpointing
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # its later name
    enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    rates = [(layer, k, v) for layer in layers for k, v in vars(layer).items() if "drop" in k and isinstance(v, float)]
    for layer in layers:
        layer.training = True  # its parts are not
    for layer, name, _ in rates:
        setattr(layer, name, 0.0)  # BART's layers drop out by themselves
    try:
        yield
    finally:
        if not earlier:
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        for layer in layers:
            layer.training = False
        for layer, name, rate in rates:
            setattr(layer, name, rate)
