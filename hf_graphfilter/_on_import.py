"""Act right after a module of another library is first imported, so that importing this package imports none."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, react: Callable[[], object]) -> None:
    """Call ``react()`` once the module ``name`` has been imported: now if it is there, else right after its import."""
    if name in sys.modules:
        react()
    else:
        sys.meta_path.insert(0, _Once(name, react))


class _Once(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, react: Callable[[], object]):
        self.name, self.react = name, react
        self.asking = threading.local()  # the other finders, for the spec

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name or vars(self.asking):
            return None
        self.asking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            del self.asking.now
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)  # who only asks for the spec, or fails here or in react, comes again
                self.react()
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
