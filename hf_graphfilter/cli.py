"""The command ``hf-graphfilter``: the same verbs as the Python API. Needs the extra ``cli``."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from . import __version__
from .errors import GraphFilterError, needs

try:
    with needs("cli", "the command line"):
        import typer
        from rich.console import Console
        from rich.markup import escape

        from .console import parse_layers, parse_options, table
except GraphFilterError as error:  # pragma: no cover
    sys.exit(f"hf-graphfilter: {error}")

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

app = typer.Typer(
    name="hf-graphfilter",
    help="Graph filters in place of self-attention, for pretrained Hugging Face models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Source = Annotated[str, typer.Argument(help="A checkpoint: directory or Hub id.")]
Output = Annotated[Path, typer.Argument(help="Directory to write to.")]
AutoClass = Annotated[
    str | None,
    typer.Option("--auto-class", help="Load with this class instead of the saved one, e.g. AutoModelForCausalLM."),
]


class Stack(StrEnum):
    encoder = "encoder"
    decoder = "decoder"


class Target(StrEnum):
    hidden = "hidden"
    logits = "logits"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-graphfilter {__version__}")
        raise typer.Exit


@app.callback()
def _before_the_verb(
    context: typer.Context,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="A module that registers filters of your own, repeatable."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    if modules and context.invoked_subcommand != "run":  # which hands them on
        from .filters import import_filters

        import_filters(modules)


@app.command()
def patch(
    source: Source,
    output: Output,
    filter: Annotated[
        str, typer.Option("--filter", "-f", help="Name of a filter; hf-graphfilter filters lists them.")
    ] = "gfsa",
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the filter as NAME=VALUE, repeatable.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", "-l", help="even, odd, indices 0,2,-1 or a slice 2:8; all layers if not given."),
    ] = None,
    stack: Annotated[Stack | None, typer.Option("--stack", help="Only this one; both if not given.")] = None,
    auto_class: AutoClass = None,
) -> None:
    """Patch a checkpoint and save it, ready to fine-tune; with GFSA its outputs are the same as before.

    [dim]hf-graphfilter patch bert-base-uncased runs/bert-gfsa -o K=4 -o 'learn=["w_0","w_K"]' --layers even[/dim]

    [dim]hf-graphfilter patch bert-base-uncased runs/bert-agf -f agf -o correction=true -o window=4[/dim]
    """
    from .filters import as_config
    from .patching import patch_model

    config, chosen = as_config(filter, **parse_options(options or [])), parse_layers(layers)
    _check_output(output, source)
    only: Any = stack and stack.value
    model = _load(source, auto_class, make=lambda plain: patch_model(plain, config, layers=chosen, stack=only))
    _save(model, source, output)
    if not config.starts_as_original:
        Console().print("its outputs are not the original's: fit it with hf-graphfilter transfer, or fine-tune it")


@app.command()
def unpatch(source: Source, output: Output, auto_class: AutoClass = None) -> None:
    """Take the filters out of a checkpoint and save the original architecture, with the weights it has now.

    [dim]hf-graphfilter unpatch runs/bert-gfsa runs/bert-plain[/dim]
    """
    from .patching import unpatch_model

    _check_output(output, source)
    _save(unpatch_model(_load(source, auto_class, patched=True)), source, output)


@app.command()
def transfer(
    source: Source,
    output: Output,
    text: Annotated[list[Path], typer.Option("--text", "-t", help="A file of plain text, repeatable.")],
    steps: Annotated[int, typer.Option(min=1, help="Batches of the regression.")] = 1000,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a window of text.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    end_to_end: Annotated[Target | None, typer.Option(help="A second stage, against these of the model.")] = None,
    auto_class: AutoClass = None,
) -> None:
    """Fit the filters of a patched language model to its original attention, on plain text. Interrupted, it goes on.

    [dim]hf-graphfilter transfer runs/bert-agf runs/bert-agf-fitted -t wiki.txt --steps 1000[/dim]
    """
    import torch

    from .training import transfer_attention

    if not 0 < lr < float("inf"):
        raise GraphFilterError(f"--lr must be a positive number, got {lr}")
    _check_output(output, source)
    _config(source, patched=True)
    ids = torch.tensor(_tokens(source, text))
    windows = ids[: len(ids) // length * length].view(-1, length)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    batches, held = list(windows.split(batch_size)), 4
    if len(batches) <= held:
        raise GraphFilterError(
            f"the text gives {len(windows)} windows of {length} tokens, {len(batches)} batches of {batch_size}, and "
            f"{held + 1} are needed, {held} to measure on: give more text, or a smaller --batch-size or --length"
        )
    model: Any = _load(source, auto_class, patched=True)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    progress = output / "transfer"
    try:
        report = transfer_attention(
            model,
            batches,
            steps=steps,
            lr=lr,
            coefficient_lr=10 * lr,
            end_to_end=end_to_end and end_to_end.value,  # type: ignore[arg-type]
            holdout=held,
            checkpoint=progress,
        )
    except KeyboardInterrupt:
        there = progress.is_dir()
        kept = f"progress is kept in {progress}, the same command goes on" if there else "nothing was fitted yet"
        print(f"hf-graphfilter: interrupted: {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    _save(model, source, output, show=False)
    shutil.rmtree(progress, ignore_errors=True)  # none is kept of a fit that became non-finite
    Console().print(escape(str(report)))


def _tokens(source: str, files: list[Path]) -> list[int]:
    from transformers import AutoTokenizer

    texts = [file.read_text(errors="replace") for file in files]
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise GraphFilterError(f"{source} has no tokenizer: {error}") from error
    return [i for t in texts for i in tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"]]


@app.command()
def status(source: Source, auto_class: AutoClass = None) -> None:
    """Show what is patched: module, filter, coefficients (mean ± spread over heads), backend.

    [dim]hf-graphfilter status runs/bert-gfsa[/dim]
    """
    _print_status(_load(source, auto_class, patched=True))


@app.command()
def filters(
    name: Annotated[str | None, typer.Argument(help="Only this filter; all if not given.")] = None,
) -> None:
    """List the registered filters, with their options as hf-graphfilter patch -o takes them.

    [dim]hf-graphfilter filters gfsa[/dim]

    [dim]hf-graphfilter --import my_package.my_filters filters[/dim]
    """
    from importlib import metadata

    from .filters import available_filters, get_filter
    from .filters.base import summary
    from .filters.fields import options

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


@app.command()
def save_filter(source: Source, output: Output, auto_class: AutoClass = None) -> None:
    """Write the filter of a patched checkpoint alone: a few KB, to be laid over any copy of the base model.

    [dim]hf-graphfilter save-filter runs/bert-gfsa runs/filter[/dim]
    """
    from .checkpoints.filter_file import save_filter

    _check_output(output, source)
    save_filter(_load(source, auto_class, patched=True), output)
    Console().print(f"saved to {escape(str(output))}")


@app.command()
def load_filter(
    source: Source,
    filter: Annotated[str, typer.Argument(help="What save-filter wrote: directory or Hub id.")],
    output: Output,
    auto_class: AutoClass = None,
) -> None:
    """Lay a saved filter over a copy of its base model, and save the patched checkpoint.

    [dim]hf-graphfilter load-filter bert-base-uncased runs/filter runs/bert-gfsa[/dim]
    """
    from .checkpoints.filter_file import load_filter

    _check_output(output, source)
    _save(_load(source, auto_class, make=lambda model: load_filter(model, filter)), source, output)


@app.command()
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
    from .checkpoints.card import check_card, create_model_card

    if output is None:
        if not Path(source).is_dir():
            raise GraphFilterError(f"{source} is no directory: name the card's file with --output")
        output = Path(source) / "README.md"
    check_card(output, force)
    _check_output(output.parent)
    settings = _trained(Path(source)) | parse_options(training or [])
    model = _load(source, auto_class, patched=True)
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

    _check_output(output)
    logging.set_verbosity_error()  # the new head is no news here
    logging.disable_progress_bar()
    run_demo(output, seeds=seeds, rows=rows, K=K, filter_lr=filter_lr, minutes=minutes)


def _check_output(output: Path, source: str | None = None) -> None:
    """Before long work: whether ``output`` can be a directory that files are written to."""
    try:
        if source is not None and output.exists() and output.samefile(source):
            raise GraphFilterError(f"{output} is the checkpoint that is read: name another directory to write to")
    except FileNotFoundError:
        pass  # the source is on the Hub
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise GraphFilterError(f"cannot write to {output}: {there} is a file, name a directory")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise GraphFilterError(f"cannot write to {output}: {there}: {error.strerror}") from error


def _config(source: str, patched: bool = False) -> PreTrainedConfig:
    import transformers

    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise GraphFilterError(f"{source} holds no config.json: it is no checkpoint")
    if folder.is_dir() and '"pretrained_cfg"' in (folder / "config.json").read_text(errors="replace"):
        raise GraphFilterError(f"{source} is a checkpoint of timm: use load_timm_model in Python")
    if folder.is_file():
        raise GraphFilterError(f"{source} is a file: name the directory of a checkpoint, or a Hub id")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except GraphFilterError:
        raise
    except Exception as error:  # whatever a config that was written by hand leads to
        raise GraphFilterError(f"cannot load {source}: {_short(error)}") from error
    if patched and getattr(config, "graph_filter", None) is None:
        raise GraphFilterError(f"{source} has no graph filter; patch it with: hf-graphfilter patch")
    return config


def _load(
    source: str, auto_class: str | None, patched: bool = False, make: Callable[[Any], Any] = lambda model: model
) -> Any:
    """``make(model)`` of a checkpoint, tried without the weights first, since these may take long to come."""
    import copy

    import transformers
    from accelerate import init_empty_weights
    from safetensors import SafetensorError
    from transformers.utils import logging

    config = _config(source, patched)
    if auto_class is None:
        named = config.architectures if isinstance(config.architectures, list) else []
        auto_class = next((a for a in named if isinstance(a, str) and hasattr(transformers, a)), "AutoModel")
    model_class: Any = getattr(transformers, auto_class, None)
    if not hasattr(model_class, "from_pretrained"):
        raise GraphFilterError(f"transformers has no model class {auto_class!r}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # loading warns again
    with init_empty_weights():
        try:
            empty = getattr(model_class, "from_config", model_class)(copy.deepcopy(config))
        except GraphFilterError:
            raise
        except Exception:  # whatever is wrong with the model itself, loading will say
            empty = None
        finally:
            logging.set_verbosity(verbosity)
        if empty is not None:
            make(empty)
    try:
        return make(model_class.from_pretrained(source))
    except GraphFilterError:
        raise
    except (
        *(OSError, ValueError, RuntimeError, ImportError, SafetensorError),
        *(LookupError, TypeError, AttributeError, ArithmeticError),  # of values in a config that no model has
    ) as error:
        raise GraphFilterError(f"cannot load {source}: {_short(error)}") from error


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _save(model: Any, source: str, output: Path, show: bool = True) -> None:
    """The checkpoint, and its tokenizer or image processor, so that it is as usable as the source."""
    from transformers import AutoProcessor

    from .status import filter_status

    model.save_pretrained(output)
    try:
        AutoProcessor.from_pretrained(source).save_pretrained(output)
    except (OSError, ValueError, ImportError):
        Console(stderr=True).print(f"note: no tokenizer or processor found in {escape(source)}", style="dim")
    if show and filter_status(model):
        _print_status(model)
    Console().print(f"saved to {escape(str(output))}")


def _print_status(model: Any) -> None:
    from .status import filter_status

    found = filter_status(model)
    if not found:
        raise GraphFilterError(f"{type(model).__name__} has no graph filter; patch it with: hf-graphfilter patch")
    Console().print(table(*found.table()))


@app.command(context_settings={"allow_interspersed_args": False})  # the program's options are not ours
def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="A Python file, a command, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments and options.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as with python -m.")] = False,
) -> None:
    """Run any other Python program so that it, and every process it starts, loads patched checkpoints.

    [dim]hf-graphfilter run lm_eval --model hf --model_args pretrained=runs/gpt2-gfsa --tasks lambada_openai[/dim]

    [dim]hf-graphfilter run -m torch.distributed.run --nproc-per-node 2 train.py[/dim]
    """
    from .launch import run_program

    modules = context.parent.params["modules"] if context.parent else None  # of --import
    run_program(program, arguments or (), module=module, imports=modules or ())


@app.command()
def export_remote_code(
    folder: Annotated[Path, typer.Argument(help="A patched checkpoint; two small changes are made in it.")],
) -> None:
    """Let programs that only offer trust_remote_code load a patched checkpoint, where this package is installed.

    [dim]hf-graphfilter export-remote-code runs/gpt2-gfsa[/dim]
    """
    from .remote_code import export_remote_code

    classes = export_remote_code(folder)
    Console().print(f"{escape(str(folder))} loads with trust_remote_code=True: {', '.join(classes)}")


_CALLS = {
    **{"patch_model": "patch", "unpatch_model": "unpatch", "filter_status": "status", "create_model_card": "card"},
    **{"save_filter": "save-filter", "load_filter": "load-filter", "transfer_attention": "transfer"},
    "available_filters": "filters",
}


def _spoken(message: str) -> str:
    """A message of the Python API in the words of the command line."""
    called = rf"\b(call )?({'|'.join(_CALLS)})\b(\([^()]*\))?"
    message = re.sub(called, lambda m: f"{'run ' if m[1] else ''}hf-graphfilter {_CALLS[m[2]]}", message)
    message = re.sub(r"\b(layers|stack)=(?=[\w'\"\[(])", r"--\1 ", message)
    return (
        re.sub(r"\b(layers|stack)=", r"--\1", message)
        .replace("force=True", "--force")
        .replace("must be imported first", "needs --import MODULE before the verb")
    )


def main() -> None:
    """Entry point: user mistakes are one line on stderr and exit code 1, wrong usage 2."""
    try:
        app(prog_name="hf-graphfilter")
    except (GraphFilterError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        message = " ".join(_spoken(text).split())
        print(f"hf-graphfilter: {message}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as done:  # Typer makes a silent one of Ctrl-C
        if isinstance(getattr(done.__context__, "__cause__", None), KeyboardInterrupt):
            print("hf-graphfilter: interrupted", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
