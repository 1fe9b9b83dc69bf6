"""The search for self-attention in a module of PyTorch."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import nn

from ...filters import AttentionSite
from ...filters.core.attached import CHILD
from ..base import collect_sites, looks_like_attention, without_wrappers
from ..watching import REPLACED, running_forward
from .attaching import leads_to_filter
from .attend import GraphFilterAttention

_CROSS_NAME = re.compile(r"cross|enc(oder)?_?dec|^encoder_att|^enc_att|^x_att|memory|pool", re.I)
_CROSS_CHILD = "multihead_attn"  # the cross-attention of nn.TransformerDecoderLayer, of DETR and of what copies them


def find(model: nn.Module) -> tuple[list[AttentionSite], dict[str, str]]:
    """Return all self-attention modules, and the refused attention modules: name -> reason.

    The layers of PyTorch declare which attention is self-attention. In other modules, cross-attention is recognised by
    its name. If the name does not show it, the call raises an error.
    """
    sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return collect_sites(model, partial(_find_refusal, model, sharded), _describe)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is of a class in which this host looks for self-attention."""
    return isinstance(module, (nn.MultiheadAttention, GraphFilterAttention)) or _is_scripted(module)


def _is_scripted(module: Any) -> bool:
    return getattr(module, "original_name", None) in ("MultiheadAttention", "GraphFilterAttention")


def _find_refusal(model: nn.Module, sharded: bool, name: str, module: Any) -> str | None:
    """Return None for self-attention, "" for no attention, and otherwise the reason for its refusal."""
    if _is_scripted(module):
        return "scripted: patch the model instead, and use torch.compile or torch.export on it"
    if isinstance(module, GraphFilterAttention):
        return None
    if not isinstance(module, nn.MultiheadAttention):
        has_attention = any(is_attention(child) for child in module.children())
        reason = "no torch.nn.MultiheadAttention: write GraphFilterAttention into its forward"
        return reason if looks_like_attention(module) and not has_attention else ""
    if CHILD in module._modules and leads_to_filter(module):
        return None
    if any(cls.__module__.startswith("torch.ao.") for cls in type(module).__mro__):
        return "quantized: patch the model before quantization"
    if "forward" in vars(module) or running_forward(module) is not nn.MultiheadAttention.forward:
        if "forward" in vars(module) or CHILD in module._modules:
            return f"{REPLACED}: undo that before patch_model"
        return "a subclass with a forward of its own"
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.add_zero_attn else "add_bias_kv"
        return f"{option}: a key that is no token, so that A is not square"
    if _is_cross(model, name):
        return "cross-attention: A is not square"
    return "wrapped by FullyShardedDataParallel: patch the model before" if sharded else None


def _is_cross(model: nn.Module, name: str) -> bool:
    *parents, attribute = name.split(".")
    if not attribute:  # the model itself
        return False
    layer = model.get_submodule(".".join(parents))
    if attribute == _CROSS_CHILD and isinstance(getattr(layer, "self_attn", None), nn.MultiheadAttention):
        return True
    if isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return attribute != "self_attn"
    return any(_CROSS_NAME.search(part) for part in (*parents[-1:], attribute))


def _describe(name: str, module: Any) -> dict[str, Any]:
    """Return the fields of ``AttentionSite`` for self-attention."""
    if isinstance(module, GraphFilterAttention):
        return {**module.describe(), "causal": False}
    size, heads = module.embed_dim, module.num_heads
    first = not module.batch_first
    return {"heads": heads, "causal": False, "hidden_size": size, "head_dim": size // heads, "tokens_first": first}


def relative_name(model: nn.Module, name: str) -> str:
    """Return a module's name without the wrappers of PEFT."""
    return without_wrappers(model, name)


def saved_names(model: nn.Module, sites: list[AttentionSite]) -> dict[str, AttentionSite]:
    """Return no names: PyTorch does not rename modules in checkpoints."""
    return {}
