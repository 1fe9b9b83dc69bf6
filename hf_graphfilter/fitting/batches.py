"""The batches of a fit: held-out ones to measure on, and the others, which are repeated."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
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

from ..analysis.model_inputs import check_batches, to_device
from ..devices import device_of, process
from ..errors import GraphFilterError, shown
from .objectives import Batch

NONE_LEFT = "no batch is left that is not held out: give more batches, or a smaller holdout"
WORKERS = "num_workers", "worker_init_fn", "multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout"
LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions", "next_sentence_label")


class Batches:
    """The batches of a fit, as inputs of the model, on its device.

    Args:
        model: the model that reads the batches.
        data: mappings of model inputs, or tensors, the model's main input.
        holdout: number of batches to take from ``data`` and measure on, or the batches to measure on.
        labels: whether the model receives labels too.

    Attributes:
        held_out: the batches to measure on.

    Raises:
        GraphFilterError: there are too few batches, or a batch is no input of the model.
    """

    def __init__(self, model: nn.Module, data: Iterable[Any], holdout: int | Iterable[Any], labels: bool = False):
        if isinstance(holdout, int) and (holdout < 1 or isinstance(holdout, bool)):
            raise GraphFilterError(f"holdout must be a number of batches, at least 1, got {shown(holdout)}")
        data, holdout = split_holdout(check_batches(data), holdout)
        to_inputs = partial(inputs_of, model, labels=labels)
        count = holdout if isinstance(holdout, int) else 0
        self.held_out = [*map(to_inputs, islice(data, count) if isinstance(holdout, int) else check_batches(holdout))]
        if not isinstance(holdout, int) and not self.held_out:
            raise GraphFilterError("holdout holds no batches to measure on")
        if isinstance(holdout, int) and len(self.held_out) < holdout:
            raise GraphFilterError(
                f"there are {len(self.held_out)} batches, and holdout={holdout} asks for more: give more batches, or a "
                "smaller holdout"
            )
        self._data, self._to_inputs = data, to_inputs
        self._is_iterator = iter(data) is data  # an iterator gives each batch once: later stages resume where it stands
        self._skip = 0 if self._is_iterator else count
        with contextlib.suppress(TypeError):  # of data without a length
            if len(data) - self._skip < process()[1]:  # type: ignore[arg-type]  # one for each process
                raise GraphFilterError(NONE_LEFT)
        self._remaining: Iterator[Batch] | None = None

    def stream(self) -> Iterator[Batch]:
        """Return an iterator over the batches for one stage, which repeats them.

        If ``data`` is an iterator, each batch comes only once in all stages together. Several processes share the
        batches.
        """
        if not self._is_iterator:
            return self._repeat()
        if self._remaining is None:
            batches = self._repeat()
            self._remaining = chain([next(batches)], batches)  # raises here if there is none
        return self._remaining

    def _repeat(self) -> Iterator[Batch]:
        first_pass, (number, processes) = True, process()
        while True:
            empty = True
            for batch in islice(self._data, self._skip + number, None, processes):
                empty = False
                yield self._to_inputs(batch)
            if empty and first_pass:
                raise GraphFilterError(NONE_LEFT)
            if empty or self._is_iterator:  # some data can be read once and is no iterator itself
                return
            first_pass = False


def split_holdout(data: Iterable[Any], holdout: int | Iterable[Any]) -> tuple[Iterable[Any], int | Iterable[Any]]:
    """Split the rows of a ``DataLoader`` that shuffles into training and held-out batches; return other data unchanged.

    The first batches of such a loader cannot be held out: their rows would come again in its next pass.

    Raises:
        GraphFilterError: the sampler does not say which rows it draws from, or there are too few rows.
    """
    if not isinstance(holdout, int) or not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return data, holdout
    batch_sampler = data.batch_sampler  # accelerate's loaders have no other sampler
    sampler_owner = data if batch_sampler is None else batch_sampler if type(batch_sampler) is BatchSampler else None
    if sampler_owner is not None and isinstance(sampler_owner.sampler, SequentialSampler):
        return data, holdout
    size, base = getattr(batch_sampler, "batch_size", None), getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(base, "sampler", base)
    sampler_rows = _rows_of(sampler, data.dataset)
    if not size or sampler_rows is None:
        raise GraphFilterError(
            f"this DataLoader may show the first {holdout} batches again later ({type(sampler).__name__}), "
            "where they would be trained on: give holdout= as batches of other rows"
        )
    generator = torch.Generator().manual_seed(0)  # the same in all processes, which share the batches
    rows = [sampler_rows[i] for i in torch.randperm(len(sampler_rows), generator=generator).tolist()]
    options: dict[str, Any] = {name: getattr(data, name) for name in ("collate_fn", "pin_memory", *WORKERS)}
    options |= {"batch_size": size, "drop_last": getattr(batch_sampler, "drop_last", False)}
    if len(rows) <= holdout * size:
        raise GraphFilterError(NONE_LEFT)
    held_out, training = (Subset(data.dataset, part) for part in (rows[: holdout * size], rows[holdout * size :]))
    return DataLoader(training, shuffle=True, generator=generator, **options), list(DataLoader(held_out, **options))


def _rows_of(sampler: Sampler[int] | Any, dataset: Any) -> Sequence[int] | None:
    """Return the rows that a sampler draws from; None for a sampler with weights or another rule."""
    if isinstance(sampler, SubsetRandomSampler):
        return sampler.indices
    draws_all = isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler, LengthGroupedSampler))
    return range(len(dataset)) if draws_all and hasattr(dataset, "__len__") else None


def inputs_of(model: nn.Module, batch: Any, labels: bool) -> Batch:
    """Return the entries of a batch that the model receives, on its device."""
    batch = to_device(batch, device_of(model))
    if isinstance(batch, Tensor):
        first = next(iter(inspect.signature(model.forward).parameters))  # for models of timm and PyTorch
        batch = {getattr(model, "main_input_name", first): batch}
    inputs = {name: x for name, x in batch.items() if labels or name not in LABELS}
    if "labels" in batch and "labels" not in inputs:
        inputs |= _make_decoder_inputs(model, inputs, batch["labels"])
    if not inputs:
        raise GraphFilterError(f"a batch holds {list(batch) or 'nothing'} and no input of the model")
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def _make_decoder_inputs(model: nn.Module, inputs: Batch, labels: Any) -> Batch:
    """Make the inputs of a decoder from the labels, if the batch holds no others; return the entries to add."""
    config = getattr(model, "config", None)
    has_inputs = any(name.startswith("decoder_input") for name in inputs)
    if has_inputs or not isinstance(labels, Tensor) or not getattr(config, "is_encoder_decoder", False):
        return {}
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    start = getattr(config, "decoder_start_token_id", None)
    if shift is None and start is None:
        name = model.main_input_name
        raise GraphFilterError(f"the batches of {type(model).__name__} need decoder_input_ids beside {name}")
    labels = labels.to(device_of(model))
    if shift is not None:
        tokens = shift(labels=labels)
    else:  # speech models (Whisper ...) have no such method, so their labels are shifted here
        tokens = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], 1)
        tokens = tokens.masked_fill(tokens == -100, config.pad_token_id)  # type: ignore[union-attr]
    entries = {"decoder_input_ids": tokens, "decoder_attention_mask": (labels != -100).long()}
    return {name: x for name, x in entries.items() if name in inspect.signature(model.forward).parameters} | inputs
