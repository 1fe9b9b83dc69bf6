"""Read the files of a task: tables (TSV, CSV), JSON and lines of text."""

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_graphfilter import GraphFilterError

FILES = {"train": "train", "validation": "valid", "test": "test"}  # the parts, and how official files call them


def read_rows(file: Path, header: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file: TSV (``header`` where the file has none), CSV, JSON, JSON lines or text lines."""
    if file.suffix == ".tsv":
        return list(tsv_rows(file, header))
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".csv":
            csv.field_size_limit(2**31 - 1)  # instead of 128 KiB, which a document may have
            lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
            return list(name_rows(lines, header, file))
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        if file.suffix == ".json":
            rows = json.loads(text)
            return list(rows.values()) if isinstance(rows, dict) else rows
        return [{"text": line.rstrip("\r")} for line in text.removesuffix("\n").split("\n")] if text else []
    except (json.JSONDecodeError, csv.Error, UnicodeDecodeError) as error:
        doc = getattr(error, "doc", None)  # of JSON, in JSON lines one line
        number = f"line {text.split(chr(10)).index(doc) + 1}, " if doc and file.suffix == ".jsonl" else ""
        raise GraphFilterError(f"{file} cannot be read as {file.suffix[1:]}: {number}{error}") from error


def tsv_rows(file: Path, header: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a TSV file without quotes; blank lines are no rows."""
    with file.open(encoding="utf-8-sig") as lines:
        try:
            cells = (text.removesuffix("\n").split("\t") for text in lines if text != "\n")
            yield from name_rows(cells, header, file)
        except UnicodeDecodeError as error:
            raise GraphFilterError(f"{file} cannot be read as tsv: {error}") from error


def name_rows(rows: Iterable[list[str]], header: Sequence[str] | None, source: object) -> Iterator[dict[str, Any]]:
    """Yield rows by the names of the columns.

    These are the ``header``, which every row then fits, or the first row, of whose columns a row may lack some.
    """
    rows = iter(rows)
    names = list(header or next(rows, []))
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise GraphFilterError(f"{source} has two columns called {twice}")
    for number, cells in enumerate(rows, 1):
        if len(cells) > len(names) or (header and len(cells) < len(names)):
            raise GraphFilterError(f"{source}: row {number} has {len(cells)} columns, {len(names)} were expected")
        yield dict(itertools.zip_longest(names, cells))


def first_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of ``names`` that is in ``folder``."""
    if not folder.is_dir():
        raise GraphFilterError(f"--data: there is no folder {folder}{': it is a file' * folder.exists()}")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    files = ", ".join(sorted(p.name for p in folder.iterdir())[:12])
    raise GraphFilterError(f"--data: {folder} has no {' or '.join(names)}; it holds: {files or 'nothing'}")


def read_texts(folder: Path, classes: Sequence[str]) -> Dataset:
    """Return the files of FOLDER/CLASS/ as texts, with the number of their class; UTF-8, or else Latin-1."""
    rows = []
    for label, name in enumerate(classes):
        files = sorted(f for f in (folder / name).iterdir() if f.is_file() and not f.name.startswith("."))
        if not files:
            raise GraphFilterError(f"{folder / name} holds no documents")
        for file in files:
            rows.append({"text_a": read_text(file), "label": label})
            if not rows[-1]["text_a"].strip():
                raise GraphFilterError(f"{file} is an empty document")
    return Dataset.from_list(rows)


def read_text(file: Path) -> str:
    content = file.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")
