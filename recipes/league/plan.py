"""What a league asks for: its tasks, variants, rates and stages, and from them the runs that are wanted next."""

import importlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import nearest
from recipes import SCRIPTS, check_extras
from recipes.errors import OtherSettingsError
from recipes.league.records import Records, Run, check_file, rank_scores, round_score
from recipes.records import get_value, lower_is_better
from recipes.settings import Settings
from recipes.summary import PLAIN, name_variant

TUNING_SEED = 0
LONGER = "plain, longer"
HELD_OUT = 0.1
LENGTHS = ("max_steps", "num_train_epochs", "epochs")  # what a budget is given by


@dataclass(frozen=True)
class Stage:
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    best: int | None = None


class League:
    """What a league file asks for.

    Args:
        content: of the file.
        name: of the league.
        data: the folder that the tasks' ``data`` lie in.
    """

    def __init__(self, content: dict[str, Any], name: str, data: Path):
        check_file(content, name)
        self.content, self.name, self.data, self.longer = content, name, data, content.get("longer")
        self.tasks: dict[str, dict[str, Any]] = content["tasks"]
        try:
            self.variants = {name: dict(overrides or {}) for name, overrides in content["variants"].items()}
            self.rates = {key: [float(rate) for rate in rates] for key, rates in content["rates"].items()}
        except (TypeError, ValueError) as error:
            raise GraphFilterError(f"variants are given as NAME: VALUE, rates as numbers: {error}") from error
        if not all(0 < rate < math.inf for rates in self.rates.values() for rate in rates):
            raise GraphFilterError(f"the rates of a league are numbers above 0, found {self.rates}")
        self.tune = {name: overrides.pop("tune", "filter_lr") for name, overrides in self.variants.items()}
        reserved = {*map(name_variant, (PLAIN, LONGER))}
        if taken := [variant for variant in self.variants if name_variant(variant) in reserved]:
            raise GraphFilterError(f"the league {name} plays {taken[0]!r} by itself: give the variant another name")
        self.tune |= {PLAIN: "learning_rate", LONGER: "learning_rate"}
        if unknown := [name for name, key in self.tune.items() if key not in [*self.rates]]:
            raise GraphFilterError(f"the variant {unknown[0]!r} tunes one of {', '.join(self.rates)}")
        if fixed := [name for name, overrides in self.variants.items() if self.tune[name] in overrides]:
            raise GraphFilterError(f"the variant {fixed[0]!r} sets {self.tune[fixed[0]]}, which it tunes: leave it out")
        if self.longer is not None and not (isinstance(self.longer, int | float) and self.longer > 1):
            raise GraphFilterError(f"the league {name}: `longer` is how many times as long, above 1: {self.longer!r}")
        if len({len(set(rates)) for rates in self.rates.values()}) != 1:
            raise GraphFilterError(
                f"the league {name} must give the baseline and filters as many rates, found {self.rates}"
            )
        relative = any(self.tune[name] == "learning_rate" for name in self.variants)  # to the baseline's rate
        if relative and len(only := self.rates["learning_rate"]) == 1 and only != [1]:
            raise GraphFilterError(f"the learning_rate {only[0]:g} would apply twice: give 1, and set it in the tasks")
        self.stages = [
            Stage(tuple(s.get("tasks", self.tasks)), tuple(s["seeds"]), s.get("best")) for s in content["stages"]
        ]
        for stage in self.stages:
            if unknown := [task for task in stage.tasks if task not in self.tasks]:
                raise GraphFilterError(f"a stage has no task {unknown[0]!r}{nearest(unknown[0], self.tasks)} to play")
            if TUNING_SEED in stage.seeds or len({*stage.seeds}) < len(stage.seeds):
                raise GraphFilterError(f"the seeds of a stage are different ones, and none {TUNING_SEED}, the tuning's")
            if stage.best and any({*stage.seeds} & {*other.seeds} for other in self.stages if other is not stage):
                raise GraphFilterError("the best of a stage are tested with seeds of their own, which chose nothing")
        if not self.stages or self.stages[0].best is not None:
            raise GraphFilterError("the first stage plays all variants: nothing is known yet of which are the `best`")

    @cached_property
    def settings(self) -> dict[str, Settings]:
        by_task = {}
        for task, entry in self.tasks.items():
            if (recipe := entry.get("recipe")) not in SCRIPTS:
                raise GraphFilterError(f"the task {task!r} has no recipe {recipe!r}; recipes are {', '.join(SCRIPTS)}")
            if recipe == "imagenet":
                check_extras("vision")
            by_task[task] = Settings(importlib.import_module(f"recipes.{SCRIPTS[recipe]}").RECIPE)
        return by_task

    def metric(self, task: str) -> str:
        """Return the metric by which runs with the stages' seeds are compared."""
        return self.settings[task].recipe.metric(self.name_task(task))

    def tuning_metric(self, task: str) -> str:
        return self.settings[task].recipe.metric(self.name_task(task), held_out=True)

    def name_task(self, task: str) -> str:
        """Return the task as its recipe calls it."""
        return self.tasks[task].get("task", task)

    @cached_property
    def base(self) -> dict[str, dict[str, Any]]:
        """The settings of the unpatched model on each task."""
        by_task = {}
        for task, entry in self.tasks.items():
            argv = ["--config", entry["config"], "--task", self.name_task(task)]
            if "data" in entry:
                argv += ["--data", str(self.data / entry["data"])]
            values, _ = self.settings[task].parse([*argv, "--filter", "none"])
            values = self.settings[task].override(values, entry.get("settings", {}), f" of the task {task!r}")
            defaults = self.settings[task].defaults
            by_task[task] = {name: defaults[name] for name in ("learning_rate", *LENGTHS) if name in defaults} | values
        return by_task

    def values(self, run: Run, found: Records) -> dict[str, Any]:
        """Return the settings of a run, with what was tuned before it."""
        settings, values = self.settings[run.task], dict(self.base[run.task])
        is_baseline = run.variant in (PLAIN, LONGER)
        factor = run.rate if is_baseline else self.choose_rate(found, run.task, PLAIN) or 1.0
        values["learning_rate"] *= factor
        if not is_baseline:
            changes = {"filter": run.variant, **self.variants[run.variant]}
            if self.tune[run.variant] == "filter_lr":
                changes["filter_lr"] = run.rate
            else:
                values["learning_rate"] *= run.rate
            values = settings.override(values, changes, f" of the variant {run.variant!r}")
        elif run.variant == LONGER:
            length = next(name for name in LENGTHS if (values.get(name) or 0) > 0)
            values[length] = type(values[length])(values[length] * self.longer)
        tests = self.metric(run.task) == self.tuning_metric(run.task) or values.get("validation") == "test"
        if run.seed == TUNING_SEED and tests:  # the rates must not be chosen by what is compared
            values["held_out"] = HELD_OUT
        values |= {"save_strategy": "no", "disable_tqdm": True, "output_dir": f"runs/league/{self.name}"}
        return values

    def check(self, found: Records) -> None:
        """Raise unless every run can be and finished ones had these settings; forget refusals of other settings."""
        for task, variant in itertools.product(self.tasks, [PLAIN, *self.variants]):
            self.settings[task].check(self.values(Run(task, variant, 1, 1.0), found))
        for run, record in [*found.items()]:
            if run.task not in self.tasks or run.variant not in (PLAIN, *[LONGER] * bool(self.longer), *self.variants):
                continue  # of another version of the file: kept, and not counted
            identity = self.settings[run.task].identity(self.values(run, found))
            changed = self.settings[run.task].list_differences(record.get("settings", {}), identity)
            if changed and "refused" in record:
                del found[run]
            elif changed:
                raise OtherSettingsError(
                    f"{run.variant} on {run.task}, seed {run.seed}, was run with other settings "
                    f"({', '.join(changed)} differ): give the file another name, or begin again with --fresh"
                )

    # ------------------------------------------------------------------------------------------- what is to be run

    def value(self, run: Run, record: dict[str, Any]) -> float:
        """Return what a run is compared by; NaN of one that diverged or was refused."""
        metric = self.metric_of(run)
        part, _, name = metric.partition("/")
        if (metrics := record.get("metrics")) and not any(key.startswith(f"{part}/") for key in metrics):
            raise GraphFilterError(f"the task {run.task!r} has no {part} part to measure {name} on: give it one")
        return get_value(record, metric)

    def score(self, run: Run, record: dict[str, Any]) -> float:
        """Return a score of which higher is better; of a run that diverged or was refused, minus infinity."""
        value = self.value(run, record)
        sign = -1 if lower_is_better(self.metric_of(run)) else 1
        return sign * value if math.isfinite(value) else -math.inf

    def metric_of(self, run: Run) -> str:
        return self.tuning_metric(run.task) if run.seed == TUNING_SEED else self.metric(run.task)

    def choose_rate(self, found: Records, task: str, variant: str) -> float | None:
        """Return the best rate on validation, None before all have been tried; a single one is not tried.

        Of equal ones (accuracy over few examples) it is that of the lowest loss.
        """
        trials = [Run(task, variant, TUNING_SEED, rate) for rate in self.rates[self.tune[variant]]]
        if len(trials) == 1:
            return trials[0].rate
        if any(run not in found for run in trials):
            return None
        loss = f"{self.tuning_metric(task).rpartition('/')[0]}/loss"
        return max(trials, key=lambda run: (self.score(run, found[run]), -get_value(found[run], loss))).rate

    def find_refusal(self, found: Records, task: str, variant: str) -> str | None:
        """Return why a filter is left out of a task, None if it is not."""
        return next((r["refused"] for run, r in found.items() if run[:2] == (task, variant) and "refused" in r), None)

    def select_runs(self, found: Records, task: str, variant: str, seeds: tuple[int, ...]) -> dict[int, dict[str, Any]]:
        """Seed to record, at the rate that tuning chose: others are of another version of the file, and not counted."""
        rate = self.choose_rate(found, task, PLAIN if variant == LONGER else variant)
        if rate is None:
            return {}
        runs = {seed: found.get(Run(task, variant, seed, rate), {}) for seed in seeds}
        return {seed: record for seed, record in runs.items() if "metrics" in record}

    def choose_variants(self, found: Records, stage: Stage) -> list[str]:
        """Return the variants of a stage."""
        if stage.best is None:
            return [*self.variants]
        previous = self.stages[self.stages.index(stage) - 1]
        return [variant for variant in self.ranks(found, previous) if variant != PLAIN][: stage.best]

    def scores(self, found: Records, stage: Stage) -> dict[str, dict[str, float]]:
        """Return task to the mean score of the unpatched model and each variant, over the seeds that all have.

        Tasks without such a seed are left out. A variant that cannot run on the task has minus infinity.
        """
        playing, means = [PLAIN, *self.choose_variants(found, stage)], {}
        for task in stage.tasks:
            variants = [variant for variant in playing if not self.find_refusal(found, task, variant)]
            runs = {variant: self.select_runs(found, task, variant, stage.seeds) for variant in variants}
            if runs and (shared := set.intersection(*({*records} for records in runs.values()))):
                means[task] = dict.fromkeys(playing, -math.inf)
                for variant, records in runs.items():
                    values = (self.score(Run(task, variant, seed, 0.0), records[seed]) for seed in shared)
                    means[task][variant] = round_score(fmean(values))
        return means

    def ranks(self, found: Records, stage: Stage) -> dict[str, float]:
        """Return the mean rank of the unpatched model and the variants over the tasks that all have run; 1 is best."""
        by_task = [rank_scores(means) for means in self.scores(found, stage).values()]
        mean = {variant: fmean(ranks[variant] for ranks in by_task) for variant in (by_task[0] if by_task else ())}
        return dict(sorted(mean.items(), key=lambda x: x[1]))

    def list_runs(self, found: Records) -> Iterator[Run]:
        """Yield the runs that can be begun now and are not finished, in order."""
        for stage in self.stages:
            variants = self.choose_variants(found, stage)
            missing = [run for task in stage.tasks for run in self._list_task_runs(found, task, variants, stage.seeds)]
            yield from missing
            if missing:
                break  # the next stage waits; what follows here does not
        for task in self.tasks if self.longer else ():
            rate = self.choose_rate(found, task, PLAIN)
            if rate is not None and (run := Run(task, LONGER, self.stages[0].seeds[0], rate)) not in found:
                yield run

    def _list_task_runs(self, found: Records, task: str, variants: list[str], seeds: tuple[int, ...]) -> Iterator[Run]:
        """Yield the runs of a task: tuning of the unpatched model, then of filters at its rate, then seed by seed."""
        playing = [PLAIN, *(v for v in variants if not self.find_refusal(found, task, v))]
        rates: dict[str, float | None] = {variant: self.choose_rate(found, task, variant) for variant in playing}
        if rates[PLAIN] is None:
            rates = {PLAIN: None}
        tuned = {variant: rate for variant, rate in rates.items() if rate is not None}
        waiting = [variant for variant in rates if variant not in tuned]
        runs = [Run(task, v, TUNING_SEED, rate) for v in waiting for rate in self.rates[self.tune[v]]]
        runs += [Run(task, variant, seed, rate) for seed in seeds for variant, rate in tuned.items()]
        yield from (run for run in runs if run not in found)
