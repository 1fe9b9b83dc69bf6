"""Whole tables of the papers: what is printed, what is measured, what is missing, and the test across data sets."""

import json

import pytest
from rich.console import Console

from hf_graphfilter import GraphFilterError
from recipes import compare, glue, paper_table
from recipes.paper_table import Row, Table, draw, measured, signed_rank
from recipes.settings import Settings

PRINTED = """
uea: AGF, Table 1: 71.9 72.4 71.5 72.0 71.9 72.2 71.5 72.2 73.0 73.0 75.1
uea: AGF, Tables 19 and 20: 72.2 71.7 72.1 75.1
lra: AGF, Table 2: 58.8 55.1 53.6 49.7 55.6 59.0 59.0 59.2 57.5 60.1
lra: Converter, Table 1: 54.39 51.24 50.67 53.46 51.36 55.01 50.55 51.29 51.41 52.88 58.95 61.95 55.30 55.23 58.91 75.94
"""
AVERAGES = [tuple(line.split(": ")) for line in PRINTED.strip().splitlines()]
SLIPS = {("uea", "Longformer"), ("uea", "Performer"), ("lra", "Sinkhorn Trans."), ("lra", "Paramixer (Chord)")}
TABLE_13 = "0.002 0.010 0.002 0.049 0.002 0.002 0.002 0.008 0.004 0.004"  # printed: 0.01 and, last, 0.008


@pytest.mark.parametrize(("table", "paper", "averages"), AVERAGES)
def test_the_averages_are_those_printed(table, paper, averages):
    """Typed a second time from the papers; docs/papers.md lists where a paper's average is another."""
    for row, text in zip(Table.load(table).printed(paper), averages.split(), strict=True):
        same = row.average == pytest.approx(float(text), abs=0.051)
        assert same != ((table, row.name) in SLIPS), row.name


def test_the_test_across_data_sets_is_that_of_the_paper():
    *others, agf = Table.load("uea").printed("AGF, Table 1")
    for row, text in zip(others, TABLE_13.split(), strict=True):
        assert signed_rank(row, agf) == (pytest.approx(float(text), abs=6e-4), 10)


def test_the_test_takes_the_columns_that_both_have():
    a, b = Row("a", [1.0, 2.0, None, 4.0]), Row("b", [0.5, 1.0, 9.0, 1.0])
    assert signed_rank(a, b) == (0.25, 3)
    assert signed_rank(a, a) == (None, 3)
    assert signed_rank(a, Row("none", [None] * 4)) == (None, 0)


def test_every_table_has_tasks_of_its_recipe_and_full_rows():
    for name in paper_table.TABLES:
        shape = Table.load(name)
        for paper in shape.papers:
            assert all(len(row.scores) == len(shape.columns) for row in shape.printed(paper))
            assert shape.papers[paper].get("against", "") in {"", *shape.papers[paper]["rows"]}


def results(variants, metric="validation/accuracy"):
    runs = [
        {"variant": variant, "seed": seed, "settings": {}, "metrics": {metric: value, **more}}
        for variant, scores in variants.items()
        for seed, (value, more) in enumerate(scores, 1)
    ]
    return {"metric": metric, "runs": runs}


def test_rows_are_means_over_seeds_and_columns_may_have_their_own_metric():
    shape = Table.load("glue")
    other = "validation_mismatched/accuracy"
    found = {
        "mnli": results({"gfsa": [(0.8, {other: 0.7}), (0.9, {other: 0.9})], "plain": [(0.5, {other: float("nan")})]})
    }
    plain, gfsa = measured(found, shape.columns)
    assert (plain.name, plain.scores[5:7], plain.average) == ("plain", [50.0, None], None)
    assert gfsa.scores[5:7] == pytest.approx([85.0, 80.0])
    header, body = draw(shape.columns, [plain, gfsa], "baseline")
    assert header[-2:] == ["seeds", "p against baseline"]
    assert body[0][-2:] == ["0 to 1", ""]
    assert body[1][-2:] == ["2", "1.000 (1 of 9)"]


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """The tasks that were run; a comparison writes its file, and the data of one task are not there."""
    seen = []
    monkeypatch.chdir(tmp_path)

    def stand_in(recipe, flags, options, console):
        task = flags[flags.index("--task") + 1]
        seen.append(task)
        if task == "pathfinder":
            raise GraphFilterError("no such folder")
        scores = {"plain": [(0.5, {})], "performer": [(0.25, {})], "by hand": [(0.1, {})]}
        file = options.results / f"sequences-{task}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(results(scores, "test/accuracy")))

    monkeypatch.setattr(compare, "compare", stand_in)
    return seen


def test_the_table_is_run_shown_and_written(compared, tmp_path, capsys):
    argv = ["table", "lra", "--results", str(tmp_path / "mine"), "--variants", "agf", "performer", "--seeds", "1"]
    compare.main(argv)
    assert compared == ["listops", "imdb", "retrieval", "image", "pathfinder"]
    text = (tmp_path / "mine" / "table-lra.md").read_text()
    assert "| baseline | 50.0 | 50.0 | 50.0 | 50.0 | – | – | 1 |  |" in text
    assert "| performer | 25.0 | 25.0 | 25.0 | 25.0 | – | – | 1 | 0.125 (4 of 5) |" in text
    assert "- Pathfinder has no baseline, agf, performer: no such folder" in text
    assert "| Nyströmformer | 37.2 |" in text
    assert "by hand" not in text
    assert "missing: ListOps has no agf" in " ".join(capsys.readouterr().out.split())
    compare.main([*argv, "--show", "--versus", "performer"])
    assert len(compared) == 5, "--show runs nothing"
    compare.main([*argv, "--tasks", "image"])
    assert compared[5:] == ["image"]
    capsys.readouterr()
    compare.main([*argv, "2", "--show"])
    said = " ".join(capsys.readouterr().out.split())
    assert "missing: Image is not finished: baseline, seed 2; performer, seed 2" in said
    text = (tmp_path / "mine" / "table-lra.md").read_text()
    compare.main([*argv, "--show", "--smoke"])
    assert (tmp_path / "mine" / "table-lra-smoke.md").is_file()
    assert (tmp_path / "mine" / "table-lra.md").read_text() == text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "cola"], "has listops"),
        (["--versus", "x"], "has baseline"),
        (["--variants", "no such"], "--variants 'no such': the table has 'agf', "),
        (["--fresh"], "--show runs nothing and --fresh begins again"),
    ],
)
def test_what_a_table_does_not_have(compared, flags, message):
    with pytest.raises(GraphFilterError, match=message):
        paper_table.main(["lra", "--show", *flags], compare.compare, Console(quiet=True))


def test_runs_with_other_settings_are_left_out():
    settings = Settings(glue.RECIPE)
    values, sections = settings.parse(["--config", "glue/bert", "--task", "cola"])
    own = settings.identity(settings.override(values, {"filter": "none"}))
    other = {**own, "model": "another"}
    runs = [{"variant": "plain", "seed": seed, "settings": s} for seed, s in ((1, own), (2, other))]
    content = {"runs": runs}
    assert paper_table.drop_others(settings, values, sections, content) == ["plain"]
    assert [run["seed"] for run in content["runs"]] == [1]


def test_nothing_is_read_from_damaged_files(tmp_path):
    (tmp_path / "sequences-listops.json").write_text("{")
    with pytest.raises(GraphFilterError, match=r"sequences-listops\.json"):
        paper_table.main(["lra", "--show", "--results", str(tmp_path)], compare.compare, Console(quiet=True))
