"""Texts: folders of documents, and files of the usual formats."""

from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_graphfilter import GraphFilterError
from recipes.data import check_rows, load_from_hub, make_table
from recipes.files import first_file, read_rows, read_texts, tsv_rows
from recipes.own_texts import LABEL, TEXT, find_tables, with_capitals
from recipes.sequence_tasks.task import Loaded, Task, number_labels

FIFTY = {"train": "train", "validation": "dev", "test": "test"}
NOTES = {"text_a": ("TEXT",), "label": ("LABELS",)}
UNLABELLED = "unsup"  # a folder of the official IMDb
COLUMNS = {"text_a": with_capitals(TEXT), "label": with_capitals(LABEL)}


def hub_texts(task: Task) -> Loaded:
    """Training and test part of a data set of the Hub."""
    data = load_from_hub(task.online, {"text_a": ("text",), "label": ("label",)})
    return Loaded(DatasetDict(train=data["train"], test=data["test"]), task.labels)


def documents(root: Path | None, task: Task, labels: tuple[str, ...] = ()) -> Loaded:
    """Read a folder of documents per class (of ``labels``, else all), or two folders, which end in train and test."""
    if root is None:
        return hub_texts(task)
    folders = {part: sub for part in ("train", "test") for sub in subfolders(root) if sub.name.endswith(part)}
    if len(folders) != 2:
        folders = {"all": root}
    train = folders.get("train", root)
    labels = labels or tuple(sub.name for sub in subfolders(train) if sub.name != UNLABELLED)
    if len(labels) < 2:
        raise GraphFilterError(f"--data: {train} must hold a folder of documents for each of two classes at least")
    for label in labels:
        for part, folder in folders.items():
            if not (folder / label).is_dir():
                owner = "the training part" if part == "test" else "the task"
                raise GraphFilterError(f"--data: {folder} has no folder {label}, which {owner} has")
    return Loaded(DatasetDict({part: read_texts(folder, labels) for part, folder in folders.items()}), labels)


def subfolders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def r8(root: Path, task: Task) -> Loaded:
    """Two text files without a header: a class and a document a line."""
    files = {part: first_file(root, [f"r8-{part}-all-terms.txt"]) for part in ("train", "test")}
    return number_classes({part: (file, list(tsv_rows(file, ("label", "text")))) for part, file in files.items()})


def ag_news(root: Path | None, task: Task) -> Loaded:
    """Two CSV files without a header: the number of a class from 1, title, description."""
    if root is None:
        return hub_texts(task)
    parts = {}
    for part in ("train", "test"):
        file = first_file(root, [f"{part}.csv"])
        rows = read_rows(file, ("label", "title", "description"))
        texts = [{"text": f"{row['title']} {row['description']}", "label": row["label"]} for row in rows]
        parts[part] = file, texts
    return Loaded(number_classes(parts, [str(number) for number, _ in enumerate(task.labels, 1)]).parts, task.labels)


def tables(root: Path, task: Task) -> Loaded:
    """Read a file with columns of texts and labels; a folder with such files for the parts; or folders of documents."""
    files = find_tables(root)
    if not files:
        return documents(root, task)
    if not {"all", "test"} & {*files}:
        raise GraphFilterError(f"--data: {root} has no file called test, on which this recipe scores")
    return number_classes({part: (file, read_rows(file)) for part, file in files.items()})


def mimic(root: Path, task: Task) -> Loaded:
    """Read the three files of MIMIC-III 50 as CAML's code writes them: columns TEXT and LABELS, codes with ; between.

    A text has several labels, so that its ``label`` is a list with a 1 for each of its codes.
    """
    files = {part: first_file(root, [f"{name}_50.csv"]) for part, name in FIFTY.items()}
    rows = {part: make_table(read_rows(file), NOTES, file) for part, file in files.items()}
    codes = sorted({code for labels in rows["train"]["label"] for code in split_codes(labels)})
    numbers = {code: number for number, code in enumerate(codes)}
    for part, table in rows.items():
        code_lists = [split_codes(labels) for labels in table["label"]]
        if unknown := min(set().union(*code_lists) - numbers.keys(), default=None):
            raise GraphFilterError(f"{files[part]} has the code {unknown!r}, which the training part does not have")
        indicators = [[float(code in labels) for code in codes] for labels in code_lists]
        rows[part] = table.remove_columns("label").add_column("label", indicators)
    return Loaded(DatasetDict(rows), tuple(codes))


def split_codes(labels: str) -> set[str]:
    return {code for code in labels.split(";") if code.strip()}


def number_classes(parts: dict[str, tuple[Path, list]], labels: list[str] | None = None) -> Loaded:
    """Files and their rows, with the classes that the training part has if none are given."""
    data: dict[str, Dataset] = {}
    for part, (file, rows) in parts.items():
        check_rows(rows, file)
        data[part] = make_table(
            [{name: None if v is None else str(v) for name, v in row.items()} for row in rows], COLUMNS, file
        )
        for number, text in enumerate(data[part]["text_a"], 1):
            if not text.strip():
                raise GraphFilterError(f"{file}: row {number} has an empty document")
        if labels is None:
            labels = sorted(
                {*data[part]["label"]}, key=lambda label: (len(label), label) if label.isdigit() else (0, label)
            )
            if len(labels) < 2:
                raise GraphFilterError(f"{file} must hold two classes at least")
        data[part] = number_labels(data[part], labels, file)
    return Loaded(DatasetDict(data), tuple(labels))
