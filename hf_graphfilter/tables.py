"""Tables: as text for a terminal, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .text import html_text, markdown_text


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, rule: bool = True) -> str:
    """Return columns of text, each as wide as its longest cell, with a ``rule`` of dashes below the header.

    Example:
        >>> print(text_table(["filter", "K"], [["gfsa", "3"]]))
        filter  K
        ------  -
        gfsa    3
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, *[["-" * width for width in widths]][:rule], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; its cells are text of anyone's."""
    lines = [("th", header), *(("td", row) for row in rows)]
    body = ("".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in body) + "</table>"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, escape: bool = False) -> str:
    """Return a GitHub-flavoured Markdown table; its cells are Markdown, or with ``escape`` text of anyone's."""
    write = markdown_text if escape else str
    lines = [map(write, header), ["---"] * len(header), *(map(write, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
