"""The one exception of the package, and what it says where an optional dependency is missing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator


class GraphFilterError(ValueError):
    """Raised for every mistake that the package can name: what was asked, what was found, what to do.

    It is also a ``ValueError``. A call that raises it leaves the model as it was.
    """


@contextlib.contextmanager
def needs(extra: str, purpose: str) -> Iterator[None]:
    """Around the imports of what an extra installs: where one is missing, a sentence names it and the extra.

    Example:
        >>> with needs("plots", "a plot"):
        ...     import nothing_of_this_name
        Traceback (most recent call last):
        hf_graphfilter.errors.GraphFilterError: a plot needs nothing_of_this_name: pip install 'hf-graphfilter[plots]'
    """
    try:
        yield
    except ImportError as error:
        broken = "" if isinstance(error, ModuleNotFoundError) else f" (it does not import: {error})"
        message = f"{purpose} needs {error.name}{broken}: pip install 'hf-graphfilter[{extra}]'"
        raise GraphFilterError(message) from error


def require(module: str, extra: str, purpose: str) -> None:
    """Import ``module`` or say which extra installs it: for the beginning of long work that needs it at its end.

    Example:
        >>> require("json", "recipes", "a recipe")
    """
    with needs(extra, purpose):
        importlib.import_module(module)
