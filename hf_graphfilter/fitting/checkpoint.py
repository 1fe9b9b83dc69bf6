"""Keep the progress of a fit on disk, for one call at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import align_module_device
from torch import Tensor, nn

from ..devices import is_first_process
from ..errors import GraphFilterError, is_number, shown
from ..files import DamagedFileError, check_content, locked, read_json, read_state, write_state
from ..filters.core.attached import CHILD
from .objectives import Batch
from .processes import total

STATE_FILE, LOCK = "transfer.safetensors", ".lock"
INPUTS = ("inputs-train", "inputs-held")  # folders with the stored inputs of a fit in blocks
EARLIER_FILE = "transfer.json"  # earlier versions kept everything but the tensors here
# types of the values that are written beside the tensors
NEEDED = {"settings": dict[str, Any], "stage": str, "finished": list[str], "step": int, "earlier_steps": int}
NEEDED |= {"best": float, "stale": int, "history": list[list[float]], "before": dict[str, float]}
LATER = {"used": int, "before_it": int, "stopped": str}  # the first release wrote none of these


class Checkpoint:
    """The parameters, moments and counters of a fit, in one safetensors file that is replaced as a whole."""

    def __init__(self, directory: str | os.PathLike[str], settings: dict[str, Any]):
        self.directory, self.settings = Path(directory), settings
        self.finished: list[str] = []

    def write(self, stage: str, finished: bool, progress: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the file; after an interruption the earlier file is intact."""
        if finished:
            self.finished.append(stage)
        if not is_first_process():
            return
        content = {"settings": self.settings, "stage": stage, "finished": self.finished, **progress}
        write_state(self.directory / STATE_FILE, content, tensors)
        (self.directory / EARLIER_FILE).unlink(missing_ok=True)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the progress and the tensors, or None without an intact file; set ``finished`` to the ended stages."""
        try:
            state = self._read()
        except DamagedFileError as error:
            warnings.warn(f"progress is ignored, and the fit begins again: {error}", stacklevel=2)
            return None
        if state is None:
            return None
        check_same(state[0]["settings"], self.settings, self.directory)
        self.finished = state[0]["finished"]
        return state

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        file, earlier_file = self.directory / STATE_FILE, self.directory / EARLIER_FILE
        if not file.exists() and not earlier_file.exists():
            return None
        content, tensors = read_state(file)
        is_one_file = content is not None
        if content is None:
            file, content = earlier_file, read_json(earlier_file)
        optional_kinds = {name: kind for name, kind in LATER.items() if name in content}
        progress = check_content(content, file, **NEEDED, **optional_kinds)
        counts = (progress[name] for name, kind in (NEEDED | optional_kinds).items() if kind is int)
        pairs = progress["history"]
        if not all(map(is_number, counts)) or not pairs or any(len(pair) != 2 for pair in pairs):
            raise DamagedFileError(f"{file} is damaged: it counts {shown(progress)}")
        # earlier versions wrote two files, which may be of different steps; AdamW counts the steps too
        moments = [t for name, t in tensors.items() if name.startswith("step.") and t.numel()]
        if not is_one_file and max((t.max().item() for t in moments), default=0) != progress["step"]:
            raise DamagedFileError(f"{file} is damaged: it is not of the step of its tensors")
        return progress, tensors


def check_directory(checkpoint: str | os.PathLike[str] | None) -> None:
    """Raise an error before long work if ``checkpoint`` is a file."""
    if checkpoint is not None and os.path.isfile(checkpoint):
        raise GraphFilterError(f"checkpoint must be a directory, and {shown(str(checkpoint))} is a file")


def check_same(earlier: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Raise an error if earlier progress has other settings than this fit; old versions recorded fewer settings."""
    before, now = ({"blocks": 1, **settings} for settings in (earlier, now))  # written only if there are several blocks
    if changed := [name for name, value in before.items() if value != now.get(name)]:
        raise GraphFilterError(
            f"{directory} holds the progress of another transfer ({', '.join(changed)} differ): "
            "use its settings to resume it, or another directory"
        )


@contextlib.contextmanager
def exclusive(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Lock a directory of progress against other calls; the processes of one call share the lock.

    Raises:
        GraphFilterError: another call uses the directory. The error is raised in all processes.
    """
    with contextlib.ExitStack() as exit_stack:
        problem: Exception | None = None
        if directory is not None and is_first_process():
            try:
                exit_stack.enter_context(locked(Path(directory, LOCK), work="fitting with this directory"))
            except (GraphFilterError, OSError) as error:
                problem = error
        if total(problem is not None):
            raise problem or GraphFilterError(f"another command is fitting with this directory: {directory}")
        yield


def is_kept(directory: Path) -> bool:
    """Return whether a directory, or the folder of one of its stages, holds progress."""
    return any(any(directory.glob(pattern)) for pattern in (STATE_FILE, f"*/{STATE_FILE}"))


def remove(directory: Path) -> None:
    """Remove the files of an interrupted fit from a directory, and leave other files there."""
    for folder in (*directory.glob("*/"), directory):  # a folder for each stage
        inputs = folder.glob("*") if folder.name in INPUTS else ()
        names = STATE_FILE, EARLIER_FILE, LOCK
        for file in (*folder.glob(f".{STATE_FILE}.*"), *(folder / name for name in names), *inputs):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def marked(values: Iterable[Any]) -> str:
    """Return a hash of a few numbers of each tensor; it identifies a model or batches."""
    digest = hashlib.sha256()
    for x in values:
        if isinstance(x, Tensor):
            try:
                numbers = x.detach().flatten()[:: max(1, x.numel() // 16)].tolist()
            except NotImplementedError:  # some quantized tensors cannot be read like others
                numbers = []
            digest.update(repr((x.dtype, x.shape, numbers)).encode())
    return digest.hexdigest()


def fitted_to(model: nn.Module, held_out: list[Batch]) -> dict[str, str]:
    """Return settings that identify the weights outside the filters, and the held-out batches."""
    weights = (
        _fetch(model, name) if x.is_meta else x for name, x in model.state_dict().items() if f".{CHILD}." not in name
    )
    return {"model": marked(weights), "held out": marked(x for batch in held_out for x in batch.values())}


def _fetch(model: nn.Module, name: str) -> Tensor:
    """Return a weight that accelerate has offloaded."""
    owner, _, own_name = name.rpartition(".")
    with align_module_device(module := model.get_submodule(owner), "cpu"):
        return getattr(module, own_name)
