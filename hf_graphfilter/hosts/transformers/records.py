"""The record of a patch in the config of a transformers model, and the entries that transformers reads with it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import GraphFilterError, shown
from ...filters import FilterConfig
from ...filters.core.attached import CHILD, active_filter, filters_of, patched_modules
from ...filters.core.kept_heads import count_kept
from ...filters.core.record import group_by_config
from ...models import find_class
from ...wrappers import Function
from ..base import WRAPPED_NAMES
from ..torch.attend import GraphFilterAttention
from .implementation import CURE, IMPLEMENTATION
from .sites import find, relative_name

# settings that transformers checks in every model's __init__; the second one stops a user who overrides the first as
# the error of transformers proposes
_GUARDED = ("attn_implementation", "experts_implementation")
_WRITTEN = (CHILD, *_GUARDED)
_SHARED_CONFIG = "_graph_filter_shared_config"
_TAGS = "_graph_filter_tags"
CODE_FILE = "modeling_graph_filter.py"  # what remote_code writes into a checkpoint


def tag(model: PreTrainedModel, filters: Iterable[str]) -> None:
    """Name the filters of the model in ``model_tags``, which appear on the cards of the Trainer and the Hub."""
    for part in model.modules():  # a part that was loaded with a record has tags of its own
        if isinstance(part, PreTrainedModel) and (our_tags := vars(part).pop(_TAGS, None)) is not None:
            part.model_tags = [t for t in part.model_tags or () if t not in our_tags]
            if part.model_tags == (type(part).model_tags or []):
                del part.model_tags
    if filters:
        old_tags = model.model_tags or []
        our_tags = [t for t in ("graph-filter", *filters, "hf_graphfilter") if t not in old_tags]
        model.model_tags = [*old_tags, *our_tags]
        setattr(model, _TAGS, our_tags)


def model_class(name: object) -> type[PreTrainedModel] | None:
    """Return the model class of transformers or of this package with a name from a file, or None."""
    candidate = getattr(transformers, name, None) or find_class(name) if isinstance(name, str) else None
    return candidate if isinstance(candidate, type) and issubclass(candidate, PreTrainedModel) else None


def read_record(model: Any) -> dict[str, Any] | None:
    """Return the record in the config, or None."""
    return getattr(model.config, CHILD, None)


def write_record(model: Any, record: dict[str, Any] | None) -> None:
    """Keep the record in the config, with implementation names that make loading without this package fail."""
    tag(model, sorted({g["config"]["filter"] for g in record["filters"]}) if record else ())
    if record is None:
        _forget_record(model)
        return
    if read_record(model) is not record and _SHARED_CONFIG not in vars(model):
        _copy_config(model)
    config = model.config
    setattr(config, CHILD, record)
    config.__dict__.update(dict.fromkeys(_GUARDED, CURE))
    # read by from_pretrained: coefficients stay in float32 whatever dtype is asked for
    coefficients = {
        f"{CHILD}.{name}"
        for _, graph_filter in filters_of(model, copies=True)
        for name, tensor in graph_filter.coefficient_tensors().items()
        if tensor.is_floating_point()
    }
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *coefficients}
    if getattr(config, "quantization_config", None) is not None:  # quantizers leave what is named here as it is
        model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), rf".*\.{CHILD}"}


def is_our_name(implementation: object) -> bool:
    """Return whether this package wrote an implementation name into a config; text may follow after a space."""
    return isinstance(implementation, str) and implementation.partition(" ")[0] == IMPLEMENTATION


def is_our_code(reference: Any) -> bool:
    """Return whether an entry of an ``auto_map`` names the file that ``export_remote_code`` writes."""
    return isinstance(reference, str) and reference.rpartition("--")[2].startswith(CODE_FILE.removesuffix("py"))


def forget_names(config: PreTrainedConfig) -> None:
    """Remove our names from a loaded config and its sub-configs, to which transformers copied them."""
    for name in _GUARDED:
        if is_our_name(getattr(config, f"_{name}", None)):
            setattr(config, f"_{name}_internal", None)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            forget_names(part)


def resolve_implementation(
    original: Function, self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Choose the attention implementation of a model from an argument, a config or a checkpoint."""
    # a patched checkpoint names us, so that it cannot be loaded without us: for the model it means "the default"
    if hasattr(self.config, CHILD) or is_our_name(self.config._experts_implementation):
        forget_names(self.config)
        attn_implementation = None if is_our_name(attn_implementation) else attn_implementation
    try:
        return original(self, attn_implementation, *args, **kwargs)
    except (ValueError, ImportError) as error:
        if getattr(self.config, CHILD, None) is None:
            raise
        raise GraphFilterError(
            f"{type(self).__name__} with this graph filter cannot run with {shown(attn_implementation)}: choose "
            f"attn_implementation='sdpa' or 'eager' ({error})"
        ) from error


@contextlib.contextmanager
def saved_config(model: PreTrainedModel, state: Any = None) -> Iterator[None]:
    """Check that a model and the ``state`` to save are complete, and mark the configs of its parts inside the context.

    Inside, the config of every part that holds a filter has our implementation names too, since a part (a tower) can
    be loaded by itself. In the whole model, the names in its own config take precedence over those of its parts.
    """
    check_recorded(model)
    if state and not model._hf_peft_config_loaded:  # empty in all processes but the first
        state_keys = set(map(_without_wrapper_names, state))
        # The model's own state_dict would gather what FSDP has sharded, which all processes would have to do.
        filters = [(name, module._modules[CHILD]) for name, module in patched_modules(model, required=False)]
        keys = [f"{name}.{CHILD}.{key}" for name, graph_filter in filters for key in graph_filter.state_dict()]
        names = [*map(_without_wrapper_names, keys)]
        if missing := [key for key in names if key not in state_keys]:
            raise GraphFilterError(
                f"state_dict lacks {len(missing)} of the {len(names)} filter weights of this {type(model).__name__} "
                f"({missing[0]} ...), which would be lost: take it from the patched model"
            )
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and patched_modules(m, required=False)]
    added = [(vars(part.config), name) for part in parts for name in _GUARDED if name not in vars(part.config)]
    for attributes, name in added:
        attributes[name] = CURE
    try:
        yield
    finally:
        for attributes, name in added:
            attributes.pop(name, None)


def _without_wrapper_names(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPED_NAMES)


def check_recorded(model: PreTrainedModel) -> None:
    """Raise if a model could not be loaded again after saving.

    The record is saved with the config. The patch may belong to a model around this one, or to a part, which may have
    been unpatched separately. If layers with filters were removed or added since, the record is brought up to date.
    """
    parts = {f"{n}." if n else "": m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    config_ids: set[int] = set()
    for config in iterate_configs(model.config):
        if (record := getattr(config, CHILD, None)) and any(read_record(part) == record for part in parts.values()):
            config_ids.add(id(config))
        elif record:  # of a part that was unpatched or exchanged, which has another config now
            _strip_record(config)
    recorded = {prefix: part for prefix, part in parts.items() if id(part.config) in config_ids}
    for name, _ in filters_of(model):
        if isinstance(model.get_submodule(name), GraphFilterAttention):
            continue  # the class of the model builds it, with its filter
        if not f"{name}.".startswith(tuple(recorded)):
            raise GraphFilterError(
                f"the config of this {type(model).__name__} holds no record of the filter at {name}: save the model "
                "that was patched (a part of this one, or one around it), or patch this whole model with layers="
            )
    settled: set[int] = set()
    for prefix, part in recorded.items():
        if id(part.config) in settled:  # parts share the config of what is around them, to which its names are relative
            continue
        settled.add(id(part.config))
        modules = {relative_name(part, name): (name, module) for name, module in part.named_modules()}
        for named in (named for group in getattr(part.config, CHILD)["filters"] for named in group["modules"]):
            name, module = modules.get(named, ("", None))
            if module is not None and CHILD not in module._modules:
                raise GraphFilterError(
                    f"the config of this {type(model).__name__} records a filter at {prefix}{name}, which no longer "
                    "exists (its module was exchanged, or a part unpatched separately): unpatch the model that was "
                    "patched, and patch it again with layers="
                )
        _update_record(part, [p for p, other in recorded.items() if id(other.config) != id(part.config)], prefix)


def _update_record(part: PreTrainedModel, others: list[str], prefix: str) -> None:
    """Bring the record up to date with the filters in the model, if its module names no longer fit.

    Modules below the prefixes of ``others`` have records of their own.
    """
    record = getattr(part.config, CHILD)
    recorded_configs = {name: FilterConfig.from_dict(g["config"]) for g in record["filters"] for name in g["modules"]}
    patched = patched_modules(part, required=False)
    sites = [
        (name, module)
        for name, module in patched
        if not f"{prefix}{name}.".startswith(tuple(others)) and not isinstance(module, GraphFilterAttention)
    ]
    filters = {name: active_filter(module) for name, module in sites}
    configs = {relative_name(part, n): config for n, config in count_kept(filters, lambda: find(part)[0]).items()}
    if configs and configs != recorded_configs:
        setattr(part.config, CHILD, {**record, "filters": group_by_config(configs.items())})


def iterate_configs(config: Any) -> Iterator[PreTrainedConfig]:
    """Yield a config and those of its parts."""
    if isinstance(config, PreTrainedConfig):
        yield config
        yield from (c for part in vars(config).values() for c in iterate_configs(part))


def _copy_config(model: PreTrainedModel) -> None:
    """Give the model a config object of its own, as other models may have been built from the same one."""
    vars(model)[_SHARED_CONFIG] = model.config, vars(model.config).copy()
    _swap_config(model, model.config, copy.copy(model.config))


def _swap_config(model: nn.Module, old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
            elif isinstance(value, PreTrainedConfig):  # of a composite, or of a patched module
                for name in [n for n, part in vars(value).items() if part is old]:
                    vars(value)[name] = new


def _strip_record(config: PreTrainedConfig) -> None:
    """Remove what ``write_record`` wrote into a config."""
    for key in _WRITTEN:
        vars(config).pop(key, None)
    if isinstance(code := getattr(config, "auto_map", None), dict):  # of a checkpoint with code for the record
        vars(config)["auto_map"] = {k: v for k, v in code.items() if not is_our_code(v)}
        if not config.auto_map:
            del config.auto_map


def _forget_record(model: PreTrainedModel) -> None:
    """Undo ``write_record``: the model gets its former config object back, with later changes.

    If that config came with a record, it remains for the other models that were built from it, and this model gets a
    copy without the record.
    """
    for part in (m for m in model.modules() if isinstance(m, PreTrainedModel)):
        for names in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"):
            setattr(part, names, {name for name in getattr(part, names) or () if CHILD not in name})
        config = part.config
        values = {k: v for k, v in vars(config).items() if k not in _WRITTEN}
        shared, old = vars(part).pop(_SHARED_CONFIG, (config, vars(config)))
        if CHILD in old:
            plain = copy.copy(config)
            _strip_record(plain)
            _swap_config(model, config, plain)
            continue
        for key in old.keys() - values.keys():
            vars(shared).pop(key, None)
        if shared is not config:  # which stays, with its record, that of models that were built from it
            vars(shared).update({k: v for k, v in values.items() if k not in old or old[k] is not v})
            _swap_config(model, config, shared)
