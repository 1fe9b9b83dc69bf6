"""The filter-only file: a few KB of coefficients to load into any copy of the same base model.

Whole patched checkpoints do not need this file: ``save_pretrained``, ``push_to_hub`` and ``from_pretrained`` work as
usual.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ..devices import is_first_process
from ..errors import GraphFilterError, shown
from ..files import digest, read_path, replacing, write_tensors
from ..filters import GraphFilter
from ..filters.core.attached import class_of, filters_of, is_offloaded, is_sharded, patched_modules, read_whole
from ..filters.core.record import describe_record, read_groups, same_filters
from ..hosts import Host, encoder_of, host_of, own_record, unwrapped
from ..logs import log_filters
from ..patching.base_weights import SAMPLE, changed_weights, differing_weights, written_weights
from ..patching.patch import STARTS
from ..patching.restore import apply_record, resolve
from ..text import printable
from .copies import strip_adapters
from .values import check_values

WEIGHTS_FILE = "graph_filter.safetensors"
CONFIG_FILE = "graph_filter.json"
WEIGHTS = "weights"  # in that file: a few weights of the base model
BASE_MODEL = "base_model"  # in that file: the Hub repository of the base model, if it has one
MARK = "saved"  # in both files: a mark that is the same if one call of `save_filter` wrote both
M = TypeVar("M", bound=nn.Module)


def save_filter(model: nn.Module, directory: str | os.PathLike[str], *, base_model: str | None = None) -> Path:
    """Write the filter of a patched model, and nothing else, to ``directory``.

    There are two files: ``graph_filter.safetensors`` holds the coefficients, ``graph_filter.json`` the configs and the
    requirements for the base model. The function warns if weights outside the filter changed since the model was
    patched or loaded, as the files do not contain them. It cannot see this for weights that are sharded, offloaded or
    quantized. Only the first of several processes writes. If FSDP2 or ZeRO-3 has sharded the model, all processes must
    call this function.

    Args:
        model: a patched model, wrapped or not.
        directory: the folder to write to.
        base_model: the Hub id of the model that was patched, for ``load_filtered_model``. Default: the repository that
            it was loaded from.

    Returns:
        The directory.

    Raises:
        GraphFilterError: the model is not patched, a part of it was patched separately, or ``directory`` is no path.
        OSError: the directory cannot be written. Earlier files there stay as they were.
    """
    model, directory = unwrapped(model), Path(read_path(directory))
    host = host_of(model)
    record = own_record(host, model) if patched_modules(model) else {}
    tensors = _coefficients(host, model, lambda f: read_whole(f, nn.Module.state_dict))
    if not is_first_process():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    if changed := changed_weights(host, model):
        warnings.warn(
            f"{len(changed)} weights outside the filter changed since the model was patched or loaded ({changed[0]} "
            f"...), and {printable(directory)} holds only the filter: save the whole model, or train with the base "
            "frozen",
            stacklevel=2,
        )
    names = [name for group in record["filters"] for name in group["modules"]]
    description = {**record, "base": _describe_base(host, model), WEIGHTS: written_weights(host, model, names)}
    if (name := base_model or host.base_model(model)) is not None:
        revision = None if base_model else getattr(getattr(model, "config", None), "_commit_hash", None)
        description[BASE_MODEL] = {"name": name, "revision": revision, "class": class_of(model).__name__}
    mark = digest(json.dumps(description), tensors)
    with replacing(directory / WEIGHTS_FILE, directory / CONFIG_FILE) as (weights, config):
        write_tensors(weights, tensors, {MARK: mark})
        config.write_text(json.dumps({**description, MARK: mark}, indent=2) + "\n")
    return directory


def load_filter(model: M, source: str | os.PathLike[str], **hub_options: Any) -> M:
    """Load a saved filter into ``model``, in place: an unpatched model is patched, a patched one gets its coefficients.

    The function warns if the attention weights of the base differ from those in the file, as far as bfloat16 can tell.

    Args:
        model: a copy of the base model that the filter was trained on, or one patched in the same way. A patched one
            keeps its own values of options that no coefficient depends on, such as ``memory`` of ``"far_field"``.
        source: a directory that ``save_filter`` wrote, or the id of a Hub repository that holds its two files.
        **hub_options: ``subfolder``, and ``revision``, ``token``, ``cache_dir`` ... of the download.

    Returns:
        The model itself.

    Raises:
        GraphFilterError: a file is missing or corrupted, its version is unknown, coefficients are not finite, the base
            model is another one (heads, layers, type), or the model is patched differently. The model is then
            unchanged.
    """
    wrapped, inner = model, unwrapped(model, running=False)
    # for an unpatched model that PEFT has wrapped, raise the error of patch_model
    model = inner if patched_modules(inner, required=False) else encoder_of(model)  # type: ignore[assignment]
    host = host_of(model)
    description, tensors = _translate_names(host, model, *_read(source, hub_options))
    base, model_base = description.get("base"), _describe_base(host, model)
    if base != model_base:
        raise GraphFilterError(f"{source} does not fit {type(model).__name__}: {_compare_bases(base, model_base)}")
    record = {key: value for key, value in description.items() if key not in ("base", WEIGHTS, BASE_MODEL, MARK)}
    current = own_record(host, model) if patched_modules(model, required=False) else None
    if current is None and len(model_base["heads"]) < len(host.find(model)[0]):
        raise GraphFilterError(
            f"{type(model).__name__} holds copies of whole attention modules (PEFT's modules_to_save): load the filter "
            "before the adapters"
        )
    if current is not None and not same_filters(current, record):
        raise GraphFilterError(
            f"{type(model).__name__} is patched with {describe_record(current)}, {source} holds "
            f"{describe_record(record)}; call unpatch_model first (hf-graphfilter unpatch)"
        )
    if current is None:
        host.write_record(model, record)
    try:
        if current is None:
            apply_record(model, complete=True)
        if any(is_offloaded(f) for _, f in filters_of(model, required=True)):
            raise GraphFilterError(f"{source} cannot be loaded into a model on disk: load it before that is offloaded")
        # not detached, since marks of sharding are on the parameters
        _copy(_coefficients(host, model, lambda f: f.state_dict(keep_vars=True)), tensors, source)
        vars(model).pop(STARTS, None)
    except BaseException:
        if current is None:
            host.detach(model, [module for _, module in patched_modules(model, required=False)])
            host.write_record(model, None)
            vars(model).pop(SAMPLE, None)
        raise
    if names := differing_weights(description.get(WEIGHTS), host, model):
        warnings.warn(
            f"{printable(source)} was trained on a base with other weights ({names[0]} and {len(names) - 1} more): "
            "its outputs differ here; load it into the base that it was trained on",
            stacklevel=2,
        )
    log_filters("loaded the filter of", model, filters_of(model), source)
    return wrapped


def read_description(source: str | os.PathLike[str], **hub_options: Any) -> dict[str, Any]:
    """Return the content of ``graph_filter.json`` of a saved filter.

    Raises:
        GraphFilterError: a file is missing or corrupted, or its version is unknown.
    """
    config_file = _locate(source, CONFIG_FILE, hub_options)
    try:
        description = json.loads(Path(config_file).read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise GraphFilterError(f"{config_file} is not readable JSON ({error}); save or download it again") from error
    if not isinstance(description, dict):
        description = {}
    read_groups(description, config_file)
    return description


def _read(
    source: str | os.PathLike[str], hub_options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config_file, weights_file = (_locate(source, name, hub_options) for name in (CONFIG_FILE, WEIGHTS_FILE))
    description = read_description(source, **hub_options)
    try:
        with safe_open(weights_file, framework="pt") as opened:
            mark = (opened.metadata() or {}).get(MARK)
        tensors = load_file(weights_file)
    except Exception as error:  # for some damage safetensors raises exceptions of torch
        raise GraphFilterError(
            f"{weights_file} is corrupted or truncated ({error}); save or download it again"
        ) from error
    if mark is not None and mark != description.get(MARK):
        raise GraphFilterError(f"{config_file} and {weights_file} were not saved together; save or download both again")
    return description, tensors


def _translate_names(
    host: Host, model: nn.Module, description: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a description and its tensors with the module names of this release of the model's library."""
    base, groups = description.get("base"), description["filters"]
    if not isinstance(base, dict) or not isinstance(heads := base.get("heads"), dict):
        return description, tensors
    sites = resolve(host, model, [*heads, *(name for group in groups for name in group["modules"])])
    new_names = {name: host.relative_name(model, site.name) for name, site in sites.items()}
    groups = [{**group, "modules": [new_names.get(name, name) for name in group["modules"]]} for group in groups]
    heads = {new_names.get(name, name): count for name, count in heads.items()}
    renamed = {}
    for key, tensor in tensors.items():
        owner = next((name for name in new_names if key.startswith(f"{name}.")), "")
        renamed[new_names.get(owner, owner) + key.removeprefix(owner)] = tensor
    return {**description, "filters": groups, "base": {**base, "heads": heads}}, renamed


def _locate(source: str | os.PathLike[str], name: str, hub_options: dict[str, Any]) -> str:
    source = read_path(source)
    if os.path.isdir(source):
        path = Path(source, hub_options.get("subfolder") or "", name)
        if not path.is_file():
            hint = "; a whole model is loaded by from_pretrained" * (path.parent / "config.json").is_file()
            raise GraphFilterError(
                f"{path.parent} holds no {name}; a saved filter is {CONFIG_FILE} and {WEIGHTS_FILE}{hint}"
            )
        return str(path)
    from transformers.utils import cached_file

    try:
        return cached_file(source, name, **hub_options)  # type: ignore[return-value]
    except (OSError, ValueError) as error:
        text = f"no directory and no reachable Hub repository {shown(source)} with {name}: {error}"
        raise GraphFilterError(text) from error


def _coefficients(
    host: Host, model: nn.Module, read: Callable[[GraphFilter], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    return {
        f"{host.relative_name(model, name)}.{key}": tensor
        for name, graph_filter in filters_of(model, required=True)
        for key, tensor in strip_adapters(read(graph_filter)).items()
    }


def _describe_base(host: Host, model: nn.Module) -> dict[str, Any]:
    """Return the facts about a model that must equal those of the model that the filter was trained on."""
    heads = {host.relative_name(model, site.name): site.heads for site in host.find(model)[0]}
    return {"model_type": host.model_type(model), "heads": heads}


def _compare_bases(base: Any, model_base: dict[str, Any]) -> str:
    if not isinstance(base, dict) or not isinstance(base.get("heads"), dict):
        return f"it does not describe its base model ({shown(base)})"
    if base.get("model_type") != model_base["model_type"]:
        return f"it was made for a {base.get('model_type')} model, this is {model_base['model_type']}"
    saved_heads, model_heads = base["heads"], model_base["heads"]
    if len(saved_heads) != len(model_heads):
        return f"it was made for {len(saved_heads)} attention layers, this model has {len(model_heads)}"
    for name in saved_heads:
        if name not in model_heads or saved_heads[name] != model_heads[name]:
            return f"{name} had {shown(saved_heads[name])} heads, here it has {model_heads.get(name, 'no such layer')}"
    unknown = shown(sorted(base.keys() - model_base.keys()))
    return f"it names facts of its base model that this installation does not know ({unknown})"


def _copy(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor], path: Any) -> None:
    for name in {**target, **source}:
        source_shape = tuple(source[name].shape) if name in source else "nothing"
        target_shape = tuple(target[name].shape) if name in target else "nothing"
        if source_shape != target_shape:
            raise GraphFilterError(f"{path}: {name} should hold {target_shape}, it holds {source_shape}")
    if any(map(is_sharded, target.values())):
        raise GraphFilterError(f"{path} cannot be loaded into a sharded model: load it before the model is sharded")
    check_values(source, target, path)
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
