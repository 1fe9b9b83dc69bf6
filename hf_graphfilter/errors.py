"""The exception of the package, how its messages show values, and what to install where an import fails."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import math
import numbers
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from .text import printable

LONGEST = 1000  # characters of a message
_PART = 120  # and of a value within it
UNSEEN = (
    "prefix tuning, whose virtual tokens no layer computes, cannot be used with this filter (prompt tuning can); start "
    "with a new cache if an unpatched model filled this one"
)


class GraphFilterError(ValueError):
    """Raised for every mistake that the package can name: what was asked, what was found, what to do.

    It is also a ``ValueError``. A call that raises it leaves the model as it was. Its message is one line of at most
    1000 characters that a terminal can print, whatever other libraries' messages and names it repeats.
    """

    def __init__(self, message: object = ""):
        text = str(message)
        if text.startswith("Caught "):  # a DataLoader raises an error of its worker again, behind its traceback
            text = text.rpartition(f"\n{type(self).__module__}.{type(self).__qualname__}: ")[2]
        super().__init__(_shortened(text, LONGEST))


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message: one line, shortened in the middle, whatever ``repr`` does.

    Example:
        >>> shown("gfsa"), len(shown("g" * 20_000))
        ("'gfsa'", 120)
    """
    try:
        return _shortened(repr(value), _PART)
    except Exception:  # an integer of 5,000 digits, a dict nested 1,000 times, an object's own mistake
        return f"<{type(value).__name__} without a repr>"


def nearest(word: object, known: Iterable[str], prefix: str = "") -> str:
    """Return the known word that was probably meant, as the end of a message, after ``prefix`` as users write it.

    Example:
        >>> nearest("gsfa", ["agf", "gfsa"]), nearest("converter", ["agf", "gfsa"])
        (" (did you mean 'gfsa'?)", '')
    """
    by_lower = {k.lower(): k for k in known}
    matches = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {prefix + by_lower[matches[0]]!r}?)" if matches else ""


def is_number(value: Any, most: float = math.inf, *, whole: bool = False) -> bool:
    """Return whether an argument is a finite number from 0 to ``most``; text is not, such as YAML's 1e-2.

    Example:
        >>> is_number(0.5, 1), is_number("1e-2"), is_number(2.5, whole=True)
        (True, False, False)
    """
    value = value.item() if hasattr(value, "item") and getattr(value, "size", None) else value
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value <= most:  # type: ignore[operator]
        return False
    return value <= sys.float_info.max and (not whole or float(value).is_integer())


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a hint, parts included; an integer is a number, and True is not.

    Example:
        >>> has_type({"a": [1, 2.5]}, dict[str, list[float]]), has_type([True], list[int])
        (True, False)
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(isinstance(value, type(part)) and value == part for part in parts)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, part) for part in parts)
    if origin is tuple and parts[-1] is not ...:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(has_type, value, parts))
    if origin in (tuple, list):
        return isinstance(value, origin) and all(has_type(x, parts[0]) for x in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            has_type(k, parts[0]) and has_type(x, parts[1]) for k, x in value.items()
        )
    if isinstance(value, bool):
        return hint is bool
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return type(value) is hint and all(has_type(getattr(value, name), hints[name]) for name in vars(value))
    return isinstance(value, (int, float) if hint is float else hint)


def _shortened(text: str, most: int) -> str:
    line = printable(" ".join(text.split()))
    half = (most - 5) // 2
    return line if len(line) <= most else f"{line[: most - 5 - half]} ... {line[-half:]}"


@contextlib.contextmanager
def needs(extra: str, purpose: str) -> Iterator[None]:
    """Turn an import that fails inside into an error that names the module and the extra to install.

    Example:
        >>> with needs("plots", "a plot"):
        ...     import nothing_of_this_name
        Traceback (most recent call last):
        hf_graphfilter.errors.GraphFilterError: a plot needs nothing_of_this_name: pip install 'hf-graphfilter[plots]'
    """
    try:
        yield
    except ImportError as error:
        detail = "" if isinstance(error, ModuleNotFoundError) else f" (it does not import: {error})"
        message = f"{purpose} needs {error.name or 'a package'}{detail}: pip install 'hf-graphfilter[{extra}]'"
        raise GraphFilterError(message) from error


def require(module: str, extra: str, purpose: str) -> None:
    """Import ``module``, or raise an error that names the extra to install, before long work that needs it.

    Example:
        >>> require("json", "recipes", "a recipe")
    """
    with needs(extra, purpose):
        importlib.import_module(module)
