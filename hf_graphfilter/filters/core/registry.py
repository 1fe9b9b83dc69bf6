"""The registry of filters: their names, and the import of modules that register more."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ...errors import GraphFilterError, nearest, shown

CONFIG_CLASSES: dict[str, type[Any]] = {}  # by registered name; ``register_filter`` adds to it


class UnknownFilterError(GraphFilterError):
    """Error for a name under which no filter is registered."""


def available_filters() -> tuple[str, ...]:
    """Return the names of the registered filters, sorted.

    Example:
        >>> "gfsa" in available_filters()
        True
    """
    return tuple(sorted(CONFIG_CLASSES))


def get_filter(name: str) -> type[Any]:
    """Return the config class registered as ``name``; the error for an unknown name lists the known ones."""
    if name not in CONFIG_CLASSES:
        for entry in metadata.entry_points(group="hf_graphfilter.filters", name=name):
            try:
                entry.load()
            except Exception as error:
                raise GraphFilterError(
                    f"the filter {shown(name)} is in {entry.value}, which cannot be imported: {shown(error)}"
                ) from error
    if name not in CONFIG_CLASSES:
        known = available_filters()
        raise UnknownFilterError(
            f"unknown filter {shown(name)}{nearest(name, known)}; known filters: {', '.join(known)} (command line: "
            "--import MODULE; a third party's filter must be imported first)"
        )
    return CONFIG_CLASSES[name]


def import_filters(modules: Sequence[str]) -> None:
    """Import modules that register filters, as ``--import`` of the command line and of the recipes does.

    Args:
        modules: dotted names or paths of ``.py`` files. Names are also found from the current directory, as with
            ``python -m``. The folder of a file goes on the path, as with ``python file.py``. Importing a module again
            does nothing.

    Raises:
        GraphFilterError: a module does not exist or raises while it is imported; the message names its error.

    Example:
        >>> import_filters(["hf_graphfilter.filters.gfsa"])
    """
    if isinstance(modules, str):
        raise GraphFilterError(
            f"modules to import must be a list of names, got the string {modules!r}: pass [{modules!r}]"
        )
    for name in modules:
        path = Path(name).resolve() if name.endswith(".py") or os.sep in name else None
        if path is not None and not path.is_file():
            raise GraphFilterError(f"cannot import filters from {name!r}: there is no such file")
        folder = os.getcwd() if path is None else str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        importlib.invalidate_caches()  # the file may be new
        try:
            module = importlib.import_module(name if path is None else path.stem)
        except (Exception, SystemExit) as error:
            raise GraphFilterError(
                f"cannot import filters from {name!r}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        file = getattr(module, "__file__", None)
        if path is not None and not path.samefile(file or os.devnull):
            raise GraphFilterError(
                f"cannot import filters from {name!r}: the name {path.stem!r} is taken by {file or 'Python'}; rename "
                "the file"
            )
