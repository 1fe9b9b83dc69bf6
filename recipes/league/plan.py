"""What a league asks for: its tasks, variants, rates and stages, and from them the runs that are wanted next."""

import importlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import eq, gt
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from hf_graphfilter import GraphFilterError
from recipes import SCRIPTS, check_extras
from recipes.errors import OtherSettingsError, nearest
from recipes.metrics import LOWER_IS_BETTER
from recipes.settings import Settings, identity
from recipes.summary import PLAIN

TUNING_SEED = 0
LONGER = "plain, longer"
HELD_OUT = 0.1
LENGTHS = ("max_steps", "num_train_epochs", "epochs")  # what a budget is given by


class Run(NamedTuple):
    """One training: tuning where the seed is 0."""

    task: str
    variant: str
    seed: int
    rate: float  # of the plain model a factor, of the filter's coefficients the learning rate


@dataclass(frozen=True)
class Stage:
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    best: int | None = None


Records = dict[Run, dict[str, Any]]


class League:
    """What a league file asks for.

    Args:
        content: of the file.
        name: of the league.
        data: the folder that the tasks' ``data`` lie in.
    """

    def __init__(self, content: dict[str, Any], name: str, data: Path):
        _known(
            content, f"the league {name}", {"tasks": dict, "variants": dict, "rates": dict, "stages": list}, "longer"
        )
        _known(content["rates"], "rates", {"learning_rate": list, "filter_lr": list})
        for task, about in content["tasks"].items():
            _known(about, f"the task {task!r}", {"recipe": str, "config": str}, "task", "data", "settings")
        for stage in content["stages"]:
            _known(stage, "a stage", {"seeds": list}, "tasks", "best")
        self.content, self.name, self.data, self.longer = content, name, data, content.get("longer")
        self.tasks: dict[str, dict[str, Any]] = content["tasks"]
        self.variants: dict[str, dict[str, Any]] = content["variants"]
        self.rates = {key: [float(rate) for rate in rates] for key, rates in content["rates"].items()}
        if len({len(set(rates)) for rates in self.rates.values()}) != 1:
            raise GraphFilterError(f"the league {name} must give plain and filters as many rates, found {self.rates}")
        self.stages = [
            Stage(tuple(s.get("tasks", self.tasks)), tuple(s["seeds"]), s.get("best")) for s in content["stages"]
        ]
        for stage in self.stages:
            if unknown := [task for task in stage.tasks if task not in self.tasks]:
                raise GraphFilterError(f"a stage has no task {unknown[0]!r}{nearest(unknown[0], self.tasks)} to play")
            if TUNING_SEED in stage.seeds or len({*stage.seeds}) < len(stage.seeds):
                raise GraphFilterError(f"the seeds of a stage are different ones, and none {TUNING_SEED}, the tuning's")
        if not self.stages or self.stages[0].best is not None:
            raise GraphFilterError("the first stage plays all variants: nothing is known yet of which are the `best`")

    @cached_property
    def settings(self) -> dict[str, Settings]:
        found = {}
        for task, about in self.tasks.items():
            if (recipe := about.get("recipe")) not in SCRIPTS:
                raise GraphFilterError(f"the task {task!r} has no recipe {recipe!r}; recipes are {', '.join(SCRIPTS)}")
            if recipe == "imagenet":
                check_extras("vision")
            found[task] = Settings(importlib.import_module(f"recipes.{SCRIPTS[recipe]}").RECIPE)
        return found

    def metric(self, task: str) -> str:
        """By which runs with the stages' seeds are compared."""
        return self.settings[task].recipe.metric(self.task_of(task))

    def tuning_metric(self, task: str) -> str:
        return f"validation/{self.metric(task).partition('/')[2]}"

    def task_of(self, task: str) -> str:
        """As its recipe calls it."""
        return self.tasks[task].get("task", task)

    @cached_property
    def base(self) -> dict[str, dict[str, Any]]:
        """The settings of the plain model on each task."""
        found = {}
        for task, about in self.tasks.items():
            argv = ["--config", about["config"], "--task", self.task_of(task)]
            if "data" in about:
                argv += ["--data", str(self.data / about["data"])]
            values, _ = self.settings[task].parse([*argv, "--filter", "none"])
            found[task] = self.settings[task].override(values, about.get("settings", {}), f" of the task {task!r}")
        return found

    def values(self, run: Run, found: Records) -> dict[str, Any]:
        """The settings of a run, with what was tuned before it."""
        settings, values = self.settings[run.task], dict(self.base[run.task])
        plain = run.variant in (PLAIN, LONGER)
        factor = run.rate if plain else self.tuned(found, run.task, PLAIN) or 1.0
        values["learning_rate"] *= factor
        if not plain:
            changes = {"filter": run.variant, **(self.variants[run.variant] or {}), "filter_lr": run.rate}
            values = settings.override(values, changes, f" of the variant {run.variant!r}")
        elif run.variant == LONGER:
            length = next(name for name in LENGTHS if values.get(name))
            values[length] = type(values[length])(values[length] * self.longer)
        if run.seed == TUNING_SEED and self.metric(run.task) == self.tuning_metric(run.task):
            values["held_out"] = HELD_OUT
        values |= {"save_strategy": "no", "disable_tqdm": True, "output_dir": f"runs/league/{self.name}"}
        return values

    def check(self, found: Records) -> None:
        """That every run can be, and that finished ones had these settings."""
        for task, variant in itertools.product(self.tasks, [PLAIN, *self.variants]):
            self.settings[task].check(self.values(Run(task, variant, 1, 1.0), found))
        for run, record in found.items():
            if run.task not in self.tasks or run.variant not in (PLAIN, LONGER, *self.variants) or "refused" in record:
                continue  # of another version of the file: kept, and not counted
            now = identity(self.values(run, found))
            if changed := self.settings[run.task].differing(record["settings"], now):
                raise OtherSettingsError(
                    f"{run.variant} on {run.task}, seed {run.seed}, was run with other settings "
                    f"({', '.join(changed)} differ): give the file another name, or begin again with --fresh"
                )

    # ------------------------------------------------------------------------------------------- what is to be run

    def score(self, run: Run, record: dict[str, Any]) -> float:
        """Higher is better; of a run that diverged or was refused, minus infinity."""
        metric = self.tuning_metric(run.task) if run.seed == TUNING_SEED else self.metric(run.task)
        value = record.get("metrics", {}).get(metric, math.nan)
        sign = -1 if metric.endswith(LOWER_IS_BETTER) else 1
        return sign * value if math.isfinite(value) else -math.inf

    def tuned(self, found: Records, task: str, variant: str) -> float | None:
        """The best rate on validation, when all have been tried."""
        key = "learning_rate" if variant == PLAIN else "filter_lr"
        tried = [Run(task, variant, TUNING_SEED, rate) for rate in self.rates[key]]
        if any(run not in found for run in tried):
            return None
        return max(tried, key=lambda run: self.score(run, found[run])).rate

    def refused(self, found: Records, task: str, variant: str) -> str | None:
        """Why a filter is left out of a task."""
        own = (r.get("refused") for run, r in found.items() if run[:2] == (task, variant))
        return next(filter(None, own), None)

    def ranks(self, found: Records, stage: Stage) -> dict[str, float]:
        """Mean rank over the tasks of plain and the variants that ran, 1 the best; who is refused comes last."""
        own: dict[str, dict[str, list[float]]] = {}
        for run, record in found.items():
            known = run.task in stage.tasks and run.seed in stage.seeds and run.variant in (PLAIN, *self.variants)
            if known and "metrics" in record:
                own.setdefault(run.variant, {}).setdefault(run.task, []).append(self.score(run, record))
        total = dict.fromkeys(own, 0.0)
        for task in stage.tasks:
            means = {variant: fmean(scores.get(task, [-math.inf])) for variant, scores in own.items()}
            for variant, mean in means.items():
                above, level = (sum(compared(other, mean) for other in means.values()) for compared in (gt, eq))
                total[variant] += above + (level + 1) / 2
        return {variant: rank / len(stage.tasks) for variant, rank in sorted(total.items(), key=lambda x: x[1])}

    def wanted(self, found: Records) -> Iterator[Run]:
        """The runs that can be begun now and are not finished, in order."""
        before: Stage | None = None
        for stage in self.stages:
            variants = list(self.variants)
            if stage.best is not None and before is not None:
                variants = [variant for variant in self.ranks(found, before) if variant != PLAIN][: stage.best]
            missing = [run for task in stage.tasks for run in self._of(found, task, variants, stage.seeds)]
            yield from missing
            if missing:
                return  # the next stage waits
            before = stage
        if self.longer:
            for task in self.tasks:
                rate = self.tuned(found, task, PLAIN)
                if rate is not None and (run := Run(task, LONGER, 1, rate)) not in found:
                    yield run

    def _of(self, found: Records, task: str, variants: list[str], seeds: tuple[int, ...]) -> Iterator[Run]:
        """Of one task: plain's tuning, then that of the filters, which have its learning rate, then seed by seed."""
        playing = [PLAIN, *(v for v in variants if not self.refused(found, task, v))]
        rates: dict[str, float | None] = {variant: self.tuned(found, task, variant) for variant in playing}
        if rates[PLAIN] is None:
            rates = {PLAIN: None}
        runs = []
        for variant, rate in rates.items():
            if rate is None:
                key = "learning_rate" if variant == PLAIN else "filter_lr"
                runs += [Run(task, variant, TUNING_SEED, tried) for tried in self.rates[key]]
        for seed in seeds:
            runs += [Run(task, variant, seed, rate) for variant, rate in rates.items() if rate is not None]
        yield from (run for run in runs if run not in found)


def by_run(content: dict[str, Any]) -> Records:
    """The records of a results file."""
    return {Run(*(record[name] for name in Run._fields)): record for record in content["runs"]}


def _known(content: Any, what: str, needed: dict[str, type], *others: str) -> None:
    """That a part of the file has what it needs, and nothing that would be overlooked."""
    if not isinstance(content, dict):
        raise GraphFilterError(f"{what} must be given as NAME: VALUE, found {content!r}")
    if unknown := [key for key in content if key not in (*needed, *others)]:
        raise GraphFilterError(f"{what} has no {unknown[0]!r}{nearest(str(unknown[0]), (*needed, *others))}")
    for key, kind in needed.items():
        if not isinstance(content.get(key), kind) or not content[key]:
            raise GraphFilterError(f"{what} needs {key!r}, a {kind.__name__}, found {content.get(key)!r}")
