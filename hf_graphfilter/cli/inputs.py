"""The inputs of the verbs: texts and images for the model of a checkpoint, and a learning rate."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import GraphFilterError, needs
from .common import from_source

SHUFFLED = 1000  # size of the shuffle buffer of a stream, in rows
TABLES = {".csv", ".json", ".jsonl", ".tsv"}
IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


def check_rate(lr: float | None) -> float | None:
    """Return a learning rate if it is positive and finite, or None."""
    if lr is not None and not 0 < lr < float("inf"):
        raise GraphFilterError(f"--lr must be a positive number, got {lr}")
    return lr


def tokenizer_of(source: str) -> Any:
    """Return the tokenizer of a checkpoint, with a token for padding if it has one that ends texts."""
    from transformers import AutoTokenizer

    from ..checkpoints.tokenizer import knows_words

    try:
        tokenizer = from_source(AutoTokenizer, source)
    except Exception as error:  # a damaged file can raise anything
        raise GraphFilterError(
            f"{source} has no tokenizer that can be read ({type(error).__name__}: {error}): save or download it again"
        ) from error
    if not knows_words(tokenizer):
        raise GraphFilterError(f"{source} has no tokenizer: save that of the original model there")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def text_of(file: Path) -> str:
    """Return the text in a file.

    Raises:
        GraphFilterError: the file is a table or binary.
    """
    content = file.read_bytes()  # once: a pipe has nothing to read a second time
    if file.suffix.lower() in TABLES or b"\0" in content[:8192]:
        raise GraphFilterError(f"{file} is no text file: write its texts into one, each on a line")
    return content.decode(errors="replace").replace("\r\n", "\n")


def lines_of(files: list[Path]) -> list[str]:
    """Return the lines of files that hold text.

    Raises:
        GraphFilterError: a file is a table or binary, or there are no lines.
    """
    lines = [line for file in files for line in text_of(file).splitlines() if line.strip()]
    if not lines:
        raise GraphFilterError(f"{', '.join(map(str, files))} holds no texts: give a file with one text per line")
    return lines


def column_of(dataset: str, configuration: str | None, split: str, column: str, stream: bool = False) -> Iterator[str]:
    """Return an iterator over the texts in a column of a data set of the Hub or a folder, in random order.

    With ``stream`` the data set is read from its beginning, and shuffled within a buffer of ``SHUFFLED`` rows.
    """
    with needs("recipes", "a data set"):
        import datasets
    try:
        rows = datasets.load_dataset(dataset, configuration, split=split, streaming=stream)
        names = rows.column_names or list(next(iter(rows)))
    except Exception as error:  # a loader or the network can raise anything
        raise GraphFilterError(f"--dataset {dataset}: {' '.join(str(error).split())[:300]}") from error
    if column not in names:
        raise GraphFilterError(f"--dataset {dataset} has no column {column!r}; it has {', '.join(names)}")
    rows = rows.shuffle(seed=0, **({"buffer_size": SHUFFLED} if stream else {})).select_columns([column])
    return (row[column] for row in rows if isinstance(row[column], str) and row[column].strip())


def texts_of(source: str, files: list[Path], count: int, length: int, batch_size: int) -> list[Any]:
    """Return batches of the first ``count`` lines of files.

    Raises:
        GraphFilterError: one of the errors of ``lines_of`` and ``tokenizer_of``, or the tokenizer cannot pad texts.
    """
    from transformers import AutoConfig

    lines, tokenizer = lines_of(files)[:count], tokenizer_of(source)
    if tokenizer.pad_token is None:
        raise GraphFilterError(
            f"{source} has a tokenizer with neither pad_token nor eos_token, so that texts cannot be batched: set its "
            "pad_token, and save it there"
        )
    options = {"padding": True, "truncation": True, "max_length": length, "return_attention_mask": True}
    encoder_decoder = from_source(AutoConfig, source).is_encoder_decoder
    batches = []
    for start in range(0, len(lines), batch_size):
        part = lines[start : start + batch_size]
        batch = tokenizer(part, return_tensors="pt", **options)
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        batches.append(add_decoder_inputs(batch) if encoder_decoder else batch)
    return batches


def add_decoder_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with decoder inputs added; these are the text itself."""
    return batch | {f"decoder_{name}": value for name, value in batch.items()}


class Images:
    """Batches of the images in a folder and its subfolders; each iteration reads the files again."""

    def __init__(self, source: str, folder: Path, batch_size: int, count: int | None = None):
        from transformers import AutoImageProcessor

        if not folder.is_dir():
            raise GraphFilterError(f"--images: there is no folder {folder}")
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)  # one class after the other
        if not files:
            raise GraphFilterError(f"--images: {folder} holds no images ({', '.join(sorted(IMAGES))})")
        if count is not None and count < len(files):
            files = [files[i * len(files) // count] for i in range(count)]  # of all subfolders
        self.files = files
        random.Random(0).shuffle(self.files)
        self.batch_size = batch_size
        try:
            self.processor = from_source(AutoImageProcessor, source)
        except Exception as error:  # a damaged file can raise anything
            raise GraphFilterError(f"{source} has no image processor: {error}") from error

    def __len__(self) -> int:
        return -(-len(self.files) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self.files), self.batch_size):
            opened = [open_image(file) for file in self.files[start : start + self.batch_size]]
            yield dict(self.processor(opened, return_tensors="pt"))


def open_image(file: Path) -> Any:
    """Return an image in RGB.

    Raises:
        GraphFilterError: the file is damaged, or has more pixels than PIL takes.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except Exception as error:  # a damaged file can raise anything
        raise GraphFilterError(f"--images: {file} cannot be read as an image ({error}): remove it") from error


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Return epochs, steps and batch size from ``trainer_state.json``; the pickle with the arguments is not read."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
        names = {"num_train_epochs": "epochs", "global_step": "steps", "train_batch_size": "batch size"}
        return {names[key]: state[key] for key in names if state.get(key)}
    except (OSError, ValueError, AttributeError):
        return {}
