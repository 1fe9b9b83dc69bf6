"""The files of a run and of a comparison: where they are, read and written."""

import json
from pathlib import Path
from typing import Any

from hf_graphfilter import GraphFilterError
from recipes.errors import line

RECORD = "record.json"
RESULTS = Path(__file__).parent / "results"  # shipped: what the tables of the documents are written from


def own_results(values: dict[str, Any]) -> Path:
    """Where comparisons go: beside the folders of the runs."""
    return Path(values["output_dir"]).parent


def results_name(record: dict[str, Any], suffix: str = "") -> str:
    return f"{record['recipe']}-{Path(record['task']).name}{suffix}.json"


def read_results(file: Path) -> dict[str, Any]:
    """A results file of recipes/compare.py; without runs where there is none."""
    if not file.is_file():
        return {"runs": []}
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        content["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise GraphFilterError(f"{file} is no results file of compare.py: {line(error)}") from error
    return content


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)
