"""The report of a linearization: printed, as JSON, and for a model card."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from ..analysis.plots import make_figure, save_figure
from ..errors import GraphFilterError, has_type, shown
from ..files import DamagedFileError
from ..hosts import encoder_of
from ..tables import markdown_table, text_table
from ..text import figure_text, printable
from .speed import Speed, crossover, decoding_speed, speed
from .transfer_report import TransferReport, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT = {
    "agreement": "Its likeliest class or token is the original's in {0:.1%} of all cases",
    "cosine": "Its embeddings have a cosine of {0:.3f} with the original's",
    "perplexity": "On held-out texts its perplexity is {0:.4g}, and the original's is {1:.4g}",
}


@dataclass(frozen=True)
class Measure:
    """A measure of the model on the held-out batches.

    Attributes:
        name: ``"perplexity"``, ``"agreement"``, ``"divergence"``, ``"cosine"`` or ``"rank correlation"``.
        original, converted: the value for each of the two models.
        without: the value for the linearized model with a part of the filters switched off, by the part's name.
    """

    name: str
    original: float
    converted: float
    without: dict[str, float]


@dataclass
class ConversionReport:
    """What ``linearize`` did; prints as tables.

    Attributes:
        before, after: relative L2 error ``|filter - attention| / |attention|`` of each linearized module, on the
            held-out batches.
        by_context: the mean error over the modules at the end, by the number of tokens that a token sees.
        by_position: for text decoders, the perplexity of the ``"original"`` and of the ``"converted"`` model on the
            held-out batches, by the number of tokens before the predicted one; empty in reports of earlier versions.
        errors_without: the mean error with a part of the filters switched off, by the part's name.
        measures: measures of the whole model.
        stages: a report of each stage: tokens, held-out error, reason of its end.
        config: the config of the filter.
        sensitivity: with ``layers="auto:..."``, how much the loss falls if the attention of this module is restored, in
            addition to that of the modules chosen before it. The unit is that of the loss, or standard deviations with
            ``choose="both"``. Reports of earlier versions, which have no ``choose``, hold the reverse: how far the
            outputs move if only this module has a filter.
        parameters: number of parameters of the filters; 0 in reports of earlier versions.
        budget: number of tokens of all stages.
        seconds: wall-clock time of this call.
        speed, decoding: the results of ``speed`` and ``decoding_speed``, if ``time`` was called.
        choose: with ``layers="auto:..."``, the loss that the layers were chosen by: ``"text"``, ``"retrieval"`` or
            ``"both"``.
    """

    before: dict[str, float]
    after: dict[str, float]
    by_context: dict[str, float]
    errors_without: dict[str, float]
    measures: list[Measure]
    stages: dict[str, TransferReport]
    config: dict[str, Any] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    budget: int = 0
    seconds: float = 0.0
    speed: list[Speed] = field(default_factory=list)
    decoding: list[Speed] = field(default_factory=list)
    choose: str = ""
    by_position: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def error_before(self) -> float:
        """The mean error of the modules that are filters now, before the first step."""
        return mean({name: self.before[name] for name in self.after})

    @property
    def error(self) -> float:
        """The mean error of the modules at the end."""
        return mean(self.after)

    @property
    def kept(self) -> list[str]:
        """The modules that got their attention back."""
        return [name for name in self.before if name not in self.after]

    @property
    def tokens(self) -> int:
        """The tokens that were used."""
        return sum(stage.history[-1][0] for stage in self.stages.values() if stage.history)

    def __getitem__(self, name: str) -> Measure:
        """Return the measure of that name.

        Raises:
            GraphFilterError: the report has no such measure.
        """
        by_name = {measure.name: measure for measure in self.measures}
        if name not in by_name:
            raise GraphFilterError(f"the report has no measure {shown(name)}: {', '.join(by_name)}")
        return by_name[name]

    def time(self, model: nn.Module, lengths: Iterable[int] | None = None, rounds: int = 5) -> None:
        """Fill in ``speed`` and, for a decoder, ``decoding``; the arguments are those of ``speed``."""
        self.speed = speed(model, lengths, rounds)
        model = encoder_of(model)
        if model.can_generate() and not model.config.is_encoder_decoder:  # type: ignore[operator, union-attr]
            self.decoding = decoding_speed(model)

    @property
    def crossing(self) -> str:
        """A sentence on the number of tokens from which the linearized model is faster; empty if it was not timed."""
        if not self.speed:
            return ""
        if (start := crossover(self.speed)) is None:
            return f"not faster than the original up to {max(row.tokens for row in self.speed):,} tokens"
        return f"faster than the original from {start:,} tokens on"

    @property
    def verdict(self) -> str:
        """Two sentences: whether the linearized model is faster, and what it lost."""
        loss_sentences = [KEPT[m.name].format(m.converted, m.original) for m in self.measures if m.name in KEPT]
        speed_sentence = f"The linearized model is {self.crossing}." if self.speed else "Its speed was not measured."
        return " ".join([speed_sentence, *(f"{sentence}." for sentence in loss_sentences[-1:])])

    def tables(self) -> dict[str, list[list[str]]]:
        """Return tables as rows of text by title; the first row is the header."""
        parts = list(self.errors_without)
        measures = [["measure", "original", "linearized", *(f"without {part}" for part in parts)]]
        for m in self.measures:
            measures += [[m.name, *(f"{x:.4g}" for x in (m.original, m.converted, *(m.without[p] for p in parts)))]]
        errors = [f"{x:.4g}" for x in (self.error, *self.errors_without.values())]
        measures += [["relative error of attention", "0", *errors]]
        layers = [["module", "before", "after"]]
        layers += [[name, f"{self.before[name]:.3f}", f"{error:.3f}"] for name, error in self.after.items()]
        layers += [[name, f"{self.before[name]:.3f}", "keeps its attention"] for name in self.kept]
        if self.choose and self.sensitivity:
            gains = (f"{self.sensitivity[name]:.3g}" for name, *_ in layers[1:])
            for row, gain in zip(layers, [f"gain if restored ({self.choose})", *gains], strict=True):
                row.append(gain)
        contexts = [["tokens that a token sees", "relative error"]]
        contexts += [[label, f"{error:.3f}"] for label, error in self.by_context.items()]
        stages = [["stage", "tokens", "held-out error at the start", "at its best", "ended"]]
        for name, run in self.stages.items():
            run_errors = [error for _, error in run.history]
            stages += [[name, f"{run.history[-1][0]:,}", f"{run_errors[0]:.4g}", f"{min(run_errors):.4g}", run.stopped]]
        tables = {"the model": measures, "stages": stages, "by context": contexts, "by layer": layers}
        if self.by_position:
            positions = [["tokens before", "perplexity of the original", "linearized"]]
            positions += [
                [label, *(f"{values[m]:.4g}" for m in ("original", "converted"))]
                for label, values in self.by_position.items()
            ]
            tables["by position"] = positions
        timings = {"a forward pass": ("tokens", self.speed), "decoding": ("tokens before", self.decoding)}
        for title, (tokens, times) in timings.items():
            if times:
                header = [tokens, "original ms", "linearized ms", "linearized / original"]
                rows = [
                    [f"{s.tokens:,}", f"{s.original_ms:.3g}", f"{s.converted_ms:.3g}", f"{s.ratio:.3f}"] for s in times
                ]
                if all(s.original_mb is not None for s in times):
                    header += ["original MB", "linearized MB"]
                    for row, s in zip(rows, times, strict=True):
                        row += [f"{s.original_mb:,.0f}", f"{s.converted_mb:,.0f}"]
                tables[title] = [header, *rows]
        return tables

    def __str__(self) -> str:
        added = f"; {self.parameters:,} parameters added" if self.parameters else ""
        lines = [self.verdict, "", f"{self.tokens:,} of {self.budget:,} tokens, {self.seconds:.0f} s{added}"]
        for header, *rows in self.tables().values():
            lines += ["", text_table(header, rows, rule=False)]
        return printable("\n".join(lines))

    def to_markdown(self) -> str:
        """Return the tables as a model card shows them."""
        parts = [self.verdict]
        for title, (header, *rows) in self.tables().items():
            parts.append(f"*{title[0].upper()}{title[1:]}*\n\n{markdown_table(header, rows, escape=True)}")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {**asdict(self), "tokens": self.tokens, "error": self.error, "error_before": self.error_before}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """Return the report from a result of ``to_dict``, such as ``conversion.json`` beside a checkpoint.

        Raises:
            DamagedFileError: a part is missing or has a wrong type.
        """
        names = {f.name for f in fields(cls)}
        kinds = {"measures": Measure, "speed": Speed, "decoding": Speed}
        try:
            values = {k: [kinds[k](**x) for x in v] if k in kinds else v for k, v in content.items() if k in names}
            stages = {
                k: TransferReport(**v | {"history": [*map(tuple, v["history"])]}) for k, v in content["stages"].items()
            }
            report = cls(**values | {"stages": stages})
            if not has_type(report, cls) or not str(report):
                raise TypeError("its parts have other types")
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise DamagedFileError(f"no report of a conversion: {error}") from error
        return report

    def plot(self) -> Figure:
        """Draw the held-out error of each stage over the tokens so far, and the error by context.

        Raises:
            GraphFilterError: matplotlib is not installed.
        """
        chart_count = len(self.stages) + 1
        figure = make_figure(3.5 * chart_count, 3)
        axes = figure.subplots(1, chart_count)
        offset = 0
        for name, ax in zip(self.stages, axes[:-1], strict=True):
            history = self.stages[name].history
            ax.plot([offset + tokens for tokens, _ in history], [error for _, error in history], marker=".")
            offset += history[-1][0]
            ax.set(title=figure_text(f"stage: {name}"), xlabel="tokens", ylabel="held-out error")
        axes[-1].bar([*map(figure_text, self.by_context)], list(self.by_context.values()))
        axes[-1].tick_params(axis="x", rotation=45)
        axes[-1].set(title="by tokens that a token sees", ylabel="relative error")
        return figure

    def save_figure(self, path: str | os.PathLike[str]) -> Path:
        """Draw what ``plot`` gives to ``path`` (PNG)."""
        return save_figure(self.plot(), path)
