"""The result of a measurement: bands by layer, which become a table, JSON or a figure."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from ..errors import GraphFilterError, needs
from ..text import figure_text
from .observing import Layer, Reader
from .plots import make_figure
from .statistics import Band, Running

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito, 2008
Name = tuple[Layer, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """The bands of quantities by layer.

    Attributes:
        model: name of the model's class.
        bands: bands by layer and name of the quantity.

    Class attributes:
        quantities: labels for the axes of a figure, by name of the quantity.
        title: title of a figure.
    """

    model: str
    bands: dict[Name, Band]

    quantities: ClassVar[dict[str, str]] = {}
    title: ClassVar[str] = ""

    @classmethod
    def grid(cls, quantity: str, points: int) -> tuple[str, list[float]] | None:
        """Return (label of the axis, values of the points) for a quantity that is a curve; None without an axis."""
        return None

    def layers(self, stack: str | None = None) -> list[Layer]:
        """Return the measured layers in order, of all stacks or of one."""
        layers = dict.fromkeys(layer for layer, _ in self.bands)
        return sorted((x for x in layers if stack in (None, x.stack)), key=lambda layer: (layer.stack, layer.index))

    def __getitem__(self, key: tuple[Layer | int, str]) -> Band:
        """Return the band of a layer and a quantity.

        A layer may be given by its number in the only stack or, if there are two, in the encoder; -1 is the last layer.

        Raises:
            GraphFilterError: there is no such band.
        """
        layer, quantity = key
        if isinstance(layer, int):
            stack = self.layers()[-1].stack  # sorted by name, so "encoder" is last
            known_layers = self.layers(stack)
            layer = known_layers[layer] if -len(known_layers) <= layer < 0 else Layer(stack, layer)
        if (layer, quantity) not in self.bands:
            known = ", ".join(dict.fromkeys(name for _, name in self.bands))
            raise GraphFilterError(f"{type(self).__name__} has no {quantity!r} of layer {layer}; it has {known}")
        return self.bands[layer, quantity]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each number: stack, layer, quantity, mean, sd, samples, and the place on a curve."""
        rows: list[dict[str, Any]] = []
        for (layer, quantity), band in self.bands.items():
            labels = {"stack": layer.stack, "layer": layer.index, "quantity": quantity}
            if band.mean.dim() == 0:
                places: list[dict[str, Any]] = [{}]
            else:
                axis, at = self.grid(quantity, band.mean.numel()) or ("index", [*map(float, range(band.mean.numel()))])
                places = [{"at": x, "axis": axis} for x in at]
            numbers = zip(places, band.mean.flatten().tolist(), band.sd.flatten().tolist(), strict=True)
            rows += [{**labels, **place, "mean": m, "sd": s, "samples": band.samples} for place, m, s in numbers]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the result, the model and the rows, ready for JSON."""
        return {"measured": type(self).__name__, "model": self.model, "rows": self.rows()}

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write ``to_dict`` to a JSON file, and return its path."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        return file

    def to_frame(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``.

        Raises:
            GraphFilterError: pandas is not installed.
        """
        with needs("recipes", "a table of pandas"):
            import pandas
        return pandas.DataFrame(self.rows())

    def plot(self, against: Measured | None = None, quantities: list[str] | None = None) -> Figure:
        """Draw small multiples: a row per stack, a column per quantity.

        A scalar quantity is drawn over the layers. A quantity that is a curve is drawn for a few layers. The label of
        each axes is its ``caption``.

        Args:
            against: a second measurement, drawn with dashes.
            quantities: the quantities to draw. Default: those of ``self.quantities`` that were measured.

        Raises:
            GraphFilterError: a quantity was not measured, or matplotlib is not installed.
        """
        known = dict.fromkeys(name for _, name in self.bands)
        if unknown := [name for name in quantities or () if name not in known]:
            raise GraphFilterError(f"{type(self).__name__} has no {unknown[0]!r}; it has {', '.join(known)}")
        names = [name for name in quantities or self.quantities if name in known] or [*known]
        stacks = list(dict.fromkeys(layer.stack for layer in self.layers()))
        figure = make_figure(4.2 * len(names), 3.1 * len(stacks))
        grid = figure.subplots(len(stacks), len(names), squeeze=False)
        for axes, (stack, name) in zip(grid.flat, product(stacks, names), strict=True):
            if not any((layer, name) in self.bands for layer in self.layers(stack)):
                axes.remove()  # a stack whose filter is not linear has no response
                continue
            axes.set_label(self.caption(stack, name))
            self._draw(axes, stack, name, against)
        figure.suptitle(self.title, fontsize=9, wrap=True)
        return figure

    def caption(self, stack: str, quantity: str) -> str:
        """Return a caption for the chart of a quantity, with the first and the last number."""
        measured = [
            (layer, self.bands[layer, quantity].mean) for layer in self.layers(stack) if (layer, quantity) in self.bands
        ]
        (first, start), (last, end) = measured[0], measured[-1]
        name = " ".join(self.quantities.get(quantity, quantity).split())
        name = f"{name[0].upper()}{name[1:]}"
        stack_note = f", {stack}" if len({layer.stack for layer in self.layers()}) > 1 else ""
        if end.dim():
            return f"{name}: {_short(end[0])} to {_short(end[-1])} in layer {last.index}{stack_note}"
        start_place = "in the input embeddings" if first.index < 0 else f"in layer {first.index}"
        return f"{name}: {_short(start)} {start_place}, {_short(end)} in layer {last.index}{stack_note}"

    def _draw(self, axes: Axes, stack: str, quantity: str, against: Measured | None) -> None:
        pairs = [(self, self.model, "-")] + ([(against, "reference", "--")] if against else [])
        sample = next(b for (layer, name), b in self.bands.items() if name == quantity and layer.stack == stack)
        for number, (measured, label, style) in enumerate(pairs):
            layers = [x for x in measured.layers(stack) if (x, quantity) in measured.bands]
            if sample.mean.dim() == 0:
                x = [layer.index for layer in layers]
                bands = [measured.bands[layer, quantity] for layer in layers]
                _line(axes, x, [b.mean for b in bands], [b.sd for b in bands], COLOURS[number], style, label)
                axes.set_xlabel(f"layer of the {stack} (-1: input embeddings)" if -1 in x else f"layer of the {stack}")
            else:
                axis, at = measured.grid(quantity, sample.mean.numel()) or ("index", [*range(sample.mean.numel())])
                for colour, layer in zip(COLOURS, pick_some(layers), strict=False):
                    band = measured.bands[layer, quantity]
                    place = "input embeddings" if layer.index < 0 else f"layer {layer.index}"
                    text = f"{label}, {place}" if len(pairs) > 1 else place
                    _line(axes, at, list(band.mean), None, colour, style, text)
                axes.set_xlabel(axis)
        axes.set_ylabel(self.quantities.get(quantity, quantity))
        axes.legend(frameon=False, fontsize=7)


def _short(number: Tensor) -> str:
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.0f}"


def _line(
    axes: Axes, x: list[Any], mean: list[Tensor], sd: list[Tensor] | None, colour: str, style: str, label: str
) -> None:
    values, label = [float(m) for m in mean], figure_text(label)
    axes.plot(x, values, style, color=colour, label=label, marker="o" if sd is not None else None, markersize=3)
    if sd is not None:
        low, high = ([m + sign * float(s) for m, s in zip(values, sd, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def pick_some(items: list[T], count: int = 4) -> list[T]:
    """Return at most ``count`` items: the first, the last and some between."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


M = TypeVar("M", bound=Measured)


class BandReader(Reader, Generic[M]):
    """A reader that collects samples of quantities by layer.

    Class attributes:
        result_class: class of the result.
        lacking: message of the error if there is no sample.
    """

    result_class: type[M]
    lacking: ClassVar[str]

    def __init__(self) -> None:
        self.samples: dict[Name, Running] = defaultdict(Running)

    def result(self, model: nn.Module) -> M:
        """Return the result for the model.

        Raises:
            GraphFilterError: no sample was read.
        """
        if not self.samples:
            raise GraphFilterError(self.lacking)
        return self.result_class(type(model).__name__, {name: running.band() for name, running in self.samples.items()})
