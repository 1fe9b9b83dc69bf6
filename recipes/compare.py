"""Compare a graph filter with the unpatched model over the same seeds, or sweep its options.

    python recipes/compare.py glue --config glue/bert.yaml --task cola --seeds 1 2 3 4 5
    python recipes/compare.py glue --config glue/bert.yaml --task cola --sweep K=2,3,4,5 layers=all,even
    python recipes/compare.py glue --config glue/minilm.yaml --task mrpc     # the `variants` of a YAML file

The first word names the recipe; every flag of that recipe may follow. The baseline is the unpatched model (--filter
none). It is compared with the given settings, with the `variants` of the YAML file, or with every combination of the
axes of --sweep. An axis is an option of the filter or any setting (K, layers, filter_lr ...); without values, --sweep
uses the `sweep` of the file. --equal_time 1.1 adds a baseline with 1.1 times the steps, and compares each filter with
it too: if a step with the filter takes 1.1 times as long, both train for the same time.

Each finished run is written at once to a results file beside the folders of the runs (runs/glue/glue-cola.json, or in
the folder --results). The same command resumes at the first missing run; --fresh begins again. --against shipped shows
the results that come with the recipes beside your own. A figure shows paired differences with their intervals, or the
values of a sweep.

Several machines with one shared folder work on one comparison: give the same command to each, at any time. With Slurm,
--jobs 4 --slurm partition=gpu,gres=gpu:1 starts four such jobs (submitit; the names are those of sbatch).

Two further commands have their own --help: `compare.py league` tunes many filters alike on many tasks, and `compare.py
table` reproduces a table of a paper.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

import argparse
import importlib
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import Console, table
from hf_graphfilter.errors import require
from hf_graphfilter.files import LockedError, check_content
from recipes import SCRIPTS, check_extras, jobs, paper_table, records, runs
from recipes.errors import is_main_process, one_line_errors
from recipes.league import play
from recipes.records import RUN, list_missing, lock, lower_is_better, move_aside, tell
from recipes.settings import Recipe, Settings
from recipes.summary import (
    PLAIN,
    as_comparison,
    compare_results,
    name_variant,
    plot_differences,
    plot_sweep,
    summarise,
    summary_rows,
)
from recipes.variants import choose_variants

NEEDED = {**RUN, "moved": dict[str, float], "filter_parameters": int}  # of each run, for the table


def read_other_results(against: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Return other results, to show beside the user's own, and their file."""
    folder = records.RESULTS if against == "shipped" else Path(against)
    content = records.read_results(folder / name, **NEEDED)
    if not content["runs"]:
        names = ", ".join(sorted(file.name for file in folder.glob("*.json"))) or "none"
        raise GraphFilterError(f"--against {against}: {folder} has no results {name}; there are: {names}")
    check_content(content, folder / name, variants=dict[str, Any], metric=str)
    return folder / name, content


def compare(recipe: Recipe, argv: list[str], options: argparse.Namespace, console: Console) -> None:
    """Do every missing run, then show the summary; the results file is whole after each run."""
    settings = Settings(recipe)
    values, sections = settings.parse(argv)
    if values.get("push_to_hub"):
        raise GraphFilterError("a comparison pushes nothing: run the recipe itself with --push_to_hub and one seed")
    chosen = choose_variants(settings, values, sections, options.sweep, options.variants, options.equal_time)
    resolved, folders = {}, {}
    for variant, overrides in chosen.items():
        folder = name_folder(variant)
        if (other := folders.setdefault(folder, variant)) != variant:
            raise GraphFilterError(f"{other!r} and {variant!r} would share the folder {folder}: rename one of them")
        resolved[variant] = settings.override(values, overrides, f" in the variant {variant!r}")
        settings.check(resolved[variant])
    require("matplotlib", "plots", "the figure of a comparison")
    compared = {"recipe": recipe.name, "task": values["task"]}
    suffix = "-sweep" * (options.sweep is not None) + "-smoke" * bool(values.get("smoke"))
    file_name = f"{options.name}.json" if options.name else records.name_results(compared, suffix)
    other_file, other = read_other_results(options.against, file_name) if options.against else (None, None)
    file = (options.results or records.results_folder(values)) / file_name
    root = records.results_folder(values) / file.stem
    if options.fresh:
        with lock(Path(f"{file}.lock"), *root.rglob(".lock"), work="making this comparison"):
            move_aside([file, file.with_suffix(".png"), root], console)
    metadata = {
        "name": file.stem,
        **compared,
        "metric": recipe.metric(values["task"], bool(values.get("held_out"))),
        "sweep": options.sweep is not None,
    }

    def add(*new: dict[str, Any]) -> dict[str, Any]:
        """Return the results with new runs, and with what other commands have added; the main process writes them."""
        with records.updating(file, **NEEDED) as content:
            variants = content.get("variants", {}) | chosen  # what earlier commands ran stays in view
            runs_of_all = [*content["runs"], *new]
            order = [*dict.fromkeys([*variants, *(run["variant"] for run in runs_of_all)])]
            unique_runs = {(run["seed"], order.index(run["variant"])): run for run in runs_of_all}
            content["runs"] = [unique_runs[run] for run in sorted(unique_runs)]  # written also if the next line raises
            # in the table of a sweep all else is the same, also of points that earlier commands ran
            checked = variants if options.sweep is not None else chosen
            checked_values = {v: settings.override(values, overrides) for v, overrides in checked.items()}
            check_settings(settings, checked_values, content, file)
            content |= {**metadata, "variants": variants}
            content["model"] = options.model_name or content.get("model") or Path(values["model"]).name
            content["summary"] = summarise(content)
        return content

    content = add()
    tell(console, f"results: {file}, {len(content['runs']) or 'no'} runs at hand")
    wanted = list(itertools.product(values.get("seeds", [1]), chosen))
    missing = list_missing(wanted, content)
    seeds = runs.count(len(wanted) // len(chosen), "seed")
    tell(console, f"plan: {len(chosen)} variants x {seeds} = {len(wanted)} runs, {len(missing)} of them to do")
    for seed, variant in wanted:
        if (seed, variant) not in missing:
            tell(console, f"{name_variant(variant)}, seed {seed}: at hand")
    seconds: list[float] = []
    waits, announced = 0, set()
    while missing:
        for seed, variant in missing:
            if (seed, variant) not in announced:  # again and again while another command has it
                tell(console, f"{name_variant(variant)}, seed {seed}")
            announced.add((seed, variant))
            folder = root / name_folder(variant) / f"seed-{seed}"
            is_finished, start_time = (folder / records.RECORD).is_file(), time.monotonic()
            try:
                record = runs.run_seed(settings, resolved[variant], seed, folder, console)
            except LockedError:
                if os.environ.get("WORLD_SIZE", "1") != "1":
                    raise  # only the first process knows of it
                continue
            content = add({"variant": variant, **record})
            if not is_finished:  # by another command, in no time here
                seconds.append(time.monotonic() - start_time)
                tell(console, say_progress(seconds, len(list_missing(wanted, content))))
        if missing := list_missing(wanted, content):
            records.wait_for_others(len(missing), waits, console)
            waits += 1
            content = add()
            missing = list_missing(wanted, content)
    if is_main_process():
        show(content, console)
        figure = file.with_suffix(".png")
        if content["sweep"]:
            plot_sweep(content, figure, chosen)
        else:
            plot_differences(content, figure)
        for label, path in {"results": file, "figure": figure, "runs": root}.items():
            tell(console, f"{label}: {path}")
        if other:
            comparison, differing = compare_results(settings, content, other)
            old = other["runs"][0]
            tell(console, f"other: {other_file} ({old['date']}, {old['machine']}, torch {old['versions']['torch']})")
            console.print(comparison)
            tell(console, f"settings that differ: {', '.join(differing) or 'none'}")


def name_folder(variant: str) -> str:
    """Return the name of the folder of a variant's runs."""
    return variant.replace(" ", "-").replace("/", "-").replace(",", "")


def check_settings(settings: Settings, resolved: dict[str, Any], content: dict[str, Any], file: Path) -> None:
    """Raise if a finished run of these variants had other settings than it has now."""
    for run in content["runs"]:
        variant = run["variant"]
        if variant in resolved and (
            changed := settings.list_differences(run["settings"], settings.identity(resolved[variant]))
        ):
            raise GraphFilterError(
                f"{file}: {variant}, seed {run['seed']} was run with other settings ({', '.join(changed)} differ): "
                "choose another --name, or begin again with --fresh"
            )


def say_progress(seconds: list[float], left: int) -> str:
    """Say how long the last run took, and about how long those that are left will take."""
    took = f"done in {seconds[-1] / 60:.1f} min"
    return f"{took}; {left} left, about {statistics.mean(seconds) * left / 60:.0f} min" if left else took


def show(content: dict[str, Any], console: Console) -> None:
    """Print the summary, in short."""
    header, rows = summary_rows(content)
    columns = [header.index(name) for name in (*header[:3], "filter moved")]
    cells = [[row[i] for i in columns] for row in (header, *rows)]
    console.print(table(cells[0], cells[1:], title=f"{content['model']} on {content['task']}"))
    for variant, summary in content["summary"].items():
        differences = {PLAIN: summary.get("difference"), **summary.get("equal time", {})}
        for baseline, difference in differences.items():
            if difference:
                names = f"{name_variant(variant)} - {name_variant(baseline)}"
                tell(console, f"{names}, {content['metric']}: {as_comparison(difference)}")
    if lower_is_better(content["metric"]):
        tell(console, "lower is better")


def arguments() -> argparse.ArgumentParser:
    """Return the flags of a comparison; those of the recipe follow them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", choices=SCRIPTS)
    parser.add_argument("--sweep", nargs="*", help="axes of the sweep, NAME=VALUE,VALUE,...")
    parser.add_argument("--variants", nargs="+", help="only these of the YAML file, and the unpatched model")
    parser.add_argument(
        "--equal_time", type=float, metavar="X", help="also train the baseline for X times the steps, above 1"
    )
    parser.add_argument("--name", help="name of the results file; default: RECIPE-TASK")
    parser.add_argument("--model_name", help="name of the model in tables; default: the last part of its path")
    parser.add_argument("--results", type=Path, help="folder of the results file; default: that of the runs")
    parser.add_argument("--fresh", action="store_true", help="begin again; old results and runs are moved aside")
    parser.add_argument("--against", metavar="shipped|FOLDER", help="show these results beside one's own")
    return parser


def main(argv: list[str] | None = None) -> None:
    runs.silence_libraries()
    argv = sys.argv[1:] if argv is None else argv
    console = Console(quiet=not is_main_process())
    resume_command = "this command without --fresh" if "--fresh" in argv else "the same command"
    with one_line_errors("compare.py", resume_command):
        count, slurm_options, argv = jobs.split_flags(argv)
        if count is not None:
            jobs.submit(count, slurm_options, argv, console)
            return
        if argv[:1] == ["league"]:
            play.main(argv[1:], console)
        elif argv[:1] == ["table"]:
            paper_table.main(argv[1:], compare, console)
        else:
            options, recipe_argv = arguments().parse_known_args(argv)
            if options.recipe == "imagenet":
                check_extras("vision")
            compare(importlib.import_module(f"recipes.{SCRIPTS[options.recipe]}").RECIPE, recipe_argv, options, console)


if __name__ == "__main__":
    main()
