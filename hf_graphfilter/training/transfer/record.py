"""What a transfer leaves: its report, and its progress on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import GraphFilterError

STATE_FILE, PROGRESS_FILE = "transfer.safetensors", "transfer.json"


def mean(errors: dict[str, float]) -> float:
    """Over the modules."""
    return sum(errors.values()) / len(errors)


@dataclass
class TransferReport:
    """What ``transfer_attention`` did; prints as a table.

    Attributes:
        before, after: relative L2 error ``|filter - attention| / |attention|`` of each module on the held-out batches.
        steps: of optimisation that were made, both stages together.
        seconds: of wall-clock time.
        stopped: why it ended: ``"all steps made"``, ``"no improvement"``, or what became non-finite.
        history: (step, mean held-out error) pairs.
    """

    before: dict[str, float]
    after: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    stopped: str = "all steps made"
    history: list[tuple[int, float]] = field(default_factory=list)

    @property
    def mean_before(self) -> float:
        return mean(self.before)

    @property
    def mean_after(self) -> float:
        return mean(self.after)

    def __str__(self) -> str:
        width = max(map(len, [*self.after, "module"]))
        rows = [f"{name:<{width}}  {self.before[name]:6.3f}  {error:6.3f}" for name, error in self.after.items()]
        means = f"{'mean':<{width}}  {self.mean_before:6.3f}  {self.mean_after:6.3f}"
        head = f"{'module':<{width}}  before   after"
        return "\n".join([head, *rows, means, f"{self.steps} steps, {self.seconds:.0f} s, {self.stopped}"])


class Checkpoint:
    """Progress on disk: safetensors for parameters and moments, JSON for the rest."""

    def __init__(self, directory: str | os.PathLike[str], settings: dict[str, Any]):
        self.directory, self.settings = Path(directory), settings
        self.finished: list[str] = []

    def write(self, stage: str, finished: bool, progress: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Each file is replaced when it is whole: an interrupted write leaves the last state."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if finished:
            self.finished.append(stage)
        partial = self.directory / f"{STATE_FILE}.part"
        save_file({k: t.cpu().contiguous().clone() for k, t in tensors.items()}, partial)
        partial.replace(self.directory / STATE_FILE)
        text = self.directory / f"{PROGRESS_FILE}.part"
        text.write_text(json.dumps({"settings": self.settings, "stage": stage, "finished": self.finished, **progress}))
        text.replace(self.directory / PROGRESS_FILE)

    def progress(self) -> dict[str, Any] | None:
        """What was written, with the stages that are finished in ``finished``; None if nothing was."""
        file = self.directory / PROGRESS_FILE
        if not file.is_file():
            return None
        progress: dict[str, Any] = json.loads(file.read_text())
        if progress["settings"] != self.settings:
            changed = [k for k in self.settings if progress["settings"].get(k) != self.settings[k]]
            raise GraphFilterError(
                f"{self.directory} holds the progress of another transfer ({', '.join(changed) or 'settings'} differ): "
                "use its settings to go on with it, or another directory"
            )
        self.finished = progress["finished"]
        return progress

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.directory / STATE_FILE)
