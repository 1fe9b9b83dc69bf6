"""Replacement filters for decoders in which some heads keep softmax attention.

Source: Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (ICLR
2025), where the other heads see sinks and a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphFilterError, is_number, shown
from ...ops.heads import HeadPart, merge_heads
from ...shift.attention import AttentionShift
from .attached import CHILD
from .base import FilterConfig, GraphFilter
from .replacing import ReplacingConfig, ReplacingFilter
from .site import AttentionSite

Keep = dict[int, tuple[int, ...]]
FORM = "must give key heads by layer, as {4: [0, 2]}"


class KeepingFilter(ReplacingFilter):
    """Base class of replacement filters in which some heads can keep attention; a subclass defines ``filter_part``.

    The shapes of the parameters do not depend on ``keep``; those of kept heads are not used. So a saved filter fits any
    ``keep``.

    Attributes:
        part: the heads that are filtered.
        kept: the others, None if all are filtered.
    """

    config: KeepingConfig

    def __init__(self, config: KeepingConfig, site: AttentionSite):
        super().__init__(config, site)
        heads = (config.keep or {}).get(site.index, ())
        if heads:
            _check_heads(heads, site)
        self.kept = HeadPart(site.key_heads, heads) if heads else None
        self.part = HeadPart(site.key_heads, tuple(head for head in range(site.key_heads) if head not in heads))

    def filter_part(self, shift: AttentionShift, value: Tensor) -> Tensor:
        """Return the output of the filter for the heads of ``part``, the only heads that ``shift`` has."""
        raise NotImplementedError

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        if self.kept is None:
            return self.filter_part(shift, value)
        kept_out, memory = _attend(shift.part(self.kept), self.kept.take(value))
        out = self.filter_part(shift.part(self.part), self.part.take(value))
        if shift.state is not None:
            shift.state.update(memory)
        return merge_heads([(self.kept, kept_out.to(out.dtype)), (self.part, out)])


@dataclass(frozen=True, kw_only=True)
class KeepingConfig(ReplacingConfig):
    """The option of ``KeepingFilter``.

    Args:
        keep (dict, default None): Key heads that keep their attention to all tokens, by layer, as in ``{4: [0, 2]}``;
            decoders only. Layers are counted as in ``patch_model(layers=)``. The cache holds the keys and values of
            these heads. The filter can be fitted without ``keep``.
    """

    keep: dict[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", _read_keep(self.keep, type(self).__name__))
        super().__post_init__()

    def check_sites(self, sites: Sequence[AttentionSite]) -> None:
        super().check_sites(sites)
        layers = sorted({site.index for site in sites if CHILD not in site.module._modules})
        if absent := [layer for layer in self.keep or {} if layer not in layers]:
            raise GraphFilterError(
                f"keep={self.keep} names layer {absent[0]}, which does not get the filter: name some of "
                f"{', '.join(map(str, layers))}, or select the layer with layers="
            )

    def to_dict(self) -> dict[str, Any]:
        options = super().to_dict()
        keep = options.pop("keep")  # left out where nothing is kept: earlier releases do not know it
        return options | ({"keep": {str(layer): list(heads) for layer, heads in keep.items()}} if keep else {})


def count_kept(
    filters: Mapping[str, GraphFilter], find: Callable[[], Iterable[AttentionSite]]
) -> dict[str, FilterConfig]:
    """Return the configs of filters by the names of their modules, with ``keep`` counted over the present layers.

    Layers may have been taken out or moved since the filters were built.

    Args:
        filters: filters by the names of their modules.
        find: gives the sites of the model.

    Raises:
        GraphFilterError: two layers that now have one number keep other heads.
    """
    configs = {name: graph_filter.config for name, graph_filter in filters.items()}
    keeping = {n: f for n, f in filters.items() if isinstance(f, KeepingFilter) and f.config.keep}
    indices = {site.name: site.index for site in find()} if keeping else {}
    groups: dict[str, dict[str, KeepingFilter]] = {}
    for name, graph_filter in keeping.items():
        if name in indices:
            groups.setdefault(repr(graph_filter.config.to_dict()), {})[name] = graph_filter
    for group in groups.values():
        keep: Keep = {}
        for name, graph_filter in group.items():
            heads = graph_filter.kept.chosen if graph_filter.kept else ()
            if keep.setdefault(indices[name], heads) != heads:
                raise GraphFilterError(
                    f"{name} has the number {indices[name]} now and keeps the heads {list(heads)}, another of this "
                    f"number {list(keep[indices[name]])}, which keep= cannot say: unpatch the model, and patch it again"
                )
        configs |= {name: replace(graph_filter.config, keep=keep) for name, graph_filter in group.items()}
    return configs


def _read_keep(keep: Any, name: str) -> Keep | None:
    """Return ``keep`` with integers as keys, which JSON turns into strings; None if no head is kept."""
    if keep is None:
        return None
    if isinstance(keep, str | float):
        raise GraphFilterError(
            f"{name}: keep {FORM}, got {shown(keep)}; only linearize(...) chooses a share of heads, given as '20%'"
        )
    layers: Keep = {}
    for layer, heads in keep.items() if isinstance(keep, Mapping) else [(keep, None)]:
        index = int(layer) if isinstance(layer, str) and layer.isdecimal() else layer
        indices: list[Any] = [*heads] if isinstance(heads, Sequence) else [None]
        if not is_number(index, whole=True) or index in layers or not all(is_number(x, whole=True) for x in indices):
            raise GraphFilterError(f"{name}: keep {FORM}, with whole numbers from 0, got {shown(keep)}")
        layers[int(index)] = tuple(sorted({int(head) for head in indices}))
    return {layer: heads for layer, heads in sorted(layers.items()) if heads} or None


def _check_heads(heads: tuple[int, ...], site: AttentionSite) -> None:
    """Raise if a module cannot keep the attention of these key heads."""
    where, count = f"{site.name}: keep={{{site.index}: {list(heads)}}}", site.key_heads
    if not site.causal:
        raise GraphFilterError(
            f"{where} is for decoders only, and this module is not causal: leave it out, or use stack="
        )
    if heads[-1] >= count:
        raise GraphFilterError(f"{where} names the key head {heads[-1]}, but the module has {count}, counted from 0")
    if len(heads) == count:
        raise GraphFilterError(f"{where} keeps all {count} key heads: exclude the layer with layers= instead")


def _attend(shift: AttentionShift, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the attention of some heads to all tokens so far, and the keys and values that the state must hold.

    Args:
        shift: the part of these heads.
        value: (batch, key heads of the part, tokens, features).
    """
    key, state = shift.key, shift.state
    memory: dict[str, Tensor] = {}
    if state is not None:
        past_rows = [state.pop(name, None) for name in ("kept_key", "kept_value")]
        if key.shape[2] == shift.query.shape[2]:  # otherwise the cache has all of them itself
            # a slice would hold the other heads, too
            key, value = (
                x.clone() if past is None else torch.cat([past, x], 2)
                for past, x in zip(past_rows, (key, value), strict=True)
            )
            memory = {"kept_key": key, "kept_value": value}
    return shift.call.attend(key, value)[0].transpose(1, 2), memory
