"""The verb that measures a checkpoint and writes a page about it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub.utils import tqdm
from rich.markup import escape

from ..console import Console
from ..devices import default_device
from ..errors import GraphFilterError
from .checkpoints import AutoClass, Source, check_output, load
from .common import hub_options, no_revision
from .inputs import Images, texts_of


def report(
    source: Source,
    text: Annotated[
        list[Path] | None, typer.Option("--text", "-t", help="A file with one text per line; repeatable.")
    ] = None,
    images: Annotated[Path | None, typer.Option("--images", help="A folder of images, with subfolders.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint to compare with, such as the unpatched model.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", help="File of the page; numbers and figures are written beside it.")
    ] = Path("report.html"),
    count: Annotated[int, typer.Option("--count", min=1, help="Texts or images to measure.")] = 64,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens per text; longer texts are cut.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts or images per batch.")] = 8,
    auto_class: AutoClass = None,
) -> None:
    """Measure over-smoothing, frequencies, ranks and coefficients of a checkpoint, and write a page about them.

    [dim]hf-graphfilter report runs/bert-gfsa --text reviews.txt --against bert-base-uncased[/dim]

    [dim]hf-graphfilter report facebook/deit-tiny-patch16-224 --images photos --output deit.html[/dim]
    """
    from ..analysis.report import report as measured
    from ..fitting import load_conversion

    if bool(text) == bool(images):
        raise GraphFilterError("a report needs inputs: either --text FILE or --images DIR")
    if output.suffix.lower() not in (".html", ".htm"):
        raise GraphFilterError(f"--output {output}: name a page, NAME.html")
    check_output(output.parent)
    for path, is_taken in ((output, output.is_dir()), (output.with_suffix(""), output.with_suffix("").is_file())):
        if is_taken:  # the figures go into a folder with the name of the page
            raise GraphFilterError(f"--output {output}: {path} is in the way")
    if images is None:
        batches = texts_of(source, text or [], count, length, batch_size)
    else:
        batches = list(Images(source, images, batch_size, count))
    device = default_device()
    model = load(source, auto_class).to(device)
    conversion = load_conversion(source, **hub_options(source))
    with no_revision():  # --revision belongs to the checkpoint
        reference = load(against, auto_class).to(device) if against else None
    progress = partial(tqdm, desc="measuring", leave=False, disable=None)
    max_length = length if images is None else None
    title = Path(source).name
    result = measured(
        model, batches, reference, title=title, conversion=conversion, progress=progress, max_length=max_length
    )
    page = result.to_html(output)
    result.save_figures(output.with_suffix(""))
    output.with_suffix(".json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    for line in result.summary():
        Console().print(escape(f"- {line}"), highlight=False)
    Console().print(f"saved to {escape(str(page))}")
