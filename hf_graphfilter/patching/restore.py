"""Put the filters of a record into a model: find the sites that it names, and build their filters."""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..devices import device_of
from ..errors import GraphFilterError, shown
from ..filters import AttentionSite, FilterConfig, GraphFilter
from ..filters.core.attached import CHILD, active_filter, patched_modules
from ..filters.core.build import build_filter
from ..filters.core.record import read_groups
from ..hosts import Host, host_of, host_of_module
from .base_weights import remember_weights

STARTED = "_started"  # attribute of a filter built on meta: the values that __init__ gives its unsaved buffers


def apply_record(model: nn.Module, complete: bool = False) -> None:
    """Patch the modules of a model that its saved record names, as ``from_pretrained`` does.

    Modules that are already patched stay as they are. If the model is only a part of the one that was saved, the names
    of other modules are ignored. A model without a task head can read the record of one with a head.

    Args:
        model: a model whose config holds a record.
        complete: whether the model must have every module that the record names. If the model has the class that was
            saved, it must in any case.

    Raises:
        GraphFilterError: an unknown version, filter or field, a malformed record, or a missing module.
    """
    host = host_of(model)
    record: Any = host.read_record(model)
    groups = read_groups(record, type(model).__name__, " of config.graph_filter")
    named = [name for _, names in groups for name in names]
    sites = resolve(host, model, named)
    check_resolved(host, model, named, sites, complete or record.get("model") == type(model).__name__)
    chosen = [(config, sites[name]) for config, names in groups for name in names if name in sites]
    if record.get("model") == type(model).__name__:
        _detach_misread(host, model, record, {site.name: config for config, site in chosen})
    filters = [(site, build_at(config, site, model)) for config, site in chosen if not hasattr(site.module, CHILD)]
    attach(host, model, filters, record)


def _detach_misread(host: Host, model: nn.Module, record: dict[str, Any], configs: dict[str, FilterConfig]) -> None:
    """Detach filters that a part of a model attached because it was built from the model's config.

    The names in a record are relative to the model that was saved. In a part, such as the second of two towers of one
    class, they may name other modules.
    """
    patched = [(n, m) for n, m in patched_modules(model, required=False) if host_of_module(m, host) is host]
    if wrong := [m for n, m in patched if configs.get(n) != active_filter(m).config]:
        parts = (m for m in model.modules() if getattr(getattr(m, "config", None), CHILD, None) == record)
        inside = {id(module) for part in parts if part is not model for module in part.modules()}
        host.detach(model, [module for module in wrong if id(module) in inside])


def attach(
    host: Host, model: nn.Module, filters: list[tuple[AttentionSite, GraphFilter]], record: dict[str, Any]
) -> None:
    """Attach the filters, and write the record of all filters that the model then has."""
    if filters and any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise GraphFilterError(
            f"the parameters of {type(model).__name__} are sharded already (FSDP2, tensor parallelism): patch the "
            "model before fully_shard or accelerator.prepare; for tensor parallelism load a patched checkpoint"
        )
    old_record = host.read_record(model)
    try:
        for site, graph_filter in filters:
            host.attach(site, graph_filter)
        if patched_modules(model, required=False):
            host.write_record(model, record)
            remember_weights(host, model)
    except BaseException:
        host.detach(model, [site.module for site, _ in filters if CHILD in site.module._modules])
        host.write_record(model, old_record)
        raise


def resolve(host: Host, model: nn.Module, names: Iterable[str]) -> dict[str, AttentionSite]:
    """Return the sites of this model by the module names of a record or of coefficients.

    Names that the model does not have are left out.

    A name may come from an earlier release of the library. Then it is the name under which the library still saves the
    weights, or the name of the parent module, if attention was not yet a module of its own.
    """
    sites, _ = host.find(model)
    by_name = {host.relative_name(model, site.name): site for site in sites}
    if set(names) <= set(by_name):
        return {name: by_name[name] for name in names}
    parents = Counter(name.rpartition(".")[0] for name in by_name)
    by_parent = {
        name.rpartition(".")[0]: site for name, site in by_name.items() if parents[name.rpartition(".")[0]] == 1
    }
    by_any_name = by_parent | host.saved_names(model, sites) | by_name
    return {name: by_any_name[name] for name in names if name in by_any_name}


def check_resolved(
    host: Host, model: nn.Module, names: list[str], sites: dict[str, AttentionSite], complete: bool
) -> None:
    """Raise if two names of a record mean the same module, or if a ``complete`` model lacks a module.

    Raises:
        GraphFilterError: the first such name, with the nearest name that the model has.
    """
    absent = [name for name in names if name not in sites]
    if complete and absent:
        existing = [host.relative_name(model, site.name) for site in host.find(model)[0]]
        nearest = difflib.get_close_matches(absent[0], existing, 1, cutoff=0)
        layers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in (*absent, *existing)}
        is_shallower = bool(existing) and min(layers[name] for name in absent) > max(layers[name] for name in existing)
        remedy = "all of the layers that were patched" if is_shallower else "the release of the library that wrote it"
        raise GraphFilterError(
            f"the record of the graph filter names {len(absent)} of {len(names)} modules that are no self-attention of "
            f"{type(model).__name__} ({shown(absent[0])}, nearest here {nearest}): load it with {remedy}, or patch the "
            "model again and save it"
        )
    by_site = {site.name: name for name, site in sites.items()}
    if len(by_site) < len(sites):
        duplicate = next(name for name, site in sites.items() if by_site[site.name] != name)
        raise GraphFilterError(
            f"the record of the graph filter names one module of {type(model).__name__} twice: {shown(duplicate)} and "
            f"{shown(by_site[sites[duplicate].name])}"
        )


def build_at(config: FilterConfig, site: AttentionSite, model: nn.Module) -> GraphFilter:
    """Build the filter of a site, with the training mode, device and dtype of its module.

    If the module has no weights (``GraphFilterAttention``), device and dtype are those of the nearest module around it
    that has some. If the weights are quantized, the filter keeps the dtype in which it was made.
    """
    graph_filter = build_filter(config, site)
    path = site.name.split(".")
    modules = (model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1))
    owner = next((module for module in modules if next(module.parameters(), None) is not None), site.module)
    parameter = next(owner.parameters(), torch.empty(0))
    is_quantized = not parameter.is_floating_point() or parameter.element_size() == 1  # integers or float8
    dtype = None if is_quantized else parameter.dtype
    graph_filter.train(site.module.training)
    device = device_of(owner)
    # in a model on the meta device, a module may hold tensors that are not on it
    to_be_loaded = device is None or any(t.is_meta for t in (*graph_filter.parameters(), *graph_filter.buffers()))
    if not to_be_loaded:
        return graph_filter.to(device=device, dtype=dtype)
    # unsaved buffers get the values of __init__, since reset_parameters need not set them
    unsaved = {f"{n}.{k}".lstrip(".") for n, m in graph_filter.named_modules() for k in m._non_persistent_buffers_set}
    if unsaved:
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            buffers = dict(build_filter(config, site).named_buffers())
            vars(graph_filter)[STARTED] = {name: buffers[name] for name in unsaved if name in buffers}
    return graph_filter


def reset_missing(graph_filter: GraphFilter) -> None:
    """Set start values for all tensors that no checkpoint has loaded.

    ``reset_parameters`` may set them in place, through ``data``, or as new tensors.
    """
    for name, start in vars(graph_filter).pop(STARTED, {}).items():
        tensor = graph_filter.get_buffer(name)
        tensor.data = start.to(tensor)
    slots: list[dict[str, Any]] = [s for m in graph_filter.modules() for s in (m._parameters, m._buffers)]
    entries = [(slot, name, tensor) for slot in slots for name, tensor in slot.items() if tensor is not None]
    loaded_values = {
        id(tensor): tensor.detach().clone() for _, _, tensor in entries if getattr(tensor, "_is_hf_initialized", False)
    }
    if len(loaded_values) == len(entries):
        return
    graph_filter.reset_parameters()
    for slot, name, tensor in entries:
        if id(tensor) in loaded_values:
            tensor.data = loaded_values[id(tensor)]
        elif (start := slot.get(name)) is not None and start is not tensor:
            tensor.data = start.detach().to(tensor)
        slot[name] = tensor
