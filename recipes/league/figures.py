"""Figures of a league: ranks by task, and which mean ranks can be told apart."""

import itertools
import math
from pathlib import Path
from typing import Any

from hf_graphfilter.analysis.results import COLOURS
from hf_graphfilter.text import figure_text
from recipes.league.plan import League, Stage
from recipes.league.records import Records, rank_scores
from recipes.league.standings import LEVEL, last_stage
from recipes.summary import name_variant


def plot_ranks(league: League, found: Records, stage: Stage) -> Any:
    """Draw the rank of each variant on each task, and their mean."""
    from matplotlib.figure import Figure

    means, scores = league.ranks(found, stage), league.scores(found, stage)
    figure = Figure(figsize=(6.4, 0.8 + 0.3 * len(means)), layout="constrained")
    axes = figure.subplots()
    for i, (colour, (task, means_of_task)) in enumerate(zip(itertools.cycle(COLOURS), scores.items(), strict=False)):
        ranks, off = rank_scores(means_of_task), 0.5 * ((i + 0.5) / len(scores) - 0.5)  # equal ranks beside each other
        x, y = [ranks[v] for v in means], [y + off for y in range(len(means))]
        axes.plot(x, y, "o", color=colour, label=figure_text(task))
    axes.plot([*means.values()], range(len(means)), "k|", markersize=16, markeredgewidth=2.5, label="mean")
    axes.set_yticks(range(len(means)), [figure_text(name_variant(variant)) for variant in means])
    axes.set(
        xlabel="rank among the baseline and the filters, 1 is best", title=f"Ranks by task, {len(stage.seeds)} seeds"
    )
    axes.invert_yaxis()
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def critical_difference(variants: int, tasks: int) -> float:
    """Return the distance from which two mean ranks differ, by Nemenyi's test at 5 % (Demsar, 2006).

    Example:
        >>> round(critical_difference(5, 30), 3)
        1.114
    """
    from scipy import stats

    q = stats.studentized_range.ppf(1 - LEVEL, variants, math.inf) / math.sqrt(2)
    return float(q * math.sqrt(variants * (variants + 1) / (6 * tasks)))


def ranks_differ(scores: dict[str, dict[str, float]]) -> bool:
    """Return whether Friedman's test at 5 % finds any difference between mean ranks, given task to variant to score.

    Nemenyi's test says which ones differ, so it comes after this one. Two variants need no test before it.

    Example:
        >>> ranks_differ({f"task {i}": {"a": 3.0, "b": 2.0, "c": 1.0} for i in range(6)})
        True
    """
    from scipy import stats

    variants = [*zip(*(score.values() for score in scores.values()), strict=True)]
    if len(variants) < 3 or all(len({*score.values()}) == 1 for score in scores.values()):
        return len(variants) < 3
    return bool(stats.friedmanchisquare(*variants).pvalue < LEVEL)


def plot_critical_difference(league: League, found: Records, stage: Stage) -> Any:
    """Draw mean ranks on a line; bars join what Nemenyi's test, or first Friedman's, cannot tell apart."""
    from matplotlib.figure import Figure

    means, scores = [*league.ranks(found, stage).items()], league.scores(found, stage)
    distance = critical_difference(len(means), len(scores)) if ranks_differ(scores) else math.inf
    figure = Figure(figsize=(7.2, 1.4 + 0.13 * len(means)), layout="constrained")
    axes = figure.subplots()
    bars, last = [], -1
    for i, (_, rank) in enumerate(means):
        end = max(j for j, (_, other) in enumerate(means) if other - rank <= distance)
        if end > max(i, last):
            bars.append((rank, means[end][1]))
            last = end
    half = (len(means) + 1) // 2
    top = 0.35 * len(bars) + 0.5
    for i, (variant, rank) in enumerate(means):
        left, name = i < half, figure_text(variant)
        depth = -top - 0.6 * (i if left else len(means) - 1 - i)
        edge = 0.4 if left else len(means) + 0.6
        axes.plot([rank, rank, edge], [0, depth, depth], "k-", linewidth=0.8)
        axes.text(
            edge, depth, f"{name} " if left else f" {name}", ha="right" if left else "left", va="center", fontsize=8
        )
    for i, (low, high) in enumerate(bars):
        axes.plot([low - 0.05, high + 0.05], [-0.35 * (i + 1)] * 2, color=COLOURS[0], linewidth=3)
    if math.isfinite(distance):
        axes.plot([1, 1 + distance], [0.9, 0.9], "k-", linewidth=2)
        axes.text(1 + distance / 2, 1.05, f"critical difference {distance:.2f}", ha="center", fontsize=8)
    else:
        axes.text(1, 1.05, "Friedman's test finds no difference between the mean ranks", fontsize=8)
    axes.plot([1, len(means)], [0, 0], "k-")
    for rank in range(1, len(means) + 1):
        axes.plot([rank, rank], [0, 0.12], "k-")
        axes.text(rank, 0.2, str(rank), ha="center", fontsize=8)
    axes.axis("off")
    axes.set_xlim(-1.5, len(means) + 2.5)
    return figure


def draw(league: League, found: Records, folder: Path) -> list[Path]:
    """Write both figures of the last stage that has comparisons, once all have played a task of it."""
    stage = last_stage(league, found)
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in {"ranks": plot_ranks, "critical-difference": plot_critical_difference}.items():
        if stage is not None and league.ranks(found, stage):
            files.append(folder / f"league-{league.name}-{name}.png")
            plot(league, found, stage).savefig(files[-1], dpi=110)
    return files
