"""PEFT adapters: they carry the record of the base model's filter, and an unpatched base gets the filter they hold.

The record is in the configuration of an adapter, which is read before the adapter is built. It is also in the weights
(``fingerprint``), where it is checked on every way into a model.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import warnings
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from ..errors import GraphFilterError
from ..files import write_text
from ..filters.core.attached import CHILD, filters_of, patched_modules
from ..filters.core.record import describe_record, read_groups
from ..hosts import host_of, unwrapped
from ..logs import log_filters
from ..patching.patch import STARTS, restore_on_error, unpatch_model
from ..patching.restore import apply_record
from ..wrappers import Function, wrap
from . import copies
from .fingerprint import KEY, check_adapter, check_record, encode_record, live_record

READ = "_graph_filter_read"  # attribute of an adapter's configuration that holds the record of its filters
_loading = ContextVar("_loading", default=False)


def install() -> None:
    """Wrap the functions of PEFT that handle adapters; ``checkpoints.transformers`` wraps those of transformers."""
    from peft import PeftMixedModel, PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners import IA3Model, LoraModel
    from peft.tuners.lora import conversion
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils import hotswap, save_and_load

    wrap(PeftModel, "__init__", _create_with_filter)
    wrap(PeftModel, "from_pretrained", load_with_filter)
    wrap(PeftModel, "load_adapter", load_with_filter)
    wrap(PeftModel, "delete_adapter", delete_with_filter)
    wrap(PeftMixedModel, "from_pretrained", load_with_filter)
    wrap(PeftMixedModel, "delete_adapter", delete_with_filter)
    wrap(PeftConfigMixin, "from_peft_type", _read_record)
    wrap(PeftConfigMixin, "save_pretrained", _write_record)
    wrap(BaseTuner, "merge_and_unload", copies.unload_with_copies)
    wrap(BaseTuner, "unload", copies.unload_with_copies)
    wrap(LoraModel, "add_weighted_adapter", copies.weigh_with_copies)
    wrap(IA3Model, "add_weighted_adapter", copies.weigh_with_copies)
    wrap(LoraModel, "subtract_mutated_init", _subtract_with_filter)
    wrap(conversion, "convert_to_lora", _convert_with_copies)
    wrap(hotswap, "hotswap_adapter_from_state_dict", _swap_with_copies)
    wrap(save_and_load, "get_peft_model_state_dict", _add_record)
    wrap(save_and_load, "set_peft_model_state_dict", _check_weights)


def _create_with_filter(
    original: Function, self: Any, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Warn if a new adapter should train a filter that the model does not have; PEFT would ignore that."""
    wants_filter = CHILD in (getattr(peft_config, "modules_to_save", None) or ())
    if wants_filter and not getattr(peft_config, "inference_mode", False) and not filters_of(model):
        warnings.warn(
            f"modules_to_save names {CHILD}, and {type(model).__name__} has no filter, so that the adapter trains "
            "none: call patch_model before get_peft_model",
            stacklevel=5,  # the caller of get_peft_model
        )
    original(self, model, peft_config, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------------- saving


def _add_record(
    original: Function, model: Any, state_dict: Any = None, adapter_name: str = "default", *args: Any, **kwargs: Any
) -> Any:
    state = original(model, state_dict, adapter_name, *args, **kwargs)
    return _record(model, state, model.peft_config[adapter_name], state_dict)


def _convert_with_copies(original: Function, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    config, state = original(model, *args, **kwargs)
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    state = copies.complete_copies(state, model, arguments.get("adapter_name", "default"))
    return config, _record(model, state, config)


def _subtract_with_filter(
    original: Function, self: Any, output_state_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Keep the weights of the filter when PEFT converts PiSSA or similar adapters to LoRA; it would drop them."""
    filter_tensors = {k: tensor for k, tensor in output_state_dict.items() if k == KEY or f".{CHILD}." in k}
    return {**filter_tensors, **original(self, output_state_dict, *args, **kwargs)}


def _record(model: nn.Module, state: dict[str, Any], config: Any, model_state: Any = None) -> dict[str, Any]:
    """Add the record of the model's filters to an adapter's weights and configuration, and return the weights."""
    if (record := live_record(model)) is not None:
        state = {**state, KEY: encode_record(state, record, model, model_state)}
    vars(config)[READ] = record
    return state


def _write_record(original: Function, self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    from peft.utils import CONFIG_NAME

    result = original(self, save_directory, *args, **kwargs)
    if (record := vars(self).get(READ)) is not None:
        file = Path(save_directory, CONFIG_NAME)
        content = {**json.loads(file.read_text()), CHILD: record}
        write_text(file, json.dumps(content, indent=2, sort_keys=True))
    return result


def _read_record(original: Function, cls: type, **kwargs: Any) -> Any:
    record = kwargs.pop(CHILD, None)
    config: Any = original(cls, **kwargs)
    vars(config)[READ] = record
    return config


# ------------------------------------------------------------------------------------------------------------ loading


def _check_weights(original: Function, model: nn.Module, peft_model_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(model, check_adapter(model, peft_model_state_dict), *args, **kwargs)
    except KeyError as error:  # PEFT misses a module that modules_to_save names
        if f".{CHILD}." not in str(error):
            raise
        raise GraphFilterError(
            f"the adapter should hold the filter (modules_to_save), and its weights lack {error}: save or download "
            "it again"
        ) from error


def check_loaded_weights(
    original: Function, model: nn.Module, state_dict: Any, checkpoint_files: Any, *args: Any, **kw: Any
) -> Any:
    """Check the weights of adapters that transformers loads."""
    files = [file for file in checkpoint_files or () if Path(file).name.startswith("adapter_model.")]
    for file in (file for file in files if file.endswith(".safetensors")):
        check_adapter(model, _read_filter_tensors(file))
    state_dict = check_adapter(model, state_dict) if state_dict and _loading.get() else state_dict
    info, index = original(model, state_dict, checkpoint_files, *args, **kw)
    if records := {key for key in info.unexpected_keys if key.rpartition(".")[2] == KEY}:
        if not files[0].endswith(".safetensors"):
            raise GraphFilterError(
                f"{files[0]} was trained over a graph filter, and is a pickle, which cannot be checked: "
                "load it with PeftModel.from_pretrained, or save it as safetensors"
            )
        info.unexpected_keys -= records
    return info, index


def _read_filter_tensors(file: str) -> dict[str, Any]:
    """Read the tensors of the filter, and those of its record, from the weights file of an adapter."""
    with safe_open(file, framework="pt") as opened:
        keys = [key for key in opened.keys() if KEY in key or f".{CHILD}." in key]  # noqa: SIM118
        return {key: opened.get_tensor(key) for key in keys}


def _swap_with_copies(
    original: Function,
    model: nn.Module,
    state_dict: Any,
    adapter_name: str,
    config: Any,
    parameter_prefix: str = "lora_",
) -> Any:
    if (record := vars(config).get(READ)) is not None:
        _apply_or_check(model, record, config)
    filters, adapter_tensors = copies.split_copies(check_adapter(model, state_dict), model, parameter_prefix)
    target = copies.tensors_of(model, adapter_name)
    copies.check_copies(filters, target, adapter_name)
    result = original(model, adapter_tensors, adapter_name, config, parameter_prefix)
    copies.swap_copies(filters, target)
    return result


def load_with_filter(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter: an unpatched base gets the filter first, and an error leaves the model as it was."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    model, config = arguments.get("model", arguments.get("self")), arguments.get("config", arguments.get("peft_config"))
    if _loading.get() or not isinstance(model, nn.Module):
        return original(*args, **kwargs)
    token = _loading.set(True)
    try:
        with restore_on_error(model):
            recorded_config = config if getattr(config, READ, None) else _read_configuration(arguments)
            if (record := getattr(recorded_config, READ, None)) is not None:
                _apply_or_check(model, record, config or recorded_config)
            result = original(*args, **kwargs)
            if record is not None:
                base = unwrapped(model)
                log_filters("loaded an adapter into", base, filters_of(base))
            return result
    finally:
        _loading.reset(token)


def _read_configuration(arguments: dict[str, Any]) -> Any:
    """Return the configuration of the adapter to load, from its folder or repository; None if it has none."""
    from peft import PeftConfig

    options = {**(getattr(arguments.get("load_config"), "download_kwargs", None) or {}), **arguments.get("kwargs", {})}
    options |= arguments.get("adapter_kwargs") or {}
    with contextlib.suppress(ValueError, TypeError):
        if (source := arguments.get("model_id", arguments.get("peft_model_id"))) is not None:
            return PeftConfig.from_pretrained(source, **PeftConfig._split_kwargs(options)[0])
    return None


def delete_with_filter(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Delete adapters of a PEFT or transformers model, with the last one also the filter that came with them."""
    original(self, *args, **kwargs)
    if not getattr(self, "peft_config", None) and patched_modules(self, required=False):
        copies.drop_copies(base := unwrapped(self))
        if vars(base).get(STARTS):  # the filter came with the adapters
            unpatch_model(base)


def _apply_or_check(model: nn.Module, record: Any, config: Any) -> None:
    """Give an unpatched model the filters that an adapter holds, or check that the model has these filters already.

    Raises:
        GraphFilterError: the model has other filters. Or it has none, and either the adapter does not hold them, or the
            model already has other adapters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    groups, base = read_groups(record, "the adapter", f" of {CHILD} in its configuration"), unwrapped(model)
    host, kind = host_of(base), type(base).__name__
    trained_on = f"the adapter was trained on a model with {describe_record(record)}"
    has_filter = copies.holds_filters(config, (name for _, names in groups for name in names))
    remedy = "load it into that model, or load its filter into this one first, with load_filter"
    if patched_modules(base, required=False):
        check_record(base, record)
        if not has_filter and vars(base).get(STARTS):
            raise GraphFilterError(
                f"{trained_on} and does not hold the filter, which another adapter brought: {remedy}"
            )
        return
    if not has_filter:
        raise GraphFilterError(
            f"{trained_on} and does not hold the filter (modules_to_save=[{CHILD!r}] would), which this {kind} "
            f"lacks: {remedy}"
        )
    if any(module._get_available_adapters() for module in base.modules() if isinstance(module, BaseTunerLayer)):
        raise GraphFilterError(
            f"{trained_on}, and this {kind} holds adapters that were trained without it: load it before them"
        )
    host.write_record(base, record)
    apply_record(base, complete=True)
    vars(base)[STARTS] = True
