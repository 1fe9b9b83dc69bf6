"""The scale of a verdict: measured values of pretrained models, written by ``benchmarks/tables.py``."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class ReferenceValue:
    """The mean cosine of two tokens after the last layer of a stack of a pretrained model.

    Attributes:
        model: name of the model; for a model with two stacks, the name of the stack follows.
        cosine: mean over the samples.
        samples: number of texts or images.
        data: description of the texts or images.
        date: day of the measurement.
    """

    model: str
    cosine: float
    samples: int
    data: str
    date: str


def load_references() -> list[ReferenceValue]:
    """Return the values of the gallery in docs/analysis.md, in its order.

    Example:
        >>> [f"{value.model} {value.cosine:.2f}" for value in load_references()][:2]
        ['MiniLM-L6 0.30', 'DeiT-Tiny 0.30']
    """
    text = (resources.files("hf_graphfilter") / "data" / "gallery.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    models = [row["model"] for row in rows]
    return [
        ReferenceValue(
            f"{row['model']} {row['stack']}" if models.count(row["model"]) > 1 else row["model"],
            float(row["mean"]),
            int(row["samples"]),
            row["data"],
            row["date"],
        )
        for row in rows
    ]
