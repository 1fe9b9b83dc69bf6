"""Choosing layers: what ``layers`` and ``stack`` of ``patch_model`` mean."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from ..errors import GraphFilterError, shown
from ..filters import AttentionSite

Layers = None | Literal["all", "even", "odd"] | Collection[int] | slice | Callable[[int, str], bool]


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
    if layers is None or (isinstance(layers, str) and layers == "all"):
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
        raise GraphFilterError(f"{given}: use None, 'even', 'odd', a list of indices, a slice, a predicate or 'all'")
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
