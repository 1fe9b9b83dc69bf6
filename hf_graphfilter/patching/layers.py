"""The choice of layers: the meaning of ``layers`` and ``stack`` of ``patch_model``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import GraphFilterError, nearest, shown
from ..filters import AttentionSite

WAYS = "'all', 'even', 'odd', a list of indices, a slice or a predicate that takes (index, module name)"
Layers = None | str | Collection[int] | slice | Callable[[int, str], bool]


def select_sites(sites: list[AttentionSite], layers: Layers, stack: str | None) -> list[AttentionSite]:
    """Return the sites that ``layers`` and ``stack`` of ``patch_model`` select.

    Layers are counted in each group, and among those of ``stack`` if it is given.
    """
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


def parse_layers(text: str) -> list[int] | slice | None:
    """Return the layers that a text names: all, even, odd, indices ``0,2,-1`` or a slice ``2:8``."""
    named = {"all": None, "even": slice(0, None, 2), "odd": slice(1, None, 2)}
    if text in named:
        return named[text]
    try:
        if ":" in text:
            return slice(*(int(part) if part.strip() else None for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (ValueError, TypeError):
        raise GraphFilterError(
            f"layers={shown(text)}: a text is 'all', 'even', 'odd', indices such as '0,2,-1' or a slice such as "
            f"'2:8'{nearest(text, named)}"
        ) from None


def _select(group: str, sites: list[AttentionSite], layers: Layers) -> list[AttentionSite]:
    where = f"layers={shown(layers)}"
    if isinstance(layers, str):
        layers = parse_layers(layers)
    if layers is None:
        return sites
    try:
        if isinstance(layers, slice):
            return sites[layers]
        if callable(layers):
            return [site for i, site in enumerate(sites) if layers(i, site.name)]
        if not isinstance(layers, Collection) or isinstance(layers, (bytes, bytearray, memoryview, Mapping)):
            raise GraphFilterError(f"{where}: use {WAYS}")
        indices = {_index(i, where, group, len(sites)) for i in layers}  # stops at the first mistake
    except GraphFilterError:
        raise
    except Exception as error:  # a predicate may raise anything
        raise GraphFilterError(f"{where}: use {WAYS}; it raised {shown(error)}") from error
    return [site for i, site in enumerate(sites) if i in indices]


def _index(i: Any, where: str, group: str, count: int) -> int:
    # Python and PyTorch accept True as 1, but a list of bools may be meant as a mask
    if isinstance(i, bool) or str(getattr(i, "dtype", None)) == "torch.bool":
        raise TypeError(f"{i} is no index")
    if not -count <= (index := operator.index(i)) < count:
        raise GraphFilterError(
            f"{where}: {shown(i)} is out of range, {group or 'the model'} has {count} layers (use stack= to choose "
            "encoder or decoder)"
        )
    return index % count
