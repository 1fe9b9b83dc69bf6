"""Batches: what of them the model is given, which are set aside, and the others again and again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn

from ...errors import GraphFilterError
from .objectives import Batch
from .processes import process

LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions", "next_sentence_label")


def set_aside(
    model: nn.Module, dataloader: Iterable[Any], holdout: int | Iterable[Any], labels: bool = False
) -> tuple[list[Batch], int]:
    """The batches to measure on, and how many of the dataloader's they are at its start from now on."""
    if not isinstance(holdout, int):
        return [inputs_of(model, batch, labels) for batch in holdout], 0
    held = [inputs_of(model, batch, labels) for batch in islice(dataloader, holdout)]
    if len(held) < holdout or holdout < 1:
        raise GraphFilterError(f"the dataloader yields {len(held)} batches, holdout={holdout} asks for more")
    return held, 0 if iter(dataloader) is dataloader else holdout


def repeated(model: nn.Module, dataloader: Iterable[Any], skip: int, labels: bool = False) -> Iterator[Batch]:
    """All but the first ``skip``, again and again; from an iterator they come once. Several processes share them."""
    empty, (number, processes) = True, process()
    while empty or iter(dataloader) is not dataloader:
        for batch in islice(dataloader, skip + number, None, processes):
            empty = False
            yield inputs_of(model, batch, labels)
        if empty:
            raise GraphFilterError("the dataloader yields no batch that is not held out (or is exhausted)")


def inputs_of(model: nn.Module, batch: Any, labels: bool) -> Batch:
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        batch = {model.main_input_name: batch}
    if not isinstance(batch, Mapping):
        raise GraphFilterError(f"a batch must be a mapping of model inputs or a tensor, got {type(batch).__name__}")
    kept = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if labels or k not in LABELS}
    if not kept:
        raise GraphFilterError(f"a batch holds {list(batch) or 'nothing'} and no input of the model")
    if "use_cache" in inspect.signature(model.forward).parameters:
        kept["use_cache"] = False
    return kept
