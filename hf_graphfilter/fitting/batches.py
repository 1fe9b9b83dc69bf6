"""Batches: what of them the model is given, which are set aside, and the others again and again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import GraphFilterError
from .objectives import Batch
from .processes import process

LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions", "next_sentence_label")


def split_holdout(data: Iterable[Any], holdout: int | Iterable[Any]) -> tuple[Iterable[Any], int | Iterable[Any]]:
    """(data, what to measure on) of a ``DataLoader`` that shuffles, by rows: the batches at the start of one pass come
    again among all others in the next. All else is left as it is.

    Raises:
        GraphFilterError: it has no rows that could be told apart.
    """
    if not isinstance(holdout, int) or not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return data, holdout
    batched = data.batch_sampler  # accelerate's loaders tell no other sampler
    if type(batched) is BatchSampler and isinstance(batched.sampler, SequentialSampler):
        return data, holdout
    size, of_all = getattr(batched, "batch_size", None), getattr(batched, "batch_sampler", batched)
    sampler = getattr(of_all, "sampler", of_all)
    shown = _rows_of(sampler, data.dataset)
    if not size or shown is None:
        raise GraphFilterError(
            f"this DataLoader may show the first {holdout} batches again later ({type(sampler).__name__}), "
            "where they would be trained on: give holdout= as batches of other rows"
        )
    order = torch.Generator().manual_seed(0)  # the same in all processes, which share the batches
    rows = [shown[i] for i in torch.randperm(len(shown), generator=order).tolist()]
    options: dict[str, Any] = {"batch_size": size, "collate_fn": data.collate_fn, "num_workers": data.num_workers}
    held, rest = (Subset(data.dataset, part) for part in (rows[: holdout * size], rows[holdout * size :]))
    return DataLoader(rest, shuffle=True, generator=order, **options), list(DataLoader(held, **options))


def _rows_of(sampler: Sampler[int] | Any, dataset: Any) -> Sequence[int] | None:
    """What a sampler that shuffles draws from; None of one that goes by weights, or by a rule of its own."""
    if isinstance(sampler, SubsetRandomSampler):
        return sampler.indices
    whole = isinstance(sampler, (RandomSampler, DistributedSampler, LengthGroupedSampler))
    return range(len(dataset)) if whole and hasattr(dataset, "__len__") else None


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


def one_pass(batches: Iterator[Batch]) -> Callable[[], Iterator[Batch]]:
    """The same iterator for every stage: those that come after its end have nothing left."""
    first = next(batches)  # or the error that there is none
    rest = chain([first], batches)
    return lambda: rest


def inputs_of(model: nn.Module, batch: Any, labels: bool) -> Batch:
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        batch = {model.main_input_name: batch}
    if not isinstance(batch, Mapping):
        raise GraphFilterError(f"a batch must be a mapping of model inputs or a tensor, got {type(batch).__name__}")
    kept = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if labels or k not in LABELS}
    if "labels" in batch and "labels" not in kept:
        kept |= _read_by_decoder(model, kept, batch["labels"])
    if not kept:
        raise GraphFilterError(f"a batch holds {list(batch) or 'nothing'} and no input of the model")
    if "use_cache" in inspect.signature(model.forward).parameters:
        kept["use_cache"] = False
    return kept


def _read_by_decoder(model: nn.Module, kept: Batch, labels: Any) -> Batch:
    """What an encoder-decoder makes of labels for its decoder to read, where it is given nothing else to."""
    config = getattr(model, "config", None)
    given = any(name.startswith("decoder_input") for name in kept)
    if given or not isinstance(labels, Tensor) or not getattr(config, "is_encoder_decoder", False):
        return {}
    shifted: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is None:
        raise GraphFilterError(f"the batches of {type(model).__name__} need decoder_input_ids beside input_ids")
    labels = labels.to(next(model.parameters()).device)
    made = {"decoder_input_ids": shifted(labels=labels), "decoder_attention_mask": (labels != -100).long()}
    return {name: x for name, x in made.items() if name in inspect.signature(model.forward).parameters} | kept
