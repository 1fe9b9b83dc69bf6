"""Adapters of PEFT: the configuration of an adapter says which filter its base model had, and a plain one gets it.

Imported right after ``peft.tuners.tuners_utils``, for every way to an adapter ends there, in ``inject_adapter``:
``PeftModel``, ``AutoPeftModel``, ``load_adapter`` of transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from peft.config import PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ..errors import GraphFilterError
from ..filters.attached import CHILD, active_filter, patched_modules
from ..hosts import host_of, unwrapped
from ..patching import ADAPTED, apply_record, resolve, unpatch_model
from ..records import described, grouped, read_groups

READ = "_graph_filter_read"  # of the configuration of an adapter: the record in its file


def install() -> None:
    """Let configurations of adapters keep the record of the filter. Idempotent."""
    if hasattr(BaseTuner.inject_adapter, "__wrapped__"):
        return
    wraps: dict[tuple[type, str], Callable[[Any], Any]] = {
        (BaseTuner, "inject_adapter"): _fit_before,
        (PeftConfigMixin, "to_dict"): _write,
        (PeftConfigMixin, "from_peft_type"): _read,
    }
    for (cls, name), wrap in wraps.items():
        setattr(cls, name, wrap(inspect.getattr_static(cls, name)))


def _write(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def to_dict(self: PeftConfigMixin) -> dict[str, Any]:
        record = vars(self).get(ADAPTED, vars(self).get(READ))
        return {**original(self), **({CHILD: record} if record else {})}

    return to_dict


def _read(original: classmethod[Any, ..., Any]) -> classmethod[Any, ..., Any]:
    function = original.__func__

    @functools.wraps(function)
    def from_peft_type(cls: type, **kwargs: Any) -> Any:
        record = kwargs.pop(CHILD, None)
        config = function(cls, **kwargs)
        if record is not None:
            vars(config)[READ] = record
        return config

    return classmethod(from_peft_type)


def _fit_before(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def inject_adapter(self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        own, base = vars(self.peft_config[adapter_name]), unwrapped(model)
        plain = not patched_modules(base, required=False)
        if (record := own.get(READ)) is not None:
            _fit(base, record, f"the adapter {adapter_name!r}", self.peft_config[adapter_name])
        own[ADAPTED] = host_of(base).read_record(base) if patched_modules(base, required=False) else None
        try:
            original(self, model, adapter_name, *args, **kwargs)
        except BaseException:
            if plain and patched_modules(base, required=False):
                unpatch_model(base)
            raise

    return inject_adapter


def _fit(base: nn.Module, record: Any, adapter: str, config: Any) -> None:
    """The base model has the filter of the record, or gets it where the adapter holds the coefficients.

    Raises:
        GraphFilterError: it has another one; it has none, and the adapter does not hold it.
    """
    groups, host = read_groups(record, adapter, f" of {CHILD} in its configuration"), host_of(base)
    kind = type(base).__name__
    if own := {name: active_filter(module).config for name, module in patched_modules(base, required=False)}:
        sites = resolve(host, base, [name for _, names in groups for name in names])
        if own != {sites[name].name: filter for filter, names in groups for name in names if name in sites}:
            raise GraphFilterError(
                f"{adapter} was trained on a model with {described(record)}, and this {kind} is patched with "
                f"{described({'filters': grouped(own.items())})}: load it over a base that is patched as that one was"
            )
        return
    if not any(name.rpartition(".")[2] == CHILD for name in getattr(config, "modules_to_save", None) or ()):
        raise GraphFilterError(
            f"{adapter} was trained on a model with {described(record)} and does not hold the filter "
            f"(modules_to_save=[{CHILD!r}] would): load it over that model, or patch this {kind} first as it was, with "
            "load_filter or patch_model"
        )
    host.write_record(base, record)
    try:
        apply_record(base, whole=True)
    except BaseException:
        host.write_record(base, None)
        raise


install()
