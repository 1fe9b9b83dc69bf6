"""The identity of a run: the settings and files that determine its result."""

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
# tasks that are what their data are: earlier records have a mark of these alone
OWN_DATA = ("text", "texts", "ratings", "folder")
OPTIONS = ("filter_options", "from_scratch", "model_options")  # as NAME=VALUE, in any order
OF_FILTERS = {"filter_options", "filter_lr", "layers"}
MARKS = "contents"
# before the name of a mark
VISIBLE = "visible "  # without the files in hidden folders, which earlier records count
TABLE = "table "  # of the table of the task alone, whose folder earlier records count
MODELS = ("model", "tokenizer", "checkpoint")
LOADED = {".safetensors", ".bin", ".pt", ".pth", ".json", ".txt", ".model"}  # beside cards, records and checkpoints
TABLES = {".csv", ".tsv", ".json", ".jsonl"}
ROWS = "per_device_train_batch_size"
READ = 256  # files of a folder whose contents are looked at, evenly chosen: of more images, say, only the names besides


def identity(values: dict[str, Any], places: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings that a run depends on; a local file is replaced by its name and a hash of its content.

    The rows of a batch are those of all processes together.

    Args:
        values: the settings of the run.
        places: names that the folder or the table of the task may have below ``data``.
    """
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(values.items()) if v is not None}
    result = {k: v for k, v in settings.items() if k not in INCIDENTAL and k != "seed"}
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1 and ROWS in result:
        result[ROWS] *= processes
    marks = {}
    for name in MODELS:
        if name in settings and os.path.exists(settings[name]):
            result[name] = Path(settings[name]).name
            marks[name] = hash_files(str(settings[name]))
    if settings.get("eval_strategy") == "steps" and not settings.get("eval_steps"):
        result["eval_steps"] = settings.get("logging_steps")  # which the Trainer takes instead: it decides what is best
    if settings.get("load_best_model_at_end") and settings.get("save_strategy") == "steps":
        save_steps = settings.get("save_steps", 500)  # the Trainer's default
        if save_steps != result.get("eval_steps"):
            result["best_of_steps"] = save_steps  # only a saved model can be the best
    if code := [str(path) for path in settings.get("import") or () if os.path.isfile(path)]:
        marks["import"] = " ".join(map(hash_files, code))
    if "data" not in settings:
        marks["data"] = ""  # of the Hub, whatever it holds
    elif os.path.exists(settings["data"]):
        data = Path(settings["data"])
        found = next((data / name for name in places if (data / name).exists()), data)
        sizes, data_marks = mark_data(str(found if found.is_dir() else data))
        marks |= data_marks
        if found.is_file() and found != data:
            marks[f"{TABLE}data"] = mark_data(str(found))[1]["data"]
        if settings.get("task") in OWN_DATA:
            result["data"] = sizes
    return {**result, MARKS: marks} if marks else result


def list_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of what differs between two identities; earlier ones had no marks to compare."""
    marks, other_marks = a.get(MARKS, {}), b.get(MARKS, {})
    shared = {k for k in {*marks} & {*other_marks} if not k.startswith((VISIBLE, TABLE))}
    ignored = INCIDENTAL | {MARKS}
    if "data" not in shared and "data" in a and "data" in b:
        ignored -= {"data"}  # the sizes of earlier records
    if a.get("filter") == b.get("filter") == "none":
        ignored, shared = ignored | OF_FILTERS, shared - {"import"}
    settings = {k for k in {*a, *b} - ignored if _unordered(k, a.get(k)) != _unordered(k, b.get(k))}
    return sorted(settings | {f"the files of {k}" for k in shared if not _hashes(k, marks) & _hashes(k, other_marks)})


def _hashes(name: str, marks: dict[str, str]) -> set[str]:
    """Return the hashes of all files, of those in no hidden folder, of the table; one that two runs share is enough."""
    return {marks[key] for key in (name, VISIBLE + name, TABLE + name) if key in marks}


def _unordered(name: str, value: Any) -> Any:
    """Return a setting in a form that does not depend on the order of options."""
    return dict(option.partition("=")[::2] for option in value) if name in OPTIONS and value else value


@functools.cache
def hash_files(path: str) -> str:
    """Return a hash of a file, or of the files in the folder of a model that loading it depends on."""
    root = Path(path)
    files = [root] if root.is_file() else [f for f in root.iterdir() if f.suffix in LOADED and f.name != RECORD]
    return _hash_part(sorted(f for f in files if f.is_file()), root)


@functools.cache
def mark_data(path: str) -> tuple[str, dict[str, str]]:
    """Return the marks of a file or folder of data: that of earlier records, of names and sizes alone; those of now.

    Notes and hidden files do not count. Of very many files the contents of a part count, but those of all tables. The
    folder is listed once, since it may have millions of files.
    """
    root, marks = Path(path), {}
    listed = list_files(root)
    files = [f for f in listed if f.suffix != ".md" and not f.name.startswith(".")]
    visible = [f for f in files if not any(name.startswith(".") for name in f.relative_to(root).parts)]
    parts = {"": files} if visible == files else {"": files, VISIBLE: visible}
    for prefix, part in parts.items():
        marks[f"{prefix}data"] = _hash_part(part, root)
        if len(part) >= 2 * READ and (tables := [f for f in part if f.suffix in TABLES]):
            marks[f"{prefix}tables"] = _hash_contents(tables, hashlib.sha256())
    return _hash_sizes(listed, root).hexdigest()[:16], marks


def list_files(root: Path) -> list[Path]:
    """Return the files of a folder, at any depth and behind links, or the file itself."""
    if not root.is_dir():
        return [root] if root.is_file() else []
    return sorted(
        f for path, _, names in os.walk(root, followlinks=True) for name in names if (f := Path(path, name)).is_file()
    )


def _hash_part(files: list[Path], root: Path) -> str:
    """Return a hash of names and sizes, and of the contents of at most about ``2 * READ`` files."""
    return _hash_contents(files[:: max(1, len(files) // READ)], _hash_sizes(files, root))


def _hash_sizes(files: list[Path], root: Path) -> Any:
    return hashlib.sha256("\n".join(f"{f.relative_to(root)} {f.stat().st_size}" for f in files).encode())


def _hash_contents(files: list[Path], digest: Any) -> str:
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return str(digest.hexdigest()[:16])
