"""The choice of layers: the meaning of ``layers`` and ``stack`` of ``patch_model``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from ..errors import GraphFilterError, shown
from ..filters import AttentionSite

Layers = None | Literal["all", "even", "odd"] | Collection[int] | slice | Callable[[int, str], bool]


def select_sites(sites: list[AttentionSite], layers: Layers, stack: str | None) -> list[AttentionSite]:
    """Return the sites that ``layers`` and ``stack`` of ``patch_model`` select; layers count within each stack."""
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
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return sites
    if isinstance(layers, str) and layers in ("even", "odd"):
        return sites[layers == "odd" :: 2]
    where = f"layers={shown(layers)}"
    try:
        if isinstance(layers, slice):
            return sites[layers]
        if callable(layers):
            return [site for site in sites if layers(site.index, site.name)]
        if not isinstance(layers, Collection) or isinstance(layers, (str, bytes, bytearray, memoryview, Mapping)):
            raise TypeError(f"{type(layers).__name__} is no list of indices")
        indices = {_index(i, where, group, len(sites)) for i in layers}  # stops at the first mistake
    except GraphFilterError:
        raise
    except Exception as error:  # a predicate may raise anything
        raise GraphFilterError(
            f"{where}: use None, 'even', 'odd', a list of indices, a slice, 'all' or a predicate that "
            f"takes (index, module name); it raised {shown(error)}"
        ) from error
    return [site for site in sites if site.index in indices]


def _index(i: Any, where: str, group: str, count: int) -> int:
    if isinstance(i, bool):  # Python takes True for 1, and a list of them may be meant as a mask
        raise TypeError(f"{i} is no index")
    if not -count <= (index := operator.index(i)) < count:
        raise GraphFilterError(
            f"{where}: {shown(i)} is out of range, {group or 'the model'} has {count} layers (use stack= to choose "
            "encoder or decoder)"
        )
    return index % count
