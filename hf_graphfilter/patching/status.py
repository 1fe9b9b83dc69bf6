"""The state of a patched model: a table of modules, filters and coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..filters import FilterConfig, GraphFilter
from ..filters.core.attached import (
    CHILD,
    copy_restarted,
    filters_of,
    has_start_values,
    is_whole,
    patched_modules,
    read_whole,
)
from ..hosts import Host, host_of, host_of_module, unwrapped
from ..tables import html_table, text_table

FORWARD_REPLACED = "forward replaced"


@dataclass(frozen=True)
class FilterRow:
    """One patched module.

    Attributes:
        module: the name of the attention module in the model.
        filter: the config of its filter.
        coefficients: the coefficients by name, as copies on the CPU, float32 or complex64.
        backend: the attention implementation that computes ``S``. It is ``FORWARD_REPLACED`` if this is unknown,
            because the module's forward or class was replaced after ``patch_model``.
        trained: the names of the coefficients that training changes; the others are fixed.
        moved: mean distance of the learned coefficients from their start values; None if the filter has none.
    """

    module: str
    filter: FilterConfig
    coefficients: dict[str, Tensor]
    backend: str
    trained: frozenset[str] = frozenset()
    moved: float | None = None


class FilterStatus(list[FilterRow]):
    """The rows of ``filter_status``, which print as a table.

    The table shows each coefficient as its mean over the heads ± its standard deviation, with "(fixed)" if training
    does not change it. "moved" is the mean distance of the learned coefficients from their start values.

    Attributes:
        left_alone: the attention modules that cannot get a filter: name -> reason (cross-attention ...).
    """

    left_alone: Mapping[str, str] = MappingProxyType({})

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) as text."""
        names = list(dict.fromkeys(name for row in self for name in row.coefficients))
        rows = []
        for row in self:
            cells = [_summarise(row.coefficients.get(name), name in row.trained) for name in names]
            distance = "" if row.moved is None else f"{row.moved:.4f}"
            rows.append([row.module, row.filter.filter, *cells, distance, row.backend])
        return ["module", "filter", *names, "moved", "backend"], rows

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return html_table(*self.table()) if self else "<p>no graph filter</p>"

    def __str__(self) -> str:
        if not self:
            return "no graph filter"
        return "\n".join([text_table(*self.table()), *self._describe_others()])

    def _describe_others(self) -> list[str]:
        """Return a line for each reason why attention has no filter."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_alone.items():
            by_reason.setdefault(reason, []).append(name)
        suffixes = {reason: f" and {len(names) - 1} more" * (len(names) > 1) for reason, names in by_reason.items()}
        return [f"left alone: {names[0]}{suffixes[reason]} ({reason})" for reason, names in by_reason.items()]


def filter_status(model: nn.Module) -> FilterStatus:
    """List the patched modules: rows of (module, filter, coefficients, backend) that print as a table.

    If FSDP2 or ZeRO-3 has sharded the model, every process must call it.

    Args:
        model: a patched model, wrapped or not, or a module of your own with patched models in it. An unpatched model
            gives an empty list.

    Returns:
        A list with one row per patched module. A row has the attributes ``module``, ``filter`` (its config),
        ``coefficients`` (copies on the CPU), ``backend``, ``trained`` (the names of the coefficients that training
        changes) and ``moved`` (their mean distance from the start values). The attribute ``left_alone`` of the list
        names the attention modules that cannot get a filter, with the reason.

    Raises:
        GraphFilterError: the module is not a model of a supported library and holds no filter.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=2)), "gfsa", layers="even")
        >>> [row.module for row in filter_status(model)]
        ['encoder.layer.0.attention.self']
    """
    status = FilterStatus()
    left_alone: dict[str, str] = {}
    for prefix, part, host in _find_models(unwrapped(model)):
        filters = filters_of(part)
        for name, graph_filter in filters:
            values = _read_coefficients(graph_filter)
            module = part.get_submodule(name)
            owner = host_of_module(module, host)
            backend = owner.backend(module) if owner.leads_to_filter(module) else FORWARD_REPLACED
            distance, trained_names = _distance_from_start(graph_filter, values), _names_trained(graph_filter)
            status.append(FilterRow(f"{prefix}{name}", graph_filter.config, values, backend, trained_names, distance))
        if filters:
            left_alone |= {f"{prefix}{name}": reason for name, reason in host.find(part)[1].items()}
    status.left_alone = left_alone
    return status


def _find_models(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module, Host]]:
    """Return (name prefix, model, host) of the module itself if a host takes it, or else of its patched parts."""
    try:
        return [(prefix, model, host_of(model))]
    except GraphFilterError:
        parts = [] if CHILD in model._modules else model.named_children()
        patched_parts = [(name, part) for name, part in parts if patched_modules(part, required=False)]
        if not patched_parts:
            raise
    return [entry for name, part in patched_parts for entry in _find_models(part, f"{prefix}{name}.")]


def has_moved(model: nn.Module) -> bool:
    """Return whether any number of the filters in a module differs from its start value.

    Of sharded and offloaded filters only the learned coefficients are compared, which are few.
    """
    return any(
        _distance_from_start(each, _read_coefficients(each)) or (is_whole(each) and not has_start_values(each))
        for _, each in filters_of(model)
    )


def _read_coefficients(graph_filter: GraphFilter) -> dict[str, Tensor]:
    tensors = read_whole(graph_filter, type(graph_filter).coefficients)
    return {k: t.to(torch.complex64 if t.is_complex() else torch.float32) for k, t in tensors.items()}


def _names_trained(graph_filter: GraphFilter) -> frozenset[str]:
    parameters = dict(graph_filter.named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        return frozenset()
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    frozen |= {name for name, source in getattr(graph_filter, "sources", {}).items() if source in frozen}
    learned = graph_filter.learned_coefficients()
    return frozenset(name for name in learned if not {name, name.rpartition("_")[0]} & frozen)


def _distance_from_start(graph_filter: GraphFilter, values: dict[str, Tensor]) -> float | None:
    """Return the mean distance of the ``values`` of the learned coefficients from their start values."""
    with torch.random.fork_rng(devices=[]):
        start = copy_restarted(graph_filter).learned_coefficients()
    distances = [(values[name] - value).abs().flatten() for name, value in start.items()]
    return torch.cat(distances).mean().item() if distances else None


def filter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the learned parameters of all filters in the model.

    Args:
        model: a patched model, wrapped or not.
    """
    for _, graph_filter in filters_of(model):
        yield from graph_filter.parameters()


def _summarise(values: Tensor | None, trained: bool) -> str:
    if values is None:
        return ""
    spread = f" ± {values.std(correction=0):.4f}" if values.numel() > 1 and values.std(correction=0) > 0 else ""
    return f"{values.mean():.4f}{spread}" + " (fixed)" * (not trained)
