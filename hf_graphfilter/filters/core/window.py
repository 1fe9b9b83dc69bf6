"""A window of softmax attention beside a replacement filter: the nearest tokens and the first ones of the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import GraphFilterError
from ...ops.heads import repeat_heads
from ...ops.nearby import attend_few, attend_nearby, count_nearby, first_present
from ...shift.attention import AttentionShift

_SINK = ("sink", "sink_at", "sink_key", "sink_value")


def mix_window(
    graph_filter: Any, far: Tensor, outside: nn.Linear, shift: AttentionShift, hidden: Tensor, value: Tensor
) -> Tensor:
    """Return the window mixed with ``far``, the output of a replacement filter for all tokens.

    The window is softmax attention to the tokens at most ``window`` away and to the first ``sinks``. Window and filter
    are weighted as if they were parts of one softmax: output = s near + (1 - s) far, s = sigmoid(l - outside(X) -
    log(tokens)). Here ``l`` is the logarithm of the summed exponentials of the window's scores, and ``outside`` a
    learned estimate of the mean score. The tokens are those of the context, or those beyond window and sinks.
    """
    tokens, state, window = shift.query.shape[2], shift.state, graph_filter.config.window
    key, value = (repeat_heads(x[:, :, -tokens:], graph_filter.heads) for x in (shift.key, value))
    causal, keys = shift.visible()
    causal = causal or state is not None
    shape = key.shape[0], tokens
    is_token = key.new_ones(shape, dtype=torch.bool) if keys is None else keys[:, -tokens:].expand(shape)
    count = is_token.cumsum(-1) if causal else is_token.sum(-1, keepdim=True)
    if state is not None:
        if "count" in state:
            count = count + state["count"]
            key, value = (torch.cat([state[n], x], 2) for n, x in (("near_key", key), ("near_value", value)))
            is_token = torch.cat([state["near"], is_token], 1)
        memory = {"count": count[:, -1:], "near": is_token[:, -window:]}
        memory |= {"near_key": key[:, :, -window:], "near_value": value[:, :, -window:]}
        state.update({name: x.clone() for name, x in memory.items()})  # a slice would hold the whole context
    bias = _bias(graph_filter, shift)
    near, mass = attend_nearby(shift.query, key, value, window, shift.scaling, causal, is_token, bias)
    far_count = count.clamp(min=1)
    if graph_filter.config.far == "beyond":  # where there are none the filter weighs nothing
        far_count = count - count_nearby(is_token, tokens, window, causal)
    if graph_filter.config.sinks:
        rows = is_token[:, -tokens:], key[:, :, -tokens:], value[:, :, -tokens:]
        sink_out, weight, sink_count = _attend_sinks(graph_filter, shift, *rows, causal)
        far_count = far_count - sink_count if graph_filter.config.far == "beyond" else far_count
        near = torch.lerp(near, sink_out, torch.sigmoid(weight - mass).to(near.dtype))
        mass = torch.logaddexp(mass, weight)
    if graph_filter.switched_off == "far":
        return near.to(far.dtype)
    log_count = far_count.clamp(min=0).to(mass.dtype).log()[:, None, :, None]
    estimate = outside(in_dtype_of(outside, hidden)).mT.unsqueeze(-1) + log_count
    share = torch.sigmoid(mass - estimate)
    return torch.lerp(far, near.to(far.dtype), share.to(far.dtype))  # near is narrower under autocast


def _bias(graph_filter: Any, shift: AttentionShift) -> Tensor | None:
    """Return the bias that is added to the scores of the window."""
    if graph_filter.config.position_bias != "window" or not graph_filter.position_bias:
        return None
    if shift.bias is None:
        where = graph_filter.site_name
        raise GraphFilterError(f"{where} was called without the position_bias that its window needs")
    return shift.bias


def _attend_sinks(
    graph_filter: Any, shift: AttentionShift, is_token: Tensor, key: Tensor, value: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention to the first tokens that are out of the window, its weight, and how many each query sees.

    The first tokens are those of this call and those that ``shift.state`` keeps.
    """
    state, places = shift.state, torch.arange(is_token.shape[1], device=key.device).expand_as(is_token)
    past_state = state if state is not None and "sink_end" in state else None
    query_places = places = places if past_state is None else places + past_state["sink_end"]
    entries: tuple[Tensor, ...] = is_token, places, key, value
    if past_state is not None:
        entries = tuple(torch.cat([past_state[n], x], x.dim() // 2) for n, x in zip(_SINK, entries, strict=True))
    entries = first_present(graph_filter.config.sinks, *entries)
    if state is not None:
        state.update(zip(_SINK, entries, strict=True), sink_end=query_places[:, -1:] + 1)
    is_token, places, key, value = entries
    distance = query_places[:, :, None] - places[:, None]
    gap = distance if causal else distance.abs()
    bias = _bias(graph_filter, shift)
    if bias is not None:
        bias = bias.expand(places.shape[0], -1, -1, -1).gather(
            3, places[:, None, None].expand(-1, *bias.shape[1:3], -1)
        )
    visible = (gap > graph_filter.config.window) & is_token[:, None]
    return *attend_few(shift.query, key, value, shift.scaling, visible, bias), visible.sum(-1)


def in_dtype_of(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of the layer's weight, or unchanged if the layer is quantized."""
    weight = layer.weight
    return x.to(weight.dtype) if isinstance(weight, Tensor) and weight.is_floating_point() else x
