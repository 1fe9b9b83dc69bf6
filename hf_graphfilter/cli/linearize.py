"""The verb that linearizes a checkpoint."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..console import Console, parse_options, table
from ..errors import GraphFilterError
from .checkpoints import AutoClass, Force, Output, Seed, Source, check_output, keep_progress, load, load_config, save
from .inputs import Images, add_decoder_inputs, check_rate, column_of, lines_of, tokenizer_of

PROGRESS = ".conversion"


def linearize(
    source: Source,
    output: Output,
    text: Annotated[
        list[Path] | None, typer.Option("--text", "-t", help="A file with one text per line; repeatable.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="A data set of the Hub, or a folder with one.")
    ] = None,
    configuration: Annotated[
        str | None, typer.Option("--dataset-config", help="Configuration of the data set.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Split of the data set.")] = "train",
    column: Annotated[str, typer.Option("--column", help="Column of the data set that holds the texts.")] = "text",
    stream: Annotated[
        bool, typer.Option("--stream", help="Read only as much of the data set as the budget needs, from its start.")
    ] = False,
    images: Annotated[Path | None, typer.Option("--images", help="A folder of images; subfolders count, too.")] = None,
    filter: Annotated[
        str, typer.Option("--filter", "-f", help="Name of a replacement filter; hf-graphfilter filters lists them.")
    ] = "far_field",
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the filter as NAME=VALUE; repeatable.")
    ] = None,
    budget: Annotated[int, typer.Option("--budget", help="Number of tokens to train on, over all stages.")] = 1_000_000,
    stages: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            help="A stage and its share of the budget as NAME=SHARE; names: attention, hidden, logits; repeatable.",
        ),
    ] = None,
    train: Annotated[
        Literal["filters", "lora", "all"],
        typer.Option("--train", help="The weights to train in the stages after attention."),
    ] = "filters",
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            "-l",
            help="Layers to replace: even, odd, indices 0,2,-1, a slice 2:8, or auto:75% (the share is chosen by "
            "--choose); default: all without a sliding window.",
        ),
    ] = None,
    choose: Annotated[
        Literal["text", "retrieval", "both"] | None,
        typer.Option("--choose", help="The loss that auto:75% chooses by; default: both for decoders, otherwise text."),
    ] = None,
    stack: Annotated[
        Literal["encoder", "decoder"] | None, typer.Option("--stack", help="Replace only in this stack; default: both.")
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Maximum number of tokens per text.")] = 512,
    batch: Annotated[
        int | None, typer.Option("--batch-tokens", min=2, help="Number of tokens per batch; default: --length.")
    ] = None,
    holdout: Annotated[int, typer.Option("--holdout", min=1, help="Number of batches to measure on.")] = 32,
    lr: Annotated[
        float | None, typer.Option("--lr", callback=check_rate, help="Learning rate of the first stage.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="dtype of the weights; default: that of the checkpoint."),
    ] = None,
    precision: Annotated[
        Literal["bf16"] | None, typer.Option("--precision", help="Mixed precision for the computation.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Use less memory and more time.")
    ] = False,
    timed: Annotated[
        bool, typer.Option("--speed", help="Compare its speed with the original, by text length.")
    ] = False,
    seed: Seed = 0,
    force: Force = False,
    auto_class: AutoClass = None,
) -> None:
    """Linearize a pretrained model: patch it, fit it to the original, measure the loss of quality, and save it.

    For several processes, use: accelerate launch -m hf_graphfilter linearize ... After an interruption, run the same
    command again: it resumes.

    [dim]hf-graphfilter linearize sentence-transformers/all-MiniLM-L6-v2 runs/minilm-linear --text reviews.txt[/dim]

    [dim]hf-graphfilter linearize HuggingFaceTB/SmolLM2-135M runs/smollm2-linear -t wiki.txt --budget 3000000[/dim]
    """
    import torch

    from ..checkpoints.filter_card import check_card
    from ..devices import place
    from ..fitting import Rates, save_conversion
    from ..fitting import linearize as fit
    from ..fitting.checkpoint import remove
    from ..fitting.choice import parse_share
    from ..fitting.settings import read_config, read_shares

    if stream and not dataset:
        raise GraphFilterError("--stream reads a data set: give --dataset NAME")
    if sum(map(bool, (text, dataset, images))) != 1:
        raise GraphFilterError("a conversion needs inputs: give one of --text FILE, --dataset NAME and --images DIR")
    if timed and images:
        raise GraphFilterError("--speed measures models of text, by length: omit it with --images")
    parse_share(layers)
    shares, filter_options = parse_options(stages or []), parse_options(options or [])
    if wrong := [f"{k}={v}" for k, v in shares.items() if not isinstance(v, (int, float))]:
        raise GraphFilterError(f"--stage {wrong[0]}: the share is a number, for instance attention=0.7")
    if reserved_names := [name for name in filter_options if name in inspect.signature(fit).parameters]:
        raise GraphFilterError(
            f"--option {reserved_names[0]}: --option is for options of the filter; see linearize --help for the others"
        )
    read_shares(shares or None, budget)
    # `fit` reads a share of heads
    read_config(filter, filter_options | ({"keep": None} if "keep" in filter_options else {}))
    check_output(output, source)
    check_card(output / "README.md", force)
    if images is None:
        texts = column_of(dataset, configuration, split, column, stream) if dataset else lines_of(text or [])
        batches: Any = _batches(source, texts, length, batch, budget + holdout * (batch or length))
    else:
        config = load_config(source)
        size, patch = getattr(config, "image_size", 224), getattr(config, "patch_size", 16)
        sides = zip(*(x if isinstance(x, (list, tuple)) else (x, x) for x in (size, patch)), strict=True)
        patches = math.prod(max(1, side // patch_side) for side, patch_side in sides)
        batches = Images(source, images, max(1, (batch or length) // patches))
    model, is_first = place(load(source, auto_class, dtype=dtype))
    progress = output / PROGRESS
    torch.manual_seed(seed)
    with keep_progress(progress):
        report = fit(
            model,
            batches,
            filter,
            budget=budget,
            stages=shares or None,
            train=train,
            layers=layers,
            choose=choose,
            stack=stack,
            holdout=holdout,
            rates=Rates() if lr is None else Rates(attention=lr),
            precision=precision,
            gradient_checkpointing=gradient_checkpointing,
            checkpoint=progress,
            progress=is_first,
            **filter_options,
        )
    if not is_first:
        raise typer.Exit  # also skips what follows a verb, such as --push-to-hub, in all processes but the first
    save(model, source, output, show=False)
    base = None if Path(source).is_dir() else source
    save_conversion(model, report, output, base_model=base, force=force)
    if timed:
        report.time(model)
        save_conversion(model, report, output, base_model=base, force=force)
    remove(progress)
    for title, (header, *rows) in report.tables().items():
        Console().print(table(header, rows, title=title))
    Console().print(f"{report.tokens:,} tokens, {report.seconds:.0f} s{report.crossing and f'; {report.crossing}'}")


def _batches(source: str, texts: Iterable[str], length: int, tokens: int | None, at_most: int) -> list[dict[str, Any]]:
    from ..fitting.data import text_batches

    config = load_config(source)
    causal = any(name.endswith(("CausalLM", "LMHeadModel")) for name in config.architectures or [])
    packed = causal and not config.is_encoder_decoder
    batches = text_batches(tokenizer_of(source), texts, length=length, tokens=tokens, packed=packed, at_most=at_most)
    return [add_decoder_inputs(batch) for batch in batches] if config.is_encoder_decoder else batches
