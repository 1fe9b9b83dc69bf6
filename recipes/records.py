"""The files of a run and of a comparison: where they are, read and written."""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import Console
from recipes.errors import line

RECORD = "record.json"
RESULTS = Path(__file__).parent / "results"  # shipped: what the tables of the documents are written from


def value_of(record: dict[str, Any], metric: str) -> float:
    """NaN of a run that diverged. Its loss tells too: a class is predicted even where no logit is a number."""
    metrics = record.get("metrics", {})
    value, loss = metrics.get(metric, math.nan), metrics.get(f"{metric.partition('/')[0]}/loss", 0.0)
    return value if math.isfinite(value) and math.isfinite(loss) else math.nan


def lower_is_better(metric: str) -> bool:
    return metric.endswith("perplexity")


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


def move_aside(paths: list[Path], console: Console) -> None:
    """Old results and runs get the first free number at their end."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise GraphFilterError(f"--fresh moves files, which several processes cannot share: move {paths[0]} yourself")
    number = next(n for n in itertools.count(1) if not any(Path(f"{path}.{n}").exists() for path in paths))
    for path in paths:
        if path.exists():
            path.rename(f"{path}.{number}")
            tell(console, f"moved aside: {path} is now {path}.{number}")


def tell(console: Console, message: str) -> None:
    console.print(message, highlight=False, markup=False, soft_wrap=True)
