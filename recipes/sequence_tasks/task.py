"""What a task of sequences is, and what its loader returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_graphfilter import GraphFilterError


@dataclass(frozen=True)
class Loaded:
    """The parts of a task, the names of its classes, and how the parts came about.

    ``parts`` are "train" and "test", "validation" too where the data set has one; or "all" alone, to be split. Each has
    the column ``label`` (numbers of classes), and by the kind of the task

    - text: ``text_a``, of pairs ``text_b``;
    - symbols: the same, with tokens between spaces;
    - pixels: ``input_ids``, 0 to 255, row by row;
    - series: ``series``, a list of steps that are lists of channels, as they are in the file.
    """

    parts: DatasetDict
    labels: tuple[str, ...]
    split: str = "official"


@dataclass(frozen=True)
class Task:
    """Where a task is read from.

    Args:
        folder: The usual name of its folder, which is looked for below ``--data``; else ``--data`` is that folder.
        layout: What ``--data`` names, in words.
        read: The loader. Its folder is None where there is no ``--data``, and that only for a task that is ``online``.
        kind: "text", "symbols", "pixels" or "series".
        online: A data set of the Hub, or an address, which has the task too.
        labels: The names of the classes, where the data set does not tell them.
        file: Whether ``--data`` may be a file.
        shares: Percentages of training, perhaps validation, and test part where the data set is one part alone.
    """

    folder: str
    layout: str
    read: Callable[[Path | None, "Task"], Loaded]
    kind: str = "text"
    online: str | None = None
    labels: tuple[str, ...] = ()
    file: bool = False
    shares: tuple[int, ...] = (70, 30)


def number_labels(rows: Dataset, labels: Sequence[str], source: object) -> Dataset:
    """Return the column ``label`` as numbers of the training part's classes."""
    numbers = {label: number for number, label in enumerate(labels)}
    for row, value in enumerate(rows["label"], 1):
        if str(value) not in numbers:
            raise GraphFilterError(
                f"{source}: row {row} has the label {value!r}, which the training part does not have; its labels are "
                f"{', '.join(labels)}"
            )
    return rows.remove_columns("label").add_column("label", [numbers[str(value)] for value in rows["label"]])
