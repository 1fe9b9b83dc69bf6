"""Objects that replace those of a library and behave alike, except for what a filter needs changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleView:
    """A module seen with other attributes, which a subclass defines; all others are the module's."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def derive_class(base: Any, rebuild: Callable[[Any], Any], body: dict[str, Any]) -> Any:
    """Return a subclass with the name of its ``base``.

    Its objects are copied and pickled as what ``rebuild(base)`` returns, since no import finds the subclass.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return rebuild, (base,), vars(self).copy()

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**body, "__reduce_ex__": reduce, **names})
