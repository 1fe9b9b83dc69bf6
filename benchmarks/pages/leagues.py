"""Leagues, from recipes/compare.py league."""

import itertools
import json
from pathlib import Path

from scipy import stats

from hf_graphfilter.analysis.comparison import paired_comparison
from hf_graphfilter.tables import markdown_table
from pages.sources import ROOT, days
from recipes.league.plan import League
from recipes.league.records import Records, index_runs
from recipes.league.standings import (
    compare_filters,
    comparisons,
    details,
    holm,
    levels,
    overview,
    read_values,
    tuning,
    verdict,
)
from recipes.summary import PLAIN, name_variant

ALL_LAYERS = "gfsa, w_0 and w_1 too"
FEW = 5  # filters, which are shown two by two
FIGURES = {  # by compare.py league --figures docs/figures
    "ranks": "the rank of each filter on each task, and the mean",
    "critical-difference": "mean ranks; a bar joins those that show no significant difference",
}


QUESTIONS = {  # the leagues whose significant differences open the page, and their sections there
    "depth": "[deep language models](#gfsa-in-deep-language-models)",
    "long": "[four times the steps](#does-it-last)",
    "time": "[the same time](#is-it-worth-its-time)",
    "time_deep": "[the same time, 24 layers](#in-24-layers)",
    "cheap": "[half of the layers](#half-of-the-layers)",
    "few": "[few layers](#few-layers)",
    "replicated": "[a second corpus](#on-a-second-corpus)",
    "wide": "[a wider model](#in-a-wider-model)",
    "wide_replicated": "[the wider model, a second corpus](#the-wider-model-on-a-second-corpus)",
    "contranorm": "[deep vision transformers](#contranorm-in-deep-vision-transformers)",
    "contranorm_time": "[the same time, vision](#contranorm-in-the-same-time)",
    "small": "[all filters, small tasks](#all-filters-on-small-tasks)",
}


def read_league(name: str) -> tuple[League, Records]:
    """Read the plan and the runs of a league."""
    content = json.loads((ROOT / "recipes" / "league" / "results" / f"{name}.json").read_text())
    return League(content["league"], name, Path()), index_runs(content)


def answers() -> str:
    """Return a table of each difference from the baseline that stands after the correction."""
    rows = []
    for name, question in QUESTIONS.items():
        league, records = read_league(name)
        header, body = overview(league, records, league.stages[-1])
        baseline = next(row for row in body if row[0] == name_variant(PLAIN))
        significant = [
            [question, row[0], task, plain, cell]
            for row in body
            for task, plain, cell in zip(header[1:-1], baseline[1:-1], row[1:-1], strict=True)
            if "**" in cell
        ]
        rows += significant or [[question, "none", "", "", ""]]
    return markdown_table(["question", "variant", "task", "baseline", "difference, 95 % interval"], rows)


def equal_time() -> str:
    """Return all differences from a baseline that trained as long, with p-values corrected for all of them."""
    rows, probabilities = [], []
    for name in QUESTIONS:
        league, records = read_league(name)
        longer = next((variant for variant in league.variants if variant.startswith(PLAIN)), None)
        if longer is None:
            continue
        stage = league.stages[-1]
        titles = dict(zip(stage.tasks, overview(league, records, stage)[0][1:-1], strict=True))
        for task, variant in itertools.product(stage.tasks, league.variants):
            if variant == longer or (variant == ALL_LAYERS and not name.startswith("time")):  # its steps take longer
                continue
            plain, treated = (read_values(league, records, task, v, stage.seeds) for v in (longer, variant))
            pairs = [(plain[seed], treated[seed]) for seed in plain.keys() & treated.keys()]
            baseline, values = zip(*pairs, strict=True)
            paired = paired_comparison(baseline, values)
            probabilities.append(float(stats.ttest_rel(values, baseline).pvalue))
            rows.append(
                [QUESTIONS[name], variant, titles[task], name_variant(longer), paired.format("+.3g"), str(paired.pairs)]
            )
    p_values = zip(probabilities, holm(probabilities), strict=True)
    body = [[*row, f"{p:.3f}", f"{corrected:.3f}"] for row, (p, corrected) in zip(rows, p_values, strict=True)]
    header = ["question", "variant", "task", "baseline", "difference, 95 % interval", "pairs", "p (t)", "p (Holm)"]
    return markdown_table(header, body)


def league_tables(name: str) -> str:
    """Write the verdict, the tables of each stage, and how long the unpatched model was trained."""
    league, records = read_league(name)
    paragraphs = [f"**{verdict(league, records)}**"]
    for number, stage in enumerate(league.stages, 1):
        if comparisons(league, records, stage):
            title = f"Stage {number}, seeds {min(stage.seeds)} to {max(stage.seeds)}" if len(league.stages) > 1 else ""
            paragraphs += [f"*{title}*" if title else "", markdown_table(*overview(league, records, stage))]
            paragraphs += fold("Details", *details(league, records, stage))
            if len(league.choose_variants(records, stage)) <= FEW:
                paragraphs += fold(
                    "filters among each other, not corrected for their number", *compare_filters(league, records, stage)
                )
    runs = [run for run in records.values() if "machine" in run]
    machines = sorted(
        f"{run['machine']}, torch {run['versions']['torch']}, transformers {run['versions']['transformers']}"
        for run in runs
    )
    dates = [run["date"] for run in runs]
    for kind, title in FIGURES.items():
        file = f"figures/league-{name}-{kind}.png"
        paragraphs += [f"![{title}]({file})"] if (ROOT / "docs" / file).is_file() else []
    header, rows = levels(league, records)
    title = "*How far the baseline was trained (the seeds of all stages)*"
    paragraphs += [title, markdown_table(header, rows)] if rows else []
    paragraphs += fold("tuning, on validation, one seed", *tuning(league, records))
    paragraphs += [f"{'; '.join(dict.fromkeys(machines))}. {days(dates)}."]
    return "\n\n".join(filter(None, paragraphs))


def fold(title: str, header: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table that is shown when its title is clicked."""
    return [f"<details><summary>{title}</summary>", markdown_table(header, rows), "</details>"] if rows else []
