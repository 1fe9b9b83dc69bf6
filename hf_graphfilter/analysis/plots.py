"""Plots. Needs the extra ``plots`` (matplotlib)."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from ..errors import needs
from ..filters.attached import filters_of
from ..status import filter_status


def plot_coefficients(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Draw every learned coefficient over the layers, one dot a head and a line through the means, to ``path`` (PNG).

    Where nothing is learned, the fixed coefficients are drawn.

    Raises:
        GraphFilterError: the model is not patched, or matplotlib is not installed.
    """
    learned = {name for _, f in filters_of(model, required=True) for name in f.learned_coefficients()}
    rows = filter_status(model)
    with needs("plots", "a plot"):
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    recorded = dict.fromkeys(name for row in rows for name in row.coefficients)
    names = [name for name in recorded if name in learned] or list(recorded)
    figure = Figure(figsize=(7, 2.6 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        points = [(i, row.coefficients[name].flatten()) for i, row in enumerate(rows) if name in row.coefficients]
        for layer, values in points:
            axes.scatter([layer] * len(values), values, s=14, alpha=0.5, color="tab:blue")
        axes.plot([i for i, _ in points], [v.mean() for _, v in points], color="tab:red", marker="o", label="mean")
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(xlabel="patched layer", ylabel=name, xticks=range(len(rows)))
        axes.legend(frameon=False)
    figure.suptitle(f"learned filter coefficients, {type(model).__name__}", fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
