"""The route of a module's attention to its filter: a config of its own, and a hook."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ...errors import GraphFilterError
from ...filters import AttentionSite, GraphFilter
from ...filters.core.attached import CHILD, filters_of
from ...shift.earlier_layers import EarlierLayers
from ..stand_ins import derive_class
from ..watching import unwatch, watch
from . import cache
from .attention import EARLIER, HIDDEN
from .implementation import BASE_CONFIG, CHOSEN, IMPLEMENTATION, PAGED, SERVING, read_fields

_SITE = "_graph_filter_site"


def attach(site: AttentionSite, graph_filter: GraphFilter) -> None:
    """Add the filter to a module, and give the module a config that names our implementation."""
    module: Any = site.module
    base = module.config
    routed_config = copy.copy(base)
    routed_config.__class__ = _routed(type(base))  # type: ignore[arg-type]
    routed_config._attn_implementation_internal = IMPLEMENTATION
    object.__setattr__(routed_config, BASE_CONFIG, base)
    object.__setattr__(routed_config, _SITE, site.name)
    module.add_module(CHILD, graph_filter)
    module.config = routed_config
    watch(module)
    tensors = (*graph_filter.parameters(), *graph_filter.buffers())
    if not is_deepspeed_zero3_enabled() and not any(t.is_meta for t in tensors):
        for part in graph_filter.modules():  # or a composite made of patched models would give it start values again
            part._is_hf_initialized = True  # type: ignore[assignment]
    parameters = inspect.signature(type(module).forward).parameters
    names, open_ended = list(parameters)[1:], any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    stack = site.stack_module if graph_filter.reads_earlier else None
    if (open_ended and cache.NAMES & set(names)) or graph_filter.reads_hidden or stack is not None:
        module.register_forward_pre_hook(_PassOn(names), with_kwargs=True)
    if stack is not None and not _hooks(stack, _BeginPass):
        stack.register_forward_pre_hook(_BeginPass(), with_kwargs=True)


@functools.cache
def _routed(base: Any) -> Any:
    """Return the class of a patched module's config, which is copied and pickled through its base.

    At each call, the module reads our implementation from it. If another one was written into it, the call raises.
    """

    def read(self: Any) -> str:
        if (name := read_fields(self, CHOSEN)) != IMPLEMENTATION:
            raise GraphFilterError(
                f"{getattr(self, _SITE)} is patched, but {name!r} was written into its config, which bypasses the "
                f"graph filter: choose a backend with model.set_attn_implementation('sdpa'); {SERVING}"
            )
        return IMPLEMENTATION

    def write(self: Any, value: Any) -> None:
        self._attn_implementation_internal = value

    return derive_class(base, _rebuild, {"_attn_implementation": property(read, write)})


def _rebuild(base: Any) -> Any:
    cls = _routed(base)
    return cls.__new__(cls)


class _PassOn:
    """A forward pre-hook that passes cache and input to the attention function, as further keyword arguments.

    It also reports to ``EarlierLayers`` that the layer begins.
    """

    def __init__(self, names: list[str]):
        self.positions = {name: i for i, name in enumerate(names)}  # of arguments that may be given without a name

    def _find_argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self.positions.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        caches = (self._find_argument(name, args, kwargs) for name in cache.NAMES)
        past = next((candidate for candidate in caches if candidate is not None), None)
        reads_hidden = module.graph_filter.reads_hidden
        if (earlier := kwargs.get(EARLIER)) is not None:
            earlier.begin_layer(module.graph_filter.site_name)
        if past is None and not reads_hidden:
            return None
        extra_kwargs = {}
        if past is not None:
            if "read_index" in kwargs:  # earlier releases pass this cache on to the attention function, which raises
                raise GraphFilterError(f"{module.graph_filter.site_name}: {PAGED}")
            cache.announce(past, module)
            extra_kwargs[cache.ARGUMENT] = past
        if reads_hidden:
            extra_kwargs[HIDDEN] = self._find_argument("hidden_states", args, kwargs)
        return args, {**kwargs, **extra_kwargs}


class _BeginPass:
    """A forward pre-hook of a stack that gives its layers what they share in this pass, as a keyword argument."""

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, EARLIER: EarlierLayers()}


def _hooks(module: Any, kind: type) -> dict[int, Any]:
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)}


def _remove_hooks(module: Any, kind: type) -> None:
    for key in _hooks(module, kind):
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def detach(model: nn.Module, modules: Iterable[Any]) -> None:
    """Undo ``attach`` of these modules of a model."""
    for module in modules:
        unwatch(module)
        _remove_hooks(module, _PassOn)
        module.config = getattr(module.config, BASE_CONFIG, module.config)  # unless it was replaced since
        delattr(module, CHILD)
    for stack in model.modules():
        if _hooks(stack, _BeginPass) and not any(f.reads_earlier for _, f in filters_of(stack, copies=True)):
            _remove_hooks(stack, _BeginPass)
