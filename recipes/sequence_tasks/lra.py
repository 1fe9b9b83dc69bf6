"""The Long Range Arena, in the layout of its release (lra_release: listops-1000, tsv_data, pathfinder32).

Its text task is imdb with bytes as tokens.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict
from PIL import Image

from hf_graphfilter import GraphFilterError
from recipes.data import choose, load_from_hub
from recipes.files import first_file, tsv_rows
from recipes.sequence_tasks.task import Loaded, Task
from recipes.sequence_tasks.texts import subfolders

DIGITS = tuple("0123456789")
SYMBOLS = frozenset(["[MIN", "[MAX", "[MED", "[SM", "[FIRST", "[LAST", "]", *DIGITS])
EXPRESSION = {"text_a": ("Source",), "label": ("Target",)}
SIDE = 32
READ = 10_000  # characters of a paper, as the benchmark's own loader
HARD = "curv_contour_length_14"  # the images of which papers report results


def listops(root: Path, task: Task) -> Loaded:
    """Read the three files of the release, which have the columns Source and Target."""
    names = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
    files = {part: first_file(root, [name]) for part, name in names.items()}
    return Loaded(DatasetDict({part: expressions(file, tsv_rows(file)) for part, file in files.items()}), DIGITS)


def listops_short(root: Path, task: Task) -> Loaded:
    """10,000 expressions of a file of the original ListOps, which has the columns label and expression."""
    file = first_file(root, ["test_d20s.tsv"])
    return Loaded(DatasetDict(all=expressions(file, tsv_rows(file, ("Target", "Source")))), DIGITS)


def expressions(file: Path, rows: Iterable[dict[str, str]]) -> Dataset:
    """Expressions without their parentheses, which follow from the rest; what closes a list is one symbol."""
    texts, labels = [], []
    for row, line in enumerate(rows, 1):
        if row == 1:
            choose(EXPRESSION, list(line), file)
        source, target = line["Source"] or "", line["Target"]
        tokens = [token for token in source.split() if token not in "()"]
        if target not in DIGITS:
            raise GraphFilterError(f"{file}: row {row} has the value {target!r}, which is no digit")
        if not tokens or (unknown := set(tokens) - SYMBOLS):
            problem = f"the symbol {unknown.pop()!r}, which ListOps does not have" if tokens else "no expression"
            raise GraphFilterError(f"{file}: row {row} has {problem}")
        texts.append(" ".join(tokens))
        labels.append(int(target))
    if not texts:
        raise GraphFilterError(f"{file} holds no rows")
    return Dataset.from_dict({"text_a": texts, "label": labels})


def retrieval(root: Path, task: Task) -> Loaded:
    """Pairs of papers, one of which cites the other or not: label, two ids and two texts, without a header."""
    names = {"train": "train", "validation": "eval", "test": "test"}
    files = {part: first_file(root, [f"new_aan_pairs.{name}.tsv"]) for part, name in names.items()}
    return Loaded(DatasetDict({part: pairs(file) for part, file in files.items()}), task.labels)


def pairs(file: Path) -> Dataset:
    columns: dict[str, list] = {"text_a": [], "text_b": [], "label": []}
    for row, line in enumerate(tsv_rows(file, ("label", "id_a", "id_b", "text_a", "text_b")), 1):
        if line["label"] not in ("0", "1", "0.0", "1.0"):
            raise GraphFilterError(f"{file}: row {row} has the label {line['label']!r}, expected 0 or 1")
        for column in ("text_a", "text_b"):
            if not line[column].strip():
                raise GraphFilterError(f"{file}: row {row} has an empty document")
            columns[column].append(line[column][:READ])
        columns["label"].append(int(float(line["label"])))
    if not columns["label"]:
        raise GraphFilterError(f"{file} holds no rows")
    return Dataset.from_dict(columns)


def image(root: Path | None, task: Task, patch: int | None = None) -> Loaded:
    """CIFAR-10 in grey, a token a pixel; or in colour as series, a step per ``patch`` of so many pixels squared."""
    make = partial(pixels, side=SIDE) if patch is None else partial(patches, size=patch)
    if root is None:
        data = load_from_hub(task.online, {"image": ("img", "image"), "label": ("label", "fine_label")})
        labels = task.labels or tuple(data["train"].features["label"].names)
        parts = {
            part: ((row["image"], f"{task.online}, row {i}", row["label"]) for i, row in enumerate(data[part]))
            for part in ("train", "test")
        }
        return Loaded(DatasetDict({part: make(images) for part, images in parts.items()}), labels)
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise GraphFilterError(f"--data: {root} has no folder {part}")
    labels = tuple(sub.name for sub in subfolders(root / "train"))
    if len(labels) < 2:
        raise GraphFilterError(
            f"--data: {root / 'train'} must hold a folder of images for each of two classes at least"
        )
    if unmatched := {sub.name for sub in subfolders(root / "test")} ^ set(labels):
        raise GraphFilterError(f"--data: the class {min(unmatched)} is in one of {root}/train and {root}/test only")
    return Loaded(DatasetDict({part: make(images_in(root / part, labels)) for part in ("train", "test")}), labels)


def images_in(folder: Path, labels: tuple[str, ...]) -> Iterator[tuple[Path, Path, int]]:
    for number, label in enumerate(labels):
        files = sorted((folder / label).glob("*.png"))
        if not files:
            raise GraphFilterError(f"{folder / label} holds no PNG files")
        yield from ((file, file, number) for file in files)


def pathfinder(root: Path, task: Task, side: int | None = SIDE) -> Loaded:
    """Images with the official lists: of pathfinder32 the hard ones, or those in ``root`` itself."""
    root = root / HARD if (root / HARD).is_dir() else root
    lists = sorted(root.glob("metadata/*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not lists:
        raise GraphFilterError(f"--data: {root} has no lists metadata/*.npy")
    images = (row for file in lists for row in images_of(root, file))
    return Loaded(DatasetDict(all=pixels(images, side)), task.labels)


def images_of(root: Path, file: Path) -> Iterator[tuple[Path, Path, int]]:
    """Lines of a list: folder, file, a number, label and more; text, whatever its name says, and read as no other."""
    for row, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        words = line.split()
        if len(words) < 4 or words[3] not in ("0", "1") or not re.fullmatch(r"[\w/.-]+", f"{words[0]}/{words[1]}"):
            raise GraphFilterError(f"{file}: line {row} is not FOLDER FILE NUMBER LABEL ...: {line[:60]!r}")
        image = root / words[0] / words[1]
        if not image.resolve().is_relative_to(root.resolve()):
            raise GraphFilterError(f"{file}: line {row} leads out of {root}: {words[0]}/{words[1]}")
        if not image.is_file():
            raise GraphFilterError(f"{file}: line {row} names {words[0]}/{words[1]}, which is not there")
        if image.stat().st_size:  # the release has an empty file, which its own loader leaves out too
            yield image, image, int(words[3])


def pixels(images: Iterable[tuple], side: int | None) -> Dataset:
    """Grey images, row by row; of the first one's size if none is given."""
    values, labels = read_images(images, "L", side)
    numbers = pa.array(np.concatenate(values).ravel().astype(np.int16))
    return Dataset(pa.table({"input_ids": in_lists(numbers, values[0].size), "label": labels}))


def patches(images: Iterable[tuple], size: int) -> Dataset:
    """Images in colour as series: a step per patch, row by row, whose channels are its numbers from 0 to 1."""
    values, labels = read_images(images, "RGB", SIDE)
    array = np.stack(values).astype(np.float32).reshape(-1, SIDE // size, size, SIDE // size, size, 3) / 255
    steps = in_lists(pa.array(array.swapaxes(2, 3).ravel()), 3 * size**2)
    return Dataset(pa.table({"series": in_lists(steps, (SIDE // size) ** 2), "label": labels}))


def in_lists(values: pa.Array, length: int) -> pa.Array:
    """Return the values in lists of one length."""
    return pa.ListArray.from_arrays(np.arange(0, len(values) + 1, length, dtype=np.int32), values)


def read_images(images: Iterable[tuple], mode: str, side: int | None) -> tuple[list[np.ndarray], list[int]]:
    """Return square images of one size, and their labels."""
    values, labels = [], []
    for source, name, label in images:
        try:
            array = np.asarray((source if isinstance(source, Image.Image) else Image.open(source)).convert(mode))
        except Exception as error:  # whatever a damaged file leads to
            raise GraphFilterError(f"{name} cannot be read as an image") from error
        side = side or array.shape[0]
        if array.shape[:2] != (side, side):
            raise GraphFilterError(f"{name} has {array.shape[1]} x {array.shape[0]} pixels, not {side} x {side}")
        values.append(array)
        labels.append(label)
    if not values:
        raise GraphFilterError("there are no images")
    return values, labels
