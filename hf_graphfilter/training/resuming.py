"""The check that a run resumes with the filter, and with the optimizer's groups, that it began with.

Another filter may have tensors of the same names and shapes, so that loading would not fail. Without ``filter_lr`` the
optimizer has fewer groups than with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import GraphFilterError
from ..filters.core.attached import CHILD, filters_of
from ..filters.core.record import read_groups
from ..hosts import host_of, unwrapped
from ..logs import log_filters
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
    if isinstance(self.model, nn.Module):
        model = unwrapped(self.model)
        log_filters("resumed", model, filters_of(model), checkpoint)
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
    """Raise an error if a checkpoint of a whole model has no filters, or others than ``model`` in the same modules."""
    if not isinstance(model, nn.Module) or not filters_of(model):
        return
    try:
        record = json.loads(Path(checkpoint, "config.json").read_text(encoding="utf-8")).get(CHILD)
    except (OSError, ValueError, AttributeError):
        return  # such as a checkpoint of adapters, which have their own record
    if record is None:
        if Path(checkpoint, "optimizer.pt").is_file():
            raise GraphFilterError(
                f"{checkpoint} was trained without a filter, so its optimizer knows no coefficients: load it with "
                "from_pretrained, patch it, and begin a new run"
            )
        return
    saved_configs = {name: config for config, names in read_groups(record, checkpoint) for name in names}
    inner = unwrapped(model)
    host = host_of(inner)
    for name, graph_filter in filters_of(inner):
        saved_config = saved_configs.get(host.relative_name(inner, name), graph_filter.config)
        if saved_config != graph_filter.config:
            raise GraphFilterError(
                f"{checkpoint} was trained with {saved_config} at {name}, and the model has {graph_filter.config}: "
                "patch it as it was to resume the run, or load the checkpoint with from_pretrained"
            )
