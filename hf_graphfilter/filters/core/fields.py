"""The types of a config's fields: what they accept, and how errors and the command line describe them."""

from __future__ import annotations

import math
import numbers
import types
import typing
from dataclasses import fields
from typing import Any, Literal

import torch

from ...errors import GraphFilterError, has_type, shown

SMALLEST_TEMPERATURE = 1e-38  # float32 cannot hold the reciprocal of much smaller numbers


def check_fields(config: Any) -> None:
    """Convert the fields of a dataclass to the annotated types if nothing is lost.

    Raises:
        GraphFilterError: a value of another type, or a number that no coefficient can have; the message names the
            field.
    """
    hints = typing.get_type_hints(type(config))
    for field in fields(config):
        value, where = _to_python(getattr(config, field.name)), f"{type(config).__name__}: {field.name}"
        if isinstance(value, str) and typing.get_origin(hints[field.name]) is tuple:
            value = (value,)  # learn="w_K" names one coefficient
        object.__setattr__(config, field.name, value)
        if not has_type(value, hints[field.name]):
            raise GraphFilterError(f"{where} must be {describe(hints[field.name])}, got {shown(value)}")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise GraphFilterError(f"{where} must be finite, got {shown(value)}")
            if isinstance(number, (int, float)) and abs(number) > torch.finfo(torch.float32).max:
                raise GraphFilterError(f"{where} must be in the range of float32, got {shown(value)}")
        if hints[field.name] is float:  # torch takes no integer beyond 64 bits
            object.__setattr__(config, field.name, float(value))


def check_counts(config: Any, **most: int) -> None:
    """Raise unless each of these fields of a dataclass is None or between 1 and its limit."""
    for name, limit in most.items():
        value = getattr(config, name)
        if value is not None and not 1 <= value <= limit:
            raise GraphFilterError(f"{type(config).__name__}: {name} must be 1 to {limit}, got {shown(value)}")


def check_limits(
    config: Any, *names: str, least: float | None = None, above: float | None = None, most: float | None = None
) -> None:
    """Raise unless each of these fields of a dataclass is within the limits."""
    for name in names:
        value, limit = getattr(config, name), None
        if least is not None and value < least:
            limit = f">= {least}"
        if above is not None and value <= above:
            limit = f"> {above}"
        if most is not None and value > most:
            limit = f"at most {most}"
        if limit:
            raise GraphFilterError(f"{type(config).__name__}: {name} must be {limit}, got {shown(value)}")


def options(config_class: type[Any]) -> dict[str, tuple[str, Any]]:
    """Return the options of ``from_options``: name -> (type in words, default or ``dataclasses.MISSING``).

    The filter's own options come before those that every replacement filter has.
    """
    hints = typing.get_type_hints(config_class)
    ordered = sorted(fields(config_class), key=lambda field: bool(field.kw_only))
    return {field.name: (describe(hints[field.name]), field.default) for field in ordered}


def describe(hint: Any) -> str:
    """Return a type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple of {describe(args[0])}"
    if origin is dict:
        return f"{describe(args[1])} by {describe(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    return {int: "an integer", float: "a number", str: "a string", bool: "True or False", type(None): "None"}.get(
        hint, str(hint)
    )


def _to_python(value: Any) -> Any:
    """Convert NumPy's numbers to Python's, and lists, which JSON has instead of tuples, to tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(v if isinstance(v, (list, tuple)) else _to_python(v) for v in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    return value
