"""Tables of molecules in SMILES, and how they are split."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import needs, require, shown
from hf_graphfilter.graphs import from_smiles
from hf_graphfilter.graphs.dataset import check_labels
from hf_graphfilter.graphs.molecules import silence_rdkit
from recipes.data import choose
from recipes.errors import note

SHARES = (0.8, 0.1)  # training and validation part of a table without parts
COLUMNS = {"split": "given", "scaffold_split": "scaffold", "random_split": "random"}  # which name the part of a row
NAMES = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}


def read_molecules(
    file: Path, target: str, split: str | None, ranges: tuple[int, ...], strict: bool
) -> tuple[dict[str, Callable[[], Iterator[Any]]], str]:
    """Return (what yields the graphs of each part of a table with a column of SMILES, how they were split).

    Args:
        file: the table.
        target: its columns to predict, by commas.
        split: how it is split, see ``split_rows``.
        ranges: rows of the training and the validation part, for a table whose order is its split.
        strict: whether a target that is no number is an error, or is missing and named.
    """
    require("rdkit", "graphs", "reading molecules")
    try:
        table = pd.read_csv(file)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise GraphFilterError(f"{file} cannot be read as a table: {error}") from error
    targets = target.split(",")
    columns = choose({"smiles": ("smiles", "SMILES", "mol"), **{t: (t,) for t in targets}}, list(table.columns), file)
    numbers = np.stack([_read_numbers(table[name], file, strict) for name in targets], 1)
    smiles = table[columns["smiles"]].fillna("").astype(str).tolist()
    places, split_name = split_rows(table, smiles, split, ranges, file)

    def read(rows: Iterable[int]) -> Iterator[Any]:
        for row in rows:
            try:
                check_labels(numbers[row])
                yield from_smiles(smiles[row]) | {"labels": numbers[row]}
            except GraphFilterError as error:  # GraphDataset raises it or counts it
                yield GraphFilterError(f"row {row + 1} of the table, {shown(smiles[row])}: {error}")

    return {part: partial(read, rows) for part, rows in places.items()}, split_name


def _read_numbers(column: "pd.Series[Any]", file: Path, strict: bool) -> Any:
    """Return a target as floats, NaN where it is missing."""
    numbers = pd.to_numeric(column, errors="coerce")
    invalid = column[numbers.isna() & column.notna()]
    if len(invalid):
        message = f"{file}, column {column.name}: {len(invalid)} of {len(column)} values are no numbers, the first "
        message += repr(invalid.iloc[0])
        if strict or len(invalid) == column.notna().sum():
            raise GraphFilterError(f"{message}: a target is a number, classes are 0 and 1")
        note(f"{message}: they count as missing")
    return numbers.to_numpy(float)


def split_rows(
    table: pd.DataFrame, smiles: list[str], split: str | None, ranges: tuple[int, ...], file: Path
) -> tuple[dict[str, Any], str]:
    """Return (rows of each part, how they were split).

    ``split`` is ``given``, ``random`` or ``scaffold``. None stands for the first column that names parts (``split``,
    ``scaffold_split`` or ``random_split``), else for ``random``.
    """
    order = np.arange(len(table))
    split = split or next((method for name, method in COLUMNS.items() if name in table.columns), "random")
    if split == "given" and ranges:
        ends = np.cumsum(ranges)
        if len(table) < ends[-1]:
            raise GraphFilterError(
                f"{file} has {len(table):,} rows, and the official split needs {ends[-1]:,}: is it the whole table?"
            )
        return {"train": order[: ends[0]], "validation": order[ends[0] : ends[1]]}, "official"
    column = next(name for name, method in COLUMNS.items() if method == split)
    if column in table.columns:
        parts = {part: order[table[column].isin(names)] for part, names in NAMES.items()}
        valid = sum(NAMES.values(), ())
        if len(unknown := table[column][~table[column].isin(valid)]):
            raise GraphFilterError(
                f"{file}: {column} is {unknown.iloc[0]!r} in a row, expected {', '.join(valid)}; a column of another "
                "name is not read"
            )
        if empty := [part for part, rows in parts.items() if not len(rows)]:
            raise GraphFilterError(f"{file}: column {column} has no rows for the {empty[0]} part")
        return parts, f"{column} of the table"
    if split == "given":
        raise GraphFilterError(f"{file} has no column split: use --split random or scaffold")
    a, b = (round(share * len(order)) for share in (SHARES[0], sum(SHARES)))
    groups = [[row] for row in np.random.default_rng(0).permutation(order)] if split == "random" else scaffolds(smiles)
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for group in groups:  # whole, into the first part that has room
        used = len(parts["train"]) + len(parts["validation"])
        part = "train" if len(parts["train"]) + len(group) <= a else "validation" if used + len(group) <= b else "test"
        parts[part] += group
    if empty := [part for part, rows in parts.items() if not rows]:
        hint = ": use --split random" if split == "scaffold" else ""
        raise GraphFilterError(f"{file}: {len(order)} rows split by {split} leave none for the {empty[0]} part{hint}")
    return {part: np.array(rows) for part, rows in parts.items()}, f"80/10/10, {split}"


def scaffolds(smiles: list[str]) -> list[list[int]]:
    """Return the rows of the molecules with one Murcko scaffold together, the largest groups first."""
    with needs("graphs", "--split scaffold"):
        from rdkit import Chem
        from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
    groups: dict[str, list[int]] = {}
    with silence_rdkit():
        for row, text in enumerate(smiles):
            molecule = Chem.MolFromSmiles(text)
            scaffold = "" if molecule is None else MurckoScaffoldSmiles(mol=molecule, includeChirality=False)
            groups.setdefault(scaffold, []).append(row)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))
