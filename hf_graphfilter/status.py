"""What is patched: a table of modules, filters and coefficients."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .filters import FilterConfig
from .filters.attached import filters_of, read_whole
from .hosts import host_of, unwrapped

FORWARD_REPLACED = "forward replaced"


@dataclass(frozen=True)
class FilterRow:
    """One patched module: where it is, its filter, the coefficients by name (copies on the CPU, float32 or complex64),
    and what computes S; ``FORWARD_REPLACED`` where that is not known, since the module's forward or class was replaced
    after ``patch_model``."""

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
        return html_table(*self.table()) if self else "<p>no graph filter</p>"

    def __str__(self) -> str:
        if not self:
            return "no graph filter"
        return text_table(*self.table())


def html_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [("th", header), *(("td", row) for row in rows)]
    body = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in body) + "</table>"


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
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=2)), "gfsa", layers="even")
        >>> [row.module for row in filter_status(model)]
        ['encoder.layer.0.attention.self']
    """
    model = unwrapped(model)
    host = host_of(model)
    rows = []
    for name, graph_filter in filters_of(model):
        tensors = read_whole(graph_filter, type(graph_filter).coefficients)
        values = {k: t.to(torch.complex64 if t.is_complex() else torch.float32) for k, t in tensors.items()}
        module = model.get_submodule(name)
        backend = host.backend(module) if host.leads_to_filter(module) else FORWARD_REPLACED
        rows.append(FilterRow(name, graph_filter.config, values, backend))
    return FilterStatus(rows)


def filter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learned parameters of all filters in the model."""
    for _, graph_filter in filters_of(model):
        yield from graph_filter.parameters()


def _summary(values: Tensor | None) -> str:
    if values is None:
        return ""
    spread = f" ± {values.std(correction=0):.4f}" if values.numel() > 1 and values.std(correction=0) > 0 else ""
    return f"{values.mean():.4f}{spread}"
