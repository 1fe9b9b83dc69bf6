"""The copies of a filter that PEFT keeps, one per adapter (``modules_to_save``): merging and swapping them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from ..filters import GraphFilter
from ..filters.core.attached import CHILD
from ..hosts import unwrapped
from ..patching.patch import STARTS
from ..wrappers import Function


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the wrapper of each module that is or contains a filter and that PEFT keeps copies of."""
    for name, module in [*model.named_modules()]:
        if "modules_to_save" in module._modules and any(isinstance(part, GraphFilter) for part in module.modules()):
            yield name.removeprefix("_orig_mod."), module


def unload_with_copies(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge or unload adapters without losing the filters; a tuner would skip them or take them for linear layers.

    The model keeps the copy of the adapter that is merged, or of the active one.
    """
    adapters = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("adapter_names")
    wrappers = [(*_locate(self.model, name), wrapper) for name, wrapper in _wrappers(self.model)]
    copies = [_choose_copy(wrapper, adapters) for *_, wrapper in wrappers]
    for (parent, name, _), copy in zip(wrappers, copies, strict=True):
        setattr(parent, name, copy)
    try:
        result = original(self, *args, **kwargs)
    except BaseException:
        for parent, name, wrapper in wrappers:
            setattr(parent, name, wrapper)
        raise
    if any(copy is not wrapper.original_module for (*_, wrapper), copy in zip(wrappers, copies, strict=True)):
        vars(unwrapped(self.model)).pop(STARTS, None)  # the model's own filter is the trained one now
    return result


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child


def _choose_copy(wrapper: Any, adapters: list[str] | None) -> nn.Module:
    names = [name for name in adapters or wrapper.active_adapters if name in wrapper.modules_to_save]
    if len(names) > 1:
        raise GraphFilterError(
            f"the adapters {shown(names)} hold a graph filter each, and a merged model has room for one: merge one"
        )
    return wrapper.modules_to_save[names[0]] if names else wrapper.original_module  # type: ignore[no-any-return]


def drop_copies(model: nn.Module) -> None:
    """Remove the wrappers of a model whose adapters were all deleted; PEFT cannot use them again."""
    for name, wrapper in [*_wrappers(model)]:
        setattr(*_locate(model, name), wrapper.original_module)


def tensors_of(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter's copies, by their names in the file of the adapter."""
    return {
        f"{name}.{key}": tensor
        for name, wrapper in _wrappers(model)
        if adapter in wrapper.modules_to_save
        for key, tensor in wrapper.modules_to_save[adapter].state_dict().items()
    }


def complete_copies(state: dict[str, Tensor], model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return the weights of an adapter that PEFT converted to LoRA, with complete copies of ``adapter``.

    PEFT itself uses only the last part of a tensor's name, does not distinguish adapters, and leaves out buffers.
    """
    owners = {name for name, _ in _wrappers(model)}
    other_weights = {key: tensor for key, tensor in state.items() if key.rpartition(".")[0] not in owners}
    return other_weights | {key: tensor.contiguous() for key, tensor in tensors_of(model, adapter).items()}


def strip_adapters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a filter without adapters, which ``target_modules="all-linear"`` puts on some of them."""
    adapted = {owner for owner, marker, _ in (key.rpartition("base_layer.") for key in tensors) if marker}
    base = {key.replace("base_layer.", ""): tensor for key, tensor in tensors.items() if "base_layer." in key}
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(tuple(adapted))} | base


def split_copies(state: Mapping[str, Any], model: nn.Module, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the weights of an adapter into copies of filters and other weights; names with ``prefix`` are no copies."""
    owners = tuple(f"{name}." for name, _ in _wrappers(model))
    copies = {k: x for k, x in state.items() if prefix not in k and (k.startswith(owners) or f".{CHILD}." in k)}
    return copies, {key: tensor for key, tensor in state.items() if key not in copies}


def check_copies(copies: Mapping[str, Any], target: Mapping[str, Tensor], adapter: str) -> None:
    """Raise a ``GraphFilterError`` unless the copies can replace those of an adapter."""
    for name in sorted({*copies, *target}):
        new_shape, old_shape = (tuple(x[name].shape) if name in x else "nothing" for x in (copies, target))
        if new_shape != old_shape:
            raise GraphFilterError(
                f"the new adapter holds {new_shape} at {name}, and {shown(adapter)} holds {old_shape}: load it "
                "under another name, with load_adapter"
            )


@torch.no_grad()
def swap_copies(copies: Mapping[str, Any], target: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of an adapter's copies."""
    for name, tensor in target.items():
        tensor.copy_(copies[name])


def holds_filters(config: Any, names: Iterable[str]) -> bool:
    """Return whether the adapter with this configuration holds the filters of the named modules."""
    return all(_is_saved(name, config) for name in names)


def _is_saved(name: str, config: Any) -> bool:
    """Return whether ``modules_to_save`` names the filter of a module, or a module that contains it."""
    parts = [*name.split("."), CHILD]
    paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    entries = getattr(config, "modules_to_save", None) or ()
    return any(f".{path}".endswith(f".{entry}") or entry.endswith(f".{path}") for path in paths for entry in entries)


def weigh_with_copies(
    original: Function, self: Any, adapters: list[str], weights: Any, adapter_name: str, *a: Any, **k: Any
) -> Any:
    """Combine adapters, and give the new adapter the filter that one of them holds.

    A tuner would give it the filter of the base model. PEFT raises an error if several of the adapters hold a filter.
    """
    copies_by_adapter = {name: copies for name in adapters if (copies := tensors_of(self.model, name))}
    if copies_by_adapter and adapters[0] not in copies_by_adapter:
        raise GraphFilterError(
            f"the new adapter is made like {shown(adapters[0])}, which holds no graph filter, and "
            f"{shown(next(iter(copies_by_adapter)))} holds one: name that one first"
        )
    is_new = adapter_name not in self.peft_config
    result = original(self, adapters, weights, adapter_name, *a, **k)
    if is_new and copies_by_adapter:
        swap_copies(copies_by_adapter[adapters[0]], tensors_of(self.model, adapter_name))
    return result
