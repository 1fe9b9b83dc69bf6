"""Patch a model in place, undo it, and look at what was done."""

from __future__ import annotations

import contextlib
import difflib
import html
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from .errors import GraphFilterError, shown
from .filters import FilterConfig, GraphFilter, as_config
from .filters.base import STARTED, UnknownFilterError, build_filter, foreign_modules
from .hosts import AttentionSite, Host, encoder_of, host_of, unwrapped

Layers = None | Literal["even", "odd"] | Collection[int] | slice | Callable[[int, str], bool]
M = TypeVar("M", bound=nn.Module)
RECORD_VERSION = 1


def patch_model(
    model: M,
    filter: str | FilterConfig = "gfsa",
    *,
    layers: Layers = None,
    stack: Literal["encoder", "decoder"] | None = None,
    **options: Any,
) -> M:
    """Replace self-attention by a graph filter, in place.

    Every selected attention module gets one child, ``graph_filter``; no other parameter changes its name or value.
    Cross-attention is never patched.

    Args:
        model: a transformers ``PreTrainedModel`` whose attention runs through the attention interface, or a
            ``SentenceTransformer`` around one; the whole model that will be saved, since its config keeps the record
            (choose parts with ``layers`` and ``stack``).
        filter: name of a registered filter, or its config object.
        layers: which layers of each stack, counted from 0: ``None`` for all, ``"even"``, ``"odd"``, a list of indices
            (negative ones count from the end), a slice, or a predicate ``(index, module name) -> bool``.
        stack: ``"encoder"`` or ``"decoder"`` to patch only these; ``None`` for both.
        **options: options of the filter, when it is given by name.

    Returns:
        The model itself.

    Raises:
        GraphFilterError: an unknown filter or option, an empty or impossible selection, a model that has nothing to
            patch or is patched there already. The model is then as it was.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> patch_model(model, "gfsa", K=3) is model
        True
    """
    config = as_config(filter, **options)
    whole, model = model, encoder_of(model)
    host = host_of(model)
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise GraphFilterError(
            f"the parameters of {type(model).__name__} are sharded already (FSDP2, tensor parallelism): patch the "
            "model before fully_shard or accelerator.prepare; for tensor parallelism load a patched checkpoint"
        )
    sites, refused = host.find(model)
    if not sites:
        raise GraphFilterError(_nothing_to_patch(model, refused))
    selected = select_sites(sites, layers, stack)
    for site in selected:
        if hasattr(site.module, "graph_filter"):
            raise GraphFilterError(
                f"{type(model).__name__} is already patched at {site.name} "
                f"({site.module.get_submodule('graph_filter').config}); call unpatch_model first or select other layers"
            )
    filters = [_build(config, site) for site in selected]  # all before the first change: failing leaves no trace
    record = host.read_record(model) or {"filters": []}
    imports = sorted({*_imports(record), *foreign_modules([config])})
    names = [host.relative_name(model, site.name) for site in selected]
    groups = [*record["filters"], {"config": config.to_dict(), "modules": names}]
    written = {"version": RECORD_VERSION, "model": type(model).__name__, "filters": groups}
    host.write_record(model, {**written, "imports": imports} if imports else written)
    for site, graph_filter in zip(selected, filters, strict=True):
        host.attach(site, graph_filter)
    return whole


def unpatch_model(model: M) -> M:
    """Take all filters out again, in place: the model is then exactly the original (with the weights it has now).

    Raises:
        GraphFilterError: the model is not patched.
    """
    whole, model = model, unwrapped(model, running=False)  # type: ignore[assignment]
    host = host_of(model)
    for _, module in patched_modules(model):
        host.detach(module)
    host.write_record(model, None)
    return whole


@dataclass(frozen=True)
class FilterRow:
    """One patched module: where it is, its filter, the coefficients by name (float32 copies on the CPU), and what
    computes S."""

    module: str
    filter: FilterConfig
    coefficients: dict[str, Tensor]
    backend: str


class FilterStatus(list[FilterRow]):
    """Rows of ``filter_status``; prints as a table with the mean (and spread over heads) of each coefficient."""

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(header, rows) as text."""
        names = list(dict.fromkeys(name for row in self for name in row.coefficients))
        header = ["module", "filter", *names, "backend"]
        rows = [
            [row.module, row.filter.filter, *(_summary(row.coefficients.get(n)) for n in names), row.backend]
            for row in self
        ]
        return header, rows

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        if not self:
            return "<p>no graph filter</p>"
        header, rows = self.table()
        lines = [("th", header), *(("td", row) for row in rows)]
        body = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
        return "<table>" + "".join(f"<tr>{line}</tr>" for line in body) + "</table>"

    def __str__(self) -> str:
        if not self:
            return "no graph filter"
        return text_table(*self.table())


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns of text, each as wide as its longest entry."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def filter_status(model: nn.Module) -> FilterStatus:
    """What is patched: a list of rows (module, filter, coefficients, backend) that prints as a table.

    Of a model that FSDP2 or ZeRO-3 has sharded every process must call it.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=2)), "gfsa", layers="even")
        >>> [row.module for row in filter_status(model)]
        ['encoder.layer.0.attention.self']
    """
    model = unwrapped(model)
    host = host_of(model)
    rows = []
    for name, module in patched_modules(model, required=False):
        graph_filter = active_filter(module)
        values = {k: v.float() for k, v in read_whole(graph_filter, type(graph_filter).coefficients).items()}
        rows.append(FilterRow(name, graph_filter.config, values, host.backend(module)))
    return FilterStatus(rows)


def filter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learned parameters of all filters in the model."""
    for _, module in patched_modules(model, required=False):
        yield from active_filter(module).parameters()


def read_whole(graph_filter: GraphFilter, read: Callable[[GraphFilter], dict[str, Tensor]]) -> dict[str, Tensor]:
    """``read(graph_filter)`` as copies on the CPU, also where accelerate has offloaded it; where FSDP2 or ZeRO-3 has
    sharded it, whole: all processes must call."""
    from accelerate.utils import align_module_device

    with contextlib.ExitStack() as stack:
        for part in graph_filter.modules():
            stack.enter_context(align_module_device(part))
        if partitioned := [p for p in graph_filter.parameters() if hasattr(p, "ds_id")]:
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(partitioned))
        found = {name: tensor.detach() for name, tensor in read(graph_filter).items()}
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
        return {name: t.to("cpu", copy=True) for name, t in whole.items()}


def active_filter(module: Any) -> GraphFilter:
    """The filter of a patched module; of the copies that PEFT keeps for its adapters, the one that runs."""
    found = module.graph_filter
    if hasattr(found, "modules_to_save"):
        names = [n for n in found.active_adapters if n in found.modules_to_save and not found.disable_adapters]
        found = found.modules_to_save[names[0]] if names else found.original_module
    return found  # type: ignore[no-any-return]


def patched_modules(model: nn.Module, required: bool = True) -> list[tuple[str, Any]]:
    """(name, module) of the patched attention modules; an unpatched model is an error where one is ``required``."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if "graph_filter" in module._modules and hasattr(module.graph_filter, "site_name")
    ]
    if required and not found:
        raise GraphFilterError(f"{type(model).__name__} has no graph filter; call patch_model first")
    return found


def apply_record(model: nn.Module, whole: bool = False) -> None:
    """Patch what a saved record names and the model has, as ``from_pretrained`` does; patched modules stay.

    A sub-model sees only its own modules, and a record written with a task head is read without it.

    Args:
        whole: whether the model must have every module that the record names. The class that was saved must.

    Raises:
        GraphFilterError: an unknown version, filter or field, a record of another shape, or a module that is not there.
    """
    host = host_of(model)
    record = host.read_record(model)
    groups = read_groups(record, type(model).__name__, " of config.graph_filter")
    named = [name for _, names in groups for name in names]
    found = resolve(host, model, named)
    check_resolved(host, model, named, found, whole or record.get("model") == type(model).__name__)  # type: ignore[union-attr]
    chosen = [(config, found[name]) for config, names in groups for name in names if name in found]
    made = [(s, _build(config, s)) for config, s in chosen if not hasattr(s.module, "graph_filter")]
    for site, graph_filter in made:
        host.attach(site, graph_filter)
    if patched_modules(model, required=False):
        host.write_record(model, record)


def resolve(host: Host, model: nn.Module, names: Iterable[str]) -> dict[str, AttentionSite]:
    """The sites that module names of a record, or of coefficients, mean in this model; other names are left out.

    A name is that of the module, or what the library's release that wrote it called the module: the name that the
    library still gives to its weights in checkpoints, or that of the parent, which held the attention before it was a
    module of its own.
    """
    sites, _ = host.find(model)
    here = {host.relative_name(model, site.name): site for site in sites}
    if set(names) <= set(here):
        return {name: here[name] for name in names}
    parents = Counter(name.rpartition(".")[0] for name in here)
    inside = {name.rpartition(".")[0]: site for name, site in here.items() if parents[name.rpartition(".")[0]] == 1}
    known = inside | host.saved_names(model, sites) | here
    return {name: known[name] for name in names if name in known}


def check_resolved(
    host: Host, model: nn.Module, names: list[str], found: dict[str, AttentionSite], whole: bool
) -> None:
    """No module of a record was found by two names, and in a ``whole`` model all were found.

    Raises:
        GraphFilterError: the first that was not, with the nearest name that the model has.
    """
    absent = [name for name in names if name not in found]
    if whole and absent:
        here = [host.relative_name(model, site.name) for site in host.find(model)[0]]
        nearest = difflib.get_close_matches(absent[0], here, 1, cutoff=0)
        raise GraphFilterError(
            f"the record of the graph filter names {len(absent)} of {len(names)} modules that are no self-attention of "
            f"{type(model).__name__} ({shown(absent[0])}, nearest here {nearest}): load it with the release of the "
            "library that wrote it, or patch the model anew and save it"
        )
    by_site = {site.name: name for name, site in found.items()}
    if len(by_site) < len(found):
        twice = next(name for name, site in found.items() if by_site[site.name] != name)
        raise GraphFilterError(
            f"the record of the graph filter names one module of {type(model).__name__} twice: {shown(twice)} and "
            f"{shown(by_site[found[twice].name])}"
        )


def read_groups(record: Any, source: str, part: str = "") -> list[tuple[FilterConfig, list[str]]]:
    """(config, names of the modules) of a record; ``source`` and ``part`` say in errors where it was read."""
    if not isinstance(record, dict) or record.get("version") != RECORD_VERSION:
        version = record.get("version") if isinstance(record, dict) else record
        raise GraphFilterError(
            f"{source}: version {shown(version)}{part} is unknown, this installation reads version {RECORD_VERSION}; "
            "install the hf_graphfilter release that wrote it"
        )
    where = part.removeprefix(" of ") or source
    groups = record.get("filters")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise GraphFilterError(f"{where} is malformed: 'filters' must be a list of filters, got {shown(groups)}")
    read, seen = [], set()
    for group in groups:
        try:
            config, names = FilterConfig.from_dict(group.get("config")), group.get("modules")
        except UnknownFilterError as error:
            found = _imports(record)  # named, never imported: a checkpoint holds no code
            hint = f": import {shown(', '.join(found))}, as was done to patch the model" if found else ""
            raise GraphFilterError(f"{error}{hint}") from None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise GraphFilterError(f"{where} is malformed: 'modules' must be a list of names, got {shown(names)}")
        for name in names:
            if name in seen:
                raise GraphFilterError(f"{where} is malformed: it names the module {shown(name)} twice")
            seen.add(name)
        read.append((config, names))
    return read


def _imports(record: dict[str, Any]) -> list[str]:
    """The modules that a record says register its filters."""
    found = record.get("imports")
    named = isinstance(found, list) and all(isinstance(m, str) and m.replace(".", "").isidentifier() for m in found)
    return found if named else []  # type: ignore[return-value]


def _build(config: FilterConfig, site: AttentionSite) -> GraphFilter:
    graph_filter = build_filter(config, site)
    like = next(site.module.parameters(), torch.empty(0))
    dtype = like.dtype if like.is_floating_point() else None
    graph_filter.train(site.module.training)
    # a module of a model on meta may hold tensors that are not
    to_be_loaded = any(t.is_meta for t in (like, *graph_filter.parameters(), *graph_filter.buffers()))
    if not to_be_loaded:
        return graph_filter.to(device=like.device, dtype=dtype)
    # buffers that are not saved, and that reset_parameters may not set, are to have the values of __init__
    unsaved = {f"{n}.{k}".lstrip(".") for n, m in graph_filter.named_modules() for k in m._non_persistent_buffers_set}
    if unsaved:
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            made = dict(build_filter(config, site).named_buffers())
            vars(graph_filter)[STARTED] = {name: made[name] for name in unsaved if name in made}
    return graph_filter


def select_sites(sites: list[AttentionSite], layers: Layers, stack: str | None) -> list[AttentionSite]:
    """The sites that ``layers`` and ``stack`` of ``patch_model`` choose; layers are counted within each stack."""
    kinds = sorted({site.stack for site in sites})
    if stack is not None:
        if not isinstance(stack, str) or stack not in kinds:
            raise GraphFilterError(f"stack={shown(stack)}: the model has {' and '.join(kinds)} self-attention only")
        sites = [site for site in sites if site.stack == stack]
    groups: dict[str, list[AttentionSite]] = {}
    for site in sites:
        groups.setdefault(site.group, []).append(site)
    chosen = [site for group, members in groups.items() for site in _select(group, members, layers)]
    if not chosen:
        counts = ", ".join(f"{group or 'model'}: {len(members)}" for group, members in groups.items())
        raise GraphFilterError(f"layers={shown(layers)} selects no layer; layers found ({counts})")
    return chosen


def _select(group: str, sites: list[AttentionSite], layers: Layers) -> list[AttentionSite]:
    if layers is None:
        return sites
    if isinstance(layers, str) and layers in ("even", "odd"):
        return sites[layers == "odd" :: 2]
    given = f"layers={shown(layers)}"
    if isinstance(layers, slice):
        try:
            return sites[layers]
        except Exception as error:
            raise GraphFilterError(f"{given}: a slice of layers holds integers, its step is not 0") from error
    if callable(layers):
        return [site for site in sites if _holds(layers, site, given)]
    listed = isinstance(layers, Collection) and getattr(layers, "ndim", 1) == 1  # arrays and tensors too
    if not listed or isinstance(layers, (str, bytes, bytearray, memoryview, Mapping)):
        raise GraphFilterError(f"{given}: use None, 'even', 'odd', a list of indices, a slice, or a predicate")
    wanted = set()
    for i in layers:  # one by one: a range may be endless
        index = _index(i, given)
        if not -len(sites) <= index < len(sites):
            raise GraphFilterError(
                f"{given}: {shown(i)} is out of range, {group or 'the model'} has {len(sites)} layers (use stack= to "
                "choose encoder or decoder)"
            )
        wanted.add(index % len(sites))
    return [site for site in sites if site.index in wanted]


def _holds(predicate: Callable[[int, str], bool], site: AttentionSite, given: str) -> bool:
    try:
        return bool(predicate(site.index, site.name))
    except Exception as error:
        raise GraphFilterError(
            f"{given}: the predicate takes (index, module name) and returns True or False; at ({site.index}, "
            f"{site.name!r}) it raised {shown(error)}"
        ) from error


def _index(value: Any, given: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("a bool is no index")
        return operator.index(value)
    except Exception as error:
        raise GraphFilterError(f"{given}: a list of layers holds integers, got {shown(value)}") from error


def _nothing_to_patch(model: nn.Module, refused: dict[str, str]) -> str:
    reasons: dict[tuple[str, str], int] = {}
    for name, reason in refused.items():
        key = (type(model.get_submodule(name)).__name__, reason)
        reasons[key] = reasons.get(key, 0) + 1
    found = "; ".join(f"{count} x {cls}: {reason}" for (cls, reason), count in reasons.items())
    return f"{type(model).__name__} has no self-attention to patch. Attention found: {found or 'none'}"


def _summary(values: Tensor | None) -> str:
    if values is None:
        return ""
    spread = f" ± {values.std(correction=0):.4f}" if values.numel() > 1 and values.std(correction=0) > 0 else ""
    return f"{values.mean():.4f}{spread}"
