"""Put a filter into a module, and take it out again."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from ...filters import AttentionSite, GraphFilter
from ...filters.core.attached import CHILD
from ..subclassing import derive_filtered, restore_classes, runs_subclass, swap_class
from ..watching import running_forward
from .attend import GraphFilterAttention
from .multihead import filtered_forward


@functools.cache
def _filtered(base: Any) -> Any:
    """Return the subclass that runs the filter."""
    return derive_filtered(base, _rebuild, filtered_forward)


def _rebuild(base: Any) -> Any:
    cls = _filtered(base)
    return cls.__new__(cls)


def attach(site: AttentionSite, graph_filter: GraphFilter) -> None:
    """Add the filter to a module, and give a ``MultiheadAttention`` the subclass that runs it."""
    site.module.add_module(CHILD, graph_filter)
    if not isinstance(site.module, GraphFilterAttention):
        swap_class(site.module, _filtered)


def detach(model: nn.Module, modules: Iterable[Any]) -> None:
    """Undo ``attach`` of these modules; a ``GraphFilterAttention`` then computes softmax attention."""
    restore_classes(modules, _filtered)


def leads_to_filter(module: nn.Module) -> bool:
    """Return whether the forward of a patched module, as it is now, is known to run the filter."""
    if isinstance(module, GraphFilterAttention):
        return running_forward(module) is GraphFilterAttention.forward
    return runs_subclass(module, _filtered)


def backend(module: Any) -> str:
    """Return ``"sdpa"``; attention weights, where they are asked for, take explicit matrices."""
    return "sdpa"


def kind(module: Any) -> type:
    """Return one type for all modules, since nothing tells the parts of a model apart but their names."""
    return type(None)
