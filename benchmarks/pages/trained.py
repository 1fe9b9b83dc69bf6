"""What recipes/compare.py measured."""

import dataclasses
import json
import math
import statistics

from hf_graphfilter.analysis.comparison import paired_comparison
from hf_graphfilter.tables import markdown_table
from pages.sources import RECIPES, days, read
from recipes.paper_table import Table, as_text, measured
from recipes.records import lower_is_better
from recipes.summary import PLAIN, format_interval, group_by_seed, summary_rows


def recipe_tables(*names: str) -> str:
    """Return what recipes/compare.py measured, a table a task, and the mean over the tasks of a family of models."""
    files = [file for name in names for file in sorted(RECIPES.glob(f"{name}*.json"))]
    contents = [json.loads(file.read_text()) for file in files]
    parts = []
    for content in contents:
        run = content["runs"][0]
        notes = [f"metric: {content['metric']}" + (", lower is better" * lower_is_better(content["metric"]))]
        notes += [f"split: {run['split']}; rows: {run['rows']}".replace("'", "")] if "split" in run else []
        if content["name"].startswith("lra-") and content["task"] != "image":
            notes += [f"at most {run['settings']['max_length']:,} tokens"]
        lengths_differ = any("num_train_epochs" in overrides for overrides in content["variants"].values())
        if content["name"].startswith("lra-") or lengths_differ or content["sweep"]:
            notes += [f"{run['settings']['num_train_epochs']:g} epochs"]
        machines = dict.fromkeys(run["machine"] for run in content["runs"])
        versions = dict.fromkeys(run["versions"]["torch"] for run in content["runs"])
        run_days = days(run["date"] for run in content["runs"])
        notes += [f"{run_days}, {' and '.join(machines)}, torch {' and '.join(versions)}"]
        title = f"**{content['model']} on {content['task']}**" + (" (sweep)" if content["sweep"] else "")
        parts += [f"{title}. {'; '.join(notes)}.", markdown_table(*summary_rows(content))]
    comparisons = [c for c in contents if not c["sweep"]]
    mean = [mean_over_tasks(comparisons)] if len(comparisons) > 1 and names == ("glue",) else []
    return "\n\n".join(mean + parts)


def ablations_beside_paper() -> str:
    """Return the best accuracies of AGF's ablations beside its Tables 19 and 20, on the tasks that both have."""
    contents = [json.loads(file.read_text()) for file in sorted(RECIPES.glob("ablations-*.json"))]
    contents_by_task = {content["task"]: {**content, "metric": "validation/best_accuracy"} for content in contents}
    uea = Table.load("uea")
    columns = [column for column in uea.columns if column.task in contents_by_task]
    places = [uea.columns.index(column) for column in columns]
    own_scores = {row.name.replace("agf", "AGF"): row.scores for row in measured(contents_by_task, columns)}
    header = ["best accuracy, %", *(f"{column.task}, {source}" for column in columns for source in ("paper", "here"))]
    body = []
    for row in uea.printed("AGF, Tables 19 and 20"):
        pairs = zip((row.scores[place] for place in places), own_scores[row.name], strict=True)
        body.append([row.name, *(as_text(score) for pair in pairs for score in pair)])
    return markdown_table(header, body)


def mean_over_tasks(contents: list[dict]) -> str:
    """Return each variant's difference to the unpatched model: mean over tasks per seed, then paired over seeds."""
    rows = []
    for variant in [v for v in contents[0]["variants"] if v != PLAIN]:
        cells = [variant]
        for quantity in ("metric", "loss"):
            by_task = []
            for content in contents:
                metric = content["metric"] if quantity == "metric" else f"{content['metric'].partition('/')[0]}/loss"
                plain, treated = (group_by_seed(content, v, metric) for v in (PLAIN, variant))
                pairs = {seed: treated[seed] - plain.get(seed, math.nan) for seed in treated}
                by_task.append({seed: pair for seed, pair in pairs.items() if math.isfinite(pair)})
            seeds = sorted(set.intersection(*(set(differences) for differences in by_task)))
            means = [statistics.mean(differences[seed] for differences in by_task) for seed in seeds]
            paired = paired_comparison([0.0] * len(means), means)
            cells += [format_interval(dataclasses.asdict(paired)), f"{paired.p:.3f}"]
        rows.append([*cells, len(seeds)])
    tasks = ", ".join(content["task"] for content in contents)
    header = ["variant", "metric, against the baseline", "p", "loss, against the baseline", "p", "seeds"]
    return f"**{contents[0]['model']}, mean over {tasks}**\n\n{markdown_table(header, rows)}"


def listops_table() -> str:
    rows = read("listops")
    lengths = list(dict.fromkeys(row["lengths"] for row in rows))
    rules = dict.fromkeys(row["rule"] for row in rows)
    accuracies = {(row["rule"], row["lengths"]): row["accuracy"] for row in rows}
    body = [[rule, *(accuracies[rule, name] for name in lengths)] for rule in rules]
    return markdown_table(["answer", *lengths], body)
