"""Generated data: expressions by another evaluator, images by what their paths are, files by the loaders."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_graphfilter import GraphFilterError
from recipes import generate
from recipes.sequence_tasks import load, read
from recipes.sequence_tasks.dashed_paths import CLEARANCE, MARGIN, DashedPaths
from recipes.sequence_tasks.expressions import Expressions, median

APPLY = {
    "[MIN": lambda values: sorted(values)[0],
    "[MAX": lambda values: sorted(values)[-1],
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: math.fsum(values) % 10,
}


def parsed(tokens):
    """The binary tree of the parentheses."""
    if (token := next(tokens)) != "(":
        return token
    tree = parsed(tokens), parsed(tokens)
    assert next(tokens) == ")"
    return tree


def evaluated(tree):
    """(value, levels, most arguments) of ((((operator, argument), argument), ...), "]")."""
    if isinstance(tree, str):
        return int(tree), 1, 0
    rest, closing = tree
    assert closing == "]"
    arguments = []
    while isinstance(rest, tuple):
        rest, argument = rest
        arguments.append(evaluated(argument))
    values, levels, most = zip(*reversed(arguments), strict=True)
    return APPLY[rest](values), max(levels) + 1, max(len(values), *most)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.integers(2, 5), st.integers(0, 12), st.integers(6, 30), st.integers(0, 9))
def test_expressions_are_what_was_asked_for(depth, args, least, more, seed):
    expressions = Expressions(depth, args, least, least + more)
    try:
        expressions.check(10)
    except GraphFilterError:
        share, numbers = expressions.share()
        assert share < 1e-7 or numbers < 20
        return
    generated = expressions.generate(seed)
    rows = [next(generated) for _ in range(10)]
    assert len({text for text, _ in rows}) == 10
    for text, value in rows:
        computed, levels, most = evaluated(parsed(iter(text.split())))
        assert (computed, type(value)) == (value, int)
        assert (levels <= depth, most <= args) == (True, True)
        assert least < sum(token not in "()" for token in text.split()) < least + more


@pytest.mark.parametrize("bounds", [(3, 3, 0, 30), (4, 2, 6, 20), (3, 4, 8, 12)])
def test_the_share_of_kept_trees_is_exact(bounds):
    """Against trees drawn from the definition, and all of them counted."""

    def length(draw, level):
        if level == bounds[0] or draw.random() > 0.25:
            return 1
        return 2 + sum(length(draw, level + 1) for _ in range(draw.randint(2, bounds[1])))

    draw = random.Random(0)
    kept = statistics.fmean(bounds[2] < length(draw, 1) < bounds[3] for _ in range(20_000))
    assert Expressions(*bounds).share()[0] == pytest.approx(kept, abs=0.01)


def test_different_expressions_are_counted():
    assert Expressions(2, 2, 0, 5).share()[1] == 10 + 4 * 10**2
    assert Expressions(2, 3, 1, 6).share()[1] == 4 * 10**2 + 4 * 10**3
    assert Expressions(3, 2, 4, 8).share()[1] == 2 * (4 * 10) * (4 * 10**2)
    assert len({text for text, _ in zip(Expressions(2, 2, 3, 5).generate(0), range(200), strict=False)}) == 200


def test_of_an_even_number_the_median_is_rounded_down():
    assert [median(values) for values in ([3], [1, 2], [9, 0, 4], [5, 1, 8, 4])] == [3, 1, 4, 4]


@pytest.fixture
def write(tmp_path):
    """Runs a command of the program; the files it wrote."""

    def run(command, name, *options):
        result = CliRunner().invoke(generate.app, [command, str(tmp_path / name), *map(str, options)])
        if result.exception:
            raise result.exception
        read.cache_clear()
        return {file.relative_to(tmp_path / name): file.read_bytes() for file in (tmp_path / name).rglob("*.*")}

    return run


SHORT = ["--min-length", 10, "--max-length", 40, "--train", 8, "--validation", 3, "--test", 4]


def test_generated_listops_are_read(write, tmp_path):
    files = write("listops", "a/listops-1000", *SHORT)
    assert files == write("listops", "b", *SHORT)
    assert files != write("listops", "c", *SHORT, "--seed", 1)
    parts = load("listops", str(tmp_path / "a")).parts
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 8, "validation": 3, "test": 4}
    texts = [text for rows in parts.values() for text in rows["text_a"]]
    assert len({*texts}) == 15
    assert all(10 < len(text.split()) < 40 for text in texts)


def test_generated_paths_are_read(write, tmp_path):
    options = ["--images", 20, "--size", 48]
    files = write("dashed-paths", "dashed-paths", *options)
    assert files == write("dashed-paths", "b", *options)
    assert files != write("dashed-paths", "c", *options, "--seed", 1)
    loaded = load("dashed-paths", str(tmp_path))
    assert {part: len(rows) for part, rows in loaded.parts.items()} == {"train": 16, "validation": 2, "test": 2}
    assert sum(loaded.parts["train"]["label"]) == 8
    pixels = np.array(loaded.parts["train"]["input_ids"][:])
    assert pixels.shape == (16, 48 * 48)
    assert {*pixels.min(1), *pixels.max(1)} == {0, 255}
    with pytest.raises(GraphFilterError, match="has 48 x 48 pixels, not 32 x 32"):
        load("pathfinder", str(tmp_path / "dashed-paths"))


def test_paths_keep_clear_of_each_other_and_of_the_border():
    for seed in range(5):
        paths, apart, joined = DashedPaths(dashes=8, distractors=2).layout(random.Random(seed))
        assert joined == [paths[0][0], paths[0][-1]]
        assert [point in path for point, path in zip(apart, paths, strict=False)] == [True, True]
        assert math.dist(*apart) == pytest.approx(math.dist(*joined), abs=1)
        assert [len(path) for path in paths] == [9, 9, 3, 3]
        points = [(point, number, place) for number, path in enumerate(paths) for place, point in enumerate(path)]
        assert all(MARGIN <= z <= 32 - MARGIN for point, *_ in points for z in point)
        for a, first, i in points:
            for b, second, k in points:
                assert (first == second and abs(i - k) < 2) or math.dist(a, b) >= CLEARANCE


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("listops", ["--min-length", 3000], "no expressions of more than 3000 and less than 2000 tokens.*lies between"),
        ("listops", ["--max-depth", 2], "there are no expressions of more than 500 .* of at most 2 levels and 10"),
        ("listops", ["--max-args", 5], "share of 6e-07 are expressions .*: 100000 of them would take too long"),
        (
            "listops",
            ["--max-depth", 2, "--max-args", 2, "--min-length", 3, "--max-length", 9],
            "there are 400 different expressions .*: at most half as many",
        ),
        ("dashed-paths", ["--dashes", 60], "two paths of 60 dashes and 3 shorter ones do not fit an image: take fewer"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_writes_nothing(command, options, message, write, tmp_path):
    with pytest.raises(GraphFilterError, match=message):
        write(command, "in/here", *options)
    assert not [*tmp_path.iterdir()]


def test_what_is_there_stays_and_what_is_broken_off_leaves_nothing(write, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    with pytest.raises(GraphFilterError, match="full is there already and not an empty folder: name another one"):
        write("listops", "full", *SHORT)

    def interrupted():
        with generate.write_folder(tmp_path / "broken") as folder:
            (folder / "some.tsv").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [file.name for file in tmp_path.rglob("*")] == ["full", "mine.txt"]


def test_the_program_ends_with_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["generate.py", "listops", "nowhere", "--max-depth", "2"])
    with pytest.raises(SystemExit, match=r"^generate\.py: there are no expressions"):
        generate.main()
