"""The command line of a recipe: a run for every seed, and a table of them."""

import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import yaml

from hf_graphfilter import GraphFilterError
from hf_graphfilter.analysis.comparison import mean_and_sd
from hf_graphfilter.console import Console, table
from hf_graphfilter.files import check_content, write_text
from recipes import SCRIPTS
from recipes.errors import OtherSettingsError, line, one_line_errors
from recipes.hub import create_repository, push, write_card
from recipes.machine import commit, is_main_process, machine_name
from recipes.records import RECORD, RUN, alone, read_whole, value_of, write_json
from recipes.settings import Recipe, Settings

CONFIG = "config.yaml"
BEGUN = "begun.json"  # by which an unfinished run is known again, its data as they were


def run_seed(settings: Settings, values: dict[str, Any], seed: int, folder: Path, console: Console) -> dict[str, Any]:
    """Return the record of one run in ``folder``: found finished, resumed from its last checkpoint, or begun.

    Raises:
        GraphFilterError: another command is at work on the same run.
    """
    with alone(folder / ".lock", work="training this"):
        return _run_seed(settings, values, seed, folder, console)


def _run_seed(settings: Settings, values: dict[str, Any], seed: int, folder: Path, console: Console) -> dict[str, Any]:
    file, config = folder / RECORD, folder / CONFIG
    finished = read_whole(file, seed=int, **RUN)
    kept = ("checkpoint-*", "*/checkpoint-*", f"*/{RECORD}")  # self-pretraining has a folder of its own
    begun = config.is_file() and any(any(folder.glob(pattern)) for pattern in kept)
    before = finished["settings"] if finished else None
    if before is None and begun:  # earlier versions wrote the configuration alone
        before = read_whole(folder / BEGUN)
        if before is None:
            before = settings.identity(read_config(folder))
    if before is not None and (changed := settings.differing(before, settings.identity(values))):
        raise OtherSettingsError(
            f"{folder} holds a run with other settings ({', '.join(changed)} differ): choose another --output_dir, or "
            "delete it"
        )
    if finished is not None:
        console.print(f"seed {seed}: finished before, in {folder}", highlight=False)
        return finished
    run_values = {**values, "output_dir": str(folder), "seed": seed, "seeds": [seed]}
    run_values |= {"push_to_hub": False, "hub_token": None}  # pushed after the run; a token is written to no file
    if is_main_process():
        write_text(config, yaml.safe_dump({k: v for k, v in run_values.items() if v is not None}))
        write_json(folder / BEGUN, settings.identity(values))
    arguments = settings.arguments(run_values)
    record = {
        "recipe": settings.recipe.name,
        "task": values["task"],
        "seed": seed,
        **settings.recipe.run(*arguments),
        "settings": settings.identity(values),
        "date": date.today().isoformat(),
        "machine": machine_name(arguments[-1]),
        "versions": {n: metadata.version(n) for n in ("torch", "transformers", "hf_graphfilter")},
        "commit": commit(),
    }
    if is_main_process():
        if values.get("save_strategy") != "no":
            write_card(settings, folder, record, values)
        write_json(file, record)  # last: with it the run is finished
        (folder / BEGUN).unlink()
    return record


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings that a run was begun with.

    Raises:
        GraphFilterError: their file is damaged.
    """
    try:
        content = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise GraphFilterError(f"{folder / CONFIG} cannot be read ({line(error)}): delete {folder}") from error
    return check_content(content, folder / CONFIG)


def kept_in(folder: Path) -> bool:
    """Whether a finished run was to keep its checkpoint."""
    return not (folder / CONFIG).is_file() or read_config(folder).get("save_strategy") != "no"


def quiet() -> None:
    """No progress bars and news of the libraries; the Trainer's own bar stays."""
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """The command line of a recipe: every seed, then a table."""
    quiet()
    console = Console(quiet=not is_main_process())
    with one_line_errors(f"{SCRIPTS.get(recipe.name, recipe.name)}.py"):
        settings = Settings(recipe)
        values, _ = settings.parse(sys.argv[1:] if argv is None else argv)
        folder = Path(values["output_dir"])
        seeds = values.get("seeds", [1])
        for own in (folder / f"seed-{seed}" for seed in seeds):
            if values.get("save_strategy") != "no" and (own / RECORD).is_file() and not kept_in(own):
                raise GraphFilterError(
                    f"{own} was run with --save_strategy no and has no checkpoint: delete it to train it again, choose "
                    "another --output_dir, or ask for --save_strategy no"
                )
        if values.get("push_to_hub") and is_main_process():
            values["hub_model_id"] = create_repository(values)
        records = [run_seed(settings, values, seed, folder / f"seed-{seed}", console) for seed in seeds]
        if is_main_process():
            names = [n for n in records[0]["metrics"] if not n.endswith("loss")]
            rows = [[n, mean_and_sd([value_of(r, n) for r in records])] for n in names]
            title = f"{values['model']} on {values['task']}, {values.get('filter', 'gfsa')}, {len(records)} seeds"
            console.print(table(["metric", "value"], rows, title=title))
            if values.get("push_to_hub"):
                address = push(settings, folder / f"seed-{records[0]['seed']}", records[0], values)
                console.print(f"pushed to {address}", highlight=False)
