"""The record of a patched module of PyTorch, and what files and cards say of the module."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from torch import nn

from ...filters.core.attached import class_of, filters_of
from ...filters.core.record import record_of
from ...text import quoted
from ..base import without_wrappers
from .attend import GraphFilterAttention

RECORD = "_graph_filter_record"  # an attribute of the model: copies and pickles keep it, a state dict does not


def read_record(model: nn.Module) -> dict[str, Any] | None:
    """Return the record of ``write_record``, or that of the filters that the model's author built into it."""
    if (record := vars(model).get(RECORD)) is not None:
        return record  # type: ignore[no-any-return]
    configs = [(n, f.config) for n, f in filters_of(model) if isinstance(model.get_submodule(n), GraphFilterAttention)]
    return record_of(class_of(model).__name__, configs) if configs else None


def write_record(model: nn.Module, record: dict[str, Any] | None) -> None:
    """Keep the record as an attribute of the model, or remove it."""
    vars(model).pop(RECORD, None)
    if record is not None:
        vars(model)[RECORD] = copy.deepcopy(record)


def model_type(model: nn.Module) -> str:
    """Return the class name with a fingerprint of the attention modules: their names, classes and sizes."""
    sizes = {without_wrappers(model, name): _sizes(part) for name, part in model.named_modules() if _sizes(part)}
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()
    return f"{class_of(model).__name__} ({digest[:8]})"


def _sizes(module: Any) -> list[Any] | None:
    if isinstance(module, GraphFilterAttention):
        return ["attend", module.heads, module.key_heads, module.head_dim, module.hidden_size]
    if isinstance(module, nn.MultiheadAttention):
        return ["multihead", module.num_heads, module.embed_dim, module.kdim, module.vdim]
    return None


def usage(model: nn.Module, source: str) -> str:
    """Return Python code that loads a saved filter, for its card."""
    name = class_of(model).__name__
    return f"""from hf_graphfilter import load_filter

model = {name}(...)  # your own class, with the weights that the filter was trained on
load_filter(model, {quoted(source)})"""


def pipeline_tag(model: nn.Module) -> str | None:
    """Return None: a module does not say what it is for."""
    return None


def base_model(model: nn.Module) -> str | None:
    """Return None: a module does not say where its weights came from."""
    return None
