"""Hosts: one adapter for each library whose attention can be filtered.

A host is a file or folder that defines all functions of ``Host`` for its library.
"""

from __future__ import annotations

from torch import nn

from ..errors import GraphFilterError
from .base import Host, encoder_of, unwrapped

__all__ = ["Host", "encoder_of", "host_of", "host_of_module", "unwrapped"]


def host_of(model: object) -> Host:
    """Return the host of a model.

    Raises:
        GraphFilterError: no host supports this kind of model, or it is wrapped (by PEFT, ``torch.compile`` ...).
    """
    if any(cls.__module__.partition(".")[0] == "timm" for cls in type(model).__mro__):
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
    if any(cls.__module__.partition(".")[0] == "timm" for cls in type(module).__mro__):
        from . import timm

        return timm
    from . import torch
    from .torch.finding import is_attention

    return torch if is_attention(module) else host
