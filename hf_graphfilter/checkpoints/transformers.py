"""Patched checkpoints of transformers: the extensions of ``PreTrainedModel`` that save and load them.

The first import of ``transformers.modeling_utils`` imports this file, and its last line installs the extensions. They
only act on patched models.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..filters.core.attached import CHILD, filters_of
from ..filters.core.record import read_groups
from ..hosts import host_of
from ..hosts.transformers.attention import IMPLEMENTATION, graph_filter_attention
from ..hosts.transformers.records import model_class, read_record, resolve_implementation, saved_config
from ..hosts.transformers.sites import relative_name
from ..logs import log_filters
from ..patching.base_weights import remember_weights
from ..patching.restore import apply_record, check_resolved, reset_missing, resolve
from ..wrappers import Function, wrap
from .adapters import check_loaded_weights, delete_with_filter, load_with_filter
from .readme import write_readme
from .values import check_values


def install() -> None:
    """Register the attention function, and let ``PreTrainedModel`` save and load patched checkpoints.

    Further calls change nothing.
    """
    hooks: dict[str, Function] = {
        "_check_and_adjust_attn_implementation": resolve_implementation,
        "post_init": _patch_after_init,
        "_initialize_weights": _initialise_filters,
        "_load_pretrained_model": _load_by_record,
        "_load_from_state_dict": _refuse_lost_filters,
        "save_pretrained": _save_with_readme,
    }
    if missing := [name for name in hooks if not hasattr(PreTrainedModel, name)]:
        raise GraphFilterError(
            f"transformers {transformers.__version__} has no PreTrainedModel.{missing[0]}, which patched checkpoints "
            "need; upgrade hf_graphfilter or install transformers 5.17 to 5.24"
        )
    if IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS:
        return
    type(ALL_ATTENTION_FUNCTIONS).register(IMPLEMENTATION, graph_filter_attention)
    for name, hook in hooks.items():
        wrap(PreTrainedModel, name, hook)
    wrap(PreTrainedModel, "load_adapter", load_with_filter)
    wrap(PreTrainedModel, "delete_adapter", delete_with_filter)
    wrap(PreTrainedModel, "_load_pretrained_model", check_loaded_weights)


def _patch_after_init(original: Function, self: PreTrainedModel) -> None:
    original(self)
    if getattr(self.config, CHILD, None) is not None:
        apply_record(self)


def _initialise_filters(original: Function, self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # coefficients that a checkpoint lacks would be uninitialised memory
    if isinstance(module, GraphFilter) and not getattr(module, "_is_hf_initialized", False):
        reset_missing(module)
        module._is_hf_initialized = True  # type: ignore[assignment]
        return None
    return original(self, module, *args, **kwargs)


def _load_by_record(
    original: Function,
    model: PreTrainedModel,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load the weights of a model whose config holds a record of filters.

    Coefficients under module names of another release of transformers are renamed. An error is raised if any of them
    does not fit, or if a file is broken.
    """
    path = load_config.pretrained_model_name_or_path
    if not filters_of(model, copies=True) and read_record(model) is None:
        info, index = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        _check_coefficients(model, info, path)
        return info, index
    # a model composed of patched models has no record itself
    renamings = _follow_renaming(model) if read_record(model) is not None else []
    mapping = [*renamings, *(load_config.weight_mapping or ())]
    load_config = dataclasses.replace(load_config, weight_mapping=mapping)
    try:
        _check_values(model, state_dict, checkpoint_files or [])
        info, index = original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    except (SafetensorError, EOFError) as error:
        raise GraphFilterError(
            f"{path}: a weights file is corrupted or truncated ({error}); save or download it again"
        ) from error
    _check_coefficients(model, info, path)
    remember_weights(host_of(model), model, again=True)
    if renamings:  # so that saving does not rename them back
        conversions = vars(model)["_weight_conversions"]
        vars(model)["_weight_conversions"] = [conversion for conversion in conversions if conversion not in renamings]
    log_filters("loaded", model, filters_of(model), path)
    return info, index


def _check_values(model: PreTrainedModel, state_dict: dict[str, Tensor] | None, files: list[str]) -> None:
    """Check the coefficients in the files of a checkpoint with ``check_values``, before they are loaded.

    Once loaded, they may be cast, sharded or left on disk.
    """
    names = {name for _, graph_filter in filters_of(model) for name in graph_filter.coefficient_names()}

    def read_coefficients(keys: Iterable[str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        # without the weights of filters, which may be large or quantized
        parts = [(key, key.partition(f".{CHILD}.")[2]) for key in keys]
        return {relative_name(model, key): read(key) for key, name in parts if name in names}

    # leave out tensors that ZeRO-3 has partitioned: they are empty here
    local = {k: t for k, t in model.state_dict(keep_vars=True).items() if not hasattr(t, "ds_id")}
    targets = read_coefficients(local, local.__getitem__)
    if state_dict is not None:
        check_values(read_coefficients(state_dict, state_dict.__getitem__), targets, "state_dict")
        return
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                check_values(read_coefficients(opened.keys(), opened.get_tensor), targets, file)


def _follow_renaming(model: PreTrainedModel) -> list[WeightRenaming]:
    """Rewrite the record with the module names of this release, and return the renamings of the coefficients."""
    host, record = host_of(model), read_record(model) or {}
    names = [name for _, group in read_groups(record, type(model).__name__) for name in group]
    sites = resolve(host, model, names)
    complete = len(sites) < len(names) and not _is_a_part(model, record, {*names} - {*sites})
    check_resolved(host, model, names, sites, complete)
    new_names = {
        name: new_name for name, site in sites.items() if (new_name := relative_name(model, site.name)) != name
    }
    if new_names:
        groups = [{**g, "modules": [new_names.get(name, name) for name in g["modules"]]} for g in record["filters"]]
        setattr(model.config, CHILD, {**record, "filters": groups})
    return [
        WeightRenaming(rf"(?<![^.]){re.escape(name)}\.{CHILD}\.", f"{new_name}.{CHILD}.")
        for name, new_name in new_names.items()
    ]


def _is_a_part(model: PreTrainedModel, record: dict[str, Any], absent: set[str]) -> bool:
    """Return whether the class that was saved has the modules that ``model`` lacks, so that ``model`` is a part of it.

    The first release of this package did not record that class. Then every class that may have been saved is tried.
    """
    config = copy.deepcopy(model.config)
    setattr(config, CHILD, None)
    names = [record["model"]] if "model" in record else config.architectures or []
    for make in (*map(model_class, names), transformers.AutoModel.from_config):
        try:
            with torch.device("meta"):
                candidate = make(copy.deepcopy(config))  # type: ignore[misc]
        except Exception:  # no class of transformers, or it needs more than the config of a part
            continue
        if absent <= {*resolve(host_of(candidate), candidate, absent)}:
            return True
    return False


def _check_coefficients(model: PreTrainedModel, info: Any, path: Any) -> None:
    """Raise an error if a coefficient in the file belongs to no filter of the model, or if the file lacks some."""
    marker = f".{CHILD}."
    unexpected = sorted(k for k in info.unexpected_keys if marker in k)
    owners = {relative_name(model, name) for name, _ in model.named_modules()} if unexpected else set()
    owner_by_key = {k: relative_name(model, k.split(marker)[0]) for k in unexpected}
    owners |= {*resolve(host_of(model), model, owner_by_key.values())}
    if lost_keys := [k for k in unexpected if owner_by_key[k] in owners]:
        advice = (
            f"load it with the class that was saved, {model.config.architectures}"
            if read_record(model)
            else "its part of config.json holds no record of them. Load the class that was saved, and take the part "
            "from it; if only a part of the model was patched, patch the whole model with layers= and save it again"
        )
        raise GraphFilterError(
            f"{path} holds filter coefficients that {type(model).__name__} has no filter for ({lost_keys[0]} and "
            f"{len(lost_keys) - 1} more): {advice}"
        )
    missing = {k for k in info.missing_keys if marker in k}
    expected: dict[str, set[str]] = {}
    for key in model.state_dict() if missing else ():
        if marker in key:
            expected.setdefault(_copy_of(key.partition(marker)[2]), set()).add(key)
    for keys in expected.values():
        if lacking := keys & missing if unexpected or not keys <= missing else set():
            raise GraphFilterError(
                f"{path} lacks {len(lacking)} of its {len(keys)} filter coefficients ({min(lacking)} ...): the "
                "checkpoint is incomplete; save or download it again"
            )


def _copy_of(name: str) -> str:
    """Return which of PEFT's copies a name belongs to (PEFT keeps one per adapter, and loads them one by one)."""
    match = re.match(r"original_module\.|modules_to_save\.[^.]+\.", name)
    return match[0] if match else ""


def _refuse_lost_filters(
    original: Function, self: PreTrainedModel, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
) -> None:
    """Raise an error if ``load_state_dict`` gets the weights of a filter that the model does not have.

    PyTorch with strict=False, and PEFT, would drop such weights silently. If the Trainer resumed such a run, the state
    of the optimizer would then belong to other parameters.
    """
    saved_shapes: dict[tuple[str, str], dict[str, Any]] = {}
    for key in state_dict:
        owner, marker, name = key.removeprefix(prefix).partition(f".{CHILD}.")
        if not marker or not key.startswith(prefix):
            continue
        saved_shapes.setdefault((owner, _copy_of(name)), {})[name] = getattr(state_dict[key], "shape", ())
    for (owner, copy_name), shapes in saved_shapes.items():
        try:
            module = self.get_submodule(owner)
        except AttributeError:
            continue  # weights of another model, which torch reports
        if (graph_filter := module._modules.get(CHILD)) is None:
            raise GraphFilterError(
                f"the weights hold a graph filter at {owner}, and this {type(self).__name__} has none there: first "
                "patch it as it was when they were saved, with patch_model or load_filter"
            )
        own_shapes = {
            k: getattr(v, "shape", ()) for k, v in graph_filter.state_dict().items() if _copy_of(k) == copy_name
        }
        differs = any(own_shapes.get(k) not in (shapes[k], (0,)) for k in shapes)  # (0,): partitioned by ZeRO-3
        # FSDP: in pieces
        if differs and not any(type(m).__name__ == "FullyShardedDataParallel" for m in self.modules()):
            saved, current = (", ".join(f"{k} {tuple(v)}" for k, v in sorted(x.items())) for x in (shapes, own_shapes))
            raise GraphFilterError(
                f"the weights at {owner} are those of another filter, with {saved}, and that of this "
                f"{type(self).__name__} has {current or 'no such copy'}: patch it as it was when they were saved"
            )
    original(self, state_dict, prefix, *args, **kwargs)


def _save_with_readme(original: Function, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    with saved_config(self, arguments.get("state_dict")):
        result = original(self, *args, **kwargs)
    if arguments.get("is_main_process", True) and not getattr(self, "_hf_peft_config_loaded", False):
        write_readme(self, arguments["save_directory"])
    return result


install()
