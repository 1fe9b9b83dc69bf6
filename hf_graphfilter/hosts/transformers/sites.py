"""The search for self-attention modules of a transformers model, and their names in the model and in checkpoints."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import re
from collections import Counter
from functools import partial
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.pytorch_utils import Conv1D

from ...filters import AttentionSite
from ...filters.core.attached import CHILD
from ..base import collect_sites, looks_like_attention, without_wrappers
from ..watching import REPLACED, running_forward
from .base_attention import declares_causal
from .implementation import backend
from .interface import attention_function, honours_softcap, uses_interface

_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_CROSS_NAME = re.compile(r"cross|enc(oder)?_?dec|^encoder_att|^x_att|_to_(image|token)$", re.I)


def find(model: nn.Module) -> tuple[list[AttentionSite], dict[str, str]]:
    """Return all self-attention modules that use the attention interface, and the others with the reason."""
    return collect_sites(model, _find_refusal, partial(_describe, model))


def _find_refusal(name: str, module: Any) -> str | None:
    """Return None for a patchable module, "" for no attention, and otherwise the reason for its refusal."""
    if not uses_interface(inspect.unwrap(type(module).forward)):
        return "its forward does not use the attention interface" if looks_like_attention(module) else ""
    if (
        any(_CROSS_NAME.search(part) for part in name.split(".")[-2:])
        or "Cross" in type(module).__name__
        or getattr(module, "is_cross_attention", False)
    ):
        return "cross-attention: A is not square"
    other_tokens = inspect.signature(type(module).forward).parameters.get("encoder_hidden_states")
    if other_tokens is not None and other_tokens.default is inspect.Parameter.empty:
        return "self-attention and cross-attention in one: A is not square"
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return "it has no config to route the attention through"
    if getattr(module, "sinks", None) is not None:
        return "attention sinks: rows of A sum to less than 1"
    if getattr(module, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn: its own eager attention bypasses the interface"
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None and not honours_softcap(attention_function(type(module), backend(module))):
        chosen = backend(module)
        return f"soft-capped scores (softcap={softcap}) that {chosen!r} attention drops: load it with 'eager' attention"
    if _heads(module) is None:
        return f"none of {', '.join(_HEAD_COUNTS)} gives its number of heads"
    if not uses_interface(running_forward(module)):
        return f"{REPLACED} on the module, and does not use the attention interface"
    return None


def _heads(module: Any) -> int | None:
    for owner in (module, module.config):
        for attribute in _HEAD_COUNTS:
            heads = _read(owner, attribute)
            if isinstance(heads, int):
                return heads
    return None


def _read(owner: Any, attribute: str) -> Any:
    try:
        return getattr(owner, attribute, None)
    except RuntimeError:  # a config that has another value for each layer
        return None


def _position_bias(model: nn.Module, name: str) -> bool:
    """Return whether a bias is added to the scores.

    It may be an argument (T5), or come within the mask from the module or one around it (BEiT).
    """
    module = model.get_submodule(name)
    if "position_bias" in inspect.signature(type(module).forward).parameters:
        return True
    parts = name.split(".")
    modules = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    return any(child.endswith("position_bias") for m in modules for child, _ in m.named_children())


def _stack_module(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that holds the list of layers around a module, if it passes keyword arguments down to it."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    if not number:
        return None
    stack = model.get_submodule(".".join(parts[: number - 1]))
    inner_modules = [model.get_submodule(".".join(parts[:i])) for i in range(number + 1, len(parts) + 1)]
    path = [stack, *(module for module in inner_modules if not isinstance(module, nn.ModuleList))]
    return stack if all(_takes_any_keyword(module) for module in path) else None


def _takes_any_keyword(module: nn.Module) -> bool:
    return _passes_keywords(type(module).forward)


@functools.cache
def _passes_keywords(forward: Any) -> bool:
    """Return whether a function takes arbitrary keyword arguments, and uses them."""
    variadic = next((p.name for p in inspect.signature(forward).parameters.values() if p.kind is p.VAR_KEYWORD), None)
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if variadic is None or code is None:
        return variadic is not None
    names = (x.argval if isinstance(x.argval, tuple) else (x.argval,) for x in dis.get_instructions(code))
    return any(variadic in instruction_names for instruction_names in names)


def _describe(model: nn.Module, name: str, module: Any) -> dict[str, Any]:
    """Return the fields of ``AttentionSite`` for a module that can be patched."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    passes_hidden = parameters[0].name == "hidden_states" and _takes_any_keyword(module)
    children = (getattr(child, "base_layer", child) for child in module.children())  # PEFT wraps a layer
    projection = next((m for m in children if isinstance(m, (nn.Linear, Conv1D))), None)
    inputs = None if projection is None else getattr(projection, "in_features", projection.weight.shape[0])
    head_dim = next((d for name in _HEAD_DIMS if isinstance(d := getattr(module, name, None), int)), None)
    heads, groups = _heads(module) or 1, getattr(module, "num_key_value_groups", 1)
    return {
        "heads": heads,
        "key_heads": heads // groups if isinstance(groups, int) and groups > 0 else heads,
        "causal": declares_causal(module),
        "position_bias": _position_bias(model, name),
        "stack_module": _stack_module(model, name),
        "hidden_size": inputs if passes_hidden else None,
        "head_dim": head_dim or (inputs or 0) // heads,
        "value_dim": getattr(module, "v_head_dim", 0),
        "sliding_window": _read(module if hasattr(module, "sliding_window") else module.config, "sliding_window"),
        "in_windows": any(getattr(part, "window_size", None) for part in module.modules()),
    }


def relative_name(model: Any, name: str) -> str:
    """Return a module's name without the prefixes of task heads and PEFT's wrappers."""
    name = without_wrappers(model, name)
    return name.removeprefix(f"{model.base_model_prefix}.") if model.base_model_prefix else name


def saved_names(model: Any, sites: list[AttentionSite]) -> dict[str, AttentionSite]:
    """Return the sites by the relative names of their modules in checkpoints.

    transformers renames weights of earlier releases when it loads them, and back when it saves.
    """
    reverse = []
    for conversion in reversed(get_model_conversion_mapping(model, add_legacy=False)):
        if not isinstance(conversion, PrefixChange):  # of task heads
            with contextlib.suppress(NotImplementedError, ValueError):  # has no way back
                reverse.append(conversion.reverse_transform())
    reverse.sort(key=lambda conversion: not isinstance(conversion, WeightConverter))  # the order of saving
    by_name = {}
    for site in sites:
        names = Counter[str]()
        for key, _ in site.module.named_parameters():
            saved_key = f"{site.name}.{key}"
            for conversion in reverse:
                saved_key, _ = conversion.rename_source_key(saved_key)
            names[saved_key.rsplit(".", key.count(".") + 1)[0]] += not key.startswith(f"{CHILD}.")
        if names:
            by_name[relative_name(model, names.most_common(1)[0][0])] = site
    return by_name
