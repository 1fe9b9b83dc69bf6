"""Verbs that look at checkpoints and filters, and describe them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..console import parse_options, table
from ..errors import GraphFilterError
from .checkpoints import AutoClass, Source, check_output, load, show_status


def status(source: Source, auto_class: AutoClass = None) -> None:
    """Show what is patched: module, filter, coefficients (mean ± spread over heads), backend.

    [dim]hf-graphfilter status runs/bert-gfsa[/dim]
    """
    show_status(load(source, auto_class, patched=True))


def filters(
    name: Annotated[str | None, typer.Argument(help="Only this filter; all if not given.")] = None,
) -> None:
    """List the registered filters, with their options as hf-graphfilter patch -o takes them.

    [dim]hf-graphfilter filters gfsa[/dim]

    [dim]hf-graphfilter --import my_package.my_filters filters[/dim]
    """
    from importlib import metadata

    from ..filters import available_filters, get_filter
    from ..filters.base import summary
    from ..filters.fields import options

    declared = [] if name else [entry.name for entry in metadata.entry_points(group="hf_graphfilter.filters")]
    for known in [name] if name else sorted({*available_filters(), *declared}):
        config_class = get_filter(known)
        Console().print(f"[bold]{escape(known)}[/bold]  {escape(summary(config_class))}")
        rows = [
            [option, "must be given" if default is dataclasses.MISSING else _written(default), _plain(kind)]
            for option, (kind, default) in options(config_class).items()
        ]
        Console().print(table(["option", "default", "value"], rows) if rows else "no options")


def _plain(kind: str) -> str:
    """A type in words, as a shell has it: no quotes, and lists for tuples."""
    return kind.removeprefix("one of ").replace("'", "").replace("tuple", "list")


def _written(value: Any) -> str:
    """A value as it is given on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def card(
    source: Source,
    repo_id: Annotated[
        str | None, typer.Option(help="Hub id under which it will be found; SOURCE if not given.")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model that was patched.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence identifier of the Hub.")] = None,
    training: Annotated[list[str] | None, typer.Option(help="A hyper-parameter as NAME=VALUE, repeatable.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write; README.md of the checkpoint directory if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the text of a card that is not ours.")] = False,
    auto_class: AutoClass = None,
) -> None:
    """Write the model card of a patched checkpoint; results recorded in a card that is there are kept.

    [dim]hf-graphfilter card runs/bert-gfsa --repo-id me/bert-gfsa --base-model bert-base-uncased[/dim]
    """
    from ..checkpoints.card import check_card, create_model_card

    if output is None:
        if not Path(source).is_dir():
            raise GraphFilterError(f"{source} is no directory: name the card's file with --output")
        output = Path(source) / "README.md"
    check_card(output, force)
    check_output(output.parent)
    settings = _trained(Path(source)) | parse_options(training or [])
    model = load(source, auto_class, patched=True)
    options: dict[str, Any] = {"base_model": base_model, "license": license, "training": settings}
    create_model_card(model, repo_id=repo_id or source, **options).save(output, force=force)
    Console().print(f"wrote {escape(str(output))}")


def _trained(folder: Path) -> dict[str, Any]:
    """What a Trainer left as JSON beside its checkpoint; its arguments are a pickle, which is not read."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
        names = {"num_train_epochs": "epochs", "global_step": "steps", "train_batch_size": "batch size"}
        return {names[key]: state[key] for key in names if state.get(key)}
    except (OSError, ValueError, AttributeError):
        return {}
