"""The command line: same verbs, one-line errors, no tracebacks for user mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from deaths import deaths
from models import FAMILIES, output
from safetensors import SafetensorError
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertForSequenceClassification,
    BertTokenizer,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

import hf_graphfilter
from hf_graphfilter import GraphFilterError, devices, filter_status, patch_model
from hf_graphfilter.cli import main
from hf_graphfilter.cli.inputs import Images, lines_of
from hf_graphfilter.console import parse_options
from hf_graphfilter.files import read_state
from hf_graphfilter.fitting import fit as call
from hf_graphfilter.fitting import run


@pytest.fixture
def cli(monkeypatch, capfd):
    """The command, in this process."""

    def run(*arguments, columns=160):
        for name, value in {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["hf-graphfilter", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        stdout, stderr = capfd.readouterr()
        return SimpleNamespace(returncode=done.value.code or 0, stdout=stdout, stderr=stderr)

    verbosity = logging.get_verbosity()
    yield run
    logging.set_verbosity(verbosity)  # the demo has a quiet process of its own


def test_options_are_json_or_python():
    pairs = ["K=4", 'learn=["w_0"]', "keep={4: [0, 2]}", "basis=jacobi", "text={not closed"]
    expected = {"K": 4, "learn": ["w_0"], "keep": {4: [0, 2]}, "basis": "jacobi", "text": "{not closed"}
    assert parse_options(pairs) == expected
    constants = parse_options(["a=true", "b=False", "c=null", "d=None", "e=True story"])
    assert constants == {"a": True, "b": False, "c": None, "d": None, "e": "True story"}


def test_as_a_module():
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-m", "hf_graphfilter", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == f"hf-graphfilter {hf_graphfilter.__version__}\n"


@pytest.fixture
def plain(tmp_path):
    BertForSequenceClassification(FAMILIES["bert"].config).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_patch_status_card(cli, plain, tmp_path):
    out = tmp_path / "patched"
    done = cli("patch", plain, out, "-o", "K=4", "-o", 'learn=["w_0","w_K"]', "--layers", "0,-1")
    assert done.returncode == 0, done.stderr
    assert "no tokenizer or processor found" in done.stderr
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", "model.safetensors"}, "no tokenizer"
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


@pytest.fixture
def text(plain, tmp_path):
    """A plain text, and a tokenizer for it beside the model."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(plain)
    (tmp_path / "text.txt").write_text(" ".join("abcdefghij"[i * i % 10] for i in range(2000)))
    return tmp_path / "text.txt"


@pytest.fixture
def agf(cli, text, plain, tmp_path):
    done = cli("patch", plain, tmp_path / "agf", "-f", "agf", "-o", "correction=true", "-o", "theta=per_head")
    assert done.returncode == 0, done.stderr
    assert "fit it with hf-graphfilter transfer" in done.stdout
    return tmp_path / "agf"


SHORT = ("--steps", "4", "--length", "16", "--batch-size", "4")


def test_transfer(cli, text, agf, tmp_path):
    done = cli("transfer", agf, tmp_path / "fitted", "--text", agf / "model.safetensors", *SHORT)
    assert "model.safetensors is no text file" in done.stderr
    done = cli("transfer", agf, tmp_path / "fitted", "--text", text, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "4 steps" in done.stdout
    assert not (tmp_path / "fitted" / ".transfer").exists(), "the progress"
    model = BertForSequenceClassification.from_pretrained(tmp_path / "fitted")
    assert filter_status(model)[0].filter.correction


def test_transfer_of_an_encoder_decoder(cli, text, plain, tmp_path):
    sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "t5")
    AutoTokenizer.from_pretrained(plain).save_pretrained(tmp_path / "t5")
    options = ("-f", "agf", "-o", "position_bias=drop", "--stack", "encoder")
    assert cli("patch", tmp_path / "t5", tmp_path / "agf", *options).returncode == 0
    done = cli("transfer", tmp_path / "agf", tmp_path / "fitted", "--text", text, *SHORT)
    assert done.returncode == 0, done.stderr


def test_notes_in_the_output_stop_a_conversion_before_its_work(cli, text, plain, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("my notes")
    done = cli("linearize", plain, tmp_path / "out", "--text", text)
    assert done.returncode == 1
    assert "was not written by hf_graphfilter" in done.stderr
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out" / "README.md"]


def test_a_folder_called_run(cli, plain, tmp_path):
    assert cli("patch", plain, tmp_path / "run").returncode == 0
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert cli("status", "run", "--device", "cpu").returncode == 0
    finally:
        os.chdir(before)


def test_an_interrupted_transfer_says_that_it_goes_on(cli, text, agf, tmp_path, monkeypatch, ctrl_c):
    fitted = tmp_path / "fitted"
    command = ("transfer", agf, fitted, "--text", text, *SHORT)
    advance = run.StageRun._advance

    def interrupt(self, *arguments):
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(call, "filter_errors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        done = cli(*command)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (
            130,
            "hf-graphfilter: interrupted: nothing was fitted yet",
        )
    with monkeypatch.context() as patch:
        patch.setattr(run.StageRun, "_advance", interrupt)
        done = cli(*command)
    assert done.returncode == 130
    assert f"progress is kept in {fitted / '.transfer'}, and the same command resumes" in done.stderr
    assert read_state(fitted / ".transfer" / "transfer.safetensors")[0]["step"] == 3
    assert cli(*command).returncode == 0
    assert not (fitted / ".transfer").exists()


def test_convert(cli, text, plain, tmp_path, monkeypatch, ctrl_c):
    lines = text.read_text()
    text.write_text("\n".join(lines[i : i + 60] for i in range(0, len(lines), 60)))
    short = ("--text", text, "--budget", "2000", "--length", "16", "--batch-tokens", "64", "--holdout", "2")
    short += ("--stage", "attention=1", "--stage", "hidden=1", "-o", "window=2")
    advance, out = run.StageRun._advance, tmp_path / "converted"
    own = [out / name / "mine" for name in ("conversion", ".conversion")]
    for file in own:  # whatever it is, it is not the progress
        file.parent.mkdir(parents=True)
        file.touch()

    def interrupt(self, *arguments):
        if self.step == 7:
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run.StageRun, "_advance", interrupt)
        done = cli("linearize", plain, out, *short)
    assert done.returncode == 130
    assert f"progress is kept in {out / '.conversion'}, and the same command resumes" in done.stderr
    done = cli("linearize", plain, out, *short, "--layers", "auto:67%")
    assert done.returncode == 1
    assert "progress of another transfer (share differ)" in done.stderr
    done = cli("linearize", plain, out, *short, "--speed")
    assert done.returncode == 0, done.stderr
    assert "linearized / original" in done.stdout
    assert "faster than the original" in done.stdout
    assert "without far" in done.stdout
    assert sorted(out.glob(".conversion/**/*")) == own[1:]
    assert own[0].exists()
    assert json.loads((out / "conversion.json").read_text())["budget"] == 2000
    model = BertForSequenceClassification.from_pretrained(out)
    assert {row.filter.window for row in filter_status(model)} == {2}
    card = (out / "README.md").read_text()
    assert "## Conversion" in card
    assert "relative error of attention" in card
    (tmp_path / "texts").mkdir()
    text.rename(tmp_path / "texts" / "train.txt")
    short = ("--dataset", tmp_path / "texts", *short[2:])
    done = cli("linearize", plain, tmp_path / "of-a-data-set", *short, "--stream")
    assert done.returncode == 0, done.stderr
    done = cli("linearize", plain, tmp_path / "wrong", *short, "--column", "sentence")
    assert "has no column 'sentence'; it has text" in done.stderr
    done = cli("linearize", plain, tmp_path / "wrong", "--text", tmp_path / "texts" / "train.txt", "--stream")
    assert "--stream reads a data set" in done.stderr
    again = cli("linearize", out, tmp_path / "again", *short)
    assert "has graph filters already" in again.stderr
    for wrong, message in (
        (("--budget", "0"), "budget must be a number of tokens"),
        (("--images", tmp_path), "one of --text FILE, --dataset NAME and --images DIR"),
        (("--stage", "attention"), "write NAME=VALUE"),
        (("--stage", "attention=x"), "--stage attention=x: the share is a number"),
        (("-o", "budget=3"), "--option budget: --option is for options of the filter"),
        (("--dtype", "bfloat16", "--train", "all"), "load the model in float32"),
        (("--lr", "nan"), "--lr must be a positive number"),
        (("-f", "gfsa"), "computes softmax attention"),
        (("--choose", "both"), "choose='both' says how layers='auto:75%' chooses"),
    ):
        done = cli("linearize", plain, tmp_path / "wrong", *short, *wrong)
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
        assert not (tmp_path / "wrong").exists()


def test_the_earlier_name_of_a_verb(cli):
    assert "--budget" in cli("convert", "--help").stdout
    assert " convert " not in cli("--help").stdout


@pytest.mark.parametrize("verb", ["patch", pytest.param("linearize", marks=pytest.mark.slow)])
def test_a_filter_begins_with_the_values_of_its_seed(verb, cli, text, plain, tmp_path):
    convert = ("-f", "agf", "--text", text, "--budget", "64", "--length", "16", "--holdout", "1", "-o", "window=2")
    text.write_text("\n".join(["a b c d e f g h i j a b c d"] * 20))
    made = []
    for name, seed in {"one": (), "two": ("--seed", "0"), "other": ("--seed", "3")}.items():
        done = cli(verb, plain, tmp_path / name, *(convert if verb == "linearize" else ("-f", "agf")), *seed)
        assert done.returncode == 0, done.stderr
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_a_full_disk_is_one_line(cli, text, plain, agf, tmp_path, monkeypatch):
    write, written = safetensors.torch.serialize_file, []

    def full(tensors, path, *rest, **options):
        written.append(path)
        if len(written) == room + 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        return write(tensors, path, *rest, **options)

    convert = ("-f", "agf", "--text", text, "--budget", "64", "--length", "16", "--holdout", "1", "-o", "window=2")
    lines = tmp_path / "text.txt"
    lines.write_text(f"{lines.read_text()}\n" * 9)
    commands = {
        ("transfer", agf, tmp_path / "fitted", "--text", text, *SHORT): 1,
        ("linearize", plain, tmp_path / "converted", *convert): 1,
        ("patch", plain, tmp_path / "patched"): 0,
        ("save-filter", agf, tmp_path / "filter"): 0,
    }
    for command, room in commands.items():
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(safetensors.torch, "serialize_file", full)
            done = cli(*command)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        said = done.stderr.strip().splitlines()[-1]
        assert re.match(r"hf-graphfilter: .*No space left on device", said)
        assert ("progress is kept in" in said and "the same command resumes" in said) == bool(room), said
        assert cli(*command).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["transfer", "linearize", "save-filter"])
def test_a_command_that_dies_at_a_write_ends_the_same(verb, cli, text, plain, agf, tmp_path, transformers_warnings):
    text.write_text(f"{text.read_text()}\n" * 9)
    short = {
        "transfer": (agf, "--text", text, *SHORT),
        "linearize": (plain, "--text", text, "--budget", "64", "--length", "16", "--holdout", "1", "-o", "window=2"),
        "save-filter": (agf,),
    }

    def command(folder):
        done = cli(verb, short[verb][0], folder, *short[verb][1:])
        assert done.returncode == 0, done.stderr
        names = {".safetensors", ".json"}
        kept = {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in names}
        if "conversion.json" in kept:
            kept["conversion.json"] = {**json.loads(kept["conversion.json"]), "seconds": 0}
        return kept

    for folder, expected in deaths(tmp_path / "dying", None, command):
        assert command(folder) == expected, folder
        assert not [*folder.glob(".*/*")]


def test_convert_images(cli, tmp_path, monkeypatch):
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        image_size=[16, 16],
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    for green, animal in enumerate(("cats", "dogs")):
        (tmp_path / "photos" / animal).mkdir(parents=True)
        for i in range(20):
            Image.new("RGB", (20, 20), (i * 9, 90 * green, 90)).save(tmp_path / "photos" / animal / f"{i}.png")
    first = next(iter(Images(str(tmp_path / "vit"), tmp_path / "photos", 8)))["pixel_values"]
    assert len(first[:, 1].unique()) == 2, "of one kind, as the folders have it"
    command = ("linearize", tmp_path / "vit", tmp_path / "out", "--images", tmp_path / "photos")
    short = ("--budget", "400", "--batch-tokens", "64", "--holdout", "2", "-o", "window=2")
    done = cli(*command, *short)
    assert done.returncode == 0, done.stderr
    assert "agreement" in done.stdout
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    done = cli(*command, *short)
    assert done.returncode == 1
    assert re.search(r"--images: .*png cannot be read as an image \(Image size \(400 pixels\) exceeds", done.stderr)


def test_ctrl_c_before_the_work_is_said(cli, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    done = cli("patch", plain, tmp_path / "out", "--auto-class", "BertModel")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "hf-graphfilter: interrupted")


def test_the_filter_alone_and_back(cli, plain, tmp_path):
    places = [tmp_path / name for name in ("patched", "filter", "again", "back")]
    patched, alone, again, back = places
    assert cli("patch", plain, patched, "-o", "w_K=0.2", "-l", "even").returncode == 0
    assert cli("save-filter", patched, alone).returncode == 0
    assert {f.name for f in alone.iterdir()} == {"graph_filter.json", "graph_filter.safetensors"}
    assert cli("load-filter", plain, alone, again).returncode == 0
    assert cli("unpatch", again, back).returncode == 0
    inputs = FAMILIES["bert"].inputs()
    logits = [BertForSequenceClassification.from_pretrained(p)(**inputs).logits for p in (plain, back, patched, again)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[2], logits[3])
    assert not torch.equal(logits[0], logits[2])
    refused = cli("load-filter", cli_agf(cli, plain, tmp_path), alone, tmp_path / "no")
    assert "unpatch_model first (hf-graphfilter unpatch)" in refused.stderr
    assert not (tmp_path / "no").exists()


def cli_agf(cli, plain, tmp_path):
    assert cli("patch", plain, tmp_path / "other", "-f", "agf").returncode == 0
    return tmp_path / "other"


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_what_is_shown_fits_and_breaks_no_name(columns, cli, plain, tmp_path):
    out = tmp_path / "patched"
    shown = [cli("patch", plain, out, columns=columns), cli("filters", columns=columns)]
    shown += [cli("status", out, columns=columns)]
    for done in shown:
        assert done.returncode == 0, done.stderr
        assert all(len(line) <= columns for line in done.stdout.splitlines())
    assert all(f"bert.encoder.layer.{i}.attention.self" in shown[-1].stdout for i in range(3))
    assert "w_K 0.0000" in shown[-1].stdout or "│ 0.0000" in shown[-1].stdout
    for name in ("gfsa", "agf", "approximation", "constrain_theta", '["w_K"]', "jacobi, chebyshev"):
        assert name in shown[1].stdout


def test_filters_of_one_s_own(cli, plain, tmp_path, monkeypatch):
    (tmp_path / "half_filter.py").write_text(
        """
from dataclasses import dataclass
from hf_graphfilter import FilterConfig, GraphFilter, register_filter

class Half(GraphFilter):
    def reset_parameters(self): pass
    def forward(self, shift, value): return self.config.factor * shift(value)

@register_filter("half")
@dataclass(frozen=True)
class HalfConfig(FilterConfig):
    '''A part of the attention.'''
    module = Half
    factor: float = 0.5
"""
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    unknown = cli("patch", plain, tmp_path / "out", "-f", "half")
    assert "command line: --import MODULE" in unknown.stderr
    done = cli("--import", tmp_path / "half_filter.py", "filters", "half")
    assert all(part in done.stdout for part in ("A part of the attention.", "factor", "0.5", "a number"))
    assert cli("--import", tmp_path / "half_filter.py", "patch", plain, tmp_path / "out", "-f", "half").returncode == 0


def test_a_filter_in_the_place_of_attention_of_one_s_own(cli, plain, tmp_path):
    toy = ("--import", Path(__file__).parent / "linear_attention.py")
    done = cli(*toy, "patch", plain, tmp_path / "out", "-f", "linear-attention", "-o", "init=blend", "-o", "decay=0.5")
    assert done.returncode == 0, done.stderr
    shown = cli(*toy, "status", tmp_path / "out").stdout
    assert all(part in shown for part in ("linear-attention", "sharpness", "gate"))
    listed = cli(*toy, "filters", "linear-attention").stdout
    assert listed.index("decay") < listed.index("init"), "its own options come first"


def test_card_of_another_is_left_alone(cli, plain, tmp_path, monkeypatch):
    out = tmp_path / "patched"
    assert cli("patch", plain, out).returncode == 0
    (out / "trainer_state.json").write_text('{"num_train_epochs": 3, "global_step": 90, "log_history": []}')
    (out / "training_args.bin").write_bytes(b"no pickle is read")
    foreign = "---\nlicense: mit\n---\n\n# Mine\n"
    (out / "README.md").write_text(foreign)
    with monkeypatch.context() as patch:  # found before the weights are loaded
        patch.setattr(PreTrainedModel, "from_pretrained", None)
        done = cli("card", out)
    assert done.returncode == 1
    assert "pass force=True (--force)" in done.stderr
    assert (out / "README.md").read_text() == foreign
    done = cli("card", out, "--force", "--repo-id", "me/bert-gfsa", "--training", "learning_rate=2e-5")
    assert done.returncode == 0, done.stderr
    text = (out / "README.md").read_text()
    for part in ("license: mit", 'from_pretrained("me/bert-gfsa")', "| learning_rate | 2e-05 |", "| steps | 90 |"):
        assert part in text
    assert cli("card", out, "--repo-id", "me/bert-gfsa").returncode == 0, "its own card"
    assert "| learning_rate | 2e-05 |" not in (out / "README.md").read_text(), "these settings are the newer ones"


def test_auto_class(cli, plain, tmp_path, transformers_warnings):
    assert cli("patch", plain, tmp_path / "base", "--auto-class", "AutoModel", "--layers", "1:").returncode == 0
    transformers_warnings.clear()  # the head is left out
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
        (["patch", "PLAIN", "OUT", "--layers", "x"], 1, "a text is 'all', 'even', 'odd'"),
        (["patch", "PLAIN", "OUT", "--layers", "9"], 1, "9 is out of range"),
        (["patch", "PLAIN", "OUT", "--auto-class", "Nope"], 1, "no model class 'Nope'"),
        (["patch", "PLAIN", "OUT", "--auto-class", "AutoTokenizer"], 1, "no model class 'AutoTokenizer'"),
        (["patch", "nowhere/at-all", "OUT"], 1, "nowhere/at-all"),
        (["status", "nowhere/patch_model"], 1, "nowhere/patch_model"),
        (["patch", "PLAIN", "FILE"], 1, "FILE is a file, name a directory"),
        (["patch", "PLAIN", "FILE/x"], 1, "is a file, name a directory"),
        (["patch", "PLAIN", "PLAIN"], 1, "is the checkpoint to read"),
        (["patch", "PLAIN", "/proc/nowhere/x"], 1, "cannot write to /proc/nowhere/x"),
        (["patch", "PLAIN", "OUT", "--stack", "middle"], 2, "--stack"),
        (["patch", "PLAIN", "OUT", "--stack", "decoder"], 1, "stack='decoder': the model has encoder"),
        (["status", "PLAIN"], 1, "has no graph filter"),
        (["status", "EMPTY"], 1, "holds no config.json"),
        (["status", "FILE"], 1, "is a file: name the directory"),
        (["status", "BROKEN"], 1, "cannot load"),
        (["status", "OTHER"], 1, "cannot load"),
        (["patch", "PLAIN", "OUT", "-o", "K=" + "[" * 100_000], 1, "K must be an integer"),
        (["status", "TIMM"], 1, "use load_timm_model in Python"),
        (["card", "PLAIN"], 1, "has no graph filter"),
        (["unpatch", "PLAIN", "OUT"], 1, "has no graph filter"),
        (["save-filter", "PLAIN", "OUT"], 1, "has no graph filter"),
        (["load-filter", "PLAIN", "EMPTY", "OUT"], 1, "holds no graph_filter.json"),
        (["transfer", "PLAIN", "OUT", "-t", "FILE"], 1, "has no graph filter"),
        (["transfer", "PLAIN", "OUT", "-t", "FILE", "--lr", "nan"], 1, "--lr must be a positive number"),
        (["filters", "gsfa"], 1, "did you mean 'gfsa'?"),
        (["--import", "nothing.there", "filters"], 1, "cannot import filters from 'nothing.there'"),
        (["demo", "--seeds", "0"], 2, "--seeds"),
        (
            ["linearize", "PLAIN", "OUT", "-t", "FILE", "--budget", "-5"],
            1,
            "budget must be a number of tokens, at least 1",
        ),
        (["linearize", "nowhere/at-all", "OUT", "-t", "FILE", "--stage", "hiden=1"], 1, "there is no stage 'hiden'"),
        (["linearize", "nowhere/at-all", "OUT", "-t", "FILE", "-o", "windo=4"], 1, "has no option 'windo'"),
        (["demo", "--filter-lr", "-1"], 1, "filter_lr must be a finite learning rate >= 0, got -1"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes_are_one_line(arguments, code, message, cli, plain, tmp_path, monkeypatch):
    timm = '{"architecture": "x", "pretrained_cfg": {}}'
    for name, content in {"EMPTY": None, "BROKEN": "{", "OTHER": '{"model_type": []}', "TIMM": timm}.items():
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "config.json").write_text(content)
    (tmp_path / "FILE").write_text("text")
    there = {path.name: path for path in tmp_path.iterdir()} | {"PLAIN": plain, "OUT": tmp_path / "out"}
    places = there | {"FILE/x": tmp_path / "FILE" / "x"}
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)  # all of these are found before the weights
    done = cli(*(places.get(a, a) for a in arguments))
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len([line for line in done.stderr.splitlines() if line.startswith("hf-graphfilter:")]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "content"), [("texts.jsonl", b'{"text": "a"}'), ("texts", b"PK\x03\0")])
def test_tables_and_archives_are_no_texts(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GraphFilterError, match=f"{name} is no text file: write its texts into one"):
        lines_of([tmp_path / name])


@pytest.mark.parametrize("damage", [lambda content: content.replace("WordPiece", "Newer"), lambda content: "[]"])
def test_a_damaged_tokenizer_is_named(damage, cli, text, plain, tmp_path):
    file = plain / "tokenizer.json"
    file.write_text(damage(file.read_text()))
    done = cli("patch", plain, tmp_path / "out")
    assert done.returncode == 0
    assert f"note: {plain} has no tokenizer that can be read" in " ".join(done.stderr.split())
    done = cli("report", plain, "--text", text, "--output", tmp_path / "page.html")
    assert done.returncode == 1
    assert f"hf-graphfilter: {plain} has no tokenizer that can be read" in done.stderr


def test_texts_may_come_from_a_pipe():
    read, write = os.pipe()
    os.write(write, b"a first text\n\nand a second\n")
    os.close(write)
    assert lines_of([Path(f"/dev/fd/{read}")]) == ["a first text", "and a second"]
    os.close(read)


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"architectures": 5}, {"architectures": [5]}])
def test_a_config_written_by_hand_gives_no_traceback(change, cli, tmp_path, transformers_warnings):
    patch_model(FAMILIES["bert"].build()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    done = cli("status", tmp_path)
    transformers_warnings.clear()
    # releases of transformers differ in what they refuse
    assert done.returncode == ("cannot load" in done.stderr), done.stderr
    assert done.returncode or "num_attention_heads" not in change


def test_a_revision_a_token_and_a_device(cli, plain, tmp_path, monkeypatch):
    """Before the verb or behind it; the token reaches the environment alone."""
    monkeypatch.setenv("HF_TOKEN", "")
    asked = []

    def from_pretrained(source, **options):
        asked.append((source, options))
        raise OSError("no such repository")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    done = cli("--revision", "v2", "patch", "me/base", tmp_path / "out", "--token=hf_secret")
    assert done.returncode == 1
    assert done.stderr == "hf-graphfilter: cannot load me/base: no such repository\n"
    assert asked == [("me/base", {"revision": "v2"})]
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["status", "PLAIN", "--revision", "v2"],
            "--revision v2 is of a checkpoint on the Hub, and PLAIN is on this disk",
        ),
        (["status", "PLAIN", "--device", "nowhere"], "--device nowhere: Expected one of cpu, cuda"),
        (["patch", "PLAIN", "OUT", "--push-to-hub", "bad name!!"], "--push-to-hub bad name!!: Repo id must"),
        (["filters", "--push-to-hub", "me/filters"], "--push-to-hub: filters saves no checkpoint"),
        (["--device", "cpu", "run", "train.py"], "--device: run starts a program that chooses its device itself"),
        (["demo", "--device", "meta"], "--device meta: the demo computes on cpu or the first accelerator"),
    ],
)
def test_flags_of_all_verbs_that_do_not_fit(arguments, message, cli, plain, monkeypatch):
    monkeypatch.setattr(devices, "_chosen", [])
    monkeypatch.setattr(os, "execve", lambda *command: None)  # `run` would become the program
    done = cli(*(str(plain) if word == "PLAIN" else word for word in arguments))
    assert done.returncode == 1
    assert message.replace("PLAIN", str(plain)) in done.stderr


def test_help_teaches(cli):
    text = cli("--help").stdout
    assert all(
        verb in text for verb in ("patch", "unpatch", "status", "save-filter", "load-filter", "filters", "card", "demo")
    )
    assert "runs/bert-gfsa" in cli("patch", "--help").stdout


def test_env_names_what_a_bug_report_needs(cli, monkeypatch):
    monkeypatch.setenv("HF_GRAPHFILTER_WEIGHTS", "/somewhere")
    printed = cli("env").stdout
    for name in ("Python", "processor", "accelerators", "hf-graphfilter", "torch", "transformers"):
        assert f"- {name}: " in printed
    assert "- HF_GRAPHFILTER_WEIGHTS: /somewhere" in printed
