"""The filters that are in a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ...errors import GraphFilterError
from .base import GraphFilter

CHILD = "graph_filter"  # the name of a filter in its attention module
F = TypeVar("F", bound=GraphFilter)


def class_of(model: object) -> type:
    """Return the class of a model or module, or the one that FSDP2 made its class from."""
    return next(c for c in type(model).__mro__ if not c.__module__.startswith("torch.distributed."))


def patched_modules(model: nn.Module, required: bool = True) -> list[tuple[str, Any]]:
    """Return (name, module) of the patched attention modules.

    Args:
        model: any module.
        required: whether an unpatched model is an error.
    """
    patched = [
        (name, module)
        for name, module in model.named_modules()
        if CHILD in module._modules and hasattr(module.graph_filter, "site_name")
    ]
    if required and not patched:
        raise GraphFilterError(
            f"{type(model).__name__} has no graph filter; call patch_model first (hf-graphfilter patch)"
        )
    return patched


def active_filter(module: Any) -> GraphFilter:
    """Return the filter of a patched module; if PEFT keeps copies for its adapters, the one that runs."""
    child = module.graph_filter
    return child.get_submodule(running_copy(child)) if hasattr(child, "modules_to_save") else child  # type: ignore[no-any-return]


def running_copy(wrapper: Any) -> str:
    """Return the name of the copy that runs in PEFT's wrapper of a module, which holds one copy per adapter."""
    names = [n for n in wrapper.active_adapters if n in wrapper.modules_to_save and not wrapper.disable_adapters]
    return f"modules_to_save.{names[0]}" if names else "original_module"


def _in_a_copy_at_rest(model: nn.Module, name: str) -> bool:
    """Return whether a module lies in one of PEFT's copies that is not in use."""
    parts = name.split(".")
    for end, part in enumerate(parts):
        if part in ("original_module", "modules_to_save"):
            wrapper = model.get_submodule(".".join(parts[:end]))
            if not f"{'.'.join(parts[end:])}.".startswith(f"{running_copy(wrapper)}."):
                return True
    return False


@overload
def filters_of(model: nn.Module, *, required: bool = False, copies: bool = False) -> list[tuple[str, GraphFilter]]: ...
@overload
def filters_of(
    model: nn.Module, kind: type[F], *, required: bool = False, copies: bool = False
) -> list[tuple[str, F]]: ...
def filters_of(
    model: nn.Module, kind: type[Any] = GraphFilter, *, required: bool = False, copies: bool = False
) -> list[tuple[str, Any]]:
    """Return (name of the attention module, filter) of the filters of a ``kind``, in module order.

    Args:
        model: any module.
        kind: the class of the filters to return.
        required: whether an unpatched model is an error.
        copies: whether to count the copies that PEFT keeps for adapters that do not run.
    """
    filters: list[tuple[str, Any]] = []
    for name, module in patched_modules(model, required):
        if copies:
            filters += [(name, graph_filter) for graph_filter in module.graph_filter.modules()]
        elif not _in_a_copy_at_rest(model, name):
            filters.append((name, active_filter(module)))
    return [(name, graph_filter) for name, graph_filter in filters if isinstance(graph_filter, kind)]


def read_whole(graph_filter: GraphFilter, read: Callable[[GraphFilter], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies on the CPU of the tensors that ``read(graph_filter)`` gives, also if accelerate has offloaded them.

    Tensors that FSDP2 or ZeRO-3 has sharded are gathered, so all processes must call.
    """
    from accelerate.utils import align_module_device

    with contextlib.ExitStack() as stack:
        for part in graph_filter.modules():
            stack.enter_context(align_module_device(part))
        if partitioned := [p for p in graph_filter.parameters() if hasattr(p, "ds_id")]:
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(partitioned))
        tensors = {name: tensor.detach() for name, tensor in read(graph_filter).items()}
        return {name: gather(t).to("cpu", copy=True) for name, t in tensors.items()}


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate has offloaded parameters of a module, so that nothing can be copied into them."""
    return any(
        hasattr(part, "_hf_hook") and parameter.is_meta
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
    )


def gather(tensor: Tensor) -> Tensor:
    """Return a tensor whole that FSDP2 may have sharded; if it has, all processes must call."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether FSDP2 or ZeRO-3 keeps a part of a tensor in each process."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def copy_restarted(graph_filter: GraphFilter) -> GraphFilter:
    """Return a copy on the CPU that has the start values; random ones are drawn again.

    Its tensors are whole, also if those of the filter are sharded or offloaded.
    """
    memo: dict[int, Any] = {}
    parts = [*graph_filter.modules()]
    for part in parts:  # accelerate's hooks hold all weights of the model; others may hold a lock, or FSDP2's state
        memo |= {
            id(value): value
            for name, value in vars(part).items()
            if name.endswith(("_hook", "_hooks")) or name.startswith("__composable_api")
        }
    for tensor in (*graph_filter.parameters(), *graph_filter.buffers()):
        if tensor.is_meta or is_sharded(tensor):
            empty = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    classes = [type(part) for part in parts]
    try:
        for part in parts:  # the classes of FSDP2 refuse to be copied
            part.__class__ = class_of(part)
        start = copy.deepcopy(graph_filter, memo).cpu()
    finally:
        for part, part_class in zip(parts, classes, strict=True):
            part.__class__ = part_class
    start.reset_parameters()
    return start


def is_whole(graph_filter: GraphFilter) -> bool:
    """Return whether all tensors are here, neither sharded nor offloaded."""
    return not any(t.is_meta or is_sharded(t) for t in graph_filter.state_dict(keep_vars=True).values())


def has_start_values(graph_filter: GraphFilter) -> bool:
    """Return whether no tensor differs from its start value; those that start at random values are left out."""
    with torch.random.fork_rng(devices=[]):
        first, second = (copy_restarted(graph_filter).state_dict() for _ in range(2))
    tensors = graph_filter.state_dict()
    fixed = [name for name, start in first.items() if torch.equal(start, second[name])]
    return all(torch.equal(tensors[name].cpu(), first[name]) for name in fixed)
