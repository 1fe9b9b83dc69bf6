"""DNA in FASTA files."""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_graphfilter import GraphFilterError
from recipes.data import tsv_rows
from recipes.sequence_tasks.task import Loaded, Task

ENDING = re.compile(r"\.(fa|fasta|fna)(\.gz)?$")
LONGEST = 65_536  # letters that are kept of a record
UNKNOWN = re.compile("[^ACGT]")


def fasta(root: Path, task: Task) -> Loaded:
    """Read a file per class, or one file and labels.tsv: the name of a record, its class."""
    files = sorted(file for file in root.iterdir() if ENDING.search(file.name))
    if (root / "labels.tsv").is_file():
        if len(files) != 1:
            raise GraphFilterError(f"--data: {root} has labels.tsv and {len(files)} FASTA files, one was expected")
        classes = {row["id"]: row["label"] for row in tsv_rows(root / "labels.tsv", ("id", "label"))}
        labels = sorted({*classes.values()})
    else:
        classes = None
        labels = [ENDING.sub("", file.name) for file in files]
    if len(set(labels)) < max(2, len(labels)):
        raise GraphFilterError(f"--data: {root} must hold a FASTA file for each of two classes, or one and labels.tsv")
    sequences, numbers = [], []
    for number, file in enumerate(files):
        for name, sequence in records(file):
            if classes is not None and name not in classes:
                raise GraphFilterError(f"{file}: the record {name[:80]!r} is not in labels.tsv")
            sequences.append(sequence)
            numbers.append(number if classes is None else labels.index(classes[name]))
    return Loaded(DatasetDict(all=Dataset.from_dict({"text_a": sequences, "label": numbers})), tuple(labels))


def records(file: Path) -> Iterator[tuple[str, str]]:
    """Names and beginnings of the sequences, in the letters A, C, G, T and N; never more of one is held."""
    name, pieces, left, new_line = None, [], 0, True
    with gzip.open(file, "rt", encoding="latin-1") if file.suffix == ".gz" else file.open(encoding="latin-1") as lines:
        try:
            for text in iter(lambda: lines.readline(LONGEST), ""):
                if new_line and text.startswith(">"):
                    if name is not None:
                        yield name, sequence(file, name, pieces)
                    name, pieces, left = (text[1:].split() or [""])[0], [], LONGEST
                elif name is None and text.strip():
                    raise GraphFilterError(f"{file} has no line that begins with > before its first sequence")
                elif left and (letters := text.strip()[:left]):
                    pieces.append(letters)
                    left -= len(letters)
                new_line = text.endswith("\n")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise GraphFilterError(f"{file} cannot be read as gzip: {error}") from error
    if name is None:
        raise GraphFilterError(f"{file} holds no sequences")
    yield name, sequence(file, name, pieces)


def sequence(file: Path, name: str, pieces: list[str]) -> str:
    if not pieces:
        raise GraphFilterError(f"{file}: the record {name[:80]!r} has no sequence")
    return UNKNOWN.sub("N", "".join(pieces).upper())
