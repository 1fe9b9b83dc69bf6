"""The record of a run: how it is written and read, and where it ran."""

import contextlib
import functools
import itertools
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_graphfilter import GraphFilterError, files
from hf_graphfilter.console import Console
from recipes.errors import is_main_process, line, note

RECORD = "record.json"
RUN = {"settings": dict[str, Any], "metrics": dict[str, float]}  # what is needed of the record of a run
WAIT = 60  # seconds: for another command to write its results, or to finish the run that is missing
RESULTS = Path(__file__).parent / "results"  # shipped: what the tables of the documents are written from


def get_value(record: dict[str, Any], metric: str) -> float:
    """Return a metric, NaN of a run that diverged; its loss tells too, since a class is predicted from NaN as well."""
    metrics = record.get("metrics", {})
    value, loss = metrics.get(metric, math.nan), metrics.get(f"{metric.partition('/')[0]}/loss", 0.0)
    return value if math.isfinite(value) and math.isfinite(loss) else math.nan


def lower_is_better(metric: str) -> bool:
    return metric.endswith(("perplexity", "mae", "rmse", "wer", "cer"))


def results_folder(values: dict[str, Any]) -> Path:
    """Return the folder of comparisons, which holds those of the runs."""
    return Path(values["output_dir"]).parent


def name_results(record: dict[str, Any], suffix: str = "") -> str:
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


def lock(*locks: Path, work: str, wait: float = 0) -> contextlib.AbstractContextManager[None]:
    """Keep other commands out, as ``locked`` does; of the processes of one command the first does so."""
    return files.locked(*locks, work=work, wait=wait) if is_main_process() else contextlib.nullcontext()


@contextlib.contextmanager
def updating(file: Path, **needed: Any) -> Iterator[dict[str, Any]]:
    """Give the content of a results file to change, and write what it became; other commands wait for their turn.

    Of the processes of one command the first writes.
    """
    with lock(Path(f"{file}.lock"), work="writing these results", wait=WAIT):
        content = read_results(file, **needed)
        try:
            yield content
        finally:
            if content["runs"] and is_main_process():
                write_json(file, content)


def list_missing(wanted: list[tuple[int, str]], content: dict[str, Any]) -> list[tuple[int, str]]:
    """Return the runs, (seed, variant), that are not finished."""
    finished = {(run["seed"], run["variant"]) for run in content["runs"]}
    return [run for run in wanted if run not in finished]


def wait_for_others(count: int, waits: int, console: Console) -> None:
    """Sleep while other commands train what is missing: longer with each of the ``waits`` before."""
    if not waits:
        tell(console, f"waiting for other commands, which train {count} of the missing runs")
    time.sleep(min(2**waits, WAIT))


def try_read(file: Path, **needed: Any) -> dict[str, Any] | None:
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
    """Move old results and runs aside: they get the first free number at their end."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise GraphFilterError(f"--fresh moves files, which several processes cannot share: move {paths[0]} yourself")
    number = next(n for n in itertools.count(1) if not any(Path(f"{path}.{n}").exists() for path in paths))
    for path in paths:
        if path.exists():
            path.rename(f"{path}.{number}")
            tell(console, f"moved aside: {path} is now {path}.{number}")


def tell(console: Console, message: str) -> None:
    console.print(message, highlight=False, markup=False, soft_wrap=True)


def name_machine(arguments: Any) -> str:
    if torch.cuda.is_available() and not arguments.use_cpu:
        return torch.cuda.get_device_name()
    if torch.accelerator.is_available() and not arguments.use_cpu:
        return str(torch.accelerator.current_accelerator())
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@functools.cache
def commit() -> str | None:
    """Return the commit of the checkout, with ``-dirty`` where it was changed; None where there is none."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
