"""How a league stands: paired differences with corrected p-values, ranks, figures, and a verdict from the numbers."""

import math
import statistics
from typing import NamedTuple

from rich.console import Console

from hf_graphfilter.analysis.comparison import PairedComparison, mean_and_sd, paired_comparison
from hf_graphfilter.console import table
from recipes.league.plan import LONGER, TUNING_SEED, League, Records, Run, Stage
from recipes.metrics import LOWER_IS_BETTER
from recipes.records import tell
from recipes.summary import PLAIN

LEVEL = 0.05


class Comparison(NamedTuple):
    """A variant and plain on a task, over the seeds that both have."""

    task: str
    variant: str
    paired: PairedComparison
    p: float  # of the paired t-test
    corrected: float  # by Holm's method, over all comparisons of the stage
    better: bool  # whichever way the metric goes

    @property
    def beyond(self) -> bool:
        """Whether the difference stands after the correction."""
        return self.corrected < LEVEL


def values_of(league: League, found: Records, task: str, variant: str, seeds: tuple[int, ...]) -> dict[int, float]:
    """Seed to the metric of the task."""
    own = {run.seed: record for run, record in found.items() if run[:2] == (task, variant) and run.seed in seeds}
    return {seed: record["metrics"][league.metric(task)] for seed, record in sorted(own.items()) if "metrics" in record}


def lower_is_better(league: League, task: str) -> bool:
    return league.metric(task).endswith(LOWER_IS_BETTER)


def comparisons(league: League, found: Records, stage: Stage) -> list[Comparison]:
    """Of all pairs that there are so far, at least two of a kind; runs that diverged make none."""
    from scipy import stats

    made = []
    for task in stage.tasks:
        plain = values_of(league, found, task, PLAIN, stage.seeds)
        for variant in league.variants:
            own = values_of(league, found, task, variant, stage.seeds)
            both = [s for s in own if s in plain and math.isfinite(own[s]) and math.isfinite(plain[s])]
            if len(both) < 2:
                continue
            paired = paired_comparison([plain[s] for s in both], [own[s] for s in both])
            error = paired.sd / math.sqrt(len(both))
            p = float(2 * stats.t.sf(abs(paired.mean) / error, len(both) - 1)) if error else float(paired.mean == 0)
            made.append((task, variant, paired, p, (paired.mean < 0) == lower_is_better(league, task)))
    corrected = holm([p for *_, p, _ in made])
    return [Comparison(*c[:4], q, c[4]) for c, q in zip(made, corrected, strict=True)]


def holm(p: list[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979), in the same order.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = corrected[i] = max(largest, min(1.0, (len(p) - rank) * p[i]))
    return corrected


def last_stage(league: League, found: Records) -> Stage | None:
    """The last one that has comparisons."""
    return next((stage for stage in reversed(league.stages) if comparisons(league, found, stage)), None)


def verdict(league: League, found: Records) -> str:
    """What beat plain, and what was beaten, beyond the corrected p-value."""
    stage = last_stage(league, found)
    if stage is None:
        return "Nothing can be said yet."
    made = comparisons(league, found, stage)
    sentences = []
    for better, verb in ((True, "better"), (False, "worse")):
        own = [c for c in made if c.beyond and c.better == better]
        names = "; ".join(
            f"`{c.variant}` on {c.task} by {abs(c.paired.mean):.3g} ({metric_of(league, c.task)})" for c in own
        )
        sentences.append(f"{verb.capitalize()} than plain: {names}." if own else f"None is {verb} than plain.")
    pairs = min(c.paired.pairs for c in made), max(c.paired.pairs for c in made)
    count = f"{pairs[0]}" if pairs[0] == pairs[1] else f"{pairs[0]} to {pairs[1]}"
    unfinished = "Not finished yet. " if any(True for _ in league.wanted(found)) else ""
    about = f"Of {len(made)} comparisons with plain over {count} seeds, Holm-corrected at {LEVEL:.0%}"
    return f"{unfinished}{about}: {' '.join(sentences)}"


def metric_of(league: League, task: str) -> str:
    return league.metric(task).partition("/")[2].replace("_", " ")


# -------------------------------------------------------------------------------------------------------------- tables


def overview(league: League, found: Records, stage: Stage) -> tuple[list[str], list[list[str]]]:
    """(header, rows): plain's scores, and below them the differences to it; bold what stands after the correction."""
    made = {(c.task, c.variant): c for c in comparisons(league, found, stage)}
    ranks = {variant: f"{rank:.1f}" for variant, rank in league.ranks(found, stage).items()}
    tasks = [task for task in stage.tasks if values_of(league, found, task, PLAIN, stage.seeds)]
    header = [
        "",
        *(f"{t}, {metric_of(league, t)} {'↓' if lower_is_better(league, t) else '↑'}" for t in tasks),
        "mean rank",
    ]
    rows = []
    for variant in ranks:
        cells = []
        for task in tasks:
            if variant == PLAIN:
                cells.append(mean_and_sd([*values_of(league, found, task, PLAIN, stage.seeds).values()], ".4g"))
            elif comparison := made.get((task, variant)):
                cells.append(cell(comparison))
            else:
                cells.append("refused" if league.refused(found, task, variant) else "")
        if any(cells):
            rows.append([variant, *cells, ranks[variant]])
    return header, rows


def cell(comparison: Comparison) -> str:
    paired, mark = comparison.paired, "**" if comparison.beyond else ""
    return f"{mark}{paired.mean:+.3g} [{paired.low:+.3g}, {paired.high:+.3g}]{mark}"


def details(league: League, found: Records, stage: Stage) -> tuple[list[str], list[list[str]]]:
    """(header, rows): the tuned learning rate, scores, p-values, and what training took of plain's time."""
    made = {(c.task, c.variant): c for c in comparisons(league, found, stage)}
    header = [
        "task",
        "filter",
        "learning rate",
        "seeds",
        "score",
        "p (t)",
        "p (Holm)",
        "p (sign flips)",
        "time over plain",
    ]
    rows = []
    for task in stage.tasks:
        for variant in (PLAIN, *league.variants):
            values = values_of(league, found, task, variant, stage.seeds)
            if not values:
                continue
            settings = next(r["settings"] for run, r in found.items() if run[:3] == (task, variant, min(values)))
            rate = settings["learning_rate" if variant == PLAIN else "filter_lr"]
            row = [task, f"`{variant}`", f"{rate:g}", f"{len(values)}", mean_and_sd([*values.values()], ".4g")]
            comparison = made.get((task, variant))
            p = [comparison.p, comparison.corrected, comparison.paired.p] if comparison else []
            rows.append([*row, *(f"{x:.3g}" for x in p), *[""] * (3 - len(p)), f"{seconds(found, task, variant):.2f}"])
    return header, rows


def tuning(league: League, found: Records) -> tuple[list[str], list[list[str]]]:
    """(header, rows): the validation score of each learning rate, of plain the model's; bold what is kept."""
    rows = []
    for task in league.tasks:
        for variant in (PLAIN, *league.variants):
            best, cells = league.tuned(found, task, variant), []
            for rate in league.rates["learning_rate" if variant == PLAIN else "filter_lr"]:
                run = Run(task, variant, TUNING_SEED, rate)
                if "metrics" in (record := found.get(run, {})):
                    own = record["settings"]["learning_rate" if variant == PLAIN else "filter_lr"]
                    mark = "**" if rate == best else ""
                    cells.append(f"{own:g}: {mark}{record['metrics'][league.tuning_metric(task)]:.4g}{mark}")
            if cells:
                rows.append([task, f"`{variant}`", *cells, *[""] * (len(league.rates["filter_lr"]) - len(cells))])
    return ["task", "filter", *(f"rate {i}" for i, _ in enumerate(league.rates["filter_lr"], 1))], rows


def seconds(found: Records, task: str, variant: str) -> float:
    """Median of training over plain's; NaN where plain has no run."""
    taken = {
        name: [r["train_seconds"] for run, r in found.items() if run[:2] == (task, name) and "metrics" in r]
        for name in (PLAIN, variant)
    }
    return statistics.median(taken[variant]) / statistics.median(taken[PLAIN]) if all(taken.values()) else math.nan


def levels(league: League, found: Records) -> tuple[list[str], list[list[str]]]:
    """(header, rows): how far plain was trained, and what it reaches when it is trained on."""
    rows = []
    for task in league.tasks:
        own = {run: r for run, r in found.items() if run.task == task and "metrics" in r}
        plain = [r for run, r in own.items() if run.variant == PLAIN and run.seed != TUNING_SEED]
        if plain:
            longer = [f"{r['metrics'][league.metric(task)]:.4g}" for run, r in own.items() if run.variant == LONGER]
            score = mean_and_sd([r["metrics"][league.metric(task)] for r in plain], ".4g")
            steps = f"{plain[0]['steps']:,}"
            rows.append([task, metric_of(league, task), steps, score, *(longer or [""])])
    return ["task", "metric", "steps", "plain", f"plain, {league.longer} times as long"], rows


def show(league: League, found: Records, console: Console) -> None:
    for number, stage in enumerate(league.stages, 1):
        if comparisons(league, found, stage):
            for title, made in {"": overview, ", in detail": details}.items():
                console.print(table(*made(league, found, stage), title=f"{league.name}, stage {number}{title}"))
    console.print(table(*tuning(league, found), title="tuning"))
    console.print(table(*levels(league, found), title="how far plain was trained"))
    tell(console, verdict(league, found))
