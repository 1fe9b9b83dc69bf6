"""Keep the inputs of the blocks of a model on disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphFilterError
from ..files import read_json, read_state, write_state, write_text
from .checkpoint import check_same
from .objectives import Batch

INPUT = "input_of_the_block"  # key of the hidden states among the inputs of the model
STATE = "inputs.json"


class Inputs:
    """Batches on disk, each with the hidden states before the next block to fit.

    Args:
        folder: the folder of the files.
        device: the device that the batches are loaded to.
        settings: all settings besides the data that determine the batches.

    Attributes:
        count: number of batches.
        passed: number of blocks that are fitted, and whose outputs are stored.
    """

    def __init__(self, folder: Path, device: torch.device, settings: dict[str, Any]):
        self.folder, self.device, self.settings = folder, device, settings
        self.count = self.passed = 0

    def keep(self, batches: Iterable[Batch], budget: float, size: Callable[[Batch], int]) -> None:
        """Write batches until their sizes reach the budget, or reuse those of an interrupted call.

        Raises:
            GraphFilterError: the folder holds the batches of a call with other settings, which has fitted a block, or a
                batch has an entry that cannot be stored.
        """
        if (self.folder / STATE).is_file():
            state = read_json(self.folder / STATE, count=int, passed=int)
            settings = state.get("settings", self.settings)  # earlier code wrote none
            if state["passed"]:
                check_same(settings, self.settings, self.folder)
            if settings == self.settings:
                self.count, self.passed = state["count"], state["passed"]
                next(itertools.islice(batches, self.count, self.count), None)  # later stages get the batches after them
                return
        for file in self.folder.glob("*.safetensors"):  # of a call that was given up
            file.unlink()
        used = 0.0
        for batch in batches:
            plain = {name: value for name, value in batch.items() if not isinstance(value, Tensor)}
            tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            try:
                write_state(self._file(self.count), plain, tensors)
            except TypeError as error:
                raise GraphFilterError(
                    f"blocks= stores the batches, and cannot store an entry of one: {error}"
                ) from error
            self.count, used = self.count + 1, used + size(batch)
            if used >= budget:
                break
        self._note(0)

    def read(self, block: int) -> Iterator[Batch]:
        """Yield the batches as inputs of a block; yield nothing for a block that is already passed."""
        for number in range(self.count if self.passed <= block else 0):
            plain, tensors = read_state(self._file(number))
            if block:
                tensors |= read_state(self._file(number, block))[1]
            yield {**(plain or {}), **{name: tensor.to(self.device) for name, tensor in tensors.items()}}

    def pass_through(self, number: int, block: Callable[..., Tensor]) -> None:
        """Replace the stored hidden states before ``block``, the block of this ``number``, by those after it."""
        if self.passed > number:
            return
        for i, batch in enumerate(self.read(number)):
            write_state(self._file(i, number + 1), {}, {INPUT: block(**batch)})
        self._note(number + 1)

    def finish(self, blocks: int) -> None:
        """Remove all tensors; later calls find that all ``blocks`` are fitted."""
        self._note(blocks)
        for i in range(self.count):
            self._file(i).unlink(missing_ok=True)

    def _note(self, passed: int) -> None:
        state = {"count": self.count, "passed": passed, "settings": self.settings}
        write_text(self.folder / STATE, json.dumps(state))
        self.passed = passed
        for i, block in itertools.product(range(self.count), range(1, passed)):
            self._file(i, block).unlink(missing_ok=True)

    def _file(self, number: int, block: int | None = None) -> Path:
        return self.folder / (f"{number}.safetensors" if block is None else f"{number}-{block}.safetensors")
