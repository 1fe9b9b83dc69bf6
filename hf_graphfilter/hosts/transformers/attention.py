"""The attention function of patched modules: transformers calls it, and it applies the module's graph filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...errors import GraphFilterError
from ...filters.core.attached import CHILD
from ...shift.attention import AttentionShift
from ...shift.earlier_layers import EarlierLayers
from ..base import describe_site
from ..watching import note_filter_runs
from . import cache
from .base_attention import BaseAttention, asks_for_weights
from .implementation import IMPLEMENTATION
from .tensor_parallel import with_local_heads

HIDDEN = "graph_filter_hidden"
EARLIER = "graph_filter_earlier"


def graph_filter_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the graph filter of ``module``.

    The signature is that of every attention function of transformers.

    Args:
        module: the patched attention module.
        query: (batch, heads, tokens, features).
        key: (batch, key heads, key tokens, features).
        value: (batch, key heads, key tokens, features).
        attention_mask: what the model made for the backend that the user chose.
        kwargs: what the module passes on to that backend, and what our hooks have added for the filter.

    Returns:
        The output (batch, tokens, heads, features), and the weights of the first application where the backend gives
        them.
    """
    graph_filter = _filter_of(module)
    note_filter_runs(module)
    past, hidden, earlier = kwargs.pop(cache.ARGUMENT, None), kwargs.pop(HIDDEN, None), kwargs.pop(EARLIER, None)
    _begin_call(module, graph_filter, earlier)
    attention = BaseAttention(module, query, key, attention_mask, kwargs)
    apply_filter = graph_filter
    if query.shape[1] != graph_filter.heads:
        apply_filter = with_local_heads(graph_filter, module, query)
    past_rows, state = cache.recall(past, module, graph_filter, query, key)
    shift = AttentionShift(attention.to_call(hidden), past_rows, state, earlier)
    output = _apply(apply_filter, module, shift, value)
    if not shift.applications and attention.implementation == "eager":
        _refuse_missing_weights(module, kwargs)
    return output.transpose(1, 2).contiguous(), shift.weights


def _filter_of(module: nn.Module) -> Any:
    graph_filter = module._modules.get(CHILD)
    if graph_filter is None:
        raise GraphFilterError(
            f"{type(module).__name__} runs with attn_implementation={IMPLEMENTATION!r} but has no graph filter: use "
            "patch_model(model, ...), and leave attn_implementation to name the backend (sdpa, eager, ...)"
        )
    return graph_filter


def _begin_call(module: nn.Module, graph_filter: Any, earlier: EarlierLayers | None) -> None:
    """Count the call if the layers of the stack pass tensors to each other.

    Raises:
        GraphFilterError: the filter reads what earlier layers left, and the model has not passed it on.
    """
    if earlier is not None:
        earlier.begin_call(graph_filter.site_name)
    elif graph_filter.reads_earlier:
        raise GraphFilterError(
            f"{describe_site(module)} did not receive the tensors of earlier layers, which "
            f"{graph_filter.config.filter!r} reads with these options: it was called outside its model, or the model "
            "does not pass keyword arguments on to its layers"
        )


def _apply(apply_filter: Callable[..., Tensor], module: Any, shift: AttentionShift, value: Tensor) -> Tensor:
    """Filter ``value``, and explain the error of a filter that cannot read the module's input.

    The input may have no row per token, as in vision towers; some filters read none.
    """
    hidden, query = shift.call.hidden, shift.call.query
    if hidden is None or (hidden.dim() == 3 and hidden.shape[:2] == (query.shape[0], query.shape[2])):
        return apply_filter(shift, value)
    try:
        return apply_filter(shift, value)
    except (RuntimeError, IndexError) as error:
        raise GraphFilterError(
            f"{describe_site(module)}: {module.graph_filter.config.filter!r} reads a row of the module's input for "
            f"each query token, ({query.shape[0]}, {query.shape[2]}, features), and it has the shape "
            f"{tuple(hidden.shape)}: exclude this module with layers=, or choose another filter"
        ) from error


def _refuse_missing_weights(module: Any, options: dict[str, Any]) -> None:
    """Raise if attention weights are asked for and the filter computes none.

    transformers would leave the layer out of its output, and later layers would move up.
    """
    if asks_for_weights(options):
        raise GraphFilterError(
            f"{describe_site(module)}: output_attentions asks for the attention weights, and "
            f"{module.graph_filter.config.filter!r} replaces attention and computes none: drop that option, or read "
            "them before patching"
        )
