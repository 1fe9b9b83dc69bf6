"""The page of a report: HTML and SVG in one file."""

from __future__ import annotations

from typing import Any

from ...errors import needs
from ...tables import html_table
from ...text import html_text
from .drawing import figures
from .measurements import ConversionCost, Measurements
from .panels import INK, split_figure
from .scale import load_references
from .words import facts, headings, sentences, verdict

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --line: #ccc; --bar: #9bbcd6; --mark: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e6e6e6; --line: #444; --bar: #3f6380; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.answer { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem 3rem; }
.answer > * { min-width: 0; } .verdict { font-size: 1.2rem; margin-top: 0; } li, .verdict { max-width: 70ch; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .9rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .85rem; } td, th { border: 1px solid var(--line); padding: .2rem .5rem; }
.plain td, .plain th { border: 0; text-align: left; vertical-align: top; padding: .1rem .5rem .1rem 0; }
.plain { width: 100%; } .plain th { font-weight: inherit; white-space: nowrap; } .plain td { overflow-wrap: anywhere; }
.scale td:nth-child(2) { width: 60%; } .scale td:last-child { white-space: nowrap; } .scale .own { font-weight: bold; }
.bar { height: .9rem; background: var(--bar); } .own .bar { background: var(--mark); }
.scroll { overflow-x: auto; } .note { font-size: .85rem; }
@media print { :root { --paper: #fff; --ink: #000; } figure, table { break-inside: avoid; }
  .bar { print-color-adjust: exact; } }
"""


def page(title: str, measured: Measurements, reference: Measurements | None, conversion: ConversionCost | None) -> str:
    """Return the page: first the verdict and its scale, then what was measured, the findings and the charts."""
    parts = [f"<h1>{html_text(title)}</h1>", "<div class=answer><div>"]
    answers = ([conversion.verdict] if conversion else []) + verdict(measured, reference)
    parts += [f"<p class=verdict>{html_text(line)}</p>" for line in answers]
    parts.append(f"</div><div>{_scale(title, measured)}</div></div>")
    parts.append("<div class=answer><div><h2>Findings</h2><ul>")
    parts += [
        f"<li>{html_text(line)}</li>" for line in sentences(measured, reference)[len(verdict(measured, reference)) :]
    ]
    rows = "".join(f"<tr><th>{k}</th><td>{html_text(v)}</td></tr>" for k, v in facts(measured, reference).items())
    parts.append(f"</ul></div><div><h2>What was measured</h2><table class=plain>{rows}</table></div></div>")
    parts += _charts(title, measured, reference, conversion)
    if conversion:
        for name, (header, *cells) in conversion.tables().items():
            parts.append(f"<h3>{html_text(name)}</h3><div class=scroll>{html_table(header, cells)}</div>")
    if measured.status:
        parts.append(f"<h2>Filters</h2><div class=scroll>{measured.status._repr_html_()}</div>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _scale(title: str, measured: Measurements) -> str:
    """Return the cosine after the last layer beside those of pretrained models, as a table with bars."""
    stacks = dict.fromkeys(layer.stack for layer in measured.smoothing.layers())
    model_rows = []
    for stack in stacks:
        cosine = measured.smoothing.bands[measured.smoothing.layers(stack)[-1], "cosine"].mean.item()
        model_rows.append((f"{title} {stack}" if len(stacks) > 1 else title, cosine, " class=own"))
    references = load_references()
    rows = [*model_rows, *((value.model, value.cosine, "") for value in references)]
    cells = "".join(
        f"<tr{mark}><td>{html_text(name)}</td><td><div class=bar style='width:{max(cosine, 0):.0%}'></div></td>"
        f"<td>{cosine:.2f}</td></tr>"
        for name, cosine, mark in sorted(rows, key=lambda row: row[1])
    )
    note = f"Other models: {references[0].samples} {references[0].data}, {references[0].date}."
    return (
        "<p class=note>Mean cosine of two tokens after the last layer: 0 where tokens are unrelated, 1 where all are "
        f"alike</p><table class='plain scale'>{cells}</table><p class=note>{html_text(note)}</p>"
    )


def _charts(
    title: str, measured: Measurements, reference: Measurements | None, conversion: ConversionCost | None
) -> list[str]:
    """Return a heading and a grid of charts for each figure."""
    with needs("plots", "a report"):
        import matplotlib
    colour_settings = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    options: Any = dict.fromkeys(colour_settings, INK) | {"svg.fonttype": "none", "svg.hashsalt": title}
    parts, titles = [], headings(measured, reference, conversion)
    with matplotlib.rc_context(options):
        for name, figure in figures(measured, reference, conversion).items():
            panels = "\n".join(
                f"<figure><figcaption>{html_text(caption)}</figcaption>{svg}</figure>"
                for caption, svg in split_figure(figure, name)
            )
            parts.append(f"<h2>{html_text(titles[name])}</h2><div class=panels>{panels}</div>")
    return parts
