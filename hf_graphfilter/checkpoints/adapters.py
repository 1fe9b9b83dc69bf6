"""Adapters of PEFT: their configuration keeps the record of the base model's filter, and a plain base gets it.

Written while a model saves its adapters, from the filters that it has then. Read while one is loaded into a model,
before anything of it is built: by ``PeftModel``, ``AutoPeftModel`` or ``load_adapter`` of transformers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
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

READ = "_graph_filter_read"  # of the configuration of an adapter: the record in its file
_loading: ContextVar[nn.Module | None] = ContextVar("_loading", default=None)  # the model that an adapter is to go into
_saving: ContextVar[nn.Module | None] = ContextVar("_saving", default=None)  # one that saves its own


@functools.cache
def install() -> None:
    """Teach PEFT; ``checkpoints.transformers`` installs ``OF_TRANSFORMERS``."""
    from peft import PeftMixedModel, PeftModel
    from peft.config import PeftConfigMixin

    for cls, name, wrap in (
        (PeftModel, "from_pretrained", _loads_into_first),
        (PeftModel, "load_adapter", _loads_into_self),
        (PeftModel, "save_pretrained", _saves),
        (PeftMixedModel, "from_pretrained", _loads_into_first),
        (PeftConfigMixin, "from_peft_type", _reads),
        (PeftConfigMixin, "save_pretrained", _writes),
    ):
        setattr(cls, name, wrap(inspect.getattr_static(cls, name)))  # type: ignore[operator]


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
        if model is not None and (record := _live_record(model)) is not None:
            file = Path(save_directory, CONFIG_NAME)
            file.write_text(json.dumps({**json.loads(file.read_text()), CHILD: record}, indent=2, sort_keys=True))
        return result

    return save_pretrained


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
        with _into(model):
            given = inspect.signature(function).bind(cls, model, *args, **kwargs).arguments.get("config")
            if (record := vars(given).get(READ) if given is not None else None) is not None:  # of AutoPeftModel
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
            return original(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _read_configuration(model_id: Any, options: dict[str, Any]) -> None:
    from peft import PeftConfig

    try:
        PeftConfig.from_pretrained(model_id, **PeftConfig._split_kwargs(options)[0])
    except GraphFilterError:
        raise
    except ValueError:  # there is none: weights alone can be loaded
        pass


def _transformers_loads(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _into(self):
            return original(self, *args, **kwargs)

    return load_adapter


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
    held = holds(config, (name for _, names in groups for name in names))
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
    if any(isinstance(module, BaseTunerLayer) for module in base.modules()):
        raise GraphFilterError(f"{trained_on}, and this {kind} holds adapters that were not: load it before them")
    host.write_record(base, record)
    try:
        apply_record(base, whole=True)
    except BaseException:
        host.write_record(base, None)
        raise
    vars(base)[STARTS] = True


def holds(config: Any, names: Iterable[str]) -> bool:
    """Whether the adapter of a configuration holds the filters of the modules of these names."""
    return all(_is_saved(name, config) for name in names)


def _is_saved(name: str, config: Any) -> bool:
    """By itself, or with what it is in."""
    parts = [*name.split("."), CHILD]
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    entries = getattr(config, "modules_to_save", None) or ()
    return any(f".{path}".endswith(f".{entry}") or entry.endswith(f".{path}") for path in around for entry in entries)
