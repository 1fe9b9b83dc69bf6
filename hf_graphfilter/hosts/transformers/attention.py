"""The attention function of patched modules: what transformers calls, as the graph filter of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from ...errors import GraphFilterError
from ...filters.core.attached import CHILD
from ...ops.apply_twice import joint_form
from ...ops.few_rows import can_form_rows, form_rows
from ...ops.visibility import visibility
from ...shift.attention import AttentionCall, AttentionShift
from ..watching import note_filter_runs
from . import cache
from .interface import attention_function, honours_softcap
from .tensor_parallel import with_local_heads

IMPLEMENTATION = "hf_graphfilter"
# in config.json: transformers without us quotes it in its error. "flash", "sdpa", "flex_attention", "/" mean something
CURE = (
    f"{IMPLEMENTATION} (pip install -U hf-graphfilter, then import hf_graphfilter before loading; any other value "
    "loads the model without its graph filter)"
)
BASE_CONFIG = "_graph_filter_base_config"  # of a patched module's config: that of its model
CHOSEN = "_attn_implementation_internal"  # in a config: what ``_attn_implementation`` returns
HIDDEN = "graph_filter_hidden"
EARLIER = "graph_filter_earlier"
SERVING = (
    "vLLM and SGLang, whose attention writes the cache at every call, cannot serve patched models: use generate() or "
    "transformers serve"
)
_ENGINES = ("vllm", "sglang")  # what their transformers backends write into the configs they find
_MASKED = ("sdpa", "eager")  # whose masks say all that there is to say
_UNHONOURED = {"s_aux", "sinks", "softcap", "cache"}


def graph_filter_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as the graph filter of ``module``; the signature and results of every transformers attention function.

    query (batch, heads, tokens, features), key and value (batch, key heads, key tokens, features); returns the output
    (batch, tokens, heads, features) and the weights of the first application where the backend gives them.
    """
    graph_filter: Any = module._modules.get(CHILD)
    if graph_filter is None:
        raise GraphFilterError(
            f"{type(module).__name__} runs with attn_implementation={IMPLEMENTATION!r} but has no graph filter: use "
            "patch_model(model, ...), and leave attn_implementation to name the backend (sdpa, eager, ...)"
        )
    note_filter_runs(module)
    past, hidden = kwargs.pop(cache.ARGUMENT, None), kwargs.pop(HIDDEN, None)
    earlier = kwargs.pop(EARLIER, None)
    if graph_filter.reads_earlier and earlier is None:
        raise GraphFilterError(
            f"{_site(module)} was not handed what the filters of earlier layers made, which "
            f"{graph_filter.config.filter!r} reads with these options: it was called by itself, or its model does not "
            "hand keyword arguments on to its layers"
        )
    if earlier is not None:
        earlier.begin_call(graph_filter.site_name)
    implementation = field(field(module.config, BASE_CONFIG), CHOSEN) or "eager"
    attend = attention_function(type(module), implementation)
    if implementation in _ENGINES or implementation == IMPLEMENTATION or not _UNHONOURED.isdisjoint(kwargs):
        _refuse_unhonoured(module, implementation, attend, kwargs)
    apply_filter = graph_filter
    if query.shape[1] != graph_filter.heads:
        apply_filter = with_local_heads(graph_filter, module, query)

    def apply(keys: Tensor, signal: Tensor) -> tuple[Tensor, Tensor | None]:
        repeated = keys.shape[1] != key.shape[1]
        return attend(_SingleGroup(module) if repeated else module, query, keys, signal, attention_mask, **kwargs)

    def causal() -> bool:
        """Whether attention without a mask is causal; the eager functions never are."""
        given = kwargs.get("is_causal")
        return bool(getattr(module, "is_causal", True) if given is None else given) and implementation != "eager"

    def visible() -> tuple[bool, Tensor | None]:
        if implementation not in _MASKED:
            _refuse_untold(module, implementation, key.shape[2], attention_mask, **kwargs)
        biased, declared = graph_filter.position_bias, declared_causal(module)
        return visibility(attention_mask, causal(), query.shape[2], biased, declared)

    def twice(signal: Tensor, exact: bool) -> tuple[Tensor, Tensor] | None:
        return _sdpa_twice(query, key, signal, attention_mask, causal, exact, **kwargs)

    def few_rows() -> Tensor | None:
        return _sdpa_rows(query, key, attention_mask, **kwargs) if attend is sdpa_attention_forward else None

    rows, state = (None, None) if past is None else cache.recall(past, module, query, key)
    if past is None and graph_filter.decoding != "rows" and key.shape[2] != query.shape[2]:
        raise GraphFilterError(
            f"{_site(module)}: {query.shape[2]} query tokens see {key.shape[2]} key tokens, of whose past "
            f"{graph_filter.config.filter!r} was told nothing: use_cache=False, as its model has a cache of its own"
        )
    scaling = kwargs.get("scaling")
    call = AttentionCall(
        *(apply, query, key),
        twice=twice if attend is sdpa_attention_forward else None,
        few_rows=few_rows,
        weights_again=implementation == "eager" and not module.training,
        hidden=hidden,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        visible=visible,
        mask=attention_mask if isinstance(attention_mask, Tensor) else None,
        bias=kwargs.get("position_bias"),
    )
    shift = AttentionShift(call, rows, state, earlier)
    a_row_each = hidden is None or (hidden.dim() == 3 and hidden.shape[:2] == (query.shape[0], query.shape[2]))
    output = apply_filter(shift, value) if a_row_each else _apply_beside(hidden, apply_filter, module, shift, value)
    if not shift.applications and implementation == "eager" and _weights_wanted(kwargs):
        raise GraphFilterError(
            f"{_site(module)}: output_attentions asks for the attention weights, and {graph_filter.config.filter!r} "
            "computes none in the place of attention: leave it out, or read them before patching"
        )
    return output.transpose(1, 2).contiguous(), shift.weights


def _sdpa_twice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    may_be_causal: Callable[[], bool],
    exact: bool,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor] | None:
    """The joint form of two SDPA calls where it is the faster one; it reads its arguments as transformers does."""
    causal = mask is None and query.shape[2] > 1 and may_be_causal()
    if position_bias is not None:
        return None
    return joint_form(query, key, value, mask, scale=scaling, causal=causal, dropout=dropout, exact=exact)


def _sdpa_rows(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The matrix that SDPA applies, where it is faster than calls; it reads its arguments as transformers does."""
    if dropout or position_bias is not None or not can_form_rows(query, key, mask):
        return None
    return form_rows(query, key, mask, scale=scaling)


def _apply_beside(
    hidden: Tensor, apply_filter: Callable[..., Tensor], module: Any, shift: AttentionShift, value: Tensor
) -> Tensor:
    """Where the input is no row a query token, as in vision towers: some filters are handed it, and need none of it."""
    try:
        return apply_filter(shift, value)
    except RuntimeError as error:
        raise GraphFilterError(
            f"{_site(module)}: {module.graph_filter.config.filter!r} reads a row of the module's input for each query "
            f"token, ({shift.query.shape[0]}, {shift.query.shape[2]}, features), and it has the shape "
            f"{tuple(hidden.shape)}: leave it out with layers=, or choose another filter"
        ) from error


def declared_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", False))


class _SingleGroup:
    """A view of an attention module whose keys have been repeated to one group a head."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def backend(module: Any) -> str:
    """The attention implementation that the user chose, read at each call from the model's own config."""
    return getattr(module.config, BASE_CONFIG, module.config)._attn_implementation or "eager"


def kind(module: Any) -> type:
    """By the config; a patched module has one of its own, made of its model's."""
    config = getattr(module, "config", None)
    return type(getattr(config, BASE_CONFIG, config))


def field(config: Any, name: str) -> Any:
    """An attribute of a config past its ``__getattribute__``, which takes microseconds; a compiler reads it once."""
    return getattr(config, name) if torch.compiler.is_compiling() else object.__getattribute__(config, name)


def _site(module: Any) -> str:
    return f"{module.graph_filter.site_name} ({type(module).__name__})"


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    """transformers leaves a layer without weights out of ``attentions``, so that those of later layers move up."""
    collecting = None if torch.compiler.is_compiling() else _active_collector.get()
    return bool(kwargs.get("output_attentions")) or "attentions" in (collecting or ())


def _refuse_untold(
    module: Any,
    implementation: str,
    tokens: int,
    mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> None:
    """What FlashAttention is told of by other arguments than a mask."""
    packed = cu_seq_lens_q is not None
    if mask is None and position_ids is not None and position_ids.dim() == 2 and len(position_ids) == 1:
        increasing = (position_ids.diff() > 0).all()  # by which FlashAttention itself knows packed sequences
        if torch.compiler.is_compiling():
            torch._assert_async(increasing, "packed sequences in a graph whose filter sees no mask of them")
        else:
            packed = packed or not increasing
    window = sliding_window if sliding_window is not None and sliding_window < tokens else None
    if packed or window is not None:
        what = "packed sequences" if packed else f"a sliding window of {window} tokens"
        raise GraphFilterError(
            f"{_site(module)}: {implementation!r} attention is told of {what} without a mask, and "
            f"{module.graph_filter.config.filter!r} looks at the mask: load the model with attn_implementation='sdpa', "
            "or leave these modules out with layers="
        )


def _refuse_unhonoured(
    module: nn.Module, implementation: str, attend: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    """What would lead past the filter, break linearity or row sums, or be dropped by the backend in silence."""
    if implementation in _ENGINES:
        raise GraphFilterError(f"{_site(module)}: attention by {implementation!r} cannot be filtered; {SERVING}")
    if implementation == IMPLEMENTATION:
        raise GraphFilterError(
            f"{IMPLEMENTATION!r} was written into the config of {_site(module)} as what computes S: name a backend, "
            "with model.set_attn_implementation('sdpa')"
        )
    for sink in ("s_aux", "sinks"):
        if kwargs.get(sink) is not None:
            raise GraphFilterError(f"{_site(module)} uses attention sinks ({sink}): rows of A then sum to less than 1")
    if kwargs.get("softcap") is not None and not honours_softcap(attend):
        raise GraphFilterError(
            f"{_site(module)} caps its scores (softcap={kwargs['softcap']}) and {implementation!r} attention drops "
            "that; load the model with attn_implementation='eager'"
        )
    if kwargs.get("cache") is not None:
        raise GraphFilterError(
            f"{_site(module)}: paged attention (continuous batching) cannot be filtered; use generate()"
        )
