"""Texts: folders of documents, and files of the usual formats."""

from pathlib import Path

from datasets import DatasetDict

from hf_graphfilter import GraphFilterError
from recipes.data import from_hub, texts_in
from recipes.sequence_tasks.task import Loaded, Task

UNLABELLED = "unsup"  # a folder of the official IMDb


def hub_texts(task: Task) -> Loaded:
    """Training and test part of a data set of the Hub."""
    data = from_hub(task.online, {"text_a": ("text",), "label": ("label",)})
    return Loaded(DatasetDict(train=data["train"], test=data["test"]), task.labels)


def documents(root: Path | None, task: Task) -> Loaded:
    """A folder a class, full of documents; or two such folders whose names end in train and test."""
    if root is None:
        return hub_texts(task)
    folders = {part: sub for part in ("train", "test") for sub in subfolders(root) if sub.name.endswith(part)}
    if len(folders) != 2:
        folders = {"all": root}
    first = folders.get("train", root)
    labels = tuple(sub.name for sub in subfolders(first) if sub.name != UNLABELLED)
    if len(labels) < 2:
        raise GraphFilterError(f"--data: {first} must hold a folder of documents for each of two classes at least")
    for label in labels:
        for folder in folders.values():
            if not (folder / label).is_dir():
                raise GraphFilterError(f"--data: {folder} has no folder {label}, which the training part has")
    return Loaded(DatasetDict({part: texts_in(folder, labels) for part, folder in folders.items()}), labels)


def subfolders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))
