"""The command line: same verbs, one-line errors, no tracebacks for user mistakes."""

import os
import subprocess
import sys

import pytest
import torch
from models import FAMILIES, output
from transformers import AutoModel, BertForSequenceClassification, BertTokenizer

from hf_graphfilter import filter_status


def cli(*arguments):
    environment = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "hf_graphfilter.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def plain(tmp_path):
    BertForSequenceClassification(FAMILIES["bert"].config).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_patch_status_card(plain, tmp_path):
    out = tmp_path / "patched"
    done = cli("patch", plain, out, "-o", "K=4", "-o", 'learn=["w_0","w_K"]', "--layers", "0,-1")
    assert done.returncode == 0, done.stderr
    model = BertForSequenceClassification.from_pretrained(out)
    assert [(row.filter.K, row.filter.learn) for row in filter_status(model)] == [(4, ("w_0", "w_K"))] * 2
    inputs = FAMILIES["bert"].inputs()
    assert torch.equal(model(**inputs).logits, BertForSequenceClassification.from_pretrained(plain)(**inputs).logits)

    shown = cli("status", out)
    assert shown.returncode == 0
    assert "bert.encoder.layer.2.attention.self" in shown.stdout

    made = cli("card", out, "--base-model", "bert-base-uncased")
    assert made.returncode == 0, made.stderr
    assert "base_model: bert-base-uncased" in (out / "README.md").read_text()


def test_transfer(plain, tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(plain)
    (tmp_path / "text.txt").write_text(" ".join("abcdefghij"[i * i % 10] for i in range(2000)))
    done = cli("patch", plain, tmp_path / "agf", "-f", "agf", "-o", "correction=true", "-o", "theta=per_head")
    assert done.returncode == 0, done.stderr
    assert "fit it with hf-graphfilter transfer" in done.stdout
    arguments = ("--text", tmp_path / "text.txt", "--steps", "4", "--length", "16", "--batch-size", "4")
    done = cli("transfer", tmp_path / "agf", tmp_path / "fitted", *arguments)
    assert done.returncode == 0, done.stderr
    assert "4 steps" in done.stdout
    model = BertForSequenceClassification.from_pretrained(tmp_path / "fitted")
    assert filter_status(model)[0].filter.correction
    missing = cli("transfer", tmp_path / "agf", tmp_path / "fitted", "--text", tmp_path / "nothing.txt")
    assert missing.returncode == 1
    assert "nothing.txt" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_auto_class(plain, tmp_path):
    assert cli("patch", plain, tmp_path / "base", "--auto-class", "AutoModel", "--layers", "1:").returncode == 0
    model = AutoModel.from_pretrained(tmp_path / "base")
    assert len(filter_status(model)) == 2
    assert output(model, FAMILIES["bert"].inputs()).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["patch", "PLAIN", "OUT", "--filter", "gsfa"], 1, "did you mean 'gfsa'?"),
        (["patch", "PLAIN", "OUT", "-o", "k=3"], 1, "did you mean 'K'?"),
        (["patch", "PLAIN", "OUT", "-o", "K"], 1, "write NAME=VALUE"),
        (["patch", "PLAIN", "OUT", "-o", "K=0"], 1, "K must be an integer >= 1"),
        (["patch", "PLAIN", "OUT", "--layers", "x"], 1, "use all, even, odd, indices"),
        (["patch", "PLAIN", "OUT", "--layers", "9"], 1, "9 is out of range"),
        (["patch", "PLAIN", "OUT", "--auto-class", "Nope"], 1, "no model class 'Nope'"),
        (["patch", "nowhere/at-all", "OUT"], 1, "nowhere/at-all"),
        (["status", "PLAIN"], 1, "has no graph filter"),
        (["card", "PLAIN"], 1, "no graph filter to describe"),
        (["demo", "--seeds", "0"], 2, "--seeds"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes_are_one_line(arguments, code, message, plain, tmp_path):
    places = {"PLAIN": plain, "OUT": tmp_path / "out"}
    done = cli(*(places.get(a, a) for a in arguments))
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len([line for line in done.stderr.splitlines() if line.startswith("hf-graphfilter:")]) == 1
    assert not (tmp_path / "out").exists()


def test_help_teaches():
    text = cli("--help").stdout
    assert all(verb in text for verb in ("patch", "status", "card", "demo"))
    assert "runs/bert-gfsa" in cli("patch", "--help").stdout
