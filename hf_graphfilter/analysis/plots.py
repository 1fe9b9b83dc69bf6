"""Plots. Needs the extra ``plots`` (matplotlib)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import GraphFilterError, needs
from ..filters.core.attached import filters_of
from ..patching.status import filter_status
from ..text import figure_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float, purpose: str = "a figure") -> Figure:
    """Return an empty figure of so many inches.

    Raises:
        GraphFilterError: matplotlib is not installed, which ``purpose`` needs.
    """
    with needs("plots", purpose):
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Draw a figure to ``path`` (PNG), whose folder is made, and return it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def average_heads(coefficient: Tensor) -> Tensor:
    """(heads, ...) or a number to (heads,) or (1,): the mean of what a head has; real."""
    return coefficient.reshape(*coefficient.shape[:1], -1).real.float().mean(-1).reshape(-1)


def plot_coefficients(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Draw every learned coefficient over the layers, one dot a head and a line through the means, to ``path`` (PNG).

    Where nothing is learned, the fixed coefficients are drawn; of several numbers a head their mean.

    Raises:
        GraphFilterError: the model is not patched, its filters have no coefficients, or matplotlib is not installed.
    """
    learned = {name for _, f in filters_of(model, required=True) for name in f.learned_coefficients()}
    rows = filter_status(model)
    recorded = dict.fromkeys(name for row in rows for name in row.coefficients)
    names = [name for name in recorded if name in learned] or list(recorded)
    if not names:
        kinds = ", ".join(dict.fromkeys(f.config.filter for _, f in filters_of(model)))
        raise GraphFilterError(f"{kinds}: a filter of weights alone, which has no coefficients to draw")
    figure = make_figure(7, 2.6 * len(names), "a plot")
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        points = [(i, average_heads(row.coefficients[name])) for i, row in enumerate(rows) if name in row.coefficients]
        for layer, values in points:
            axes.scatter([layer] * len(values), values, s=14, alpha=0.5, color="tab:blue")
        axes.plot([i for i, _ in points], [v.mean() for _, v in points], color="tab:red", marker="o", label="mean")
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(xlabel="patched layer", ylabel=figure_text(name), xticks=range(len(rows)))
        axes.legend(frameon=False)
    figure.suptitle(f"learned filter coefficients, {type(model).__name__}", fontsize=10)
    return save_figure(figure, path)
