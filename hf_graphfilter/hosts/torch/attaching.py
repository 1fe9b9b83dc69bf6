"""The way of a filter into a module, and out of it again."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from ...errors import GraphFilterError
from ...filters import AttentionSite, GraphFilter
from ...filters.core.attached import CHILD
from ..stand_ins import derive_class
from ..watching import refuse_script, running_forward, unwatch, watch
from .attend import GraphFilterAttention
from .multihead import filtered_forward, is_filtered

_BASE = "_graph_filter_base"  # of the class of a patched module: the one that it had


@functools.cache
def _filtered(base: Any) -> Any:
    """Return the subclass that runs the filter."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_filtered(self):  # a wrapper has kept this function, and the module is no longer patched
            return base.forward(self, *args, **kwargs)
        return filtered_forward(self, *args, **kwargs)

    return derive_class(base, _rebuild, {"forward": forward, "__prepare_scriptable__": refuse_script, _BASE: base})


def _rebuild(base: Any) -> Any:
    cls = _filtered(base)
    return cls.__new__(cls)


def attach(site: AttentionSite, graph_filter: GraphFilter) -> None:
    """Add the filter to a module, and give a ``MultiheadAttention`` the subclass that runs it."""
    site.module.add_module(CHILD, graph_filter)
    if isinstance(site.module, GraphFilterAttention):
        return
    site.module.__class__ = _filtered(type(site.module))  # type: ignore[arg-type]
    watch(site.module)


def detach(model: nn.Module, modules: Iterable[Any]) -> None:
    """Undo ``attach`` of these modules; a ``GraphFilterAttention`` then computes plain attention."""
    modules = list(modules)
    for module in modules:
        if (base := getattr(type(module), _BASE, None)) and type(module) is not _filtered(base):
            raise GraphFilterError(
                f"{module.graph_filter.site_name} was given the class {type(module).__name__}, which derives from that "
                "of the patched module: undo that (FSDP2, parametrizations ...) before unpatch_model"
            )
    for module in modules:
        module.__class__ = getattr(type(module), _BASE, type(module))
        unwatch(module)
        delattr(module, CHILD)


def leads_to_filter(module: nn.Module) -> bool:
    """Return whether the forward of a patched module, as it is now, is known to run the filter."""
    if isinstance(module, GraphFilterAttention):
        return running_forward(module) is GraphFilterAttention.forward
    base = getattr(type(module), _BASE, None)
    return base is not None and running_forward(module) is _filtered(base).forward


def backend(module: Any) -> str:
    """Return ``"sdpa"``; attention weights, where they are asked for, take explicit matrices."""
    return "sdpa"


def kind(module: Any) -> type:
    """Return one type for all modules, since nothing tells the parts of a model apart but their names."""
    return type(None)
