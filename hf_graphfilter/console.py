"""Tables on a terminal. Needs the extra ``cli``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Column, Table


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """A Rich table of plain text."""
    drawn = Table(*(Column(name, overflow="fold") for name in header), title=title)
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn
