"""The checkpoints of a run: which is the last whole one, and whether training was over with it."""

import math
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerState

from recipes.errors import note
from recipes.records import try_read


def has_ended(checkpoint: Path) -> bool:
    """Return whether the training was over at a checkpoint, by its number of steps or by early stopping."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    waited: Any = state.stateful_callbacks.get("EarlyStoppingCallback")
    patience = waited["args"]["early_stopping_patience"] if waited else math.inf
    stopped = patience <= (waited["attributes"]["early_stopping_patience_counter"] if waited else 0)
    return stopped or 0 < state.max_steps <= state.global_step


def last_checkpoint(folder: Path, written_last: str = "trainer_state.json", step: str = "global_step") -> str | None:
    """Return the newest checkpoint that is whole.

    What is written last is there, and is of the step in its name. All files of tensors can be opened.
    """
    numbers = {int(n): path for path in folder.glob("checkpoint-*") if (n := path.name.partition("-")[2]).isdecimal()}
    for number in sorted(numbers, reverse=True):
        file = numbers[number] / written_last
        if (state := try_read(file, **{step: int})) is not None:
            if state[step] != number:
                note(f"ignored: {file} is of step {state[step]}")
            elif broken := next((other for other in sorted(file.parent.iterdir()) if is_broken(other)), None):
                note(f"ignored: {broken} is damaged")
            else:
                return str(file.parent)
    return None


def is_broken(file: Path) -> bool:
    """Return whether a file of tensors is cut off."""
    if file.suffix in (".pt", ".pth", ".bin", ".pkl"):
        return not zipfile.is_zipfile(file)
    if file.suffix != ".safetensors":
        return False
    try:
        with safe_open(file, "pt"):
            return False
    except (SafetensorError, OSError):
        return True
