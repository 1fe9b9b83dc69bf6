"""Functions and methods of other libraries that must do more for a model with a filter.

CONTRIBUTING.md lists them all, with their reasons.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
WRAPPED: set[str] = set()  # "library: owner.function"
_HOOK = "_graph_filter_hook"


def wrap(owner: Any, name: str, hook: Function) -> None:
    """Let a function of a class or module run as ``hook(original, *args, **kwargs)``; a second call does nothing.

    A class method or static method stays one, and ``original`` is its function. Where other modules of the library have
    imported the function of a module, they get the new one too.
    """
    static = inspect.getattr_static(owner, name)
    original = getattr(static, "__func__", static)
    if getattr(original, _HOOK, None) is hook:
        return

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(run, _HOOK, hook)
    wrapped = type(static)(run) if isinstance(static, (classmethod, staticmethod)) else run
    setattr(owner, name, wrapped)
    library = (owner.__name__ if inspect.ismodule(owner) else owner.__module__).partition(".")[0]
    if inspect.ismodule(owner):
        for module in [m for n, m in sys.modules.items() if n.startswith(library) and vars(m).get(name) is static]:
            setattr(module, name, wrapped)
    WRAPPED.add(f"{library}: {owner.__name__.rpartition('.')[2]}.{name}")
