"""The page of a report: HTML and SVG in one file."""

from __future__ import annotations

import io
import re
from datetime import date
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ...errors import needs
from ...tables import html_table
from ...text import html_text
from .drawing import figures
from .measurements import ConversionCost, Measurements
from .words import sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # drawn with, and then replaced by the colour of the page's text
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e6e6e6; --line: #444; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; max-width: 60rem; display: block; }
table { border-collapse: collapse; font-size: .85rem; } td, th { border: 1px solid var(--line); padding: .2rem .5rem; }
.scroll { overflow-x: auto; }
footer { margin-top: 2rem; font-size: .85rem; border-top: 1px solid var(--line); }
@media print { :root { --paper: #fff; --ink: #000; } figure, table { break-inside: avoid; } }
"""
HEADINGS = {
    "smoothing": "Do tokens become alike?",
    "response": "Which frequencies pass?",
    "spectrum": "How many dimensions are used?",
    "taylor": "How far is GFSA's approximation from a power of A?",
    "curves": "How do the filters answer?",
    "coefficients": "What did the filters learn?",
    "conversion": "What did the conversion cost?",
}


def page(title: str, measured: Measurements, reference: Measurements | None, conversion: ConversionCost | None) -> str:
    parts = [f"<h1>{html_text(title)}</h1>", "<h2>In words</h2><ul>"]
    parts += [f"<li>{html_text(line)}</li>" for line in sentences(measured, reference)]
    parts.append("</ul>")
    with needs("plots", "a report"):
        import matplotlib
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    options: Any = dict.fromkeys(inked, INK) | {"svg.fonttype": "none", "svg.hashsalt": title}
    with matplotlib.rc_context(options):
        for name, figure in figures(measured, reference, conversion).items():
            parts.append(f"<h2>{HEADINGS[name]}</h2><figure>{svg(figure, name)}</figure>")
    if conversion:
        for name, (header, *rows) in conversion.tables().items():
            parts.append(f"<h3>{html_text(name)}</h3><div class=scroll>{html_table(header, rows)}</div>")
        parts.append(f"<p>{html_text(conversion.crossing)}</p>" * bool(conversion.crossing))
    if measured.status:
        parts.append(f"<h2>Filters</h2><div class=scroll>{measured.status._repr_html_()}</div>")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("hf_graphfilter", "torch", "transformers"))
    parts.append(f"<footer><p>{date.today().isoformat()}; {versions}</p></footer>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page, in the page's colours; its ids are its own."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*"', r"\1\2", text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role=img aria-label="{html_text(HEADINGS[name])}"', 1)
