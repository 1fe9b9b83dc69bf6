"""The check that a run resumes with the filter, and with the optimizer's groups, that it began with.

Another filter may have tensors of the same names and shapes, so that loading would not fail. Without ``filter_lr`` the
optimizer has fewer groups than with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import GraphFilterError
from ..filters import FilterConfig
from ..filters.core.attached import CHILD, filters_of
from ..filters.core.record import read_groups
from ..hosts import host_of, unwrapped
from ..logs import log_filters
from ..patching.restore import resolve
from ..wrappers import Function, wrap


def check_when_resuming(trainer_class: type) -> None:
    """Make Trainers of this class check the filter and the optimizer groups of a checkpoint when they load it.

    A second call changes nothing.
    """
    for name, hook in {
        "_load_from_checkpoint": _resume_with_filter,
        "_load_optimizer_and_scheduler": _resume_with_optimizer,
    }.items():
        owner = next(c for c in trainer_class.__mro__ if name in vars(c))  # sentence-transformers overrides it
        wrap(owner, name, hook)


def _resume_with_filter(original: Function, self: Any, checkpoint: str, *args: Any, **kwargs: Any) -> Any:
    check_same_filter(self.model, checkpoint)
    result = original(self, checkpoint, *args, **kwargs)
    if isinstance(self.model, nn.Module) and (filters := filters_of(self.model)):
        log_filters("resumed", _find_base(self.model), filters, checkpoint)
    return result


def _resume_with_optimizer(original: Function, self: Any, checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, checkpoint, *args, **kwargs)
    except ValueError as error:  # raised by PyTorch, without a word about the filter's group
        if "parameter group" not in str(error) or not isinstance(self.model, nn.Module) or not filters_of(self.model):
            raise
        raise GraphFilterError(
            f"{checkpoint} was trained with other parameter groups of the optimizer than this run has: resume it with "
            "the training arguments that it began with, such as filter_lr of FilterTrainingArguments"
        ) from error


def check_same_filter(model: Any, checkpoint: str) -> None:
    """Raise an error if a checkpoint of a whole model has other filters than ``model``, or only one of them has any."""
    if not isinstance(model, nn.Module):
        return
    try:
        saved_config = json.loads(Path(checkpoint, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # such as a checkpoint of adapters, which have their own record
    base = _find_base(model)
    if not isinstance(base, PreTrainedModel):
        return
    records = dict(_find_records(base.config, saved_config))
    filters = {name: graph_filter.config for name, graph_filter in filters_of(base)}
    if not records:
        if filters and Path(checkpoint, "optimizer.pt").is_file():
            raise GraphFilterError(
                f"{checkpoint} was trained without a filter, so its optimizer knows no coefficients: load it with "
                "from_pretrained, patch it, and begin a new run"
            )
        return
    saved_filters = _read_filters(base, records, checkpoint)
    for name in {**filters, **saved_filters}:
        saved_filter, own_filter = saved_filters.get(name), filters.get(name)
        if saved_filter != own_filter:
            raise GraphFilterError(
                f"{checkpoint} was trained with {saved_filter or 'no filter'} at {name}, and the model has "
                f"{own_filter or 'none'}: patch it as it was to resume the run, or load the checkpoint with "
                "from_pretrained"
            )


def _find_base(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, but a SentenceTransformer around several models as it is."""
    try:
        return unwrapped(model)
    except GraphFilterError:
        return model


def _find_records(config: PreTrainedConfig, saved_config: Any) -> Iterator[tuple[int, Any]]:
    """Yield the records in a saved config and its sub-configs, each with the id of that config in the model."""
    if not isinstance(saved_config, dict):
        return
    if (record := saved_config.get(CHILD)) is not None:
        yield id(config), record
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            yield from _find_records(part, saved_config.get(name))


def _read_filters(model: nn.Module, records: dict[int, Any], checkpoint: str) -> dict[str, FilterConfig]:
    """Return the filters of saved records by the names that their modules have in the model."""
    host, filters = host_of(model), dict[str, FilterConfig]()
    for prefix, part in [*model.named_modules()]:  # from the outside in
        # the parts of a model may have its config, or configs and records of their own
        if isinstance(part, PreTrainedModel) and (record := records.pop(id(part.config), None)) is not None:
            groups = read_groups(record, checkpoint)
            sites = resolve(host, part, [name for _, names in groups for name in names])
            for config, names in groups:
                filters |= {f"{prefix}.{sites[name].name}".lstrip("."): config for name in names if name in sites}
    return filters
