"""Output and options of command lines: a safe console, tables, and options written as text."""

from __future__ import annotations

import ast
import contextlib
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich import console as rich_console
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from .errors import GraphFilterError
from .text import printable


class Console(rich_console.Console):
    """A console that removes control characters, so that no printed text can control the terminal."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class _Records:
    """A table in the first form that fits the width: a Rich table, one with folded headers, or a paragraph per row."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None):
        self.header, self.rows, self.title = header, rows, title

    def __rich_console__(self, console: rich_console.Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(self.header, *self.rows, strict=True))
        folded = [textwrap.fill(name, max(map(len, [*cells, *name.split()]))) for name, *cells in columns]
        for header in (self.header, folded):
            lines = [[*n.split("\n"), *cells] for n, (_, *cells) in zip(header, columns, strict=True)]
            if sum(max(map(cell_len, column)) + 3 for column in lines) < options.max_width:
                drawn = Table(*(Column(Text(name), no_wrap=True) for name in header), title=self.title)
                for row in self.rows:
                    drawn.add_row(*map(Text, row))
                yield drawn
                return
        if self.title:
            yield Text(self.title, style="italic")
        for row in self.rows:
            yield Text(row[0], style="bold")
            named = [Text(f"{n} {cell}") for n, cell in zip(self.header[1:], row[1:], strict=True) if cell]
            yield Padding(Columns(named, padding=(0, 2)), (0, 0, 0, 2))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> _Records:
    """Return a table of text for a Rich console that does not break names.

    If the columns do not fit the width, each row is shown as a paragraph.
    """
    return _Records(header, rows, title)


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``["K=4", "learn=["w_0"]", "basis=jacobi"]`` into a dict; values are JSON or Python, or else text."""
    options = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise GraphFilterError(f"the option {pair!r}: write NAME=VALUE, for instance K=4")
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError):
            options[name] = _read_literal(text)
    return options


def _read_literal(text: str) -> Any:
    """Return a dictionary or list in Python's notation, as ``{4: [0, 2]}``, or a constant; any other text as it is."""
    if text.startswith(("{", "[")) or text in ("True", "False", "None"):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text)
    return text
