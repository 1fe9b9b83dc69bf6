"""By which a run is known again: the settings that its outcome depends on, and marks of the files that it read."""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from recipes.records import RECORD

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


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
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
