"""What the documents show runs: the Python of the README, the commands of the recipes, the examples."""

import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path

import datasets
import pytest
from transformers import BertConfig, BertModel
from typer.main import get_command

from hf_graphfilter import demo
from recipes import SCRIPTS, compare, generate, paper_table
from recipes.league import play
from recipes.league.plan import League
from recipes.models import train_bpe
from recipes.settings import Settings

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


SENTENCES = [f"the {animal} number {i} sat on the mat" for i in range(24) for animal in ("cat", "dog")]


def small_bert(folder):
    """A pretrained encoder with its tokenizer, but small and random."""
    train_bpe(iter(SENTENCES), 300).save_pretrained(folder)
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    BertModel(BertConfig(**shape, **special, vocab_size=300, max_position_embeddings=64)).save_pretrained(folder)
    return folder


def commands():
    """(file, words) of each call of a recipe that the documents show."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    for file in [*files, *(ROOT / "recipes").glob("*.py")]:
        for line in file.read_text().replace("\\\n", " ").splitlines():
            if re.match(r" *(python|accelerate launch) recipes/\w+\.py ", line):
                yield file, shlex.split(line, comments=True)


def test_the_commands_of_the_documents_are_valid(monkeypatch):
    """Their flags, configurations, tasks and settings."""

    def import_filters(modules):  # a file of the reader's: that of the guide
        if modules:
            guide = (ROOT / "docs" / "write_filter.md").read_text()
            exec(re.search(r"```python\n(.+?)```", guide, re.S)[1], {"__name__": __name__})

    monkeypatch.setattr("recipes.settings.import_filters", import_filters)
    shown = 0
    for file, words in commands():
        name, *argv = words[words.index(next(w for w in words if w.endswith(".py"))) :]
        if name == "recipes/generate.py":
            get_command(generate.app).commands[argv[0]].make_context(argv[0], argv[1:])
            continue
        if name == "recipes/compare.py" and argv[0] == "league":
            options = play.arguments().parse_args(argv[1:])
            League(play.read_league(options.config), "shown", options.data).check({})
            continue
        if name == "recipes/compare.py" and argv[0] == "table":
            options, argv = paper_table.arguments().parse_known_args(argv[1:])
            table = paper_table.Table.load(options.table)
            argv = ["--config", options.config or table.config, "--task", next(iter(table.tasks)), *argv]
            name = SCRIPTS[table.recipe]
        elif name == "recipes/compare.py":
            options, argv = compare.arguments().parse_known_args(argv)
            name = SCRIPTS[options.recipe]
        recipe = import_module(f"recipes.{Path(name).stem}").RECIPE
        tasks = list(recipe.metrics)[:1] if "$task" in argv else []
        try:
            Settings(recipe).parse([*argv, *(["--task", tasks[0]] if tasks else [])])
        except ValueError as error:
            raise AssertionError(f"{file.name}: {shlex.join(words)}") from error
        shown += 1
    assert shown > 20


SAID = {
    "accelerate_loop": r"rating, 128 other snippets: (\d\.\d+) before, (\d\.\d+) after",
    # both models start as the same one
    "fine_tune": r"baseline: +(\d\.\d+) before, \d\.\d+ after\nwith GFSA: \1 before, (\d\.\d+) after",
    "language_model": r"cross-entropy of 128 other reviews: (\d\.\d+) before, (\d\.\d+) after",
    "model_report": r"cosine of two tokens .* (-?\d\.\d+) \(reference: (-?\d\.\d+)\)",
    "transfer_to_agf": r"from the original's, relative: (\d\.\d+) before, (\d\.\d+) after",
    "own_filter": r"patched: the output changes by (0\.0e\+00)\nwalking lazily: the output changes by (\d)",
    "sentence_embeddings": r"rating, 100 other pairs: (-?\d\.\d+) before, (-?\d\.\d+) after",
    "vision": r"on 64 other images: (\d\.\d+) before, (\d\.\d+) after",
}
FALL = {
    "accelerate_loop",
    "fine_tune",
    "language_model",
    "transfer_to_agf",
}  # what they print falls, that of the others rises
STEPS = ["small", "--steps", "4"]
CHEAPER = {
    "accelerate_loop": STEPS,
    "fine_tune": STEPS,
    "language_model": ["--steps", "4"],
    "model_report": ["small"],
    "sentence_embeddings": STEPS,
    "transfer_to_agf": STEPS,
}
NEEDED = {"language_model": "trl", "sentence_embeddings": "sentence_transformers"}
WRITTEN = {"model_report": "report.html"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("as_is", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_examples(file, as_is, folder, monkeypatch, capsys, transformers_warnings):
    """As a user runs them; the longer ones with a small model and few steps where the test is not slow."""
    if file.stem in NEEDED:
        pytest.importorskip(NEEDED[file.stem])
    argv = [] if as_is else CHEAPER.get(file.stem, [])
    if argv:
        small_bert("small")
    monkeypatch.setattr(sys, "argv", [str(file), *argv])
    runpy.run_path(str(file), run_name="__main__")
    transformers_warnings.clear()  # of the new head
    out = capsys.readouterr().out
    assert re.search(r"^module +filter .*backend$", out, re.MULTILINE), out
    before, after = map(float, re.search(SAID[file.stem], out).groups())
    better = before > after if file.stem in FALL else before < after
    assert better or argv
    assert list((folder / "runs" / "examples" / file.stem).rglob(WRITTEN.get(file.stem, "model.safetensors")))


def test_a_loop_makes_the_steps_that_were_asked_for(folder, monkeypatch, transformers_warnings):
    small_bert("small")
    rows = demo.load_snippets()[: 128 + 40]  # two and a half batches to train on
    monkeypatch.setattr(demo, "load_snippets", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["accelerate_loop.py", "small", "--steps", "7"])
    variables = runpy.run_path(str(ROOT / "examples" / "accelerate_loop.py"), run_name="__main__")
    assert variables["schedule"].scheduler.last_epoch == 7
    transformers_warnings.clear()  # of the new head


def test_the_page_of_examples_lists_all_and_shows_an_output():
    page = (ROOT / "docs" / "examples.md").read_text()
    files = [*EXAMPLES, *(ROOT / "notebooks").glob("*.ipynb")]
    assert [file.name for file in files if f"](../{file.relative_to(ROOT)})" not in page] == []
    assert re.search(SAID["fine_tune"], page)
