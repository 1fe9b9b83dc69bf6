"""Plots of coefficients, and the figures of other modules; they need the extra ``plots`` (matplotlib)."""

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
    """Return an empty figure of this width and height, in inches.

    Raises:
        GraphFilterError: matplotlib is not installed; the message names ``purpose``.
    """
    with needs("plots", purpose):
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure to ``path`` (PNG), make the folder if needed, and return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format=path.suffix.removeprefix(".") or "png")
    return path


def average_heads(coefficient: Tensor) -> Tensor:
    """Return the mean of each head's numbers as a real tensor: (heads, ...) gives (heads,), a scalar gives (1,)."""
    return coefficient.reshape(*coefficient.shape[:1], -1).real.float().mean(-1).reshape(-1)


def plot_coefficients(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Draw the learned coefficients of a model over its layers, write the figure (PNG), and return its path.

    Each coefficient has a chart with one dot per head and a line through the means. If a head has several numbers, the
    dot is their mean. If nothing is learned, the fixed coefficients are drawn.

    Args:
        model: a patched model.
        path: file to write; its folder is created if needed.

    Raises:
        GraphFilterError: the model is not patched, its filters have no coefficients, or matplotlib is not installed.
    """
    learned = {name for _, f in filters_of(model, required=True) for name in f.learned_coefficients()}
    rows = filter_status(model)
    recorded = dict.fromkeys(name for row in rows for name in row.coefficients)
    names = [name for name in recorded if name in learned] or list(recorded)
    if not names:
        kinds = ", ".join(dict.fromkeys(f.config.filter for _, f in filters_of(model)))
        raise GraphFilterError(f"{kinds}: the filter has weights but no coefficients, so that there is nothing to draw")
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
