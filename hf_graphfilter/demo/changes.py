"""What fine-tuning changed in the demo's model, by layer: as a table, as sentences and as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..analysis.results import COLOURS
from ..analysis.smoothing import smoothing
from ..patching.status import filter_status

COEFFICIENT = "w_K"


@dataclass
class Changes:
    """Coefficients of the filter and similarity of the tokens, before and after fine-tuning.

    Attributes:
        coefficients: for each layer, ``w_K`` of its heads after training; before training, each was 0.
        before: for each layer, the similarity of its output tokens before training.
        filtered: the same after fine-tuning with the filter.
        baseline: the same after fine-tuning the unpatched model; None if that was left out.
    """

    coefficients: list[Tensor]
    before: list[float]
    filtered: list[float]
    baseline: list[float] | None = None

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) as text."""
        similarities = {"before": self.before, "filter": self.filtered}
        if self.baseline:
            similarities["baseline"] = self.baseline
        header = ["layer", "w_K before", "w_K after", "range after", *(f"alike: {name}" for name in similarities)]
        rows = []
        for layer, w in enumerate(self.coefficients):
            cells = [f"{round(float(w.mean()), 3) + 0.0:+.3f}", f"{w.min():+.3f} to {w.max():+.3f}"]
            rows.append([str(layer + 1), "0", *cells, *(f"{values[layer]:.2f}" for values in similarities.values())])
        return header, rows

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return {
            "w_K": [w.tolist() for w in self.coefficients],
            "similarity": {"before": self.before, "filtered": self.filtered, "baseline": self.baseline},
        }

    def draw(self, path: Path) -> Path:
        """Draw coefficients and similarities over the layers to ``path`` (PNG)."""
        from matplotlib.figure import Figure  # not pyplot: no global state, no display

        layers = list(range(1, len(self.coefficients) + 1))
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.axhline(0, color="grey", linestyle="--", label="before training: 0 in every head")
        for layer, w in zip(layers, self.coefficients, strict=True):
            label = "after training: one dot per head" if layer == 1 else None
            left.scatter([layer] * len(w), w, s=26, alpha=0.45, color=COLOURS[1], linewidths=0, label=label)
        means = [float(w.mean()) for w in self.coefficients]
        left.plot(layers, means, color=COLOURS[1], linewidth=2.5, label="after training: mean of the layer")
        left.set_title("What the filter learned", fontsize=14)
        left.set_ylabel("$w_K$: weight of the power of attention", fontsize=11)
        right.plot(layers, self.before, "--", color="grey", linewidth=2, label="before training")
        if self.baseline:
            right.plot(layers, self.baseline, "-s", color=COLOURS[0], linewidth=2, label="fine-tuned without filter")
        right.plot(layers, self.filtered, "-o", color=COLOURS[1], linewidth=2, label="fine-tuned with filter")
        right.set_ylim(0, 1)
        right.set_title("How alike the tokens of a text are", fontsize=14)
        right.set_ylabel("mean cosine of two tokens  (1 = all alike)", fontsize=11)
        for axes in (left, right):
            axes.set_xlabel("layer", fontsize=11)
            axes.set_xticks(layers)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=10)
        bottom, top = left.get_ylim()
        left.set_ylim(bottom, top + 0.35 * (top - bottom))  # room for the legend above the dots
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        return path


def read_coefficients(model: nn.Module) -> list[Tensor]:
    """Return ``w_K`` of the heads, by layer."""
    return [row.coefficients[COEFFICIENT] for row in filter_status(model)]


def measure_similarity(model: nn.Module, batches: list[Any]) -> list[float]:
    """Return the mean cosine of two tokens of a text after each layer: 1 where all tokens are alike."""
    measured = smoothing(model, batches, dirichlet=False)
    return [float(measured[layer, "cosine"].mean) for layer in measured.layers() if layer.index >= 0]
