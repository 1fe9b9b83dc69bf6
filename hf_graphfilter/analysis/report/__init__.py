"""A page about what a model's attention does: numbers in words, figures, coefficients, cost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import GraphFilterError
from ..observing import Layer
from ..plots import save_figure
from .drawing import figures
from .measurements import ConversionCost, Measurements, measure
from .page import page
from .words import sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """What ``report`` gives.

    Attributes:
        title: of the page.
        measured: of the model.
        reference: of the model that it is compared with, or None.
        conversion: what ``linearize`` measured, of a model that it made, or None.
    """

    title: str
    measured: Measurements
    reference: Measurements | None = None
    conversion: ConversionCost | None = None

    def summary(self) -> list[str]:
        """The findings, a sentence each."""
        return sentences(self.measured, self.reference)

    def figures(self) -> dict[str, Figure]:
        """By name, what the page shows."""
        return figures(self.measured, self.reference, self.conversion)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        models = {"model": self.measured, "reference": self.reference}
        return {
            "title": self.title,
            "summary": self.summary(),
            **{
                name: {part: measured.to_dict() for part, measured in measurements.parts().items()}
                for name, measurements in models.items()
                if measurements
            },
            **({"conversion": self.conversion.to_dict()} if self.conversion else {}),
        }

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """One page that needs nothing else: no network and no script.

        Raises:
            GraphFilterError: it cannot be written.
        """
        return _write_page(Path(path), page(self.title, self.measured, self.reference, self.conversion))

    def save_figures(self, folder: str | os.PathLike[str], names: Sequence[str] | None = None) -> list[Path]:
        """The figures, or those of some ``names``, as PNG."""
        files, figures = [], self.figures()
        if unknown := [name for name in names or () if name not in figures]:
            raise GraphFilterError(f"the report has no figure {unknown[0]!r}; it has {', '.join(figures)}")
        for name, figure in figures.items():
            if names is not None and name not in names:
                continue
            files.append(save_figure(figure, Path(folder, f"{name}.png")))
        return files


def report(
    model: nn.Module,
    batches: Iterable[Any],
    reference: nn.Module | None = None,
    *,
    title: str | None = None,
    conversion: ConversionCost | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Report:
    """Measure a model, and a reference on the same batches: ``smoothing``, ``frequency_response``, ``spectrum`` and
    ``taylor_error`` in one pass each, the coefficients, and what a batch costs.

    Args:
        model: of transformers or timm, plain or patched; it is left as it was.
        batches: dicts of the model's arguments, or tensors; a list where there is a reference.
        reference: say, the plain model of a patched one.
        title: of the page.
        conversion: what ``linearize`` gave for the model; its tables and curves join the page.
        progress: wraps the batches, as a bar does.

    Raises:
        GraphFilterError: as ``smoothing``; the reference has other layers.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> report(model, [{"input_ids": torch.arange(16).view(2, 8)}]).title
        'BertModel'
    """
    batches = batches if reference is None else list(batches)
    measured = measure(model, batches, progress)
    other = None if reference is None else measure(reference, batches, progress)
    if other and measured.smoothing.layers() != other.smoothing.layers():
        theirs, layers = (_count_layers(each.smoothing.layers()) for each in (other, measured))
        raise GraphFilterError(
            f"the reference has {theirs}, {type(model).__name__} has {layers}: they cannot be compared layer by layer"
        )
    return Report(title or type(model).__name__, measured, other, conversion)


def _count_layers(layers: list[Layer]) -> str:
    stacks = Counter(layer.stack for layer in layers if layer.index >= 0)
    return " and ".join(f"{count} layers of the {stack}" for stack, count in stacks.items())


def _write_page(path: Path, content: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise GraphFilterError(f"{path} cannot be written: {error.strerror}") from error
    return path
