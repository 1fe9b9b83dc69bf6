"""What the pages read, and how they tell of it."""

import csv
from collections.abc import Iterable
from pathlib import Path

from measure import RESULTS

MASKS = {"False": "full", "True": "causal"}  # by the column `causal`
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "results"
CARD = ROOT / "model_cards" / "minilm-movie-snippets"


def read(name: str) -> list[dict]:
    """Rows of a results file; none where it has not been measured on this kind of device."""
    file = RESULTS / f"{name}.csv"
    return list(csv.DictReader(file.read_text().splitlines())) if file.is_file() else []


def pivot(rows: Iterable[dict], *keys: str) -> dict[tuple[str, ...], dict[str, dict]]:
    """Return the rows of each case by form, in their order; a case is given by the values of ``keys``."""
    cases: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in keys), {})[row["form"]] = row
    return cases


def where(rows: list[dict]) -> str:
    versions = [
        f"{name} {' and '.join(dict.fromkeys(row[name] for row in rows))}"
        for name in ("torch", "transformers")
        if name in rows[0]
    ]
    devices = " and ".join(dict.fromkeys(row["device"] for row in rows))
    measured = f"{devices}, {days(row['date'] for row in rows)}"
    return "; ".join(filter(None, (measured, ", ".join(versions)))) + "."


def days(dates: Iterable[str]) -> str:
    """Return the first date and the last."""
    ordered = sorted(dates)
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))


def over_plain(row: dict) -> float:
    return float(row["ratio_to_plain"])


def with_memory(rows: list[dict], file: Path) -> list[dict]:
    def key(row: dict) -> tuple:
        return row["n"], row["causal"], row["pass"], row["form"]

    peaks = {key(row): row["peak_mb"] for row in read(file.stem)}
    return [{**row, "peak_mb": peaks.get(key(row), "-")} for row in rows]
