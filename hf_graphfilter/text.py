"""Text of others (names and values in files) where it is shown: on a terminal, in a figure, on a page, in a card."""

from __future__ import annotations

import html
import json
import re

# what moves the cursor or colours a terminal, turns the direction of writing, or is no character
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""Return the text with every character that steers a terminal written as its escape; newlines and tabs stay.

    Example:
        >>> print(printable("\x1b[31mred"))
        \x1b[31mred
    """
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def html_text(text: object) -> str:
    """Return the text as part of an HTML page.

    Example:
        >>> html_text("<b>")
        '&lt;b&gt;'
    """
    return html.escape(printable(text))


def markdown_text(text: object) -> str:
    r"""Return the text as one line of Markdown without tags, links and columns of its own.

    Example:
        >>> print(markdown_text("a|b <b> w_0"))
        a\|b &lt;b&gt; w_0
    """
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(printable(text).split()), quote=False))


def quoted(text: str) -> str:
    r"""Return the text as a string in a program that is shown.

    Example:
        >>> print(quoted('me/model"'))
        "me/model\""
    """
    return json.dumps(printable(text), ensure_ascii=False)


def figure_text(text: object) -> str:
    r"""Return the text as matplotlib draws it, which takes what stands between dollar signs for a formula.

    Example:
        >>> print(figure_text("$x$"))
        \$x\$
    """
    return printable(text).replace("$", r"\$")
