"""The figures of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...patching.status import FilterStatus
from ...text import figure_text
from ..plots import average_heads, make_figure
from ..response import plot_curves
from .measurements import ConversionCost, Measurements

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = {
    "smoothing": ["cosine", "high_frequency", "dirichlet"],
    "response": ["gain", "high_to_low"],
    "spectrum": ["effective_rank", "singular_values", "attention_effective_rank"],
    "taylor": ["K=3", "K=5", "K=10"],
}


def figures(
    measurements: Measurements, reference: Measurements | None, conversion: ConversionCost | None
) -> dict[str, Figure]:
    """Return the figures of a report by name."""
    named_figures = {}
    for name, measured in measurements.parts().items():
        if name == "taylor" and not uses_gfsa(measurements, reference):
            continue
        quantities = {quantity for _, quantity in measured.bands}
        shown = [quantity for quantity in SHOWN[name] if quantity in quantities]
        named_figures[name] = measured.plot(reference.parts()[name] if reference else None, shown)
    if measurements.curves:
        named_figures["curves"] = plot_curves(measurements.curves)
    if any(row.coefficients for row in measurements.status):
        named_figures["coefficients"] = heat_maps(measurements.status)
    if conversion:
        named_figures["conversion"] = conversion.plot()
    return named_figures


def uses_gfsa(measurements: Measurements, reference: Measurements | None) -> bool:
    """Return whether the report is about GFSA; the error of the approximation applies only to it."""
    return measurements.has_gfsa or (reference is not None and reference.has_gfsa)


def heat_maps(status: FilterStatus) -> Figure:
    """Draw a map per coefficient, with a row per module and a column per head.

    Red is above 0, blue below, white at 0. If a head has several numbers, the map shows their mean.
    """
    names = list(dict.fromkeys(name for row in status for name in row.coefficients))
    heads = max(len(average_heads(value)) for row in status for value in row.coefficients.values())
    size = 1.6 + 0.22 * len(status)
    figure = make_figure(4.2 * len(names), size)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        values = torch.full((len(status), heads), torch.nan)
        for i, row in enumerate(status):
            if (value := row.coefficients.get(name)) is not None:
                values[i, : len(average_heads(value))] = average_heads(value)
        limit = values.nan_to_num().abs().max().item() or 1.0
        image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        numbers = values[~values.isnan()]
        axes.set(xlabel="head", ylabel="patched module", title=figure_text(name))
        axes.set_label(f"{name}: {numbers.min():.3g} to {numbers.max():.3g}")
        axes.set_yticks(range(len(status)))
        figure.colorbar(image, ax=axes)
    figure.suptitle("Coefficients of the filters by module and head", fontsize=10)
    return figure
