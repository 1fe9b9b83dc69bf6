"""Decoding with a key/value cache: the memory of a filter lives on the cache layer itself.

``layer_memory``, ``cache_layers`` and ``state_layers`` define these layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import UNSEEN, GraphFilterError
from ...ops.exporting import is_exporting
from ...shift.operator import PastRows
from ..base import describe_site
from .cache_layers import EXPORTED_STEP, FILTERED, FilteredDynamicLayer, FilteredStaticLayer, SignalRows
from .state_layers import STATEFUL, KeyedStateLayer

ARGUMENT = "graph_filter_cache"
# what models and their outputs call a cache; transformers 5.24 gave it a new name
NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
NAMES = {NAME, "past_key_values", "layer_past"}  # modules may receive it under an earlier name
_DUMMY: Any = getattr(cache_utils, "DummyLayer", ())  # earlier releases give such a layer no place at all
_CONVERTIBLE = {DynamicLayer, FilteredDynamicLayer, *STATEFUL.values()}  # while they hold no tokens
_SHARED = (
    "reads the keys and values of an earlier layer, and has no place in the cache for the memory of its filter: "
    "exclude it with layers=, or use use_cache=False"
)


class _Rows:
    """The ``PastRows`` of one forward: ``keys`` rows are visible to this call."""

    def __init__(self, layer: Any, keys: int):
        self.layer, self.keys = layer, keys

    def extend(self, application: int, signal: Tensor) -> Tensor:
        return self.layer.append(application, signal, self.keys)

    def newest(self, value: Tensor, tokens: int) -> Tensor:
        return value[:, :, -tokens:]


class _ExportedRows(_Rows):
    """The same in an exported graph, which returns the keys and values of a growing cache alone."""

    def extend(self, application: int, signal: Tensor) -> Tensor:
        if self.keys != signal.shape[2]:
            raise GraphFilterError(EXPORTED_STEP)
        return signal


def announce(past: Any, module: Any) -> None:
    """Prepare the layer of the cache for ``module`` before it runs, if its filter keeps a state there.

    A layer without tokens, such as one that was reset, may have served another kind of filter.

    Raises:
        GraphFilterError: another kind of cache (static, quantized ...), or one that an unpatched model filled.
    """
    kind = module.graph_filter.decoding
    layers, index = _layers(past), module.layer_idx
    if kind == "rows":
        if index < len(layers) and isinstance(layers[index], KeyedStateLayer) and not layers[index].get_seq_length():
            layers[index] = _with_memory(layers[index], FilteredDynamicLayer)
        return
    if getattr(module.config, "num_kv_shared_layers", 0):  # later layers may read its keys
        kind = "state and keys"
    create = getattr(_self_attention(past), "layer_class_to_replicate", None)
    while create is not None and len(layers) <= index:
        layers.append(create())
    layer = _layer_of(layers, module)
    if type(layer) in _CONVERTIBLE and type(layer) is not STATEFUL[kind] and not layer.get_seq_length():
        layer = layers[index] = _with_memory(layer, STATEFUL[kind])
    if type(layer) is not STATEFUL[kind]:
        filled = isinstance(layer, DynamicLayer) and layer.get_seq_length()
        raise GraphFilterError(
            f"decoding through this graph filter keeps a state in the cache, and {type(past).__name__} "
            f"({type(layer).__name__}) "
            + (f"was filled without it: {UNSEEN}" if filled else "cannot hold it: use a DynamicCache")
        )
    layer.announced = True


def recall(
    past: Any, module: Any, graph_filter: Any, query: Tensor, key: Tensor
) -> tuple[PastRows | None, dict[str, Tensor] | None]:
    """Return what the filter of ``module`` remembers in the cache ``past``: (rows of signals, state).

    A part that the filter does not use is None. Without a cache both are None.

    Raises:
        GraphFilterError: a kind of cache that cannot keep rows (static sliding windows, quantized ...), an export, or a
            model with a cache of its own, in which the filter has no place.
    """
    decoding = graph_filter.decoding
    if past is None:
        if decoding != "rows" and key.shape[2] != query.shape[2]:
            raise GraphFilterError(
                f"{describe_site(module)}: {query.shape[2]} query tokens see {key.shape[2]} key tokens, and "
                f"{graph_filter.config.filter!r} knows none of the past ones, as its model has a custom cache: use "
                "use_cache=False"
            )
        return None, None
    layers = _layers(past)
    layer = _layer_of(layers, module)
    request = graph_filter.site_name, query.shape[2], key.device
    if decoding != "rows":
        if is_exporting():
            raise GraphFilterError(
                f"{graph_filter.site_name}: an exported graph does not return the state that this graph filter "
                "keeps in a cache: export with use_cache=False"
            )
        return None, layer.kept if layer.check_usable(*request) else None  # type: ignore[union-attr]
    if is_exporting() and isinstance(layer, DynamicLayer):
        return _ExportedRows(layer, key.shape[2]), None
    if type(layer) in FILTERED:
        layer = layers[module.layer_idx] = _with_memory(layer, FILTERED[type(layer)])
    if isinstance(layer, FilteredStaticLayer):
        layer.begin_read(request[0])
        return layer, None
    if not isinstance(layer, SignalRows):
        raise GraphFilterError(
            f"decoding through a graph filter keeps rows of S(V) in the cache, and {type(past).__name__} "
            f"({type(layer).__name__}) cannot hold them: use a DynamicCache (the default), a StaticCache without "
            "sliding windows, or use_cache=False"
        )
    return _Rows(layer, key.shape[2]) if layer.check_usable(*request) else None, None


def _layer_of(layers: list[Any], module: Any) -> Any:
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if isinstance(layer, _DUMMY) or (layers and layer is None):
        raise GraphFilterError(f"{module.graph_filter.site_name} {_SHARED}")
    return layer


def _with_memory(layer: Any, layer_class: type) -> Any:
    successor: Any = object.__new__(layer_class)
    successor.__dict__ = dict(layer.__dict__)
    successor.forget()
    return successor


def _self_attention(past: Any) -> Any:
    return past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past


def _layers(past: Any) -> list[Any]:
    return getattr(_self_attention(past), "layers", [])  # some models keep a cache of their own
