"""The charts of a figure as separate SVG elements, which a page arranges in a grid."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...text import html_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # placeholder colour, which is replaced by the colour of the page's text
MARGIN = 4  # pixels around a chart


def split_figure(figure: Figure, name: str) -> Iterator[tuple[str, str]]:
    """Yield (caption, SVG element) for each axes of the figure, with its colour bar; the figure is changed.

    The caption is the label of the axes, or else its title. The ids in an element begin with ``name``.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # hiding some axes would move the others
    figure.suptitle("")
    groups = [[axes, *(image.colorbar.ax for image in axes.images if image.colorbar)] for axes in figure.axes]
    bars = {axes for _, *others in groups for axes in others}
    for number, group in enumerate(group for group in groups if group[0] not in bars):
        for axes in figure.axes:
            axes.set_visible(axes in group)
        caption = _caption(group[0])
        boxes = [box for axes in group if (box := axes.get_tightbbox()) is not None]
        box = Bbox.union(boxes).padded(MARGIN).transformed(figure.dpi_scale_trans.inverted())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}, bbox_inches=box)
        yield caption, _embed(file.getvalue(), f"{name}-{number}", caption)


def _caption(axes: Axes) -> str:
    """Return the caption of the axes without matplotlib's escapes, and remove the title from the axes."""
    caption = (str(axes.get_label()) or axes.get_title()).replace(r"\$", "$")
    axes.set_title("")
    return caption


def _embed(text: str, name: str, caption: str) -> str:
    """Return the SVG as an element of a page: in the page's colours, scalable, and with unique ids."""
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*"', r"\1\2", text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role=img aria-label="{html_text(caption)}"', 1)
