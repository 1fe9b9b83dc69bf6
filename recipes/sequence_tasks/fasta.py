"""DNA and proteins in FASTA files."""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_graphfilter import GraphFilterError
from recipes.errors import note
from recipes.files import tsv_rows
from recipes.sequence_tasks.task import Loaded, Task

ENDING = re.compile(r"\.(fa|fasta|fna)(\.gz)?$")
FOLD = re.compile(r"\S+\s+([a-z]\.\d+)\.\d+\.\d+\b")  # of a header
LONGEST = 65_536  # letters that are kept of a record
DNA, AMINO_ACIDS = "ACGT", "ACDEFGHIKLMNPQRSTVWY"  # what is neither is N, or X
FEWEST = 10  # proteins of a fold, so that it can be cut into parts


def fasta(root: Path, task: Task, alphabet: str = DNA) -> Loaded:
    """Read a file per class, or one file and labels.tsv: the name of a record, its class. Amino acids are spaced."""
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
        for name, sequence in records(file, alphabet):
            if classes is not None and name not in classes:
                raise GraphFilterError(f"{file}: the record {name[:80]!r} is not in labels.tsv")
            sequences.append(sequence if alphabet == DNA else " ".join(sequence))
            numbers.append(number if classes is None else labels.index(classes[name]))
    return Loaded(DatasetDict(all=Dataset.from_dict({"text_a": sequences, "label": numbers})), tuple(labels))


def scope(root: Path, task: Task) -> Loaded:
    """Read a file of SCOPe, whose records name their fold: ``>d1dlwa_ a.1.1.1 ...`` is of the fold a.1."""
    files = sorted(file for file in root.iterdir() if ENDING.search(file.name))
    if len(files) != 1:
        raise GraphFilterError(f"--data: {root} has {len(files)} FASTA files, one of SCOPe was expected")
    proteins: dict[str, list[str]] = {}
    for header, sequence in headers(files[0], AMINO_ACIDS):
        if not (match := FOLD.match(header)):
            raise GraphFilterError(f"{files[0]}: the record {header[:80]!r} names no fold, such as a.1.1.1")
        proteins.setdefault(match[1], []).append(" ".join(sequence))
    folds = [fold for fold in sorted(proteins) if len(proteins[fold]) >= FEWEST]
    if len(folds) < 2:
        raise GraphFilterError(f"{files[0]} has {len(folds)} folds with {FEWEST} proteins, two are needed")
    if num_dropped := sum(map(len, proteins.values())) - sum(len(proteins[fold]) for fold in folds):
        note(f"left out: {num_dropped} proteins of {len(proteins) - len(folds)} folds with less than {FEWEST}")
    rows = [(text, number) for number, fold in enumerate(folds) for text in proteins[fold]]
    columns = dict(zip(("text_a", "label"), map(list, zip(*rows, strict=True)), strict=True))
    return Loaded(DatasetDict(all=Dataset.from_dict(columns)), tuple(folds))


def records(file: Path, alphabet: str = DNA) -> Iterator[tuple[str, str]]:
    """Names of the sequences, the first word of the header, and their beginnings."""
    for header, sequence in headers(file, alphabet):
        yield (header.split() or [""])[0], sequence


def headers(file: Path, alphabet: str) -> Iterator[tuple[str, str]]:
    """Headers and beginnings of the sequences, in the letters of the alphabet; never more of one is held."""
    name, pieces, room, new_line = None, [], 0, True
    with gzip.open(file, "rt", encoding="latin-1") if file.suffix == ".gz" else file.open(encoding="latin-1") as lines:
        try:
            for text in iter(lambda: lines.readline(LONGEST), ""):
                if new_line and text.startswith(">"):
                    if name is not None:
                        yield name, sequence(file, name, pieces, alphabet)
                    name, pieces, room = text[1:].strip(), [], LONGEST
                elif name is None and text.strip():
                    raise GraphFilterError(f"{file} has no line that begins with > before its first sequence")
                elif room and (letters := text.strip()[:room]):
                    pieces.append(letters)
                    room -= len(letters)
                new_line = text.endswith("\n")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise GraphFilterError(f"{file} cannot be read as gzip: {error}") from error
    if name is None:
        raise GraphFilterError(f"{file} holds no sequences")
    yield name, sequence(file, name, pieces, alphabet)


def sequence(file: Path, name: str, pieces: list[str], alphabet: str) -> str:
    if not pieces:
        raise GraphFilterError(f"{file}: the record {name[:80]!r} has no sequence")
    return re.sub(f"[^{alphabet}]", "N" if alphabet == DNA else "X", "".join(pieces).upper())
