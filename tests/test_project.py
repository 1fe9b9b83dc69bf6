"""What surrounds the code: version, addresses, links, metadata, workflows."""

import ast
import csv
import itertools
import json
import re
import runpy
import shlex
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from compatibility import Collector, page
from durations import FILE as LONG_TESTS
from durations import choose_long
from versions import ROWS

import hf_graphfilter
from hf_graphfilter.filters import available_filters, get_filter

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
LINKS = runpy.run_path(str(ROOT / "docs" / "links.py"))
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "recipes").rglob("*.md"),
    *(ROOT / "examples").glob("*.md"),
]


def test_the_version_is_written_once():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hf_graphfilter.__version__"}
    # setuptools reads a literal without importing the package
    assert f'\n__version__ = "{hf_graphfilter.__version__}"\n' in (ROOT / "hf_graphfilter" / "__init__.py").read_text()
    assert f"\n## [{hf_graphfilter.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_addresses_are_of_one_repository():
    urls = PROJECT["project"]["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    assert urls["Changelog"] == LINKS["hosted"]("CHANGELOG.md")


def test_the_citation_agrees_with_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_graphfilter.__version__
    assert citation["repository-code"] == LINKS["ADDRESS"]
    assert " AND ".join(citation["license"]) == PROJECT["project"]["license"]
    references = {reference["title"] for reference in citation["references"]}
    for name in available_filters():
        if cited := get_filter(name).citation:
            assert re.search(r"title += \{(.*)\}", cited)[1].replace("\\&", "&") in references


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(page):
    found = []
    LINKS["relinked"](page.read_text(), str(page.relative_to(ROOT)), lambda path: found.append(path) or path)
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_no_line_repeats_the_end_of_the_line_before():
    pairs = (pair for page in PAGES for pair in itertools.pairwise(map(str.strip, page.read_text().splitlines())))
    assert [b for a, b in pairs if len(b) > 30 and b[0] != "|" and a.endswith(b)] == []


def test_the_long_description_has_no_relative_link():
    text = re.sub("```.*?```", "", LINKS["long_description"](), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert f"{LINKS['ADDRESS']}/blob/main/docs/linearize.md" in targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "<img" not in text


def test_links_are_found_and_code_is_left_alone():
    text = 'a [`b`](c.md#d) `x["k"](c.md)` [e](https://f.g) [h](#i)\n```\ny["k"](c.md)\n```\n![j](../k.png)\n'
    linked = text.replace("(c.md#d)", "(/docs/c.md#d)").replace("(../k.png)", "(/k.png)")
    assert LINKS["relinked"](text, "docs/z.md", "/{}".format) == linked


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1300


def test_the_typed_numbers_of_the_readme_are_those_measured():
    """Numbers in the sentences of the README, which no command writes."""
    readme = (ROOT / "README.md").read_text()
    count = re.search(r"\*\*(\d+) verified", (ROOT / "docs" / "coverage.md").read_text())[1]
    assert f"the {count} architectures" in readme
    with (ROOT / "benchmarks" / "results" / "busy-cpu.csv").open() as file:
        steps = [r for r in csv.DictReader(file) if r["form"] == "gfsa, all coefficients"]
        steps = [r for r in steps if r["pass"].endswith("0 busy")]
        file.seek(0)
        (few,) = (
            r
            for r in csv.DictReader(file)
            if "12 x 32," in r["case"] and r["form"] == "gfsa, layers 0, 2 and 4" and r["pass"].endswith("0 busy")
        )
    ratio = f"{float(steps[-1]['ratio_to_plain']):.2f}"
    assert "all coefficients learned: perplexity 3 to 6 % lower after the same number of steps" in readme
    assert f"a step takes {ratio} times as long (" in readme
    assert f"({float(few['ratio_to_plain']):.2f} in three layers)" in readme
    runs = json.loads((ROOT / "recipes" / "league" / "results" / "depth.json").read_text())["runs"]
    scores = {(r["task"], r["variant"], r["seed"]): r["metrics"]["test/perplexity"] for r in runs if r["seed"]}
    gains = [
        (task, scores[task, "plain", seed] - score, scores[task, "plain", seed])
        for (task, variant, seed), score in scores.items()
        if variant == "gfsa, w_0 and w_1 too"
    ]
    tasks = {task: [(gain, plain) for name, gain, plain in gains if name == task] for task, *_ in gains}
    means = [sum(gain for gain, _ in pairs) / sum(plain for _, plain in pairs) for pairs in tasks.values()]
    assert all(gain > 0 for _, gain, _ in gains)
    assert f"perplexity {100 * min(means):.0f} to {100 * max(means):.0f} % lower" in readme
    assert f"in each of {len(gains)} pairs" in readme


def test_extras_that_are_named_exist():
    table = (ROOT / "docs" / "settings.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    installed = ",".join(e for page in PAGES for e in re.findall(r"\.\[([\w,]+)\]", page.read_text())).split(",")
    makefile = re.findall(r"\(VENV\)/installed-(\w+)", (ROOT / "Makefile").read_text())
    assert named
    assert makefile
    assert {*named, *installed, *makefile} <= EXTRAS


def imported(nodes):
    """The packages of others that statements import."""
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {*OURS, *INSTALLED_BY_OTHERS}


def declared(*requirements):
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}


OURS = {"hf_graphfilter", "recipes"}
INSTALLED_BY_OTHERS = {"triton", "sitecustomize"}  # by torch, and by whoever made the environment
CORE = declared(*PROJECT["project"]["dependencies"])
OPTIONAL = declared(*(r for requirements in PROJECT["project"]["optional-dependencies"].values() for r in requirements))


@pytest.mark.parametrize("folder", sorted(OURS))
def test_what_is_imported_is_declared(folder):
    """In the core, what the package imports before a function asks for it."""
    trees = {file: ast.parse(file.read_text()) for file in (ROOT / folder).rglob("*.py")}
    distributions = {name: found[0].lower() for name, found in packages_distributions().items()}
    anywhere = {distributions.get(name, name) for tree in trees.values() for name in imported([*ast.walk(tree)])}
    assert anywhere <= CORE | OPTIONAL
    if folder == "hf_graphfilter":
        at_once = {distributions.get(name, name) for tree in trees.values() for name in imported(tree.body)}
        assert at_once <= CORE


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def named_targets(commands):
    """Return the targets that commands ask of make: its words, but for variables."""
    found = re.findall(r"(?:^|[;&] *)make ([^\n;&|]*)", "\n".join(commands), re.MULTILINE)
    return {word for words in found for word in shlex.split(words) if "=" not in word}


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda f: f.name)
def test_workflows_and_forms_are_yaml_and_name_targets_that_exist(file):
    content = yaml.safe_load(file.read_text())
    assert content["name"]
    for job in content.get("jobs", {}).values():
        matrix = job.get("strategy", {}).get("matrix", {})
        chosen = [*matrix.get("target", []), *(entry["target"] for entry in matrix.get("include", []))]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        commands = [c.replace("${{ matrix.target }}", target) for c in commands for target in chosen or [""]]
        assert named_targets(commands)
        assert named_targets(commands) <= TARGETS
        assert all((ROOT / script).is_file() for c in commands for script in re.findall(r"tests/\S+\.py", c))


def test_what_ci_runs_names_targets_that_exist():
    named = named_targets([(ROOT / ".ci" / "run").read_text()])
    assert named
    assert named <= TARGETS
    assert named_targets(["make a b C=d 'e f=g'\necho make h", "cd i && make j"]) == {"a", "b", "j"}


def test_make_docs_tests_the_site_that_it_built():
    recipe = re.search(r"^docs:.*\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    assert "installed-docs" in recipe
    assert "installed-test" in recipe
    folder = re.search(r"^site_dir: (.*)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    assert f"SITE={folder} $(BIN)/python -m pytest tests/test_site.py" in recipe.partition("mkdocs build")[2]


def test_no_file_is_unpickled():
    """SECURITY.md says so. (In memory, ``pickle.loads(pickle.dumps(model))`` is a check of filters.)"""
    pickles = re.compile(r"torch\.(load|save)\b|pickle\.load\b|Unpickler|joblib|dill\b")
    assert [f for f in (ROOT / "hf_graphfilter").rglob("*.py") if pickles.search(f.read_text())] == []


def test_the_versions_tested_are_those_named():
    oldest = dict(re.findall(r"(\S+?)==([\d.]+\d)", ROWS[0].pins))
    needed = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["vision"]]
    floors = dict(requirement.split(">=") for requirement in needed if ">=" in requirement)
    assert {name: floors.get(name) for name in oldest} == {**oldest, "numpy": None, "trl": None}
    minors = sorted({int(row.torch.removeprefix("2.")) for row in ROWS})
    assert minors == [*range(minors[0], minors[-1] + 1)]
    pythons = [c.split(" :: ")[-1] for c in PROJECT["project"]["classifiers"] if "Python :: 3" in c]
    assert {*pythons} <= {row.python for row in ROWS}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert {*pythons} == {*matrix["python"], *(entry["python"] for entry in matrix["include"])}
    chosen = re.findall(r"ROW=(\S+)", " ".join(matrix["target"]))
    assert chosen
    assert all(any(name in row.name for row in ROWS) for name in chosen)


def test_long_tests_exist():
    for name in LONG_TESTS.read_text().split():
        file, test = name.split("::")
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_long_tests_are_those_with_the_longest_cases():
    times = {"a": [9.0], "b": [1.0, 3.0], "c": [1.0] * 8}
    assert choose_long(times) == ["a", "b"], "8 of 21 seconds are left"


def collect(file, day, monkeypatch, shown, *, keyword="", exitstatus=0, arguments=("tests",)):
    """Return what the file holds after a run in which features were shown, or refused with a message."""
    monkeypatch.setattr("compatibility.date", SimpleNamespace(today=lambda: SimpleNamespace(isoformat=lambda: day)))
    collector = Collector(file)
    for feature, message in shown.items():
        properties = [("feature", feature), ("filter", "gfsa"), *([("refused", message)] if message else [])]
        outcome = {"when": "call", "passed": True, "failed": False, "skipped": False}
        collector.pytest_runtest_logreport(SimpleNamespace(user_properties=properties, **outcome))
    option = SimpleNamespace(markexpr="feature", keyword=keyword, deselect=None, ignore=None)
    config = SimpleNamespace(option=option, args=[*arguments], invocation_params=SimpleNamespace(dir=ROOT))
    session = SimpleNamespace(config=config, shouldfail=False, shouldstop=False)
    collector.pytest_sessionfinish(session, exitstatus)
    return json.loads(file.read_text())


PARTLY = [{"keyword": "b"}, {"arguments": ["tests/test_peft.py"]}, {"exitstatus": 2}]


@pytest.mark.parametrize("how", PARTLY, ids=lambda how: next(iter(how)))
def test_a_run_of_some_tests_dates_no_others(how, tmp_path, monkeypatch):
    file = tmp_path / "outcomes.json"
    collect(file, "day 1", monkeypatch, {"A: a": "no a", "A: b": "no b"})
    found = collect(file, "day 2", monkeypatch, {"A: b": "not b", "A: c": ""}, **how)
    assert found["messages"] == {"A: a (GFSA)": "no a", "A: b (GFSA)": "not b"}
    assert found["found"].keys() == {"A: a", "A: b", "A: c"}
    assert re.search("day 1. Some of them were tested again: .* day 2[.]", page(found))
    assert collect(file, "day 3", monkeypatch, {"A: b": ""}, **how)["messages"] == {"A: a (GFSA)": "no a"}


def test_a_run_of_all_tests_forgets_those_that_are_gone(tmp_path, monkeypatch):
    file = tmp_path / "outcomes.json"
    collect(file, "day 1", monkeypatch, {"A: a": "no a", "A: b": "no b"})
    collect(file, "day 2", monkeypatch, {"A: b": "not b"}, keyword="b")
    found = collect(file, "day 3", monkeypatch, {"A: b": "nor b"}, exitstatus=1)
    assert found["messages"] == {"A: b (GFSA)": "nor b"}
    assert found["found"].keys() == {"A: b"}
    assert "day 3." in page(found)
    assert "again" not in page(found)
