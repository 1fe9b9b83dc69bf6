"""The verb that measures a checkpoint and writes a page about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from ..errors import GraphFilterError
from .checkpoints import AutoClass, Source, check_output, load

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def report(
    source: Source,
    text: Annotated[
        list[Path] | None, typer.Option("--text", "-t", help="A file of texts, a line each, repeatable.")
    ] = None,
    images: Annotated[Path | None, typer.Option("--images", help="A folder of images, with subfolders.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint to compare with, say the plain model.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="The page; numbers and figures lie beside it.")] = Path(
        "report.html"
    ),
    count: Annotated[int, typer.Option("--count", min=1, help="Texts or images that are measured.")] = 64,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a text; longer ones are cut.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="In a batch.")] = 8,
    auto_class: AutoClass = None,
) -> None:
    """Measure over-smoothing, frequencies, ranks and coefficients of a checkpoint, and write a page about them.

    [dim]hf-graphfilter report runs/bert-gfsa --text reviews.txt --against bert-base-uncased[/dim]

    [dim]hf-graphfilter report facebook/deit-tiny-patch16-224 --images photos --output deit.html[/dim]
    """
    import torch

    from ..analysis.report import report as measured

    if bool(text) == bool(images):
        raise GraphFilterError("a report needs inputs: either --text FILE or --images DIR")
    if output.suffix.lower() not in (".html", ".htm"):
        raise GraphFilterError(f"--output {output}: name a page, NAME.html")
    check_output(output.parent)
    if images is None:
        batches = texts_of(source, text or [], count, length, batch_size)
    else:
        batches = images_of(source, images, count, batch_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(source, auto_class).to(device)
    reference = load(against, auto_class).to(device) if against else None
    console = Console(stderr=True)

    def progress(given: Any) -> Any:
        return track(given, "measuring", console=console, transient=True)

    found = measured(model, batches, reference, title=Path(source).name, progress=progress)
    page = found.to_html(output)
    found.save_figures(output.with_suffix(""))
    output.with_suffix(".json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    for line in found.summary():
        Console().print(escape(f"- {line}"), highlight=False)
    Console().print(f"saved to {escape(str(page))}")


def texts_of(source: str, files: list[Path], count: int, length: int, batch_size: int) -> list[Any]:
    from transformers import AutoConfig, AutoTokenizer

    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()][:count]
    if not lines:
        raise GraphFilterError(f"{', '.join(map(str, files))} holds no texts")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise GraphFilterError(f"{source} has no tokenizer: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoder_decoder = AutoConfig.from_pretrained(source).is_encoder_decoder
    batches = []
    for start in range(0, len(lines), batch_size):
        part = lines[start : start + batch_size]
        batch = dict(tokenizer(part, padding=True, truncation=True, max_length=length, return_tensors="pt"))
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if encoder_decoder:  # the text itself, as far as it is read
            batch |= {f"decoder_{name}": value for name, value in batch.items()}
        batches.append(batch)
    return batches


def images_of(source: str, folder: Path, count: int, batch_size: int) -> list[Any]:
    from PIL import Image
    from transformers import AutoImageProcessor

    if not folder.is_dir():
        raise GraphFilterError(f"--images: there is no folder {folder}")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)
    files = files[:: max(1, len(files) // count)][:count]  # of all subfolders
    if not files:
        raise GraphFilterError(f"--images: {folder} holds no images ({', '.join(sorted(IMAGES))})")
    try:
        processor = AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise GraphFilterError(f"{source} has no image processor: {error}") from error
    batches = []
    for start in range(0, len(files), batch_size):
        opened = [Image.open(file).convert("RGB") for file in files[start : start + batch_size]]
        batches.append(dict(processor(opened, return_tensors="pt")))
    return batches
