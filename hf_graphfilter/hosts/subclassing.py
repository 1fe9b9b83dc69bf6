"""The subclass that a patched module gets where a library has no attention interface: its forward runs the filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..errors import GraphFilterError
from ..filters.core.attached import CHILD
from .stand_ins import derive_class
from .watching import refuse_script, running_forward, unwatch, watch

_BASE = "_graph_filter_base"  # of the class of a patched module: the one that it had
Derive = Callable[[Any], Any]


def derive_filtered(base: Any, rebuild: Derive, run: Callable[..., Any]) -> Any:
    """Return a subclass of ``base`` whose forward is ``run(module, ...)`` while the module has a filter.

    Its objects are copied and pickled as what ``rebuild(base)`` returns.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if CHILD not in self._modules:  # a wrapper has kept this function, and the module is no longer patched
            return base.forward(self, *args, **kwargs)
        return run(self, *args, **kwargs)

    return derive_class(base, rebuild, {"forward": forward, "__prepare_scriptable__": refuse_script, _BASE: base})


def swap_class(module: Any, derive: Derive) -> None:
    """Give a module the subclass ``derive(class)``, and make a forward raise unless it runs the filter."""
    module.__class__ = derive(type(module))
    watch(module)


def restore_classes(modules: Iterable[Any], derive: Derive) -> None:
    """Remove the filters of modules, and undo ``swap_class`` where it was done.

    Raises:
        GraphFilterError: other code has derived a further class from a module's subclass. All modules then stay as they
            are.
    """
    modules = list(modules)
    for module in modules:
        if (base := getattr(type(module), _BASE, None)) and type(module) is not derive(base):
            raise GraphFilterError(
                f"{module.graph_filter.site_name} was given the class {type(module).__name__}, which derives from that "
                "of the patched module: undo that (FSDP2, parametrizations ...) before unpatch_model"
            )
    for module in modules:
        module.__class__ = getattr(type(module), _BASE, type(module))  # where another has replaced ours, that stays
        unwatch(module)
        delattr(module, CHILD)


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before ``swap_class``, or has."""
    return getattr(type(module), _BASE, type(module))


def runs_subclass(module: nn.Module, derive: Derive) -> bool:
    """Return whether the forward of a module, as it is now, is that of the subclass."""
    base = getattr(type(module), _BASE, None)
    return base is not None and running_forward(module) is derive(base).forward
