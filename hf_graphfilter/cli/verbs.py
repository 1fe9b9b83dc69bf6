"""The verbs that write, inspect and describe checkpoints and filters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from ..console import Console, parse_options, table
from ..errors import GraphFilterError
from .checkpoints import (
    AutoClass,
    Force,
    Output,
    Seed,
    Source,
    check_output,
    keep_progress,
    load,
    load_config,
    save,
    show_status,
)
from .inputs import add_decoder_inputs, check_rate, read_trainer_state, text_of, tokenizer_of


def patch(
    source: Source,
    output: Output,
    filter: Annotated[
        str, typer.Option("--filter", "-f", help="Name of a filter; hf-graphfilter filters lists them.")
    ] = "gfsa",
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the filter as NAME=VALUE; repeatable.")
    ] = None,
    layers: Annotated[
        str, typer.Option("--layers", "-l", help="Layers to patch: all, even, odd, indices 0,2,-1 or a slice 2:8.")
    ] = "all",
    stack: Annotated[
        Literal["encoder", "decoder"] | None, typer.Option("--stack", help="Patch only this stack; default: both.")
    ] = None,
    seed: Seed = 0,
    auto_class: AutoClass = None,
) -> None:
    """Patch a checkpoint and save it, ready to fine-tune. With GFSA its outputs are the same as before.

    [dim]hf-graphfilter patch bert-base-uncased runs/bert-gfsa -o K=4 -o 'learn=["w_0","w_K"]' --layers even[/dim]

    [dim]hf-graphfilter patch bert-base-uncased runs/bert-agf -f agf -o correction=true -o window=4[/dim]
    """
    import torch

    from ..filters import as_config
    from ..patching.layers import parse_layers
    from ..patching.patch import patch_model

    torch.manual_seed(seed)
    config, layer_choice = as_config(filter, **parse_options(options or [])), parse_layers(layers)
    check_output(output, source)
    model = load(source, auto_class, make=lambda model: patch_model(model, config, layers=layer_choice, stack=stack))
    save(model, source, output)
    if not config.starts_as_original:
        tool = "hf-graphfilter transfer" if model.main_input_name == "input_ids" else "transfer_attention"
        Console().print(f"its outputs differ from the original's: fit it with {tool}, or fine-tune it")


def unpatch(source: Source, output: Output, auto_class: AutoClass = None) -> None:
    """Remove the filters from a checkpoint and save the original architecture, with its current weights.

    [dim]hf-graphfilter unpatch runs/bert-gfsa runs/bert-unpatched[/dim]
    """
    from ..patching.patch import unpatch_model

    check_output(output, source)
    save(unpatch_model(load(source, auto_class, patched=True)), source, output)


def transfer(
    source: Source,
    output: Output,
    text: Annotated[list[Path], typer.Option("--text", "-t", help="A text file; repeatable.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 1000,
    length: Annotated[int, typer.Option(min=8, help="Number of tokens per window of text.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of windows per batch.")] = 8,
    lr: Annotated[float, typer.Option(callback=check_rate, help="Learning rate.")] = 3e-3,
    end_to_end: Annotated[
        Literal["hidden", "logits"] | None,
        typer.Option(help="Add a second stage that fits these outputs of the model."),
    ] = None,
    auto_class: AutoClass = None,
) -> None:
    """Fit the filters of a patched language model to its original attention, on text files.

    The same command resumes after an interruption. Under torchrun the processes share the work.

    [dim]hf-graphfilter transfer runs/bert-agf runs/bert-agf-fitted -t wiki.txt --steps 1000[/dim]
    """
    import torch

    from ..devices import place
    from ..fitting import transfer_attention
    from ..fitting.checkpoint import remove

    check_output(output, source)
    encoder_decoder = load_config(source, patched=True).is_encoder_decoder
    tokenizer, files = tokenizer_of(source), [text_of(file) for file in text]
    encoded = [tokenizer(file, add_special_tokens=False, verbose=False)["input_ids"] for file in files]
    ids = torch.tensor([i for tokens in encoded for i in tokens])
    windows = ids[: len(ids) // length * length].view(-1, length)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    batches: list[Any] = list(windows.split(batch_size))
    batches, holdout = [add_decoder_inputs({"input_ids": ids}) for ids in batches] if encoder_decoder else batches, 4
    if len(batches) <= holdout:
        raise GraphFilterError(
            f"the text gives {len(windows)} windows of {length} tokens, {len(batches)} batches of {batch_size}, and "
            f"{holdout + 1} are needed ({holdout} to measure on): give more text, or a smaller --batch-size or --length"
        )
    (model, is_first), progress = place(load(source, auto_class, patched=True)), output / ".transfer"
    with keep_progress(progress):
        report = transfer_attention(
            model,
            batches,
            steps=steps,
            lr=lr,
            filter_lr=10 * lr,
            end_to_end=end_to_end,
            holdout=holdout,
            checkpoint=progress,
        )
    if not is_first:
        raise typer.Exit
    save(model, source, output, show=False)
    remove(progress)  # none is kept of a fit that became non-finite
    Console().print(escape(str(report)))


def save_filter(source: Source, output: Output, auto_class: AutoClass = None) -> None:
    """Write the filter of a patched checkpoint alone: a few KB, to load into any copy of the base model.

    [dim]hf-graphfilter save-filter runs/bert-gfsa runs/filter[/dim]
    """
    from ..checkpoints.filter_file import save_filter

    check_output(output, source)
    save_filter(load(source, auto_class, patched=True), output)
    Console().print(f"saved to {escape(str(output))}")


def load_filter(
    source: Source,
    filter: Annotated[str, typer.Argument(help="A filter that save-filter wrote: a directory or a Hub id.")],
    output: Output,
    auto_class: AutoClass = None,
) -> None:
    """Load a saved filter into a copy of its base model, and save the patched checkpoint.

    [dim]hf-graphfilter load-filter bert-base-uncased runs/filter runs/bert-gfsa[/dim]
    """
    from ..checkpoints.filter_file import load_filter

    check_output(output, source)
    save(load(source, auto_class, make=lambda model: load_filter(model, filter)), source, output)


def push_filter(
    source: Source,
    repo_id: Annotated[str, typer.Argument(help="The repository of the Hub, OWNER/NAME; made if it does not exist.")],
    auto_class: AutoClass = None,
    base_model: Annotated[
        str | None, typer.Option(help="The Hub id of the model that was patched, for load_filtered_model.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    force: Force = False,
) -> None:
    """Upload the filter of a patched checkpoint alone to the Hub, with a card.

    [dim]hf-graphfilter push-filter runs/bert-gfsa you/bert-gfsa-filter --base-model bert-base-uncased[/dim]
    """
    from ..checkpoints.filter_hub import push_filter

    model = load(source, auto_class, patched=True)
    address = push_filter(model, repo_id, base_model=base_model, private=private or None, force=force)
    Console().print(f"pushed to {escape(address)}")


def export_remote_code(
    folder: Annotated[
        Path, typer.Argument(help="A patched checkpoint; a file of code and an entry in its config.json are added.")
    ],
) -> None:
    """Let programs that only offer trust_remote_code load a patched checkpoint, where this package is installed.

    [dim]hf-graphfilter export-remote-code runs/gpt2-gfsa[/dim]
    """
    from ..remote_code import export_remote_code

    classes = export_remote_code(folder)
    Console().print(f"{escape(str(folder))} loads with trust_remote_code=True: {', '.join(classes)}")


def status(source: Source, auto_class: AutoClass = None) -> None:
    """Show the patched modules: filter, coefficients (mean ± spread over heads) and backend.

    [dim]hf-graphfilter status runs/bert-gfsa[/dim]
    """
    show_status(load(source, auto_class, patched=True))


def filters(
    name: Annotated[str | None, typer.Argument(help="Show only this filter; default: all.")] = None,
) -> None:
    """List the registered filters, with their options as hf-graphfilter patch -o takes them.

    [dim]hf-graphfilter filters gfsa[/dim]

    [dim]hf-graphfilter --import my_package.my_filters filters[/dim]
    """
    from importlib import metadata

    from ..filters import available_filters, get_filter
    from ..filters.core.fields import options
    from ..filters.core.overview import summary

    declared = [] if name else [entry.name for entry in metadata.entry_points(group="hf_graphfilter.filters")]
    for filter_name in [name] if name else sorted({*available_filters(), *declared}):
        config_class = get_filter(filter_name)
        Console().print(f"[bold]{escape(filter_name)}[/bold]  {escape(summary(config_class))}")
        if config_class.formula:
            Console().print(escape(f"{config_class.formula} ({config_class.cost})"), highlight=False)
        rows = []
        for option, (kind, default) in options(config_class).items():
            start = "must be given" if default is dataclasses.MISSING else default
            # as on the command line: without quotes, and with lists instead of tuples
            values = kind.removeprefix("one of ").replace("'", "").replace("tuple", "list")
            rows.append([option, start if isinstance(start, str) else json.dumps(start), values])
        Console().print(table(["option", "default", "value"], rows) if rows else "no options")


def card(
    source: Source,
    repo_id: Annotated[str | None, typer.Option(help="Hub id that the card names; default: SOURCE.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model that was patched.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence, as the Hub identifies it.")] = None,
    training: Annotated[list[str] | None, typer.Option(help="A hyper-parameter as NAME=VALUE; repeatable.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file to write; default: README.md of the checkpoint directory.")
    ] = None,
    force: Force = False,
    auto_class: AutoClass = None,
) -> None:
    """Write the model card of a patched checkpoint. Results in an existing card are kept.

    [dim]hf-graphfilter card runs/bert-gfsa --repo-id me/bert-gfsa --base-model bert-base-uncased[/dim]
    """
    from ..checkpoints.card import create_model_card
    from ..checkpoints.filter_card import check_card

    if output is None:
        if not Path(source).is_dir():
            raise GraphFilterError(f"{source} is no directory: name the card's file with --output")
        output = Path(source) / "README.md"
    check_card(output, force)
    check_output(output.parent)
    settings = read_trainer_state(Path(source)) | parse_options(training or [])
    model = load(source, auto_class, patched=True)
    options: dict[str, Any] = {"base_model": base_model, "license": license, "training": settings}
    create_model_card(model, repo_id=repo_id or source, **options).save(output, force=force)
    Console().print(f"wrote {escape(str(output))}")
