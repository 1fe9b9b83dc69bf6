"""The command ``hf-graphfilter``: the verbs of the Python API."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError  # transformers raises it when a disk is full

from .. import __version__, devices
from ..console import Console
from ..errors import GraphFilterError
from ..text import printable
from . import common
from .checkpoints import check_output, message_of
from .environment import env
from .linearize import linearize
from .verbs import (
    card,
    export_remote_code,
    filters,
    load_filter,
    patch,
    push_filter,
    save_filter,
    status,
    transfer,
    unpatch,
)
from .write_report import report

app = typer.Typer(
    name="hf-graphfilter",
    help="Replace self-attention in pretrained Hugging Face models by graph filters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    result_callback=lambda result, push_to_hub=None, **options: common.push(push_to_hub),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-graphfilter {__version__}")
        raise typer.Exit


@app.callback()
def _import_modules(
    context: typer.Context,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="A module that registers custom filters; repeatable."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="The branch, tag or commit of the checkpoint on the Hub; may follow the verb.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="A token of the Hub, if HF_TOKEN is not set.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute: cpu, cuda:1 ...; default: the accelerator that is found.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload the checkpoint that the verb saves.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    common.begin(revision)
    common.check_push(push_to_hub, context.invoked_subcommand)
    devices.choose(device)
    common.check_device(device, context.invoked_subcommand)
    if token:
        os.environ["HF_TOKEN"] = token
    if modules and context.invoked_subcommand != "run":  # `run` passes them on to the program
        from ..filters import import_filters

        import_filters(modules)


def demo(
    output: Annotated[
        Path | None,
        typer.Option(help="The directory to write to.", show_default="runs/first-look, or runs/demo with --seeds"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Compare this many pairs of runs instead, with and without the filter."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=32, help="Number of training texts.", show_default="1024, or 2000 with --seeds")
    ] = None,
    K: Annotated[int, typer.Option("--K", min=1, help="The order of the filter.")] = 3,
    filter_lr: Annotated[float, typer.Option(help="Learning rate of the filter coefficients.")] = 1e-2,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Minutes that the training should take. With --seeds: start no pair of runs that would end later.",
            show_default="2.5, or 6 with --seeds",
        ),
    ] = None,
) -> None:
    """Take a first look: patch a real encoder, fine-tune it, and show what the filter changed, in two minutes.

    With --seeds, compare fine-tuning with and without the filter over seeds: about 8 minutes for three.
    """
    # waiting threads of PyTorch leave their cores to other processes; else a busy machine is several times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ..demo.plan import plan_first_look

    output = output or Path("runs/demo" if seeds else "runs/first-look")
    check_output(output)
    numbers = {"rows": rows, "minutes": minutes}
    options: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    plan = None if seeds else plan_first_look(Console())
    with plan.part() if plan else nullcontext():
        from transformers.utils import logging

        from ..demo import run_demo, run_first_look

    logging.set_verbosity_error()  # hide the report that the classification head is new
    logging.disable_progress_bar()
    if seeds:
        run_demo(output, seeds=seeds, K=K, filter_lr=filter_lr, **options)
    else:
        run_first_look(output, K=K, filter_lr=filter_lr, plan=plan, **options)


def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="A Python file, a command, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments and options of the program.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as with python -m.")] = False,
    filter_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the filter coefficients, if PROGRAM trains.")
    ] = None,
) -> None:
    """Run any other Python program so that it, and every process it starts, loads patched checkpoints.

    [dim]hf-graphfilter run lm_eval --model hf --model_args pretrained=runs/gpt2-gfsa --tasks lambada_openai[/dim]

    [dim]hf-graphfilter run -m torch.distributed.run --nproc-per-node 2 train.py[/dim]

    [dim]hf-graphfilter run --filter-lr 1e-2 trl sft --model_name_or_path runs/mine ...[/dim]
    """
    from ..launch import run_program

    modules = context.parent.params["modules"] if context.parent else None  # those that --import names
    run_program(program, arguments or (), module=module, imports=modules or (), filter_lr=filter_lr)


for _verb in (
    *(patch, unpatch, linearize, transfer, status, filters),
    *(save_filter, load_filter, push_filter, card, report, demo, env),
):
    app.command()(_verb)
app.command(context_settings={"allow_interspersed_args": False})(run)  # options after PROGRAM belong to PROGRAM
app.command()(export_remote_code)
app.command("convert", hidden=True)(linearize)  # its earlier name


def main() -> None:
    """Run the command: user mistakes are one line on stderr and exit code 1, wrong usage is exit code 2."""
    try:
        app(common.move_to_front(sys.argv[1:]), prog_name="hf-graphfilter")
    except (GraphFilterError, OSError, SafetensorError) as error:
        message = printable(" ".join(message_of(error).split()))
        print(f"hf-graphfilter: {message}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as done:  # Typer turns Ctrl-C into a silent SystemExit
        if isinstance(getattr(done.__context__, "__cause__", None), KeyboardInterrupt):
            print("hf-graphfilter: interrupted", file=sys.stderr)
        raise
