"""Reproduce a whole table of a paper: one column per task and their average, the variants and the paper's rows.

    python recipes/compare.py table uea --config sequences/agf-uea.yaml --seeds 1 2 3
    python recipes/compare.py table lra --variants agf performer --seeds 1
    python recipes/compare.py table glue --config glue/roberta.yaml --show

Each column is a comparison of compare.py, with its own results file and folders of runs. So finished runs are not
repeated, and the same command resumes. A task that cannot run (because its data are missing, for instance) does not
stop the others. --show runs nothing. In both cases the table shows the existing results, and lists what is missing.

Scores are means over seeds, in percent. The p-value is that of the two-sided Wilcoxon signed-rank test across the
columns, against the row that the table names. With fewer than six columns it cannot be below 0.05.
"""

import argparse
import importlib
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import Console, table
from hf_graphfilter.files import write_text
from hf_graphfilter.tables import markdown_table
from recipes import SCRIPTS, records
from recipes.errors import NETWORK_ERRORS, is_main_process, line
from recipes.records import RUN, tell
from recipes.settings import Settings, read_yaml
from recipes.summary import PLAIN, group_by_seed, name_variant
from recipes.variants import drop_others

PUBLISHED = Path(__file__).parent / "published"
TABLES = tuple(sorted(file.stem for file in PUBLISHED.glob("*.yaml")))
NOTHING = "–"


@dataclass
class Row:
    """What a variant, or a row of a paper, has of each column; None for what is missing."""

    name: str
    scores: list[float | None]
    seeds: list[int] = field(default_factory=list)

    @property
    def average(self) -> float | None:
        scores = [score for score in self.scores if score is not None]
        return statistics.mean(scores) if len(scores) == len(self.scores) else None


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, the task of the recipe, and the metric if it is not the task's own."""

    title: str
    task: str
    metric: str | None = None


@dataclass(frozen=True)
class Table:
    """The columns of a table, and what papers print in it: rows by paper, and the row that its test is against."""

    recipe: str
    config: str
    columns: list[Column]
    papers: dict[str, dict[str, Any]]

    @classmethod
    def load(cls, name: str) -> "Table":
        content = read_yaml(f"{name}.yaml", PUBLISHED)
        columns = [
            Column(title, **({"task": task} if isinstance(task, str) else task))
            for title, task in content["columns"].items()
        ]
        return cls(content["recipe"], content["config"], columns, content["papers"])

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(column.task for column in self.columns))

    def printed(self, paper: str) -> list[Row]:
        """Return the rows of a paper."""
        return [Row(name, scores) for name, scores in self.papers[paper]["rows"].items()]


def signed_rank(first: Row, second: Row) -> tuple[float | None, int]:
    """Return (p of the Wilcoxon signed-rank test of two rows, number of columns that both have)."""
    pairs = [(a, b) for a, b in zip(first.scores, second.scores, strict=True) if a is not None and b is not None]
    differences = [round(a - b, 10) for a, b in pairs]  # equal scores of one decimal make exact ties
    if not any(differences):
        return None, len(pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small samples with ties: the p-value is then said to be rough
        return float(stats.wilcoxon(differences).pvalue), len(pairs)


def measured(found: dict[str, dict[str, Any]], columns: Sequence[Column]) -> list[Row]:
    """Return a row per variant: the mean over the seeds that did not diverge, in percent."""
    rows: dict[str, Row] = {}
    for index, column in enumerate(columns):
        content = found.get(column.task)
        for variant in dict.fromkeys(run["variant"] for run in content["runs"]) if content else ():
            row = rows.setdefault(variant, Row(variant, [None] * len(columns)))
            values = group_by_seed(content, variant, column.metric or content["metric"])
            finite = [value for value in values.values() if math.isfinite(value)]
            row.scores[index] = 100 * statistics.mean(finite) if finite else None
            row.seeds.append(len(finite))
    return sorted(rows.values(), key=lambda row: row.name != PLAIN)


def draw(columns: Sequence[Column], rows: Sequence[Row], against: str | None) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of a table as text."""
    reference = next((row for row in rows if name_variant(row.name) == against), None)
    seeds = any(row.seeds for row in rows)
    header = ["", *(column.title for column in columns), "average"]
    header += ["seeds"] * seeds + [f"p against {against}"] * (reference is not None)
    body = []
    for row in rows:
        cells = [name_variant(row.name), *map(as_text, [*row.scores, row.average])]
        if seeds:
            least, most = min(row.seeds, default=0), max(row.seeds, default=0)
            cells.append(f"{least}" if least == most else f"{least} to {most}")
        if reference is not None:
            p, pairs = signed_rank(row, reference)
            part = f" ({pairs} of {len(columns)})" if pairs < len(columns) else ""
            cells.append("" if row is reference or p is None else f"{p:.3f}{part}")
        body.append(cells)
    return header, body


def as_text(score: float | None) -> str:
    return NOTHING if score is None else f"{score:.1f}"


def list_missing(
    rows: Sequence[Row],
    columns: Sequence[Column],
    wanted: Sequence[str],
    reasons: dict[str, str],
    unfinished: dict[str, list[tuple[int, str]]],
) -> list[str]:
    """Return a line per column that lacks a variant, with the reason if there is one, or some of its seeds."""
    by_name, lines = {row.name: row for row in rows}, []
    for index, column in enumerate(columns):
        absent = [name for name in wanted if name not in by_name or by_name[name].scores[index] is None]
        if absent:
            reason = f": {reasons[column.task]}" if column.task in reasons else ""
            lines.append(f"{column.title} has no {', '.join(map(name_variant, absent))}{reason}")
        runs = [
            f"{name_variant(name)}, seed {seed}" for seed, name in unfinished.get(column.task, ()) if name not in absent
        ]
        if runs:
            lines.append(f"{column.title} is not finished: {'; '.join(runs)}")
    return lines


def arguments() -> argparse.ArgumentParser:
    """Return the flags of a table; those of the recipe follow them."""
    parser = argparse.ArgumentParser(
        prog="compare.py table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--config", help="YAML file of the recipe; default: the one of the table")
    parser.add_argument("--show", action="store_true", help="run nothing, show the existing results")
    parser.add_argument("--tasks", nargs="+", help="run only these tasks; the table keeps all columns")
    parser.add_argument("--variants", nargs="+", help="only these of the YAML file, and the unpatched model")
    parser.add_argument("--versus", default=name_variant(PLAIN), help="variant to test against; default: the baseline")
    parser.add_argument("--model_name", help="name of the model in tables; default: the last part of its path")
    parser.add_argument("--results", type=Path, help="folder of the results files; default: that of the runs")
    parser.add_argument("--fresh", action="store_true", help="begin again; old results and runs are moved aside")
    return parser


def main(argv: list[str], compare: Callable[..., None], console: Console) -> None:
    """Do the missing runs of every column by ``compare``, then show the table and write it as Markdown."""
    options, recipe_flags = arguments().parse_known_args(argv)
    shape = Table.load(options.table)
    recipe = importlib.import_module(f"recipes.{SCRIPTS[shape.recipe]}").RECIPE
    if unknown := [task for task in options.tasks or () if task not in shape.tasks]:
        raise GraphFilterError(f"--tasks {unknown[0]}: the table {options.table} has {', '.join(shape.tasks)}")
    if options.show and options.fresh:
        raise GraphFilterError("--show runs nothing and --fresh begins again: give one of them")
    task_options = argparse.Namespace(**vars(options), sweep=None, equal_time=None, name=None, against=None)
    reasons: dict[str, str] = {}
    contents: dict[str, dict[str, Any]] = {}
    unfinished: dict[str, list[tuple[int, str]]] = {}
    wanted: dict[str, None] = {}
    settings = Settings(recipe)
    for task in shape.tasks:
        flags = ["--config", options.config or shape.config, "--task", task, *recipe_flags]
        values, sections = settings.parse(flags)
        wanted |= dict.fromkeys([PLAIN, *(options.variants or sections["variants"] or [values.get("filter", "gfsa")])])
        folder = options.results or records.results_folder(values)
        if not options.show and task in (options.tasks or shape.tasks):
            tell(console, f"task: {task}")
            try:
                compare(recipe, flags, task_options, console)
            except (GraphFilterError, *NETWORK_ERRORS) as error:
                reasons[task] = line(error)
                tell(console, f"{task} was not finished: {reasons[task]}")
        suffix = "-smoke" * bool(values.get("smoke"))
        file = folder / records.name_results({"recipe": recipe.name, "task": task}, suffix)
        content = records.read_results(file, **RUN)
        # to look at runs needs neither their data nor a machine like theirs
        ignored = {"bf16"} | ({"the files of data"} if "data" not in values else set()) if options.show else set()
        if dropped := drop_others(settings, values, sections, content, ignored):
            reasons.setdefault(task, f"runs of {', '.join(dropped)} have other settings and are left out")
        if content["runs"]:
            contents[task] = content
            runs = [(seed, name) for name in wanted for seed in values.get("seeds", [1])]
            unfinished[task] = records.list_missing(runs, content)
    if is_main_process():
        rows = measured(contents, shape.columns)
        known = dict.fromkeys([*(sections["variants"] or [values.get("filter", "gfsa")]), *(row.name for row in rows)])
        if unknown := [name for name in options.variants or () if name not in known]:
            raise GraphFilterError(f"--variants {unknown[0]!r}: the table has {', '.join(map(repr, known))}")
        file = folder / f"table-{options.table}{suffix}.md"
        missing = list_missing(rows, shape.columns, [*wanted], reasons, unfinished)
        show(options, shape, rows, [*wanted], missing, file, console)


def show(
    options: argparse.Namespace,
    shape: Table,
    rows: list[Row],
    wanted: list[str],
    missing: list[str],
    file: Path,
    console: Console,
) -> None:
    """Print the table and the paper's, and write both to a Markdown file."""
    rows += [Row(name, [None] * len(shape.columns)) for name in wanted if name not in {row.name for row in rows}]
    if options.variants:
        rows = [row for row in rows if row.name in wanted]
    versus, names = name_variant(options.versus), [name_variant(row.name) for row in rows]
    if versus not in names:
        raise GraphFilterError(f"--versus {versus}: the table has {', '.join(names)}")
    parts = {f"Measured, {options.table}": draw(shape.columns, rows, versus)}
    for paper, content in shape.papers.items():
        parts[f"Printed: {paper}"] = draw(shape.columns, shape.printed(paper), content.get("against"))
    sections = []
    for title, (header, body) in parts.items():
        console.print(table(header, body, title=title))
        sections.append(f"**{title}**\n\n{markdown_table(header, body)}")
        if title.startswith("Measured") and missing:
            sections.append("Missing:\n\n" + "\n".join(f"- {text}" for text in missing))
    for text in missing:
        tell(console, f"missing: {text}")
    write_text(file, "\n\n".join(sections) + "\n")
    tell(console, f"table: {file}")
