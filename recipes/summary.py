"""What a comparison shows: the summary of its runs, its rows as text, the results of others beside it, a figure."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_graphfilter.analysis.comparison import PairedComparison, mean_and_sd, paired_comparison
from hf_graphfilter.analysis.plots import make_figure, save_figure
from hf_graphfilter.console import table
from hf_graphfilter.text import figure_text
from recipes.records import get_value, lower_is_better
from recipes.settings import Settings

PLAIN = "plain"  # the name of the baseline in files


def name_variant(variant: str) -> str:
    """Return the name of a variant for readers.

    Example:
        >>> name_variant("plain, 1.15 times the steps"), name_variant("gfsa")
        ('baseline, 1.15 times the steps', 'gfsa')
    """
    return re.sub(rf"^{PLAIN}\b", "baseline", variant)


def name_longer(factor: float) -> str:
    """Return the name, in files, of a baseline that trains for ``factor`` times the steps."""
    return f"{PLAIN}, {factor:g} times the steps"


def list_longer(content: dict[str, Any]) -> list[str]:
    """Return the baselines of a comparison that trained for more steps than the others."""
    return [name for name in content["variants"] if re.fullmatch(rf"{PLAIN}, \S+ times the steps", name)]


def summarise(content: dict[str, Any]) -> dict[str, Any]:
    """Return for each variant the compared metric by seed, and its paired differences to the unpatched model.

    Differences of the loss are included, and those to baselines with more steps ("equal time"). They are taken over the
    seeds on which neither model diverged.
    """
    metric = content["metric"]
    longer = list_longer(content)
    summary: dict[str, Any] = {}
    for variant in content["variants"]:
        values = group_by_seed(content, variant, metric)
        summary[variant] = {"values": {str(seed): value for seed, value in values.items()}}
        if variant == PLAIN:
            continue
        differences = {
            "difference": compare_seeds(content, PLAIN, variant, metric),
            "loss difference": compare_seeds(content, PLAIN, variant, f"{metric.partition('/')[0]}/loss"),
        }
        if variant not in longer:
            by_baseline = {name: compare_seeds(content, name, variant, metric) for name in longer}
            differences["equal time"] = {name: paired for name, paired in by_baseline.items() if paired}
        summary[variant] |= {name: difference for name, difference in differences.items() if difference}
    return summary


def compare_seeds(content: dict[str, Any], baseline: str, variant: str, metric: str) -> dict[str, Any] | None:
    """Return the paired difference of two variants as a results file has it; None if they share no finite seed."""
    before, after = group_by_seed(content, baseline, metric), group_by_seed(content, variant, metric)
    shared = [seed for seed in after if math.isfinite(before.get(seed, math.nan) - after[seed])]
    if not shared:
        return None
    paired = paired_comparison([before[s] for s in shared], [after[s] for s in shared])
    return {k: None if v != v else v for k, v in dataclasses.asdict(paired).items()}


def as_comparison(stored: dict[str, Any]) -> PairedComparison:
    """Return a comparison of a results file, which has nothing where there was no number."""
    return PairedComparison(**{name: math.nan if value is None else value for name, value in stored.items()})


def group_by_seed(content: dict[str, Any], variant: str, metric: str) -> dict[int, float]:
    """Return the metric of the runs of a variant, by seed; NaN where one diverged."""
    return dict(sorted((r["seed"], get_value(r, metric)) for r in content["runs"] if r["variant"] == variant))


def summary_rows(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of the comparison as text; intervals are of 95 %."""
    metric = content["metric"].partition("/")[2]
    longer = list_longer(content)
    header = ["variant", "seeds", metric, "difference", "p", *(f"difference from {name_variant(n)}" for n in longer)]
    header += ["loss difference", "filter moved", "parameters"]
    metrics = dict.fromkeys(name for run in content["runs"] for name in run["metrics"])
    other_metrics = [name for name in metrics if name != content["metric"] and not name.endswith("/loss")]
    header += [name.replace("/", " ") for name in other_metrics]
    costs = {"epoch_seconds": "seconds per epoch", "peak_mb": "peak MB"}
    costs = {name: title for name, title in costs.items() if metrics and all(name in run for run in content["runs"])}
    header += costs.values()
    rows = []
    for variant, values in summarise(content).items():
        runs = [r for r in content["runs"] if r["variant"] == variant]
        if not runs:
            continue
        difference, loss = (values.get(name) for name in ("difference", "loss difference"))
        p = "" if not difference or difference["p"] is None else f"{difference['p']:.3f}"
        changes: dict[str, list[float]] = {}
        for run in runs:
            for name, value in run["moved"].items():
                if value:  # the others are fixed
                    changes.setdefault(name, []).append(value)
        row = [name_variant(variant), str(len(runs)), mean_and_sd([*values["values"].values()])]
        equal_time = values.get("equal time", {})
        row += [format_interval(difference), p, *(format_interval(equal_time.get(name)) for name in longer)]
        row += [format_interval(loss)]
        row += [", ".join(f"{name} {sum(v) / len(v):.4f}" for name, v in changes.items())]
        row += [str(runs[0]["filter_parameters"])]
        has = {name for run in runs for name in run["metrics"]}
        row += [mean_and_sd([*group_by_seed(content, variant, n).values()]) if n in has else "" for n in other_metrics]
        spent = {name: [run[name] for run in runs if name in run] for name in costs}
        rows.append(row + [f"{statistics.median(values):,g}" if values else "" for values in spent.values()])
    return header, rows


def format_interval(paired: dict[str, Any] | None) -> str:
    if not paired:
        return ""
    low, high = paired["low"], paired["high"]
    bounds = "" if low is None or low == high else f" [{low:+.4f}, {high:+.4f}]"  # equal differences have none
    return f"{paired['mean']:+.4f}{bounds}"


def plot_differences(content: dict[str, Any], file: Path) -> None:
    """Draw each variant's differences to the unpatched model: a dot per seed, the mean, and its 95 % interval."""
    variants = [name for name, summary in content["summary"].items() if summary.get("difference")]
    figure = make_figure(7, 1.6 + 0.45 * len(variants))
    axes = figure.subplots()
    baseline = content["summary"][PLAIN]["values"]
    for row, variant in enumerate(variants):
        summary = content["summary"][variant]
        values = [x - baseline[seed] for seed, x in summary["values"].items() if seed in baseline]
        axes.scatter(values, [row] * len(values), color="tab:blue", alpha=0.4, s=18)
        paired = summary["difference"]
        low, high = paired["low"], paired["high"]
        reach = None if low is None else [[paired["mean"] - low], [high - paired["mean"]]]
        axes.errorbar(paired["mean"], row, xerr=reach, marker="D", capsize=4, color="tab:blue")
    axes.axvline(0, color="grey", linestyle="--", linewidth=0.8)
    better = "lower" if lower_is_better(content["metric"]) else "higher"
    axes.set_yticks(range(len(variants)), [figure_text(name) for name in variants])
    axes.set(
        ylim=(len(variants) - 0.5, -0.5), xlabel=figure_text(f"{content['metric']} - baseline ({better} is better)")
    )
    axes.set_title(figure_text(f"{content['model']} on {content['task']}, {len(baseline)} seeds"), fontsize=10)
    save_figure(figure, file)


def plot_sweep(content: dict[str, Any], file: Path, variants: Iterable[str] | None = None) -> None:
    """Draw the metric over the first axis of the sweep, a line per combination of the others, and the unpatched one.

    Runs that diverged are not drawn. ``variants`` are the points of this sweep; the default is all.
    """
    points, places, axis = {}, {}, ""  # a value has its place on the axis, also where the first line lacks it
    for variant in content["summary"] if variants is None else variants:
        if variant != PLAIN:
            first, *rest = variant.split(", ")
            axis, _, value = first.partition("=")
            place = places.setdefault(value, len(places))
            if values := [x for x in content["summary"][variant]["values"].values() if math.isfinite(x)]:
                points.setdefault(", ".join(rest), []).append((place, values))
    figure = make_figure(6, 3.6)
    axes = figure.subplots()
    for i, (label, line) in enumerate(points.items()):
        means = [sum(v) / len(v) for _, v in line]
        spread = [(max(v) - min(v)) / 2 for _, v in line]
        name = figure_text(label) or None
        axes.errorbar([x for x, _ in line], means, spread, marker="o", capsize=3, color=f"C{i}", label=name)
    axes.set_xticks(range(len(places)), [figure_text(value) for value in places])
    baseline = [x for x in content["summary"][PLAIN]["values"].values() if math.isfinite(x)]
    if baseline:
        axes.axhline(sum(baseline) / len(baseline), color="grey", linestyle="--", label="baseline")
    seeds = len(content["summary"][PLAIN]["values"])
    title = f"{content['model']} on {content['task']}, {seeds} seeds"
    axes.set(xlabel=figure_text(axis), ylabel=figure_text(content["metric"]), title=figure_text(title))
    axes.legend(frameon=False)
    save_figure(figure, file)


def compare_results(settings: Settings, content: dict[str, Any], other: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return (results by variant with the other ones below each, as a table; the settings in which they differ)."""
    own_rows, other_rows = ({row[0]: row[1:4] for row in summary_rows(results)[1]} for results in (content, other))
    rows, differing = [], set()
    for name in dict.fromkeys([*own_rows, *other_rows]):
        rows.append([name, *own_rows.get(name, [""] * 3)])
        rows += [["  other", *other_rows[name]]] if name in other_rows else []
    first_runs = [{name_variant(run["variant"]): run for run in reversed(c["runs"])} for c in (content, other)]
    for name in own_rows.keys() & other_rows.keys():
        differing.update(settings.list_differences(*(by_name[name]["settings"] for by_name in first_runs)))
    return table(["variant", "seeds", content["metric"].partition("/")[2], "difference"], rows), sorted(differing)
