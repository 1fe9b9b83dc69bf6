"""Adapters of PEFT: their configuration keeps the record of the base model's filter, and a plain base gets it.

Written while a model saves its adapters, from the filters that it has then. Read while one is loaded into a model,
before anything of it is built: by ``PeftModel``, ``AutoPeftModel`` or ``load_adapter`` of transformers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import GraphFilterError
from ..filters import FilterConfig
from ..filters.attached import CHILD, filters_of, patched_modules
from ..hosts import Host, host_of, unwrapped
from ..patching import STARTS, apply_record, resolve, unpatch_model
from ..records import described, read_groups, record_of
from . import copies

READ = "_graph_filter_read"  # of the configuration of an adapter: the record in its file
_loading: ContextVar[nn.Module | None] = ContextVar("_loading", default=None)  # the model that an adapter is to go into
_saving: ContextVar[nn.Module | None] = ContextVar("_saving", default=None)  # one that saves its own


@functools.cache
def install() -> None:
    """Teach PEFT; ``checkpoints.transformers`` installs ``OF_TRANSFORMERS``."""
    from peft import PeftMixedModel, PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners.lora import conversion
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils import hotswap

    wraps: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (PeftModel, "from_pretrained", _loads_into_first),
        (PeftModel, "load_adapter", _loads_into_self),
        (PeftModel, "save_pretrained", _saves),
        (PeftModel, "delete_adapter", _deletes),
        (PeftMixedModel, "from_pretrained", _loads_into_first),
        (PeftConfigMixin, "from_peft_type", _reads),
        (PeftConfigMixin, "save_pretrained", _writes),
        (BaseTuner, "merge_and_unload", copies.unloads),
        (BaseTuner, "unload", copies.unloads),
        (conversion, "convert_to_lora", _converts),
        (hotswap, "hotswap_adapter_from_state_dict", _swaps),
    )
    for owner, name, wrap in wraps:
        wrapped = wrap(original := inspect.getattr_static(owner, name))
        setattr(owner, name, wrapped)
        for module in [m for n, m in sys.modules.items() if n.startswith("peft") and vars(m).get(name) is original]:
            setattr(module, name, wrapped)  # a function that it has imported


# ------------------------------------------------------------------------------------------------------------- saving


def _saves(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _saving.set(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _saving.reset(token)

    return save_pretrained


def _writes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        from peft.utils import CONFIG_NAME

        result = original(self, save_directory, *args, **kwargs)
        model = _saving.get()
        # by itself, it is still that of the adapter that it was read or converted from
        if (record := vars(self).get(READ) if model is None else _live_record(model)) is not None:
            file = Path(save_directory, CONFIG_NAME)
            file.write_text(json.dumps({**json.loads(file.read_text()), CHILD: record}, indent=2, sort_keys=True))
        return result

    return save_pretrained


def _converts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert_to_lora(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config, state = original(model, *args, **kwargs)
        arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
        if (record := _live_record(model)) is not None:
            vars(config)[READ] = record
            state = copies.with_copies(state, model, arguments.get("adapter_name", "default"))
        return config, state

    return convert_to_lora


def _live_record(model: nn.Module) -> dict[str, Any] | None:
    """Of the filters that a model has now; None of one without, or that no host knows."""
    if not patched_modules(model, required=False):
        return None
    try:
        base = unwrapped(model)
        host = host_of(base)
    except GraphFilterError:
        return None
    return record_of(type(base).__name__, _filters(host, base).items())


def _filters(host: Host, base: nn.Module) -> dict[str, FilterConfig]:
    """Return the configurations by the relative names of the modules."""
    return {host.relative_name(base, name): graph_filter.config for name, graph_filter in filters_of(base)}


# ------------------------------------------------------------------------------------------------------------ loading


@contextlib.contextmanager
def _into(model: nn.Module) -> Iterator[None]:
    """What is read of adapters inside is for this model, which an error leaves as it was."""
    plain, token = not patched_modules(model, required=False), _loading.set(model)
    try:
        yield
    except BaseException:
        if plain and patched_modules(model, required=False):
            unpatch_model(unwrapped(model))
        raise
    finally:
        _loading.reset(token)


def _loads_into_first(original: classmethod[Any, ..., Any]) -> classmethod[Any, ..., Any]:
    function = original.__func__

    @functools.wraps(function)
    def from_pretrained(cls: type, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(function).bind(cls, model, *args, **kwargs).arguments
        record = _record_beside(given := arguments.get("config"), arguments["model_id"], kwargs)
        with _into(model):
            if record is not None:
                _fit(model, record, given)
            return function(cls, model, *args, **kwargs)

    return classmethod(from_pretrained)


def _loads_into_self(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        into_another = _loading.get() is None and adapter_name in self.peft_config  # as the Trainer resumes
        with _into(self):
            if into_another and patched_modules(self, required=False):
                _read_configuration(model_id, kwargs)  # which PEFT does not, then
            result = original(self, model_id, adapter_name, *args, **kwargs)
            copies.check_none_lost(result.unexpected_keys, unwrapped(self))
        return result

    return load_adapter


def _read_configuration(model_id: Any, options: dict[str, Any]) -> Any:
    """Return the configuration in the folder or repository of an adapter; None where weights are alone."""
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(model_id, **PeftConfig._split_kwargs(options)[0])
    except GraphFilterError:
        raise
    except ValueError:
        return None


def _record_beside(given: Any, model_id: Any, options: dict[str, Any]) -> Any:
    """Return the record of an adapter that is loaded with a configuration of the caller's, which may not have it."""
    record = getattr(given, READ, None)
    if given is None or record is not None or model_id is None:
        return record
    return getattr(_read_configuration(model_id, options), READ, None)


def _swaps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hotswap_adapter_from_state_dict(
        model: nn.Module, state_dict: Any, adapter_name: str, config: Any, parameter_prefix: str = "lora_"
    ) -> Any:
        if (record := vars(config).get(READ)) is not None:
            _fit(model, record, config)
        given, rest = copies.split(state_dict, model, parameter_prefix)
        target = copies.of_adapter(model, adapter_name)
        copies.check_copies(given, target, adapter_name)
        result = original(model, rest, adapter_name, config, parameter_prefix)
        copies.swap(given, target)
        return result

    return hotswap_adapter_from_state_dict


def _transformers_loads(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        given, options = arguments.get("peft_config"), arguments.get("adapter_kwargs") or {}
        record = _record_beside(given, arguments.get("peft_model_id"), options)
        with _into(self):
            if record is not None:
                _fit(self, record, given)
            return original(self, *args, **kwargs)

    return load_adapter


def _deletes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delete_adapter(self: Any, adapter_name: str) -> None:
        original(self, adapter_name)
        if not self.peft_config:
            copies.drop(base := unwrapped(self))
            if vars(base).get(STARTS):  # the filter came with the adapters
                unpatch_model(base)

    return delete_adapter


OF_TRANSFORMERS = {"load_adapter": _transformers_loads, "save_pretrained": _saves}


def _reads(original: classmethod[Any, ..., Any]) -> classmethod[Any, ..., Any]:
    function = original.__func__

    @functools.wraps(function)
    def from_peft_type(cls: type, **kwargs: Any) -> Any:
        record = kwargs.pop(CHILD, None)
        config = function(cls, **kwargs)
        if record is not None:
            vars(config)[READ] = record
            if (model := _loading.get()) is not None:
                _fit(model, record, config)
        return config

    return classmethod(from_peft_type)


def _fit(model: nn.Module, record: Any, config: Any) -> None:
    """The model has the filters of an adapter's record, or gets them where the adapter holds them.

    Raises:
        GraphFilterError: it has others; it has none, and the adapter does not hold them, or other adapters are in it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    groups, base = read_groups(record, "the adapter", f" of {CHILD} in its configuration"), unwrapped(model)
    host, kind = host_of(base), type(base).__name__
    trained_on = f"the adapter was trained on a model with {described(record)}"
    held = copies.holds(config, (name for _, names in groups for name in names))
    mend = "load it over that model, or patch this one first as it was, with load_filter or patch_model"
    if own := _filters(host, base):
        named = [name for _, names in groups for name in names]
        now = {name: host.relative_name(base, site.name) for name, site in resolve(host, base, named).items()}
        if own != {now.get(name, name): filter for filter, names in groups for name in names}:
            raise GraphFilterError(
                f"{trained_on}, and this {kind} is patched with {described(record_of(kind, own.items()))}: load it "
                "over a base that is patched as that one was"
            )
        if not held and vars(base).get(STARTS):
            raise GraphFilterError(f"{trained_on} and does not hold the filter, which another adapter brought: {mend}")
        return
    if not held:
        raise GraphFilterError(
            f"{trained_on} and does not hold the filter (modules_to_save=[{CHILD!r}] would), which this {kind} has "
            f"not: {mend}"
        )
    if any(module._get_available_adapters() for module in base.modules() if isinstance(module, BaseTunerLayer)):
        raise GraphFilterError(f"{trained_on}, and this {kind} holds adapters that were not: load it before them")
    host.write_record(base, record)
    try:
        apply_record(base, whole=True)
    except BaseException:
        host.write_record(base, None)
        raise
    vars(base)[STARTS] = True
