"""Hosts: one adapter for each library whose attention can be filtered.

A host is a file or folder that defines all functions of ``Host`` for its library.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import GraphFilterError
from ..filters.core.attached import filters_of
from ..filters.core.kept_heads import count_kept
from ..filters.core.record import group_by_config
from .base import Host, encoder_of, unwrapped

__all__ = ["Host", "encoder_of", "host_of", "host_of_module", "own_record", "unwrapped"]


def host_of(model: object) -> Host:
    """Return the host of a model.

    Raises:
        GraphFilterError: no host supports this kind of model, or it is wrapped (by PEFT, ``torch.compile`` ...).
    """
    if _is_of_timm(model):
        from . import timm

        return timm
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        from . import transformers

        return transformers
    if hasattr(model, "get_base_model"):
        raise GraphFilterError(
            f"{type(model).__name__} holds adapters already: patch the base model first, then get_peft_model with "
            'modules_to_save=["graph_filter"], so that the adapter holds the filter'
        )
    is_bare = unwrapped(model) is model  # what wraps another would miss its new weights
    if isinstance(model, nn.Module) and is_bare and not any(isinstance(m, PreTrainedModel) for m in model.modules()):
        from . import torch
        from .torch.finding import is_attention

        if any(map(is_attention, model.modules())):
            return torch
    raise GraphFilterError(
        f"cannot patch a {type(model).__module__}.{type(model).__qualname__}: patch_model takes a transformers "
        "PreTrainedModel, a timm model, a SentenceTransformer or a module with torch.nn.MultiheadAttention (patch the "
        "model itself, before you wrap it)"
    )


def host_of_module(module: nn.Module, host: Host) -> Host:
    """Return the host of a patched module in a model of ``host``, which may hold modules of other libraries."""
    if _is_of_timm(module):
        from . import timm

        return timm
    from . import torch
    from .torch.finding import is_attention

    return torch if is_attention(module) else host


def own_record(host: Host, model: nn.Module) -> dict[str, Any]:
    """Return the record of a patched model, with the filters that it has now: layers may have been removed or moved.

    Raises:
        GraphFilterError: it has none, since a part of it was patched separately.
    """
    if (record := host.read_record(model)) is None:
        raise GraphFilterError(
            f"{type(model).__name__} has no record of its filters, since a part of it was patched separately: pass "
            "that part"
        )
    filters = {n: f for n, f in filters_of(model) if host_of_module(model.get_submodule(n), host) is host}
    configs = count_kept(filters, lambda: host.find(model)[0])
    return {**record, "filters": group_by_config((host.relative_name(model, n), c) for n, c in configs.items())}


def _is_of_timm(model: object) -> bool:
    return any(cls.__module__.partition(".")[0] == "timm" for cls in type(model).__mro__)
