"""The command ``hf-graphfilter``: the same verbs as the Python API. Needs the extra ``cli``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .errors import GraphFilterError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape

    from .console import parse_layers, parse_options, table
except ImportError:  # pragma: no cover
    sys.exit("hf-graphfilter: the command line needs its extra: pip install 'hf-graphfilter[cli]'")

if TYPE_CHECKING:
    from transformers import PreTrainedModel

app = typer.Typer(
    name="hf-graphfilter",
    help="Graph filters in place of self-attention, for pretrained Hugging Face models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)

Source = Annotated[str, typer.Argument(help="A checkpoint: directory or Hub id.")]
AutoClass = Annotated[
    str | None,
    typer.Option("--auto-class", help="Load with this class instead of the saved one, e.g. AutoModelForCausalLM."),
]


@app.command()
def patch(
    source: Source,
    output: Annotated[Path, typer.Argument(help="Directory for the patched checkpoint.")],
    filter: Annotated[str, typer.Option("--filter", "-f", help="Name of a registered filter.")] = "gfsa",
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the filter as NAME=VALUE, repeatable.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", "-l", help="even, odd, indices 0,2,-1 or a slice 2:8; all layers if not given."),
    ] = None,
    stack: Annotated[str | None, typer.Option("--stack", help="encoder or decoder; both if not given.")] = None,
    auto_class: AutoClass = None,
) -> None:
    """Patch a checkpoint and save it, ready to fine-tune; with GFSA its outputs are the same as before.

    [dim]hf-graphfilter patch bert-base-uncased runs/bert-gfsa -o K=4 -o 'learn=["w_0","w_K"]' --layers even[/dim]

    [dim]hf-graphfilter patch bert-base-uncased runs/bert-agf -f agf -o correction=true -o window=4[/dim]
    """
    from .patching import filter_status, patch_model

    model = _load(source, auto_class)
    patch_model(model, filter, layers=parse_layers(layers), stack=stack, **parse_options(options or []))  # type: ignore[arg-type]
    model.save_pretrained(output)
    _copy_processor(source, output)
    _print_status(model)
    Console().print(f"saved to {escape(str(output))}")
    if not all(row.filter.starts_as_original for row in filter_status(model)):
        Console().print("its outputs are not the original's: fit it with hf-graphfilter transfer, or fine-tune it")


@app.command()
def transfer(
    source: Source,
    output: Annotated[Path, typer.Argument(help="Directory for the fitted checkpoint.")],
    text: Annotated[list[Path], typer.Option("--text", "-t", help="A file of plain text, repeatable.")],
    steps: Annotated[int, typer.Option(min=1, help="Batches of the regression.")] = 1000,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a window of text.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    end_to_end: Annotated[str | None, typer.Option(help="hidden or logits: a second stage against these.")] = None,
    auto_class: AutoClass = None,
) -> None:
    """Fit the filters of a patched language model to its original attention, on plain text. Interrupted, it goes on.

    [dim]hf-graphfilter transfer runs/bert-agf runs/bert-agf-fitted -t wiki.txt --steps 1000[/dim]
    """
    import torch

    from .training import transfer_attention

    model: Any = _load(source, auto_class)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.tensor([i for file in text for i in _tokens(source, file)])
    windows = ids[: len(ids) // length * length].view(-1, length)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    report = transfer_attention(
        model,
        list(windows.split(batch_size)),
        steps=steps,
        lr=lr,
        coefficient_lr=10 * lr,
        end_to_end=end_to_end,  # type: ignore[arg-type]
        checkpoint=output / "transfer",
    )
    model.save_pretrained(output)
    _copy_processor(source, output)
    Console().print(escape(str(report)))
    Console().print(f"saved to {escape(str(output))}")


def _tokens(source: str, file: Path) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except ValueError as error:
        raise GraphFilterError(f"{source} has no tokenizer: {error}") from error
    return tokenizer(file.read_text(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[no-any-return]


@app.command()
def status(source: Source, auto_class: AutoClass = None) -> None:
    """Show what is patched: module, filter, coefficients (mean ± spread over heads), backend.

    [dim]hf-graphfilter status runs/bert-gfsa[/dim]
    """
    _print_status(_load(source, auto_class))


@app.command()
def card(
    source: Source,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model that was patched.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence identifier of the Hub.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write; README.md of the checkpoint directory if not given.")
    ] = None,
    auto_class: AutoClass = None,
) -> None:
    """Write the model card of a patched checkpoint.

    [dim]hf-graphfilter card runs/bert-gfsa --base-model bert-base-uncased[/dim]
    """
    from .card import create_model_card

    made = create_model_card(_load(source, auto_class), repo_id=source, base_model=base_model, license=license)
    if output is None:
        if not Path(source).is_dir():
            raise GraphFilterError(f"{source} is no directory: name the card's file with --output")
        output = Path(source) / "README.md"
    made.save(output)
    Console().print(f"wrote {escape(str(output))}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Directory for checkpoint, card, plot and results.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Pairs of runs, plain and GFSA.")] = 3,
    rows: Annotated[int, typer.Option(min=32, help="Training snippets.")] = 2000,
    K: Annotated[int, typer.Option("--K", min=1, help="Order of the filter.")] = 3,
    filter_lr: Annotated[float, typer.Option(help="Learning rate of the filter coefficients.")] = 1e-2,
    minutes: Annotated[float, typer.Option(help="Begin no pair of runs that would end after this time.")] = 6.0,
) -> None:
    """Fine-tune a real encoder on real text, plain and patched, and compare: a few minutes on two cores."""
    from transformers.utils import logging

    from .demo import run_demo

    logging.set_verbosity_error()  # the new head is no news here
    logging.disable_progress_bar()
    run_demo(output, seeds=seeds, rows=rows, K=K, filter_lr=filter_lr, minutes=minutes)


def _load(source: str, auto_class: str | None) -> PreTrainedModel:
    import transformers

    try:
        if auto_class is None:
            config = transformers.AutoConfig.from_pretrained(source)
            auto_class = next((a for a in config.architectures or () if hasattr(transformers, a)), "AutoModel")
        model_class = getattr(transformers, auto_class, None)
        if not hasattr(model_class, "from_pretrained"):
            raise GraphFilterError(f"transformers has no model class {auto_class!r}")
        return model_class.from_pretrained(source)  # type: ignore[union-attr]
    except OSError as error:
        raise GraphFilterError(f"cannot load {source}: {error}") from error


def _copy_processor(source: str, output: Path) -> None:
    """Tokenizer or image processor, so that the patched checkpoint is as usable as the source."""
    from transformers import AutoProcessor

    try:
        AutoProcessor.from_pretrained(source).save_pretrained(output)
    except (OSError, ValueError, ImportError):
        Console(stderr=True).print(f"note: no tokenizer or processor found in {escape(source)}", style="dim")


def _print_status(model: Any) -> None:
    from .patching import filter_status

    found = filter_status(model)
    if not found:
        raise GraphFilterError(f"{type(model).__name__} has no graph filter; patch it with: hf-graphfilter patch")
    Console().print(table(*found.table()))


@app.command(context_settings={"allow_interspersed_args": False})  # the program's options are not ours
def run(
    program: Annotated[str, typer.Argument(help="A Python file, a command, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments and options.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as with python -m.")] = False,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers filters, repeatable.")
    ] = None,
) -> None:
    """Run any other Python program so that it, and every process it starts, loads patched checkpoints.

    [dim]hf-graphfilter run lm_eval --model hf --model_args pretrained=runs/gpt2-gfsa --tasks lambada_openai[/dim]

    [dim]hf-graphfilter run -m torch.distributed.run --nproc-per-node 2 train.py[/dim]
    """
    from .launch import run_program

    run_program(program, arguments or (), module=module, imports=imports or ())


@app.command()
def export_remote_code(
    folder: Annotated[Path, typer.Argument(help="A patched checkpoint; two small changes are made in it.")],
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers filters, repeatable.")
    ] = None,
) -> None:
    """Let programs that only offer trust_remote_code load a patched checkpoint, where this package is installed.

    [dim]hf-graphfilter export-remote-code runs/gpt2-gfsa[/dim]
    """
    from .filters import import_filters
    from .remote_code import export_remote_code

    import_filters(imports or ())
    classes = export_remote_code(folder)
    Console().print(f"{escape(str(folder))} loads with trust_remote_code=True: {', '.join(classes)}")


def main() -> None:
    """Entry point: user mistakes are one line on stderr and exit code 1, wrong usage 2."""
    try:
        app()
    except (GraphFilterError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"hf-graphfilter: {message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hf-graphfilter: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
