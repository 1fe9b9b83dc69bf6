"""The record of a run: by which settings and files it is known again, how it is written and read."""

import contextlib
import functools
import hashlib
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
    known = {(run["seed"], run["variant"]) for run in content["runs"]}
    return [run for run in wanted if run not in known]


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


# ---------------------------------------------------------------------------- which run it is, and where it ran

# these do not change what a run learns: a finished run is the same run whatever they are
INCIDENTAL = (
    {"output_dir", "seeds", "data", "report_to", "run_name", "project", "disable_tqdm", "log_level", "logging_steps"}
    | {"logging_strategy", "save_strategy", "save_steps", "save_total_limit", "push_to_hub", "hub_model_id"}
    | {"hub_token", "hub_private_repo", "hub_revision", "dataloader_num_workers", "dataloader_pin_memory", "use_cpu"}
    | {"per_device_eval_batch_size", "eval_accumulation_steps", "eval_batch_size", "workers", "import"}
    | {"restore_callback_states_from_checkpoint"}
)
# tasks that are what their data are: earlier records have a mark of these alone
OWN_DATA = ("text", "texts", "ratings", "folder")
MARKS = "contents"
MODELS = ("model", "tokenizer", "checkpoint")
LOADED = {".safetensors", ".bin", ".pt", ".pth", ".json", ".txt", ".model"}  # beside cards, records and checkpoints
READ = 256  # files of a folder whose contents are looked at, evenly chosen: of more images, say, only the names besides


def identity(values: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Return the settings on which a run depends; of what is local, its name and a mark of what it holds.

    Args:
        values: of the run.
        folder: in which its task is looked for, below ``data``.
    """
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(values.items()) if v is not None}
    chosen = {k: v for k, v in settings.items() if k not in INCIDENTAL and k != "seed"}
    marks = {}
    for name in MODELS:
        if name in settings and os.path.exists(settings[name]):
            chosen[name] = Path(settings[name]).name
            marks[name] = hash_files(str(settings[name]), model=True)
    if settings.get("eval_strategy") == "steps" and not settings.get("eval_steps"):
        chosen["eval_steps"] = settings.get("logging_steps")  # which the Trainer takes instead: it decides what is best
    if code := [str(path) for path in settings.get("import") or () if os.path.isfile(path)]:
        marks["import"] = " ".join(map(hash_files, code))
    if "data" not in settings:
        marks["data"] = ""  # of the Hub, whatever it holds
    elif os.path.exists(settings["data"]):
        data = Path(settings["data"], folder) if Path(settings["data"], folder).is_dir() else Path(settings["data"])
        marks["data"] = hash_files(str(data))
        if settings.get("task") in OWN_DATA:
            chosen["data"] = hash_sizes(str(settings["data"]))
    return {**chosen, MARKS: marks} if marks else chosen


def list_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of what differs between two identities; earlier ones had no marks to compare."""
    marks, others = a.get(MARKS, {}), b.get(MARKS, {})
    ignored = INCIDENTAL - {"data"} if "data" in a and "data" in b else INCIDENTAL
    settings = {k for k in {*a, *b} - ignored - {MARKS} if a.get(k) != b.get(k)}
    return sorted(settings | {f"the files of {k}" for k in {*marks} & {*others} if marks[k] != others[k]})


@functools.cache
def hash_files(path: str, model: bool = False) -> str:
    """Return a hash of a file or folder, wherever it lies: of the names, sizes and contents of its files.

    Of very many files the contents of a part count; of a model's folder, the files that loading it depends on.
    """
    root = Path(path)
    if model and root.is_dir():
        files = sorted(f for f in root.iterdir() if f.is_file() and f.suffix in LOADED and f.name != RECORD)
    else:
        files = [f for f in list_files(root) if f.suffix != ".md" and not f.name.startswith(".")]
    digest = hashlib.sha256("\n".join(f"{f.relative_to(root)} {f.stat().st_size}" for f in files).encode())
    for file in files[:: max(1, len(files) // READ)]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def list_files(root: Path) -> list[Path]:
    """Return the files of a folder, at any depth and behind links, or the file itself."""
    if not root.is_dir():
        return [root] if root.is_file() else []
    return sorted(
        f for at, _, names in os.walk(root, followlinks=True) for name in names if (f := Path(at, name)).is_file()
    )


@functools.cache
def hash_sizes(data: str) -> str:
    """Return the mark of earlier records: a hash of names and sizes alone."""
    root = Path(data)
    sizes = [f"{file.relative_to(root)} {file.stat().st_size}" for file in list_files(root)]
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:16]


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
