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
from pathlib import Path
from typing import Any

import torch

from hf_graphfilter import GraphFilterError, files
from hf_graphfilter.console import Console
from recipes.errors import is_main_process, line, note

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


def results_folder(values: dict[str, Any]) -> Path:
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


def lock(*locks: Path, work: str) -> contextlib.AbstractContextManager[None]:
    """Keep other commands out, as ``locked`` does; of the processes of one command the first does so."""
    return files.locked(*locks, work=work) if is_main_process() else contextlib.nullcontext()


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


# ---------------------------------------------------------------------------- which run it is, and where it ran

# these do not change what a run learns: a finished run is the same run whatever they are
INCIDENTAL = (
    {"output_dir", "seeds", "data", "report_to", "run_name", "project", "disable_tqdm", "log_level", "logging_steps"}
    | {"logging_strategy", "save_strategy", "save_steps", "save_total_limit", "push_to_hub", "hub_model_id"}
    | {"hub_token", "hub_private_repo", "hub_revision", "dataloader_num_workers", "dataloader_pin_memory", "use_cpu"}
    | {"per_device_eval_batch_size", "eval_accumulation_steps", "eval_batch_size", "workers", "import"}
    | {"restore_callback_states_from_checkpoint"}
)
OWN_DATA = ("text", "texts", "folder")  # tasks that are what their data are: earlier records have a mark of these alone
MARKS = "contents"
MODELS = ("model", "tokenizer", "checkpoint")
LOADED = {".safetensors", ".bin", ".pt", ".pth", ".json", ".txt", ".model"}  # beside cards, records and checkpoints
READ = 256  # files of a folder whose contents are looked at, evenly chosen: of more images, say, only the names besides


def identity(values: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """The settings on which the outcome of a run depends; of what is local, its name and a mark of what it holds.

    Args:
        values: of the run.
        folder: in which its task is looked for, below ``data``.
    """
    own = {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(values.items()) if v is not None}
    kept = {k: v for k, v in own.items() if k not in INCIDENTAL and k != "seed"}
    marks = {}
    for name in MODELS:
        if name in own and os.path.exists(own[name]):
            kept[name] = Path(own[name]).name
            marks[name] = mark_of(str(own[name]), model=True)
    if "data" in own and os.path.exists(own["data"]):
        data = Path(own["data"], folder) if Path(own["data"], folder).is_dir() else Path(own["data"])
        marks["data"] = mark_of(str(data))
        if own.get("task") in OWN_DATA:
            kept["data"] = sizes_of(str(own["data"]))
    return {**kept, MARKS: marks} if marks else kept


def list_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs between two identities; marks are compared where both have them, earlier ones had none."""
    marks, others = a.get(MARKS, {}), b.get(MARKS, {})
    ignored = INCIDENTAL - {"data"} if "data" in a and "data" in b else INCIDENTAL
    settings = {k for k in {*a, *b} - ignored - {MARKS} if a.get(k) != b.get(k)}
    return sorted(settings | {f"the files of {k}" for k in {*marks} & {*others} if marks[k] != others[k]})


@functools.cache
def mark_of(path: str, model: bool = False) -> str:
    """Of a file or folder, wherever it lies: a hash of the names and sizes of its files and of what they hold, of very
    many a part; of a model's folder, of those that loading it depends on."""
    root = Path(path)
    if model and root.is_dir():
        files = sorted(f for f in root.iterdir() if f.is_file() and f.suffix in LOADED and f.name != RECORD)
    else:
        files = [f for f in files_in(root) if f.suffix != ".md" and not f.name.startswith(".")]
    digest = hashlib.sha256("\n".join(f"{f.relative_to(root)} {f.stat().st_size}" for f in files).encode())
    for file in files[:: max(1, len(files) // READ)]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def files_in(root: Path) -> list[Path]:
    """Those of a folder, at any depth and behind links, or the file itself."""
    if not root.is_dir():
        return [root] if root.is_file() else []
    return sorted(
        f for at, _, names in os.walk(root, followlinks=True) for name in names if (f := Path(at, name)).is_file()
    )


@functools.cache
def sizes_of(data: str) -> str:
    """The mark of earlier records: of names and sizes alone."""
    root = Path(data)
    sizes = [f"{file.relative_to(root)} {file.stat().st_size}" for file in files_in(root)]
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:16]


def machine_name(arguments: Any) -> str:
    if torch.cuda.is_available() and not arguments.use_cpu:
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@functools.cache
def commit() -> str | None:
    """Of the checkout that the recipes are in, with ``-dirty`` where it was changed; None where there is none."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
