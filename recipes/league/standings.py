"""How a league stands: paired differences with corrected p-values, ranks, figures, and a verdict from the numbers."""

import itertools
import math
from typing import NamedTuple

from hf_graphfilter.analysis.comparison import PairedComparison, mean_and_sd, paired_comparison
from hf_graphfilter.console import Console, table
from recipes.league.plan import LONGER, TUNING_SEED, League, Stage
from recipes.league.records import Records, Run
from recipes.records import get_value, lower_is_better, tell
from recipes.summary import PLAIN, name_variant

LEVEL = 0.05
OF = {"learning_rate": "model", "filter_lr": "filter"}
ROUNDING = 1e-9  # of scores of 0.1 to 1000: their spread is that of float64


class Comparison(NamedTuple):
    """A variant and the unpatched model on a task, over the seeds that both have."""

    task: str
    variant: str
    paired: PairedComparison | None  # where neither diverged; None for less than two pairs
    p: float  # of the paired t-test; 1 without one
    corrected: float  # by Holm's method, over all comparisons that the stage plans
    better: bool  # whichever way the metric goes
    missing: int  # seeds not yet run
    diverged: int  # seeds on which the variant diverged, and the unpatched model did not
    unpaired: int  # seeds on which the unpatched model diverged

    @property
    def is_significant(self) -> bool:
        """Whether the difference stands after the correction; nothing does before its seeds are complete."""
        return not (self.missing or self.diverged or self.unpaired) and self.corrected < LEVEL


def read_values(league: League, records: Records, task: str, variant: str, seeds: tuple[int, ...]) -> dict[int, float]:
    """Return seed to the metric of the task; NaN where a run diverged."""
    runs = league.select_runs(records, task, variant, seeds)
    return {seed: get_value(record, league.metric(task)) for seed, record in runs.items()}


def plan_comparisons(league: League, found: Records, stage: Stage) -> list[tuple[str, str]]:
    """Return (task, variant) of every comparison that a stage is to make."""
    pairs = itertools.product(stage.tasks, league.choose_variants(found, stage))
    return [(task, variant) for task, variant in pairs if not league.find_refusal(found, task, variant)]


def comparisons(league: League, found: Records, stage: Stage) -> list[Comparison]:
    """Return the comparisons that have two pairs so far, or a run that diverged."""
    rows = []
    family = plan_comparisons(league, found, stage)
    for task, variant in family:
        plain, treated = (read_values(league, found, task, v, stage.seeds) for v in (PLAIN, variant))
        valid_seeds = [seed for seed in treated if math.isfinite(plain.get(seed, math.nan))]
        both = [seed for seed in valid_seeds if math.isfinite(treated[seed])]
        missing = sum(seed not in treated or seed not in plain for seed in stage.seeds)
        lost = missing, len(valid_seeds) - len(both), sum(map(math.isnan, plain.values()))
        if len(both) >= 2:
            paired, p = compare_pairs([plain[seed] for seed in both], [treated[seed] for seed in both])
            better = (paired.mean < 0) == lower_is_better(league.metric(task))
            rows.append((task, variant, paired, p, better, *lost))
        elif any(lost[1:]):
            rows.append((task, variant, None, 1.0, False, *lost))
    p_values = [1.0 if any(lost) else p for _, _, _, p, _, *lost in rows]  # the others claim nothing, and take no step
    corrected = holm(p_values + [1.0] * (len(family) - len(rows)))
    return [Comparison(*c[:4], q, *c[4:]) for c, q in zip(rows, corrected, strict=False)]


def compare_pairs(plain: list[float], treated: list[float]) -> tuple[PairedComparison, float]:
    """Return the differences and the p-value of the paired t-test.

    Where all differences are equal it is that of the sign flips: a spread of nothing is an accident of few seeds and a
    small test part, and no certainty.
    """
    from scipy import stats

    paired = paired_comparison(plain, treated)
    if paired.sd <= ROUNDING * max(map(abs, [*plain, *treated])):
        return paired, paired.p
    return paired, float(stats.ttest_rel(treated, plain).pvalue)


def holm(p: list[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979), in the same order.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = corrected[i] = max(largest, min(1.0, (len(p) - rank) * p[i]))
    return corrected


def last_stage(league: League, found: Records) -> Stage | None:
    """Return the last stage with a comparison that has its seeds, or else with any."""
    by_stage = {stage: comparisons(league, found, stage) for stage in reversed(league.stages)}
    complete = (stage for stage, in_stage in by_stage.items() if any(not c.missing for c in in_stage))
    return next(complete, next((stage for stage, in_stage in by_stage.items() if in_stage), None))


def verdict(league: League, found: Records) -> str:
    """Say which variants are significantly better or worse than the unpatched model, after the correction."""
    stage = last_stage(league, found)
    if stage is None:
        return "Nothing can be said yet."
    results, count = comparisons(league, found, stage), len(plan_comparisons(league, found, stage))
    sentences = []
    for better, verb in ((True, "better"), (False, "worse")):
        names = "; ".join(
            f"`{name_variant(c.variant)}` on {c.task} by {abs(c.paired.mean):.3g} ({metric_of(league, c.task)})"
            for c in results
            if c.paired and c.is_significant and c.better == better
        )
        sentences.append(f"{verb.capitalize()} than the baseline: {names}." if names else f"None is {verb}.")
    diverged = [f"`{name_variant(c.variant)}` on {c.task}, {c.diverged} seeds" for c in results if c.diverged]
    diverged += dict.fromkeys(f"the baseline on {c.task}, {c.unpaired} seeds" for c in results if c.unpaired)
    if diverged:
        sentences.append(f"Diverged: {'; '.join(diverged)}.")
    complete = sum(not c.missing for c in results)
    progress = "but these comparisons are" if complete == count else f"{complete} of {count} comparisons are"
    unfinished = f"Not finished yet, {progress}. " if any(league.list_runs(found)) else ""
    count_text = f"{count} comparison{'s' * (count != 1)} with the baseline"
    scope = f"{count_text} over {len(stage.seeds)} seeds, Holm-corrected at {LEVEL:.0%}"
    return f"{unfinished}{scope}: {' '.join(sentences)}"


def metric_of(league: League, task: str) -> str:
    return league.metric(task).partition("/")[2].replace("_", " ")


# -------------------------------------------------------------------------------------------------------------- tables


def overview(league: League, found: Records, stage: Stage) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): scores of the unpatched model and differences to it, bold where significant."""
    results = {(c.task, c.variant): c for c in comparisons(league, found, stage)}
    ranks = {variant: f"{rank:.1f}" for variant, rank in league.ranks(found, stage).items()}
    tasks = [task for task in stage.tasks if read_values(league, found, task, PLAIN, stage.seeds)]
    header = [
        "",
        *(f"{t}, {metric_of(league, t)} {'↓' if lower_is_better(league.metric(t)) else '↑'}" for t in tasks),
        "mean rank",
    ]
    rows = []
    for variant in (*ranks, *(v for v in (PLAIN, *league.choose_variants(found, stage)) if v not in ranks)):
        cells = []
        for task in tasks:
            if variant == PLAIN:
                cells.append(mean_and_sd([*read_values(league, found, task, PLAIN, stage.seeds).values()], ".4g"))
            elif comparison := results.get((task, variant)):
                cells.append(cell(comparison))
            else:
                cells.append("refused" if league.find_refusal(found, task, variant) else "")
        if any(cells):
            rows.append([name_variant(variant), *cells, ranks.get(variant, "")])
    return header, rows


def cell(comparison: Comparison) -> str:
    paired, mark = comparison.paired, "**" if comparison.is_significant else ""
    difference = f"{mark}{paired.format('+.3g')}{mark}" if paired else ""
    diverged = f"{comparison.diverged} diverged" if comparison.diverged else ""
    so_far = f"{paired.pairs} pairs so far" if paired and comparison.missing else ""
    return ", ".join(filter(None, (difference, diverged, so_far)))


def details(league: League, found: Records, stage: Stage) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): the tuned learning rate, scores and p-values."""
    results = {(c.task, c.variant): c for c in comparisons(league, found, stage)}
    header = ["task", "filter", "tuned rate", "seeds", "score", "p (t)", "p (Holm)", "p (sign flips)"]
    rows = []
    for task in stage.tasks:
        for variant in (PLAIN, *league.choose_variants(found, stage)):
            values = read_values(league, found, task, variant, stage.seeds)
            if not values:
                continue
            settings = league.select_runs(found, task, variant, stage.seeds)[min(values)]["settings"]
            rate = f"{settings[league.tune[variant]]:g} of the {OF[league.tune[variant]]}"
            row = [task, f"`{name_variant(variant)}`", rate, f"{len(values)}", mean_and_sd([*values.values()], ".4g")]
            comparison = results.get((task, variant))
            p = [comparison.p, comparison.corrected, comparison.paired.p] if comparison and comparison.paired else []
            rows.append([*row, *(f"{x:.3g}" for x in p), *[""] * (3 - len(p))])
    return header, rows


def compare_filters(league: League, found: Records, stage: Stage) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): of every two filters, the second's differences to the first, with their intervals."""
    rows = []
    for first, second in itertools.combinations(league.choose_variants(found, stage), 2):
        cells = []
        for task in stage.tasks:
            a, b = (read_values(league, found, task, variant, stage.seeds) for variant in (first, second))
            both = [seed for seed in a if seed in b and math.isfinite(a[seed] + b[seed])]
            paired = (
                paired_comparison([a[seed] for seed in both], [b[seed] for seed in both]) if len(both) > 1 else None
            )
            cells.append(f"{paired.format('+.3g')}, {len(both)}" if paired else "")
        if any(cells):
            rows.append([f"`{name_variant(second)}` - `{name_variant(first)}`", *cells])
    return ["difference, 95 % interval, seeds", *stage.tasks], rows


def tuning(league: League, found: Records) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): the validation score of each learning rate, bold where it was chosen.

    The rate is that of the filter's coefficients or, for the baseline and filters without them, the model's. Variants
    that were tuned and not chosen for the league come last.
    """
    rows = []
    for task in league.tasks:
        tuned = [run for run in found if run.task == task and run.seed == TUNING_SEED]
        unranked = dict.fromkeys(run.variant for run in tuned if run.variant not in league.tune)
        for variant in (PLAIN, *league.variants, *unranked):
            key = league.tune.get(variant, "filter_lr")
            best, cells = league.choose_rate(found, task, variant) if variant in league.tune else None, []
            for rate in league.rates[key]:
                run = Run(task, variant, TUNING_SEED, rate)
                if "metrics" in (record := found.get(run, {})):
                    score = mean_and_sd([get_value(record, league.tuning_metric(task))], ".4g")
                    mark = "**" if rate == best else ""
                    cells.append(f"{record['settings'][key]:g}: {mark}{score}{mark}")
            if cells:
                rows.append(
                    [task, f"`{name_variant(variant)}`", *cells, *[""] * (len(league.rates["filter_lr"]) - len(cells))]
                )
    return ["task", "filter", *(f"rate {i}" for i, _ in enumerate(league.rates["filter_lr"], 1))], rows


def levels(league: League, found: Records) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): how long the unpatched model was trained, and what longer training reaches."""
    rows, seeds = [], tuple(seed for stage in league.stages for seed in stage.seeds)
    for task in league.tasks:
        plain, longer = (read_values(league, found, task, variant, seeds) for variant in (PLAIN, LONGER))
        if plain:
            steps = f"{league.select_runs(found, task, PLAIN, seeds)[min(plain)]['steps']:,}"
            columns = (plain, longer) if league.longer else (plain,)
            scores = [mean_and_sd([*values.values()], ".4g") if values else "" for values in columns]
            rows.append([task, metric_of(league, task), steps, *scores])
    names = ("baseline", *[f"baseline, {league.longer} times as long"] * bool(league.longer))
    return ["task", "metric", "steps", *names], rows


def show(league: League, found: Records, console: Console) -> None:
    for number, stage in enumerate(league.stages, 1):
        if comparisons(league, found, stage):
            for title, tabulate in {"": overview, ", in detail": details}.items():
                console.print(table(*tabulate(league, found, stage), title=f"{league.name}, stage {number}{title}"))
    console.print(table(*tuning(league, found), title="tuning"))
    console.print(table(*levels(league, found), title="how far the baseline was trained"))
    tell(console, verdict(league, found))
