"""The files of a run and of a comparison: where they are, read and written."""

import contextlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

from hf_graphfilter import GraphFilterError, files
from hf_graphfilter.console import Console
from recipes.errors import line, note
from recipes.machine import is_main_process

RECORD = "record.json"
RUN = {"settings": dict[str, Any], "metrics": dict[str, float]}  # what is needed of the record of a run
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


def read_results(file: Path, **needed: Any) -> dict[str, Any]:
    """Return the content of a results file of recipes/compare.py; without runs where there is none.

    Args:
        file: that compare.py or a league wrote.
        needed: the types of what each run must have, if it was not refused.
    """
    if not file.is_file():
        return {"runs": []}
    try:
        content = files.read_json(file, runs=list[dict[str, Any]])
        for run in content["runs"]:
            files.check_content(
                run, file, variant=str, seed=int, **(needed if "refused" not in run else {"refused": str})
            )
        kinds = {"variants": dict[str, Any], "model": str, "metric": str, "summary": dict[str, dict[str, Any]]}
        files.check_content(content, file, **{name: kind for name, kind in kinds.items() if name in content})
    except files.DamagedFileError as error:
        raise GraphFilterError(f"{file} is no results file of compare.py: {line(error)}") from error
    return content


def alone(*locks: Path, work: str) -> contextlib.AbstractContextManager[None]:
    """Keep other commands out, as ``locked`` does; of the processes of one command the first does so."""
    return files.locked(*locks, work=work) if is_main_process() else contextlib.nullcontext()


def read_whole(file: Path, **needed: Any) -> dict[str, Any] | None:
    """Return the JSON object of a file; None where there is none, or none that is whole, which is said."""
    if not file.is_file():
        return None
    try:
        return files.read_json(file, **needed)
    except files.DamagedFileError as error:
        note(f"ignored: {error}")
        return None


def write_json(file: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    files.write_text(file, json.dumps(content, indent=1) + "\n")


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
