"""The seam into transformers: the attention interface.

Nearly every modelling file computes attention through ``ALL_ATTENTION_FUNCTIONS.get_interface(
self.config._attn_implementation, eager)``. A patched module gets a shallow copy of its config whose implementation
names our function; that function calls the one the user chose, which is still written in the model's own config. So
masks, ``set_attn_implementation`` and the model's code stay as they are.

``install`` adds to ``PreTrainedModel`` what saving and loading need; it does nothing for models without a filter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import _active_collector

from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..filters.base import STARTED
from ..ops.attention import apply_twice, can_apply_twice
from ..ops.visibility import visibility
from ..shift import AttentionShift, repeat_heads
from . import AttentionSite, cache, check_values, host_of, locate, looks_like_attention
from .tensor_parallel import with_local_heads

LIBRARY = "transformers"
IMPLEMENTATION = "hf_graphfilter"
CHILD = "graph_filter"
_BASE_CONFIG = "_graph_filter_base_config"
_SITE = "_graph_filter_site"
_SHARED_CONFIG = "_graph_filter_shared_config"
_TAGS = "_graph_filter_tags"
_HIDDEN = "graph_filter_hidden"
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForImageClassification": "AutoModelForImageClassification",
}
_ENGINES = ("vllm", "sglang")  # what their transformers backends write into the configs they find
_SERVING = (
    "vLLM and SGLang, whose attention writes the cache at every call, cannot serve patched models: use generate() or "
    "transformers serve"
)
_CROSS_NAME = re.compile(r"cross|enc(oder)?_?dec|^encoder_att|^x_att", re.I)


# ---------------------------------------------------------------------------------------- the attention function


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
    graph_filter = getattr(module, CHILD, None)
    if graph_filter is None:
        raise GraphFilterError(
            f"{type(module).__name__} runs with attn_implementation={IMPLEMENTATION!r} but has no graph filter: use "
            "patch_model(model, ...), and leave attn_implementation to name the backend (sdpa, eager, ...)"
        )
    past, hidden = kwargs.pop(cache.ARGUMENT, None), kwargs.pop(_HIDDEN, None)
    implementation = backend(module)
    if implementation in _ENGINES:
        raise GraphFilterError(f"{_site(module)}: attention by {implementation!r} cannot be filtered; {_SERVING}")
    if implementation == IMPLEMENTATION:
        raise GraphFilterError(
            f"{IMPLEMENTATION!r} was written into the config of {_site(module)} as what computes S: name a backend, "
            "with model.set_attn_implementation('sdpa')"
        )
    attend = _attention_function(type(module), implementation)
    _refuse_unhonoured(module, attend, kwargs)
    run = graph_filter if query.shape[1] == graph_filter.heads else with_local_heads(graph_filter, module, query)

    def apply(keys: Tensor, signal: Tensor) -> tuple[Tensor, Tensor | None]:
        repeated = keys.shape[1] != key.shape[1]
        return attend(_SingleGroup(module) if repeated else module, query, keys, signal, attention_mask, **kwargs)

    twice = None
    if attend is sdpa_attention_forward:
        twice = _sdpa_twice(module, query, key, value, attention_mask, **kwargs)
    rows, state = cache.memory(past, module, key)
    shift = AttentionShift(apply, query, key, rows, twice)
    shift.hidden, shift.state = hidden, state
    scaling = kwargs.get("scaling")
    shift.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    shift.visible = lambda: visibility(  # type: ignore[method-assign]
        attention_mask, _causal(module, kwargs), query.shape[2], graph_filter.position_bias, _declared_causal(module)
    )
    output = run(shift, value)
    if not shift.applications and implementation == "eager" and _weights_wanted(kwargs):
        raise GraphFilterError(
            f"{_site(module)}: output_attentions asks for the attention weights, and {graph_filter.config.filter!r} "
            "computes none in the place of attention: leave it out, or read them before patching"
        )
    return output.transpose(1, 2).contiguous(), shift.weights


def _sdpa_twice(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """The joint form of two SDPA calls where it is the faster one; it reads its arguments as transformers does."""
    causal = mask is None and query.shape[2] > 1 and _causal(module, {"is_causal": is_causal})
    if position_bias is not None or not can_apply_twice(query, key, value, mask, causal, dropout):
        return None
    key = repeat_heads(key, query.shape[1])
    return lambda v: apply_twice(
        query, key, repeat_heads(v, query.shape[1]), mask, scale=scaling, causal=causal, dropout=dropout
    )


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal; the eager functions never are."""
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and backend(module) != "eager"


def _declared_causal(module: nn.Module) -> bool:
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
    return getattr(module.config, _BASE_CONFIG, module.config)._attn_implementation or "eager"


def _site(module: Any) -> str:
    return f"{module.graph_filter.site_name} ({type(module).__name__})"


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    """transformers leaves a layer without weights out of ``attentions``, so that those of later layers move up."""
    collecting = None if torch.compiler.is_compiling() else _active_collector.get()
    return bool(kwargs.get("output_attentions")) or "attentions" in (collecting or ())


def _attention_function(module_class: type[nn.Module], implementation: str) -> Callable[..., Any]:
    """What the module's own ``forward`` would call: its file's interface, or the eager function that it names."""
    forward = inspect.unwrap(module_class.forward)
    names = forward.__code__.co_names
    eager = next((n for n in names if n.endswith("eager_attention_forward")), "eager_attention_forward")
    namespace = forward.__globals__
    return namespace["ALL_ATTENTION_FUNCTIONS"].get_interface(implementation, namespace.get(eager))


@functools.cache
def _honours_softcap(attend: Callable[..., Any]) -> bool:
    return "softcap" in inspect.signature(attend).parameters


def _refuse_unhonoured(module: nn.Module, attend: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Arguments that would break linearity or row sums, or that the backend would drop in silence."""
    for sink in ("s_aux", "sinks"):
        if kwargs.get(sink) is not None:
            raise GraphFilterError(f"{_site(module)} uses attention sinks ({sink}): rows of A then sum to less than 1")
    if kwargs.get("softcap") is not None and not _honours_softcap(attend):
        raise GraphFilterError(
            f"{_site(module)} caps its scores (softcap={kwargs['softcap']}) and {backend(module)!r} attention drops "
            "that; load the model with attn_implementation='eager'"
        )
    if kwargs.get("cache") is not None:
        raise GraphFilterError(
            f"{_site(module)}: paged attention (continuous batching) cannot be filtered; use generate()"
        )


# ------------------------------------------------------------------------------------------------- finding sites


def find(model: PreTrainedModel) -> tuple[list[AttentionSite], dict[str, str]]:
    """All self-attention modules that run through the attention interface, and the others with the reason."""
    sites, refused, counts = [], {}, Counter[str]()
    for name, module in model.named_modules():
        if CHILD in name.split("."):
            continue
        reason = _refusal(name, module)
        if reason is None:
            causal = _declared_causal(module)
            stack, group = locate(name, causal)
            sites.append(
                AttentionSite(
                    *(name, module, _heads(module), causal, stack, group, counts[group]),  # type: ignore[arg-type]
                    position_bias=_position_bias(model, name),
                    **_shape(module),
                )
            )
            counts[group] += 1
        elif reason:
            refused[name] = reason
    return sites, refused


def _refusal(name: str, module: Any) -> str | None:
    """None for a patchable module, the reason for another attention module, "" for anything else."""
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if hasattr(forward, "__code__") else ()
    if "ALL_ATTENTION_FUNCTIONS" not in names:
        return "its forward does not use the attention interface" if looks_like_attention(module) else ""
    if (
        any(_CROSS_NAME.search(part) for part in name.split(".")[-2:])
        or "Cross" in type(module).__name__
        or getattr(module, "is_cross_attention", False)
    ):
        return "cross-attention: A is not square"
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return "it has no config to route the attention through"
    if getattr(module, "sinks", None) is not None:
        return "attention sinks: rows of A sum to less than 1"
    if getattr(module, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn: its own eager attention goes past the interface"
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None and not _honours_softcap(_attention_function(type(module), backend(module))):
        chosen = backend(module)
        return f"soft-capped scores (softcap={softcap}) that {chosen!r} attention drops: load it with 'eager' attention"
    if _heads(module) is None:
        return f"none of {', '.join(_HEAD_COUNTS)} tells its number of heads"
    return None


def _heads(module: Any) -> int | None:
    for owner in (module, module.config):
        for attribute in _HEAD_COUNTS:
            heads = getattr(owner, attribute, None)
            if isinstance(heads, int):
                return heads
    return None


def _position_bias(model: nn.Module, name: str) -> bool:
    """Whether scores get a bias: as an argument (T5), or of the module or one around it, within the mask (BEiT)."""
    module = model.get_submodule(name)
    if "position_bias" in inspect.signature(type(module).forward).parameters:
        return True
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    return any(child.endswith("position_bias") for m in around for child, _ in m.named_children())


def _shape(module: Any) -> dict[str, Any]:
    """The fields of ``AttentionSite`` that only some filters ask for."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    passes_on = parameters[0].name == "hidden_states" and any(p.kind is p.VAR_KEYWORD for p in parameters)
    projection = next((m for m in module.children() if isinstance(m, (nn.Linear, Conv1D))), None)
    inputs = None if projection is None else getattr(projection, "in_features", projection.weight.shape[0])
    head_dim = next((d for name in _HEAD_DIMS if isinstance(d := getattr(module, name, None), int)), None)
    return {
        "hidden_size": inputs if passes_on else None,
        "head_dim": head_dim or (inputs or 0) // (_heads(module) or 1),
        "sliding_window": getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)),
    }


# --------------------------------------------------------------------------------------------- attach and detach


def attach(site: AttentionSite, graph_filter: nn.Module) -> None:
    module: Any = site.module
    base = module.config
    routed = copy.copy(base)
    routed.__class__ = _routed(type(base))  # type: ignore[arg-type]
    routed._attn_implementation_internal = IMPLEMENTATION
    object.__setattr__(routed, _BASE_CONFIG, base)
    object.__setattr__(routed, _SITE, site.name)
    module.add_module(CHILD, graph_filter)
    module.config = routed
    tensors = (*graph_filter.parameters(), *graph_filter.buffers())
    if not is_deepspeed_zero3_enabled() and not any(t.is_meta for t in tensors):
        for part in graph_filter.modules():  # or a composite made of patched models would give it start values again
            part._is_hf_initialized = True  # type: ignore[assignment]
    parameters = inspect.signature(type(module).forward).parameters.values()
    caches = any(p.name == "past_key_values" for p in parameters) and any(p.kind is p.VAR_KEYWORD for p in parameters)
    if caches or graph_filter.reads_hidden:
        module.register_forward_pre_hook(_PassOn([p.name for p in parameters][1:]), with_kwargs=True)


@functools.cache
def _routed(base: Any) -> Any:
    """The class of a patched module's config, copied and pickled as its base: the implementation that the module reads
    from it at each call is ours, or an error."""

    def read(self: Any) -> str:
        if (found := self._attn_implementation_internal) != IMPLEMENTATION:
            raise GraphFilterError(
                f"{getattr(self, _SITE)} is patched, but {found!r} was written into its config, which leads past the "
                f"graph filter: choose a backend with model.set_attn_implementation('sdpa'); {_SERVING}"
            )
        return IMPLEMENTATION

    def write(self: Any, value: Any) -> None:
        self._attn_implementation_internal = value

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (base,), vars(self).copy()

    body = {"_attn_implementation": property(read, write), "__reduce_ex__": reduce, "__module__": base.__module__}
    return type(base.__name__, (base,), {**body, "__qualname__": base.__qualname__})


def _rebuild(base: Any) -> Any:
    cls = _routed(base)
    return cls.__new__(cls)


class _PassOn:
    """Forward pre-hook: the attention function is told of cache and input, as further keyword arguments."""

    def __init__(self, positional: list[str]):
        self.positional = positional

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(zip(self.positional, args, strict=False)) | kwargs if args else kwargs
        further = {}
        if (past := given.get("past_key_values")) is not None:
            cache.prepare(past, module)
            further[cache.ARGUMENT] = past
        if module.graph_filter.reads_hidden:
            further[_HIDDEN] = given["hidden_states"]
        return args, {**kwargs, **further}


def detach(module: Any) -> None:
    for key in [k for k, hook in module._forward_pre_hooks.items() if isinstance(hook, _PassOn)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    module.config = getattr(module.config, _BASE_CONFIG)
    delattr(module, CHILD)


def relative_name(model: PreTrainedModel, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.") if model.base_model_prefix else name


def saved_names(model: PreTrainedModel, sites: list[AttentionSite]) -> dict[str, AttentionSite]:
    """transformers renames weights of earlier releases when it loads them, and back when it saves."""
    reverse = []
    for conversion in reversed(get_model_conversion_mapping(model, add_legacy=False)):
        if not isinstance(conversion, PrefixChange):  # of task heads
            with contextlib.suppress(NotImplementedError, ValueError):  # has no way back
                reverse.append(conversion.reverse_transform())
    reverse.sort(key=lambda conversion: not isinstance(conversion, WeightConverter))  # the order of saving
    found = {}
    for site in sites:
        names = Counter[str]()
        for key, _ in site.module.named_parameters():
            saved = f"{site.name}.{key}"
            for conversion in reverse:
                saved, _ = conversion.rename_source_key(saved)
            names[saved.rsplit(".", key.count(".") + 1)[0]] += not key.startswith(f"{CHILD}.")
        if names:
            found[relative_name(model, names.most_common(1)[0][0])] = site
    return found


def model_type(model: PreTrainedModel) -> str | None:
    return getattr(model.config, "model_type", None)


def usage(model: PreTrainedModel, source: str) -> str:
    name = type(model).__name__
    auto_class = next((a for suffix, a in _AUTO_CLASSES.items() if name.endswith(suffix)), "AutoModel")
    return f"""import hf_graphfilter  # pip install hf-graphfilter
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{source}")"""


def pipeline_tag(model: PreTrainedModel) -> str | None:
    from transformers.modelcard import TASK_MAPPING, _get_mapping_values
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_MAPPING_NAMES, MODEL_MAPPING_NAMES

    bare = {"image-feature-extraction": MODEL_FOR_IMAGE_MAPPING_NAMES, "feature-extraction": MODEL_MAPPING_NAMES}
    tasks = {**TASK_MAPPING, **bare}.items()
    return next((task for task, classes in tasks if type(model).__name__ in _get_mapping_values(classes)), None)


def base_model(model: PreTrainedModel) -> str | None:
    """What is in the cache of the Hub came from the Hub; any other name may be a folder."""
    name = model.config._name_or_path
    try:
        cached = not os.path.exists(name) and try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return name if isinstance(cached, str) else None


def tag(model: PreTrainedModel, filters: Iterable[str]) -> None:
    """Let ``model_tags``, which cards of the Trainer and of ``push_to_hub`` carry, name the filters of the model."""
    for part in model.modules():  # a part that was loaded with a record has tags of its own
        if isinstance(part, PreTrainedModel) and (ours := vars(part).pop(_TAGS, None)) is not None:
            part.model_tags = [t for t in part.model_tags or () if t not in ours]
            if part.model_tags == (type(part).model_tags or []):
                del part.model_tags
    if filters:
        before = model.model_tags or []
        ours = [t for t in ("graph-filter", *filters, "hf_graphfilter") if t not in before]
        model.model_tags = [*before, *ours]
        setattr(model, _TAGS, ours)


def read_record(model: PreTrainedModel) -> dict[str, Any] | None:
    return getattr(model.config, CHILD, None)


def write_record(model: PreTrainedModel, record: dict[str, Any] | None) -> None:
    """Keep the record in the config, and with it an implementation name that makes loading without us fail."""
    tag(model, sorted({g["config"]["filter"] for g in record["filters"]}) if record else ())
    if record is None:
        _forget_record(model)
        return
    if read_record(model) is None:
        _own_config(model)
    config = model.config
    setattr(config, CHILD, record)
    config.__dict__["attn_implementation"] = IMPLEMENTATION
    # read by from_pretrained: coefficients stay in float32 whatever dtype is asked for
    coefficients = {
        f"{CHILD}.{name}"
        for f in model.modules()
        if isinstance(f, GraphFilter)
        for name, t in (*f.named_parameters(recurse=False), *f.named_buffers(recurse=False))
        if t.is_floating_point()
    }
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *coefficients}
    if getattr(config, "quantization_config", None) is not None:  # quantizers leave what is named here as it is
        model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), rf".*\.{CHILD}"}


def _own_config(model: PreTrainedModel) -> None:
    """A config object of the model's own: other models may have been built from the same one."""
    vars(model)[_SHARED_CONFIG] = model.config, vars(model.config).copy()
    _swap_config(model, model.config, copy.copy(model.config))


def _swap_config(model: nn.Module, old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
            elif isinstance(value, PreTrainedConfig):  # of a composite
                for name in [n for n, part in vars(value).items() if part is old]:
                    setattr(value, name, new)


def _forget_record(model: PreTrainedModel) -> None:
    """Undo ``write_record``: the config is again the object that it was, with what was changed in it since."""
    for part in (m for m in model.modules() if isinstance(m, PreTrainedModel)):
        for names in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"):
            setattr(part, names, {name for name in getattr(part, names) or () if CHILD not in name})
        own = part.config
        left = {k: v for k, v in vars(own).items() if k not in (CHILD, "attn_implementation")}
        shared, before = vars(part).pop(_SHARED_CONFIG, (own, vars(own)))
        for key in before.keys() - left.keys():
            vars(shared).pop(key, None)
        if shared is not own:  # which stays, with its record, that of models that were built from it
            vars(shared).update({k: v for k, v in left.items() if k not in before or before[k] is not v})
            _swap_config(model, own, shared)


# ------------------------------------------------------------------------------------------------------- install


def install() -> None:
    """Register the attention function, and teach ``PreTrainedModel`` to load patched checkpoints. Idempotent."""
    if IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS:
        return
    missing = [name for name in _WRAPS if not hasattr(PreTrainedModel, name)]
    if missing:
        raise GraphFilterError(
            f"transformers {transformers.__version__} has no PreTrainedModel.{missing[0]}, which loading patched "
            "checkpoints needs; upgrade hf_graphfilter or install transformers 5.17 to 5.23"
        )
    type(ALL_ATTENTION_FUNCTIONS).register(IMPLEMENTATION, graph_filter_attention)
    for name, wrap in _WRAPS.items():
        original = inspect.getattr_static(PreTrainedModel, name)
        setattr(PreTrainedModel, name, wrap(original))


def _resolve_implementation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _check_and_adjust_attn_implementation(
        self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        # a patched checkpoint names us, so that it cannot be loaded without us: for the model it means "the default"
        if hasattr(self.config, CHILD):
            _forget_implementation(self.config)
            attn_implementation = None if attn_implementation == IMPLEMENTATION else attn_implementation
        return original(self, attn_implementation, *args, **kwargs)

    return _check_and_adjust_attn_implementation


def _forget_implementation(config: PreTrainedConfig) -> None:
    """Take our name out of a loaded config and its sub-configs, to which transformers passed it on."""
    if config._attn_implementation == IMPLEMENTATION:
        config._attn_implementation_internal = None
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            _forget_implementation(part)


def _patch_after_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        if getattr(self.config, CHILD, None) is not None:
            from ..patching import apply_record

            apply_record(self)

    return post_init


def _initialise_filters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # coefficients missing from a checkpoint come up as uninitialised memory
        if isinstance(module, GraphFilter) and not getattr(module, "_is_hf_initialized", False):
            _reset_missing(module)
            module._is_hf_initialized = True  # type: ignore[assignment]
            return None
        return original(self, module, *args, **kwargs)

    return _initialize_weights


def _reset_missing(graph_filter: GraphFilter) -> None:
    """Start values for all tensors that no checkpoint has loaded, in whatever way ``reset_parameters`` sets them: in
    place, through ``data``, or as new tensors."""
    for name, made in vars(graph_filter).pop(STARTED, {}).items():
        tensor = graph_filter.get_buffer(name)
        tensor.data = made.to(tensor)
    slots: list[dict[str, Any]] = [s for m in graph_filter.modules() for s in (m._parameters, m._buffers)]
    before = [(slot, name, tensor) for slot in slots for name, tensor in slot.items() if tensor is not None]
    loaded = {
        id(tensor): tensor.detach().clone() for _, _, tensor in before if getattr(tensor, "_is_hf_initialized", False)
    }
    if len(loaded) == len(before):
        return
    graph_filter.reset_parameters()
    for slot, name, tensor in before:
        if id(tensor) in loaded:
            tensor.data = loaded[id(tensor)]
        elif (made := slot.get(name)) is not None and made is not tensor:
            tensor.data = made.detach().to(tensor)
        slot[name] = tensor


def _load_by_record(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
    """Loading of weights: coefficients under the names of another release are renamed, all of them must fit, and a
    broken file is named."""
    function = original.__func__

    @functools.wraps(function)
    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        path = load_config.pretrained_model_name_or_path
        if not any(isinstance(part, GraphFilter) for part in model.modules()) and read_record(model) is None:
            info, index = function(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
            _check_coefficients(model, info, path)
            return info, index
        # a composite that is made of patched models has no record of its own
        renamings = _follow_renaming(model) if read_record(model) is not None else []
        mapping = [*renamings, *(load_config.weight_mapping or ())]
        load_config = dataclasses.replace(load_config, weight_mapping=mapping)
        try:
            _check_values(model, state_dict, checkpoint_files or [])
            info, index = function(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        except (SafetensorError, EOFError) as error:
            raise GraphFilterError(
                f"{path}: a weights file is corrupted or truncated ({error}); save or download it again"
            ) from error
        _check_coefficients(model, info, path)
        if renamings:  # it will be saved by the others
            used = vars(model)["_weight_conversions"]
            vars(model)["_weight_conversions"] = [conversion for conversion in used if conversion not in renamings]
        return info, index

    return staticmethod(_load_pretrained_model)


def _check_values(model: PreTrainedModel, state_dict: dict[str, Tensor] | None, files: list[str]) -> None:
    """``check_values`` of the coefficients in a checkpoint: as they are in its files, whatever becomes of them (cast,
    sharded, left on disk)."""

    def coefficients(keys: Iterable[str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        # not the weights of a filter's children, which may be large, or quantized
        return {relative_name(model, key): read(key) for key in keys if re.search(rf"\.{CHILD}\.[^.]+$", key)}

    # those that ZeRO-3 has partitioned are empty here
    own = {k: t for k, t in model.state_dict(keep_vars=True).items() if not hasattr(t, "ds_id")}
    wanted = coefficients(own, own.__getitem__)
    if state_dict is not None:
        check_values(coefficients(state_dict, state_dict.__getitem__), wanted, "state_dict")
        return
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                check_values(coefficients(opened.keys(), opened.get_tensor), wanted, file)


def _follow_renaming(model: PreTrainedModel) -> list[WeightRenaming]:
    """The record, now with the names that the modules have in this release; and the renamings of their coefficients."""
    from .. import patching

    host, record = host_of(model), read_record(model) or {}
    names = [name for _, group in patching.read_groups(record, type(model).__name__) for name in group]
    sites = patching.resolve(host, model, names)
    whole = len(sites) < len(names) and not _is_a_part(model, record, {*names} - {*sites})
    patching.check_resolved(host, model, names, sites, whole)
    renamed = {name: now for name, site in sites.items() if (now := relative_name(model, site.name)) != name}
    if renamed:
        groups = [{**g, "modules": [renamed.get(name, name) for name in g["modules"]]} for g in record["filters"]]
        setattr(model.config, CHILD, {**record, "filters": groups})
    return [
        WeightRenaming(rf"(?<![^.]){re.escape(name)}\.{CHILD}\.", f"{now}.{CHILD}.") for name, now in renamed.items()
    ]


def _is_a_part(model: PreTrainedModel, record: dict[str, Any], absent: set[str]) -> bool:
    """Whether the modules that a record names and ``model`` lacks are in the class that was saved, or, since our first
    release does not say which that was, in one that may have been."""
    from .. import patching

    config = copy.deepcopy(model.config)
    setattr(config, CHILD, None)
    names = [record["model"]] if "model" in record else config.architectures or []
    for make in (*(getattr(transformers, str(name), None) for name in names), transformers.AutoModel.from_config):
        try:
            with torch.device("meta"):
                whole = make(copy.deepcopy(config))  # type: ignore[misc]
        except Exception:  # no class of transformers, or the config of a part is not enough for it
            continue
        if absent <= {*patching.resolve(host_of(whole), whole, absent)}:
            return True
    return False


def _check_coefficients(model: PreTrainedModel, info: Any, path: Any) -> None:
    """Nothing is silently unfiltered: every coefficient in the file went somewhere, and the file has all or none."""
    from .. import patching

    marker = f".{CHILD}."
    unexpected = sorted(k for k in info.unexpected_keys if marker in k)
    owners = {relative_name(model, name) for name, _ in model.named_modules()} if unexpected else set()
    owned = {k: relative_name(model, k.split(marker)[0]) for k in unexpected}
    owners |= {*patching.resolve(host_of(model), model, owned.values())}
    if lost := [k for k in unexpected if owned[k] in owners]:
        advice = (
            f"load it with the class that was saved, {model.config.architectures}"
            if read_record(model)
            else "its config.json holds no record of them: if only a part of the model was patched, patch the whole "
            "with layers= and save it again; if that file was changed, restore it"
        )
        raise GraphFilterError(
            f"{path} holds filter coefficients that {type(model).__name__} has no filter for ({lost[0]} and "
            f"{len(lost) - 1} more): {advice}"
        )
    missing = {k for k in info.missing_keys if marker in k}
    expected: dict[str, set[str]] = {}  # by the copies that PEFT keeps for its adapters, which come one by one
    for key in model.state_dict() if missing else ():
        if marker in key:
            copied = re.match(r"original_module\.|modules_to_save\.[^.]+\.", key.partition(marker)[2])
            expected.setdefault(copied[0] if copied else "", set()).add(key)
    for keys in expected.values():
        if lacking := keys & missing if unexpected or not keys <= missing else set():
            raise GraphFilterError(
                f"{path} lacks {len(lacking)} of its {len(keys)} filter coefficients ({min(lacking)} ...): the "
                "checkpoint is incomplete; save or download it again"
            )


def _refuse_lost_filters(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_state_dict`` of weights with a filter into a model without one: torch's strict=False, and PEFT, drop them
    in silence."""

    @functools.wraps(original)
    def _load_from_state_dict(self: PreTrainedModel, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in state_dict:
            owner, found, _ = key.removeprefix(prefix).partition(f".{CHILD}.")
            if not found or not key.startswith(prefix):
                continue
            try:
                module = self.get_submodule(owner)
            except AttributeError:
                continue  # weights of another model, which torch reports
            if CHILD not in module._modules:
                raise GraphFilterError(
                    f"the weights hold a graph filter at {owner}, and this {type(self).__name__} has none there: patch "
                    "it first as it was when they were saved, with patch_model or load_filter"
                )
        original(self, state_dict, prefix, *args, **kwargs)

    return _load_from_state_dict


_WRAPS: dict[str, Callable[[Any], Any]] = {
    "_check_and_adjust_attn_implementation": _resolve_implementation,
    "post_init": _patch_after_init,
    "_initialize_weights": _initialise_filters,
    "_load_pretrained_model": _load_by_record,
    "_load_from_state_dict": _refuse_lost_filters,
}
