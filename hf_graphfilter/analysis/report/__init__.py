"""A page on what a model's attention does: a verdict, figures, coefficients and cost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import GraphFilterError
from ..model_inputs import check_batches
from ..observing import Layer
from ..plots import save_figure
from .drawing import figures
from .measurements import ConversionCost, Measurements, measure
from .page import page
from .words import facts, sentences, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """The measurements of a model, as sentences, figures, JSON and a page.

    Attributes:
        title: title of the page.
        measured: measurements of the model.
        reference: measurements of the model that it is compared with, or None.
        conversion: report of ``linearize``, if it made the model, or None.
    """

    title: str
    measured: Measurements
    reference: Measurements | None = None
    conversion: ConversionCost | None = None

    @property
    def verdict(self) -> str:
        """Whether tokens grow alike, and whether that is usual; for a linearized model, its verdict comes first."""
        lines = verdict(self.measured, self.reference)
        return " ".join([self.conversion.verdict, *lines] if self.conversion else lines)

    def summary(self) -> list[str]:
        """Return the findings, a sentence each; the verdict comes first."""
        return sentences(self.measured, self.reference, self.conversion)

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the page by name."""
        return figures(self.measured, self.reference, self.conversion)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        models = {"model": self.measured, "reference": self.reference}
        return {
            "title": self.title,
            "verdict": self.verdict,
            "summary": self.summary(),
            "facts": facts(self.measured, self.reference),
            **{
                name: {part: measured.to_dict() for part, measured in measurements.parts().items()}
                for name, measurements in models.items()
                if measurements
            },
            **({"conversion": self.conversion.to_dict()} if self.conversion else {}),
        }

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained page, without scripts or network access, and return its path.

        Args:
            path: file to write; its folder is created if needed.

        Raises:
            GraphFilterError: the file cannot be written, or matplotlib is not installed.
        """
        return _write_page(Path(path), page(self.title, self.measured, self.reference, self.conversion))

    def save_figures(self, folder: str | os.PathLike[str], names: Sequence[str] | None = None) -> list[Path]:
        """Write the figures as PNG files, and return their paths.

        Args:
            folder: folder of the files; it is created if needed.
            names: names of the figures to write. Default: all.

        Raises:
            GraphFilterError: the report has no figure of such a name, or matplotlib is not installed.
        """
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
    max_length: int | None = None,
) -> Report:
    """Measure what attention and filters do in a model, and return a report that begins with a verdict.

    One pass over the batches gives the results of ``smoothing``, ``frequency_response``, ``spectrum`` and
    ``taylor_error``. The report also has the coefficients of the filters and the time of a forward pass.

    Args:
        model: model of transformers or timm, with or without filters; it is left as it was.
        batches: dicts of the model's arguments, or tensors.
        reference: a second model, measured on the same batches, such as the unpatched model. Default: none.
        title: title of the page. Default: the name that the model was loaded by, or else its class.
        conversion: report of ``linearize`` on the model; its verdict, tables and curves join the page. Default: none.
        progress: wraps the batches, as a progress bar does. Default: no bar.
        max_length: number of tokens at which you cut the texts; the page names it. Default: not named.

    Raises:
        GraphFilterError: one of the errors of ``smoothing``, or the reference has other layers.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> report(model, [{"input_ids": torch.arange(16).view(2, 8)}]).title
        'BertModel'
    """
    batches = check_batches(batches) if reference is None else list(check_batches(batches))
    measured = measure(model, batches, progress, max_length)
    measured_reference = None if reference is None else measure(reference, batches, progress, max_length)
    if measured_reference and measured.smoothing.layers() != measured_reference.smoothing.layers():
        reference_layers, layers = (_count_layers(each.smoothing.layers()) for each in (measured_reference, measured))
        raise GraphFilterError(
            f"the reference has {reference_layers}, {type(model).__name__} has {layers}: they cannot be compared "
            "layer by layer"
        )
    checkpoint_name = Path(str(getattr(getattr(model, "config", None), "_name_or_path", ""))).name
    return Report(title or checkpoint_name or type(model).__name__, measured, measured_reference, conversion)


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
