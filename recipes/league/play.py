"""Compare many filters on many tasks: a league in which each filter's learning rate is tuned in the same way.

    python recipes/compare.py league --config small.yaml --data DATA --workers 2

The YAML file names ``tasks`` (a recipe, its configuration, the folder of its data within --data, settings),
``variants`` (overrides, as in the other comparisons; the unpatched model is added), ``rates`` and ``stages``. On each
task:

1. The unpatched model is trained once with each of ``rates.learning_rate``, times that of its configuration. The rate
   that is best on validation is kept for all variants.
2. Each variant is trained once with each of ``rates.filter_lr`` (as many values); the best rate on validation is kept.
   With ``tune: learning_rate``, its rates are that of the unpatched model times each of ``rates.learning_rate``.
3. The unpatched model and the variants are trained with the ``seeds`` of each stage, and tested. A stage with ``best:
   N`` waits for the tasks of the stage before, and takes the N variants with the best mean rank there to all its tasks.

Tuning uses the seed 0 and the validation part; a task without a test part holds out a tenth of the training part for
it. A single rate needs no tuning. All runs of a task take the same steps over the same tokens. A filter that raises an
error on a task is left out of it, and the message is kept. ``longer: 4`` trains the unpatched model four times as long,
to see how much a longer training would gain.

The workers share the cores (OMP_NUM_THREADS threads each, if that is set) and take turns at the GPUs. Each run is
written to the results file when it ends, so the same command resumes, also with another number of workers. Several
machines with one shared folder play one league: give the same command to each, at any time. A run is trained by the
first command that locks its folder. If the league file changed under finished runs, an error names the changes.
"""

import argparse
import importlib
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import Console
from hf_graphfilter.files import LockedError, locked
from hf_graphfilter.filters import import_filters
from recipes import SCRIPTS, records, runs
from recipes.errors import OtherSettingsError, RefusedError, line
from recipes.league.figures import draw
from recipes.league.plan import League
from recipes.league.records import Records, Run, index_runs
from recipes.league.standings import show
from recipes.ranks import list_gpus
from recipes.records import move_aside, read_results, tell
from recipes.settings import Settings, read_yaml
from recipes.summary import name_variant

CONFIGS = Path(__file__).parent / "configs"
# of glibc: memory is not given back and cleared anew in every step, a sixth of the time of small models
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def begin(threads: int, begun: Any) -> None:
    """Begin a process that trains: an interrupt is its parent's to handle, and it ends when its parent does.

    Args:
        threads: of PyTorch.
        begun: a shared number, how many processes have begun. Each gets a GPU, in turn.
    """
    with begun.get_lock():
        number, begun.value = begun.value, begun.value + 1
    if gpu := choose_gpu(number):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)) if parent else None, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    runs.silence_libraries()


def choose_gpu(number: int) -> str | None:
    """Return which of several GPUs that this command sees is that of a worker; None where there is no choice."""
    names = list_gpus()
    return names[number % len(names)] if len(names) > 1 else None


def train(recipe: str, values: dict[str, Any], seed: int, folder: Path) -> dict[str, Any] | None:
    """Return the record of one run; None if another command trains it.

    Of a filter that this model does not take, the record is what it says.
    """
    settings = Settings(importlib.import_module(f"recipes.{SCRIPTS[recipe]}").RECIPE)
    import_filters(values.get("import", []))
    try:
        return runs.run_seed(settings, values, seed, folder, Console(quiet=True))
    except LockedError:
        return None
    except RefusedError as error:
        return {"refused": line(error), "settings": settings.identity(values)}


def play(league: League, file: Path, root: Path, workers: int, console: Console) -> Records:
    """Do every run that is missing, unless another command does; the results file is whole after each."""
    finished = add_runs(league, file, {})
    tell(console, f"results: {file}, {len(finished) or 'no'} runs at hand")
    running: dict[Future[dict[str, Any] | None], Run] = {}
    elsewhere: set[Run] = set()  # trained by other commands
    waits = 0
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    for name, value in KEEP_MEMORY.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else an import fixes which GPUs a worker sees
    context = multiprocessing.get_context("spawn")
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end too
    with ProcessPoolExecutor(workers, context, begin, (int(threads), context.Value("i", 0))) as pool:
        try:
            while True:
                busy = elsewhere.union(running.values())
                open_runs = (run for run in league.list_runs(finished) if run not in busy)
                for run in itertools.islice(open_runs, workers - len(running)):
                    folder = root / run.task / run.variant.replace(" ", "-") / f"{run.rate:g}" / f"seed-{run.seed}"
                    recipe = league.settings[run.task].recipe.name
                    running[pool.submit(train, recipe, league.values(run, finished), run.seed, folder)] = run
                if running:
                    futures = wait(running, return_when=FIRST_COMPLETED).done
                    outcomes = {running.pop(future): future.result() for future in futures}
                    elsewhere.update(run for run, record in outcomes.items() if record is None)
                    if not (new := {run: record for run, record in outcomes.items() if record is not None}):
                        continue
                elif elsewhere:
                    records.wait_for_others(len(elsewhere), waits, console)
                    waits, new = waits + 1, {}
                else:
                    return finished
                finished = add_runs(league, file, new)
                elsewhere.clear()  # they may have ended, finished or not
                for run in new:
                    tell(console, describe_run(league, run, finished[run], len(finished)))
        except BaseException as error:
            for child in multiprocessing.active_children():
                child.terminate()
            if isinstance(error, BrokenProcessPool):
                raise GraphFilterError(
                    "a process of the league was killed, for want of memory?: fewer --workers"
                ) from None
            raise
        finally:
            signal.signal(signal.SIGTERM, previous_handler)


def add_runs(league: League, file: Path, new: Mapping[Run, dict[str, Any]]) -> Records:
    """Write new records to the results file, and return all that are there, those of other commands too.

    Raises:
        OtherSettingsError: finished runs had other settings: of another file, or of another rate of the model.
    """
    with records.updating(file, metrics=dict[str, float], train_seconds=float) as content:
        finished = index_runs(content)
        for run, record in new.items():
            finished[run] = {**record, **run._asdict()}  # the league's name of the task
            finished[run].pop("coefficients", None)  # by layer: long, and `moved` says the most of it
        content["runs"] = [finished[run] for run in sorted(finished, key=Run.order)]
        league.check(finished)
        content.update(
            name=league.name, league=league.content, runs=[finished[run] for run in sorted(finished, key=Run.order)]
        )
    return finished


def describe_run(league: League, run: Run, record: dict[str, Any], count: int) -> str:
    name = f"{run.task}, {name_variant(run.variant)}, rate {run.rate:g}, {f'seed {run.seed}' if run.seed else 'tuning'}"
    if "refused" in record:
        return f"{count}: {name}: refused: {record['refused']}"
    value = league.value(run, record)
    return f"{count}: {name}: {f'{value:.4f}' if math.isfinite(value) else 'diverged'}, {record['train_seconds']:.0f} s"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare.py league", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="the league file, by path or by name in recipes/league/configs")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the data of the tasks")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time; the cores are shared")
    parser.add_argument(
        "--results", type=Path, default=Path("runs/league"), help="folder of the results file; runs are in runs/league"
    )
    parser.add_argument("--figures", type=Path, help="folder of the figures; default: that of the results")
    parser.add_argument("--fresh", action="store_true", help="begin again; old results and runs are moved aside")
    parser.add_argument("--show", action="store_true", help="show the results so far, without training")
    return parser


def read_league(name: str) -> dict[str, Any]:
    """Return the content of a league file; ``league/small.yaml`` is an earlier name of ``small.yaml``."""
    return read_yaml(name if Path(name).is_file() else name.removeprefix("league/"), CONFIGS)


def main(argv: list[str], console: Console) -> None:
    options = arguments().parse_args(argv)
    if options.workers < 1:
        raise GraphFilterError(f"--workers {options.workers}: at least one run at a time")
    league = League(read_league(options.config), Path(options.config).stem, options.data)
    file, root = options.results / f"{league.name}.json", Path("runs/league") / league.name
    if options.show and options.fresh:
        raise GraphFilterError("--show trains nothing and leaves results as they are: use it without --fresh")
    if options.show:
        finished = index_runs(read_results(file, metrics=dict[str, float], train_seconds=float))
        try:
            league.check(finished)
        except OtherSettingsError as error:
            tell(console, f"the file has changed since: {error}")
    else:
        if options.fresh:
            with locked(Path(f"{file}.lock"), *root.rglob(".lock"), work="playing this league"):
                move_aside([file, root], console)
        finished = play(league, file, root, options.workers, console)
    show(league, finished, console)
    for figure in draw(league, finished, options.figures or file.parent):
        tell(console, f"figure: {figure}")
