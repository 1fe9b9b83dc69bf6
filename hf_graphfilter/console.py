"""What command lines share: tables, and values written as text. Needs the extra ``cli``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from .errors import GraphFilterError


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """A Rich table of plain text."""
    drawn = Table(*(Column(name, overflow="fold") for name in header), title=title)
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``["K=4", "learn=[\"w_0\"]", "basis=jacobi"]`` as a dict: values are JSON, or else text."""
    options = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise GraphFilterError(f"the option {pair!r}: write NAME=VALUE, for instance K=4")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def parse_layers(text: str | None) -> Any:
    """``layers`` of ``patch_model`` from text: all, even, odd, indices ``0,2,-1`` or a slice ``2:8``."""
    if text is None or text == "all":
        return None
    if text in ("even", "odd"):
        return text
    try:
        if ":" in text:
            return slice(*(int(part) if part else None for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (ValueError, TypeError) as error:
        raise GraphFilterError(f"--layers {text!r}: use all, even, odd, indices 0,2,-1 or a slice 2:8") from error
