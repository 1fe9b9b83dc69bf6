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
    if "data" in own:
        data = Path(own["data"], folder) if Path(own["data"], folder).is_dir() else Path(own["data"])
        marks["data"] = mark_of(str(data))
    return {**kept, MARKS: marks} if marks else kept


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs between two identities; marks are compared where both have them, earlier ones had none."""
    marks, others = a.get(MARKS, {}), b.get(MARKS, {})
    settings = {k for k in {*a, *b} - INCIDENTAL - {MARKS} if a.get(k) != b.get(k)}
    return sorted(settings | {f"the files of {k}" for k in {*marks} & {*others} if marks[k] != others[k]})


@functools.cache
def mark_of(path: str, model: bool = False) -> str:
    """Of a file or folder, wherever it lies: a hash of the names of its files and of what they hold; of a model's
    folder, of those that loading it depends on."""
    root = Path(path)
    if root.is_dir():
        found = root.iterdir() if model else (Path(at, name) for at, _, names in os.walk(root) for name in names)
        files = sorted(f for f in found if f.is_file() and (not model or f.suffix in LOADED) and f.name != RECORD)
    else:
        files = [root] if root.is_file() else []
    digest = hashlib.sha256("\n".join(str(f.relative_to(root)) for f in files).encode())
    for file in files[:: max(1, len(files) // READ)]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
