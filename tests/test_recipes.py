"""The recipes: settings, data, runs that resume, comparisons, pushing. Small models from scratch, no network."""

import dataclasses
import gc
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
import weakref
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, DatasetDict
from deaths import deaths, some
from filelock import FileLock
from hub_server import TOKEN, Hub
from models import FAMILIES
from scipy import stats
from sklearn import metrics as sklearn_metrics
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Seq2SeqTrainingArguments,
)
from transformers.integrations import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.trainer_pt_utils import LengthGroupedSampler

import recipes
from hf_graphfilter import GraphFilterError, filter_status, patch_model
from hf_graphfilter.analysis.comparison import paired_comparison
from recipes import (
    checkpoints,
    compare,
    errors,
    glue,
    graphs,
    identities,
    imagenet,
    language_modeling,
    metrics,
    own_texts,
    records,
    runs,
    sequences,
    source_code,
    speech,
    summary,
    training,
)
from recipes import (
    settings as recipe_settings,
)
from recipes.arguments import RecipeArguments
from recipes.classifier import PooledClassifier
from recipes.data import cut, encode_labels
from recipes.files import read_texts
from recipes.models import build_model, train_bpe
from recipes.settings import CONFIGS, Settings
from recipes.variants import choose_variants

ROOT = Path(__file__).parents[1]

SCRIPTS = (glue, language_modeling, source_code, sequences, imagenet, graphs, speech)
RECIPES = {recipe.RECIPE.name: recipe.RECIPE for recipe in SCRIPTS}
DATA = ROOT.parent / "shared" / "data"
ENCODER = ["--model", "roberta", "--from_scratch", "num_hidden_layers=2", "hidden_size=32", "num_attention_heads=2"]
ENCODER += ["intermediate_size=64", "max_position_embeddings=40", "--train_tokenizer", "280", "--max_length", "32"]
DECODER = ["--model", "gpt2", "--from_scratch", "n_layer=2", "n_embd=32", "n_head=2", "n_positions=16"]
DECODER += ["--train_tokenizer", "280", "--max_length", "16"]
SHORT = ["--max_steps", "4", "--eval_strategy", "no", "--save_strategy", "no", "--disable_tqdm", "true", "--use_cpu"]

README_COMPARISON = ["glue", "--config", "glue/minilm.yaml", "--task", "cola", "--seeds", "1"]


@pytest.fixture
def cola(tmp_path):
    """A folder with CoLA files, in which the label depends on a word."""
    folder = tmp_path / "data" / "CoLA"
    folder.mkdir(parents=True)
    for name, rows in (("train", 48), ("dev", 16)):
        lines = [f'src\t{i % 2}\t\tThe "{("cat", "dog")[i % 2]}" number {i} sat' for i in range(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder.parent


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """(filter, seed, bf16) of the runs that the recipe was asked for; it trains nothing. In an empty folder."""
    seen = []

    def run(args, training):
        seen.append((args.filter, training.seed, training.bf16))
        metrics = {"validation/matthews_correlation": training.seed / 10, "validation/loss": 1.0}
        return {"metrics": metrics, "moved": {}, "coefficients": {}, "filter_parameters": 0}

    monkeypatch.setattr(glue, "RECIPE", dataclasses.replace(glue.RECIPE, run=run))
    monkeypatch.setattr(recipe_settings, "bf16_pays", lambda use_cpu: True)
    monkeypatch.chdir(tmp_path)
    return seen


def parse(recipe, *argv):
    return Settings(RECIPES[recipe]).parse([*map(str, argv)])


def record(folder, seed=1):
    return json.loads((folder / f"seed-{seed}" / "record.json").read_text())


# ------------------------------------------------------------------------------------------------------- settings


def test_flags_stand_over_the_file_and_the_task_over_its_general_part(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "model: m\nlearning_rate: 3e-5\nfilter_options: {K: 4, w_0: -0.01}\nseeds: [1, 2]\nlayers: [0, -1]\n"
        "tasks: {rte: {num_train_epochs: 7}}\nvariants: {x: {layers: even}}\nsweep: {K: [2, 3]}\n"
    )
    values, sections = parse("glue", "--config", file, "--task", "rte", "--filter_options", "K=5", "--seeds", "9")
    assert values["learning_rate"] == 3e-5, "text in YAML"
    assert values["num_train_epochs"] == 7
    assert sorted(values["filter_options"]) == ["K=5", "w_0=-0.01"]
    assert values["seeds"] == [9]
    assert values["layers"] == "0,-1"
    assert sections == {"variants": {"x": {"layers": "even"}}, "sweep": {"K": [2, 3]}}
    values, _ = parse("glue", "--config", file, "--task", "rte", "--filter", "agf")
    assert values["filter_options"] == [], "options of another filter"


OF_RECIPES = sorted(file for file in CONFIGS.rglob("*.yaml") if file.parent.name in RECIPES)  # leagues have their tests


@pytest.mark.parametrize("file", OF_RECIPES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_every_configuration_is_valid_for_all_its_tasks(file, tmp_path):
    recipe = RECIPES[file.parent.name]
    sections = yaml.safe_load(file.read_text())
    converter = "model: converter" in file.read_text()  # which reads no series
    swept = False
    for task in recipe.metrics:
        if task == "*" or (converter and sequences.TASKS[task].kind == "series"):
            continue
        settings = Settings(recipe)
        own = ["--data", "mine"] if recipe is glue.RECIPE and task in glue.OWN else []
        values, found = settings.parse(["--config", str(file), "--task", task, *own])
        sweeps = (None, []) if "sweep" in sections and not swept else (None,)
        swept = True  # its settings are those of all tasks
        for sweep in sweeps:
            for overrides in compare.choose_variants(settings, values, found, sweep).values():
                settings.check(settings.override(values, overrides))


@pytest.mark.parametrize(
    ("recipe", "config", "task", "expected"),
    [
        (
            *("glue", "glue/bert.yaml", "cola"),
            {"num_train_epochs": 5, "per_device_train_batch_size": 32, "learning_rate": 2e-5, "weight_decay": 0}
            | {"lr_scheduler_type": "linear", "filter_options": ["K=4", "w_0=-0.01"]},
        ),
        ("language_modeling", "language_modeling/gpt2", "ptb", {"num_train_epochs": 15, "filter_options": ["K=7"]}),
        ("language_modeling", "language_modeling/gpt2", "wikitext-2", {"num_train_epochs": 10, "learning_rate": 5e-5}),
        ("language_modeling", "language_modeling/gpt2", "wikitext-103", {"num_train_epochs": 4, "stride": 512}),
        ("code", "code/codet5-small.yaml", "defect", {"num_train_epochs": 10, "early_stopping_patience": 2}),
        ("code", "code/plbart.yaml", "clone", {"num_train_epochs": 1, "per_device_train_batch_size": 16}),
        (
            *("speech", "speech/transformer.yaml", "librispeech-100"),
            # 100 epochs at one speed of three
            {"num_train_epochs": 33.333, "per_device_train_batch_size": 32, "learning_rate": 8e-4, "weight_decay": 0.01}
            | {"ctc_weight": 0.3, "label_smoothing_factor": 0.1, "seeds": [74443], "filter_options": ["K=2"]},
        ),
        ("speech", "speech/conformer.yaml", "librispeech-100", {"num_train_epochs": 40, "speeds": [0.95, 1.0, 1.05]}),
    ],
)
def test_the_settings_of_the_papers(recipe, config, task, expected):
    values, _ = parse(recipe, "--config", config, "--task", task, "--use_cpu")
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--task", "colla"], r"no task 'colla' \(did you mean 'cola'\?\)"),
        (["--task", "cola", "--filter", "gsfa"], r"unknown filter 'gsfa' \(did you mean 'gfsa'\?\).*--import MODULE"),
        (
            ["--task", "cola", "--learnin_rate", "1"],
            r"unknown argument --learnin_rate \(did you mean '--learning_rate'\?",
        ),
        (
            ["--task", "cola", "--config", "glue/bart.yaml"],
            r"no configuration glue/bart.yaml \(did you mean 'glue/bert",
        ),
        (["--task", "cola", "--seeds", "1", "1"], "name each seed once"),
        (["--task", "cola", "--seeds", "1", "2", "--push_to_hub"], "name one seed"),
        (["--task", "cola", "--push_to_hub", "--save_strategy", "no"], "needs a saved checkpoint"),
        (["--task", "cola", "--early_stopping_patience", "2", "--eval_strategy", "no"], "needs --eval_strategy"),
        (["--task", "cola", "--early_stopping_patience", "2"], "needs --metric_for_best_model, loss or another"),
        (
            ["--task", "cola", "--from_scratch", "n_layer=1", "--train_tokenizer", "300", "--tokenizer", "bert"],
            "--train_tokenizer 300 and --tokenizer bert exclude each other",
        ),
        (["--task", "cola", "--layers", "evn"], "layers='evn': a text is 'all'"),
        (["--task", "cola", "--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps 0: .* at least 1 is"),
        (
            ["--task", "cola", "--per_device_eval_batch_size", "0"],
            "--per_device_eval_batch_size 0: a number at least 1",
        ),
        (["--task", "cola", "--learning_rate=-1"], "--learning_rate -1: a number at least 0 is needed"),
        (["--task", "cola", "--batch_eval_metrics", "true"], "--batch_eval_metrics True: the recipes compute"),
        (["--task", "cola", "--eval_do_concat_batches", "false"], "--eval_do_concat_batches False: the recipes"),
        (
            ["--task", "cola", "--lr_scheduler_type", "cosine_with_min_lr"],
            "--lr_scheduler_type cosine_with_min_lr, .*min_lr",
        ),
        (["--task", "movie-snippets", "--data", "mine.csv"], "leave out --data, or use --task ratings"),
        ([], "no task given"),
    ],
)
def test_wrong_flags_are_one_clear_error(argv, message):
    with pytest.raises(GraphFilterError, match=message):
        parse("glue", "--model", "m", "--use_cpu", *argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leraning_rate: 1", r"unknown setting 'leraning_rate' in .*\(did you mean 'learning_rate'\?\)"),
        ("learning_rate: fast", "the setting 'learning_rate' in .* cannot be 'fast'"),
        ("learning_rate: [1]", "the setting 'learning_rate' in .* cannot be"),
        ("learning_rate: null", "the setting 'learning_rate' in .* cannot be None"),
        ("filter: null", "the setting 'filter' in .* cannot be None"),
        ("filter: [gfsa]", "the setting 'filter' in .* cannot be"),
        ("smoke: perhaps", "the setting 'smoke' in .* cannot be 'perhaps'"),
        ("tasks: {colla: {}}", "no task 'colla'"),
        ("tasks: {cola: 3}", "`tasks` in .* must hold, by names, a dict each"),
        ("variants: [a, b]", "`variants` in .* must hold, by names, a dict each"),
        ("sweep: {K: 3}", "`sweep` in .* must hold, by names, a list each"),
        ("tasks: {cola: {epochs: 3}}", "unknown setting 'epochs' in .*, task cola"),
        ("- a", "must hold settings"),
        ("a: [", "is no YAML"),
    ],
)
def test_wrong_files_are_one_clear_error(text, message, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(GraphFilterError, match=message):
        parse("glue", "--config", tmp_path / "a.yaml", "--task", "cola", "--model", "m", "--use_cpu")


def test_a_number_of_epochs_replaces_one_of_steps():
    config = ("language_modeling", "--config", "language_modeling/deep.yaml", "--task", "ptb", "--use_cpu")
    values, _ = parse(*config)
    assert values["max_steps"] == 2500
    values, _ = parse(*config, "--num_train_epochs", "3")
    assert (values.get("max_steps"), values["num_train_epochs"]) == (None, 3)
    values, _ = parse(*config, "--num_train_epochs", "3", "--max_steps", "7")
    assert values["max_steps"] == 7
    values, _ = parse(*config, "--smoke")
    smoke = Settings(language_modeling.RECIPE).override(values, {"num_train_epochs": 3})  # of a variant
    assert smoke["max_steps"] == values["max_steps"] == 4


def test_a_package_that_a_setting_needs_is_named():
    for error in (ImportError("pip install bitsandbytes"), RuntimeError("it requires wandb to be installed.")):
        with pytest.raises(GraphFilterError, match=r"settings of the training: .*(bitsandbytes|wandb)"):  # noqa: SIM117
            with errors.name_missing_packages():
                raise error
    with pytest.raises(RuntimeError, match="shapes"), errors.name_missing_packages():
        raise RuntimeError("shapes differ")


def test_settings_of_a_file_are_read_as_flags(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model: 7\nseeds: 3\nsmoke: 'no'\nfilter_options: {K: 5}\nmetric_for_best_model: perplexity\n")
    for flags, options in (
        ([], ["K=5"]),
        (["--filter", "gfsa"], ["K=5"]),  # which it is by default
        (["--filter", "gfsa", "--filter_options", "w_K=0.1"], ["K=5", "w_K=0.1"]),
        (["--filter", "agf"], []),
    ):
        values, _ = parse("glue", "--config", file, "--task", "rte", "--use_cpu", *flags)
        assert values["filter_options"] == options
    assert (values["model"], values["seeds"], values["smoke"]) == ("7", [3], False)
    images = Settings(imagenet.RECIPE)
    for key, given, read in (
        *(("auto_augment", None, ""), ("auto_augment", False, ""), ("precision", False, "no")),
        *(("save_strategy", False, "no"), ("max_grad_norm", None, None)),
    ):
        assert images.override({}, {key: given}) == {key: read}
    settings = Settings(glue.RECIPE)
    assert settings.arguments(values)[-1].greater_is_better is False, "of a perplexity"
    sweep = compare.choose_variants(settings, values, {"sweep": {}, "variants": {}}, ["full_determinism=false,true"])
    made = [settings.override(values, overrides).get("full_determinism") for overrides in sweep.values()]
    assert made == [None, False, True]


OWN_FILTER = """
from dataclasses import dataclass
from hf_graphfilter import FilterConfig, GraphFilter, register_filter

class Same(GraphFilter):
    def forward(self, shift, value):
        return shift(value)

@register_filter({name!r})
@dataclass(frozen=True)
class SameConfig(FilterConfig):
    module = Same
    strength: float = 1.0
"""


def test_flags_have_the_names_of_the_example_scripts_too():
    argv = ["--model_name_or_path=a", "--task_name", "cola", "--max_seq_length", "64", "--train_batch_size", "7"]
    values, _ = Settings(glue.RECIPE).parse(argv)
    chosen = [values[name] for name in ("model", "task", "max_length", "per_device_train_batch_size")]
    assert chosen == ["a", "cola", 64, 7]


def test_filters_of_other_people_are_imported_when_named(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("one", "two", "three"):
        (tmp_path / f"recipes_test_{name}.py").write_text(OWN_FILTER.format(name=f"recipes-test-{name}"))
    argv = ["--config", "glue/minilm.yaml", "--task", "cola", "--filter", "recipes-test-one"]
    argv += ["--filter_options", "strength=2", "--import", "recipes_test_one.py", "--import", "recipes_test_two"]
    runs.main(glue.RECIPE, argv)
    compare.main(["glue", *argv, "--sweep", "filter=recipes-test-one,recipes-test-two"])
    assert [name.rpartition("-")[2] for name, *_ in asked] == ["one", "none", "one", "two"]
    folder = tmp_path / "runs" / "glue" / "cola-recipes-test-one"
    assert "import" not in record(folder)["settings"], "the name of a module does not change what is learned"
    asked.clear()
    runs.main(glue.RECIPE, ["--config", str(folder / "seed-1" / "config.yaml"), "--output_dir", "again"])
    assert asked == [("recipes-test-one", 1, True)]

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [EntryPoint("n", "recipes_test_three", "group")])
    values, _ = parse("glue", "--model", "m", "--task", "cola", "--filter", "recipes-test-three")
    assert values["filter"] == "recipes-test-three", "an installed package has named its module"


def test_a_missing_extra_is_one_sentence(monkeypatch):
    for name, extra in (("sklearn", "recipes"), ("timm", "vision")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SystemExit) as stopped:
            recipes.check_extras(extra)
        monkeypatch.undo()
        assert f"this recipe needs {name}: pip install 'hf-graphfilter[{extra}]'" in stopped.value.code


# ----------------------------------------------------------------------------------------------------------- data


def test_official_files_are_read_as_they_are(tmp_path):
    (tmp_path / "train.tsv").write_text(
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
        '1\t1\t2\t" A quote that does not end .\tB\r\n0\t3\t4\tC\tD\n',
        encoding="utf-8",
    )
    (tmp_path / "dev.json").write_text(json.dumps({"0": {"text_a": "e", "text_b": "f", "label": "1"}}))
    data = glue.load.__wrapped__("mrpc", str(tmp_path))
    assert data["train"]["text_a"][:] == ['" A quote that does not end .', "C"]
    assert data["train"]["text_b"][:] == ["B", "D"]
    assert data["train"]["label"][:] == [1, 0]
    assert data["validation"][0] == {"text_a": "e", "text_b": "f", "label": 1}


def test_broken_rows_of_qqp_are_left_out_and_counted(tmp_path, capsys):
    rows = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t1\t2\ta\tb\t0"]
    (tmp_path / "dev.tsv").write_text("\n".join(rows))
    file = tmp_path / "train.tsv"
    file.write_text("\n".join([*rows, "2\t3\t4\ta broken", " question\tc\t1", "3\t5\t6\td\te\t1"]))
    data = glue.load.__wrapped__("qqp", str(tmp_path))
    assert (data["train"]["text_a"][:], data["train"]["label"][:]) == (["a", "d"], [0, 1])
    assert capsys.readouterr().err.splitlines() == [f"{file}: 2 of 4 rows are broken and left out"]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, r"has no train.tsv or train.json; it holds: dev.tsv"),
        ("", "train.tsv holds no rows"),
        ("sentence1\tsentence2\tlabel \na\tb\t0\n", "has no column 'label'; its columns are .*, 'label '"),
        ("sentence1\tsentence2\tlabel\na\tb\n", "row 1 has 2 columns, 3 were expected"),
        (
            "sentence1\tsentence2\tlabel\na\tb\tmaybe\n",
            "row 1 has the label 'maybe', expected entailment or not_entailment",
        ),
        ("sentence1\tsentence2\tlabel\na\tb\t2\n", "row 1 has the label '2'"),
        ('[{"sentence1": "a", "sentence2": "b", "label": 1.7}]', "train.json: row 1 has the label 1.7, expected"),
    ],
)
def test_wrong_data_is_one_clear_error(train, message, tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\tentailment\n")
    if train is not None:
        (tmp_path / f"train.{'json' if train.startswith('[') else 'tsv'}").write_text(train)
    with pytest.raises(GraphFilterError, match=message):
        glue.load.__wrapped__("rte", str(tmp_path))


def test_an_empty_part_and_a_missing_folder_are_errors(tmp_path):
    with pytest.raises(GraphFilterError, match="there is no folder"):
        glue.load.__wrapped__("rte", str(tmp_path / "nowhere"))
    data = DatasetDict({"train": Dataset.from_dict({"text_a": ["a"]}), "test": Dataset.from_dict({})})
    with pytest.raises(GraphFilterError, match="the part 'test' of defect is empty"):
        cut(data, RecipeArguments(model="m", task="defect"))


def test_clones_are_split_by_function(tmp_path):
    names = [str(i) for i in range(60)]  # the last twenty are others' texts again, but for white space
    texts = [f"f{int(n) % 40}{' ' if int(n) < 40 else '  '}()\u2028" for n in names]
    lines = [json.dumps({"func": text, "idx": n}) for n, text in zip(names, texts, strict=True)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    pairs = [(a, b, (int(a) + int(b)) % 2) for a, b in itertools.combinations(names, 2)]
    (tmp_path / "test.txt").write_text("".join(f"{a}\t{b}\t{y}\n" for a, b, y in pairs))
    data, split = source_code.load.__wrapped__("clone", str(tmp_path))
    functions = {
        part: {" ".join(text.split()) for text in (*rows["text_a"], *rows["text_b"])} for part, rows in data.items()
    }
    assert not any(functions[a] & functions[b] for a, b in itertools.combinations(functions, 2))
    assert [len(f) for f in functions.values()] == [24, 4, 12]
    assert split == "60/10/30 of the functions of the official test part, equal ones together"
    (tmp_path / "test.txt").write_text("0\t99\t1\n")
    with pytest.raises(GraphFilterError, match=r"test\.txt: line 1 is not two functions of data\.jsonl"):
        source_code.load.__wrapped__("clone", str(tmp_path))


def test_defects_are_split_once_and_officially_where_the_files_are(tmp_path):
    rows = [json.dumps({"func": f"int f{i}();", "target": i % 2}) for i in range(50)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    data, split = source_code.load.__wrapped__("defect", str(tmp_path))
    assert {k: len(v) for k, v in data.items()} == {"train": 35, "validation": 5, "test": 10}
    assert len({t for part in data.values() for t in part["text_a"]}) == 50
    assert split.startswith("70/10/20")
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(rows[0])
    data, split = source_code.load.__wrapped__("defect", str(tmp_path))
    assert ({k: len(v) for k, v in data.items()}, split) == ({"train": 1, "validation": 1, "test": 50}, "official")


# -------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_those_of_scikit_learn_and_scipy():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 2, (40,), generator=g).tolist() for _ in range(2))
    x, y = (torch.randn(40, generator=g, dtype=torch.float64).tolist() for _ in range(2))
    both = {"predictions": a, "references": b}
    assert metrics.load("accuracy").compute(**both) == {"accuracy": sklearn_metrics.accuracy_score(b, a)}
    assert metrics.load("f1").compute(**both) == {"f1": sklearn_metrics.f1_score(b, a)}
    assert metrics.load("matthews_correlation").compute(**both) == {
        "matthews_correlation": sklearn_metrics.matthews_corrcoef(b, a)
    }
    found = metrics.score(("spearmanr", "pearson"), x, y)
    assert found == pytest.approx({"spearmanr": stats.spearmanr(x, y)[0], "pearson": stats.pearsonr(x, y)[0]})
    assert metrics.score(("spearmanr", "pearson"), [1.0, 1.0], [1.0, 2.0]) == {"spearmanr": 0, "pearson": 0}
    assert metrics.load("f1").compute(predictions=[0, 0], references=[0, 0]) == {"f1": 0}
    assert metrics.load("perplexity").compute(nll=[2.0, 4.0], tokens=[1.0, 5.0]) == {
        "perplexity": pytest.approx(math.e)
    }


@pytest.mark.parametrize(("tokens", "stride"), [(50, 8), (50, 3), (50, 16), (16, 8), (9, 4), (17, 1)])
def test_sliding_windows_count_every_token_once_with_its_context(tokens, stride):
    length = 16
    ids = torch.arange(100, 100 + tokens)
    data = language_modeling.windows(ids, length, stride, pad=0)
    seen = {}
    for row, label in zip(data["input_ids"], data["labels"], strict=True):
        assert len(row) == len(label) == length
        for i in range(1, length):  # the first label of a window is never predicted
            if label[i] != -100:
                assert row[i] == label[i]
                seen.setdefault(label[i], []).append(i)
    missing = {x.item() for x in ids[1:]} - set(seen)
    assert all(len(v) == 1 for v in seen.values())
    if stride < length:
        assert not missing
        assert all(v[0] >= length - stride for token, v in seen.items() if token >= 100 + length)
    else:
        assert missing == {100 + length * k for k in range(1, math.ceil(tokens / length))}, "no overlap, no context"


def test_perplexity_is_that_of_one_forward_pass_a_token(tmp_path, transformers_warnings):
    """With stride 1 every token is scored with the 15 tokens before it."""
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 6)
    argv = [*DECODER, "--task", "text", "--data", tmp_path, "--output_dir", tmp_path / "run", *SHORT, "--stride", 1]
    language_modeling.tokens.cache_clear()
    language_modeling.load.cache_clear()
    runs.main(language_modeling.RECIPE, [*map(str, argv), "--save_strategy", "steps", "--save_steps", "4"])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run" / "seed-1"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert [row.filter.K for row in filter_status(model)] == [3, 3]
    lines = (tmp_path / "test.txt").read_text().splitlines(keepends=True)
    encoded = AutoTokenizer.from_pretrained(folder)(lines, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([i for line in encoded for i in line])
    with torch.no_grad():
        nll = [
            -model(ids[None, max(0, t - 15) : t]).logits[0, -1].log_softmax(-1)[ids[t]].item()
            for t in range(1, len(ids))
        ]
    transformers_warnings.clear()  # of GPT-2's loss_type, which its config does not set
    found = record(tmp_path / "run")["metrics"]["test/perplexity"]
    assert found == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)


def test_a_label_that_no_training_row_has_is_no_class():
    """A number counts as the place of a class only where no class is called by one."""
    rows = Dataset.from_dict({"text": ["a"], "label": ["0"]})
    assert encode_labels(rows, ["no", "yes"], "x")["label"] == [0]
    with pytest.raises(GraphFilterError, match="row 1 has the label '0', expected 1 or 2 or 3"):
        encode_labels(rows, ["1", "2", "3"], "x")
    for values in ([True, False], [1.0, 0.0], [1, 0], ["1", "0"]):
        rows = Dataset.from_dict({"text": ["a", "b"], "label": values})
        assert encode_labels(rows, ["0", "1"], "x")["label"] == [1, 0]


def test_paired_comparison_is_the_t_interval_and_the_exact_sign_flip_test():
    a, b = [0.1, 0.2, 0.4, 0.3, 0.5], [0.2, 0.25, 0.43, 0.38, 0.49]
    found = paired_comparison(a, b)
    differences = torch.tensor(b, dtype=torch.float64) - torch.tensor(a, dtype=torch.float64)
    flips = torch.tensor(list(itertools.product((1, -1), repeat=5)), dtype=torch.float64) @ differences
    assert found.p == pytest.approx((flips.abs() >= differences.sum().abs() - 1e-12).double().mean().item())
    interval = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert "no claim" in str(paired_comparison([1.0], [2.0]))
    equal = paired_comparison([0.5, 0.6, 0.7], [0.4, 0.5, 0.6])
    assert math.isnan(equal.low)
    assert "-0.1000 with each of 3 seeds, which gives no interval" in str(equal)
    assert equal.format("+.1f") == "-0.1"
    assert paired_comparison([10] * 10, [10, *[11] * 9]).p == pytest.approx(2 / 2**9), "whole numbers"
    for wrong in (([], []), ([1.0], [1.0, 2.0]), ([1.0], [math.nan])):
        with pytest.raises(GraphFilterError, match="a paired comparison needs"):
            paired_comparison(*wrong)


# ----------------------------------------------------------------------------------------------------------- runs


TOY = str(Path(__file__).parent / "linear_attention.py")


@pytest.mark.parametrize(
    "options",
    [
        ["--filter", "none"],
        [],
        ["--filter", "agf", "--filter_options", "gamma=0.1"],
        ["--filter", "linear-attention", "--import", TOY, "--filter_options", "init=blend"],
    ],
)
def test_a_run_trains_the_filter_and_records_everything(options, cola, tmp_path):
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, *options]
    runs.main(glue.RECIPE, [*map(str, argv), "--logging_steps", "1", "--filter_lr", "0.05"])
    found = record(tmp_path / "run")
    assert set(found["metrics"]) == {"validation/loss", "validation/matthews_correlation"}
    assert found["steps"] == 4
    if options[1:] == ["none"]:
        assert found["filter_parameters"] == 0
        assert found["moved"] == {}
    elif not options:
        assert found["filter_parameters"] == 4
        assert 0.02 < found["moved"]["w_K"] < 0.3, "at its own learning rate"
        assert len(found["coefficients"]["w_K"]) == 2
    elif options[1] == "agf":
        assert found["moved"]["theta_1"] > 0
    else:
        assert found["moved"]["gate"] == 1, "carried by the recipe"
        assert found["moved"]["sharpness"] > 0.02
    assert "data" not in found["settings"]
    assert str(tmp_path) not in json.dumps(found), "no path of this machine"


def test_coefficients_are_logged_by_layer(cola, tmp_path, transformers_warnings):
    seen = []

    class Keep(training.EarlyStoppingCallback):
        def __init__(self, patience):
            super().__init__(patience)

        def on_train_end(self, args, state, control, **_):
            seen.extend(state.log_history)

    original, training.EarlyStoppingCallback = training.EarlyStoppingCallback, Keep
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, "--logging_steps", 1]
    extra = ["--eval_strategy", "steps", "--save_strategy", "steps", "--eval_steps", "2", "--save_steps", "2"]
    extra += ["--early_stopping_patience", "3", "--load_best_model_at_end", "--metric_for_best_model", "loss"]
    try:
        runs.main(glue.RECIPE, [*map(str, argv), *extra, "--layers", "0"])
    finally:
        training.EarlyStoppingCallback = original
    transformers_warnings.clear()  # of times on this file system, when an old checkpoint is deleted
    logged = [entry["filter/0/w_K"] for entry in seen if "loss" in entry]
    assert len(logged) == 4
    assert len(set(logged)) == 4
    assert not any("filter/1/w_K" in entry for entry in seen), "one layer is patched"


def test_a_run_that_stopped_early_is_over_also_after_an_interruption(cola, tmp_path, transformers_warnings):
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, "--max_steps", "40"]
    argv += ["--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]
    argv += ["--early_stopping_patience", "2", "--metric_for_best_model", "loss", "--learning_rate", "0"]
    argv += ["--filter", "none"]
    runs.main(glue.RECIPE, [*map(str, argv)])
    whole, folder = record(tmp_path / "run"), tmp_path / "run" / "seed-1"
    assert whole["steps"] == 3, "nothing is learned at a rate of 0"
    (folder / "record.json").unlink()
    runs.main(glue.RECIPE, [*map(str, argv)])
    transformers_warnings.clear()
    again = record(tmp_path / "run")
    assert (again["steps"], again["metrics"]) == (whole["steps"], whole["metrics"])


def test_without_an_optimizer_an_interrupted_run_begins_again(cola, tmp_path, capsys, transformers_warnings):
    argv = [*ENCODER, "--task", "cola", "--data", cola, *SHORT, "--save_strategy", "steps", "--save_steps", "1"]
    argv += ["--save_only_model", "true", "--save_total_limit", "9", "--output_dir"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    runs.main(glue.RECIPE, [*map(str, [*argv, whole])])
    shutil.copytree(whole, cut)
    (cut / "seed-1" / "record.json").unlink()
    last = max(cut.glob("seed-1/checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    shutil.rmtree(last)
    runs.main(glue.RECIPE, [*map(str, [*argv, cut])])
    transformers_warnings.clear()
    assert "holds no optimizer (--save_only_model): the run begins again" in capsys.readouterr().err
    assert record(cut)["metrics"] == record(whole)["metrics"]


def test_a_run_of_its_own_config_is_the_same_run(cola, tmp_path):
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, "--smoke"]
    runs.main(glue.RECIPE, [*map(str, argv), "--max_steps", "3"])
    file = tmp_path / "run" / "seed-1" / "config.yaml"
    values, _ = parse("glue", "--config", file)
    assert (values["max_steps"], values["output_dir"], values["seeds"]) == (3, str(tmp_path / "run"), [1])


def test_fields_of_a_model_from_scratch_do_not_go_to_one_with_weights(tmp_path):
    base = ("--config", "sequences/small.yaml", "--task", "bbc", "--data", tmp_path, "--use_cpu")
    values, _ = parse("sequences", *base)
    assert values["from_scratch"]
    settings = Settings(sequences.RECIPE)
    assert settings.override(values, {"model": str(tmp_path)})["from_scratch"] == []
    assert settings.override(values, {"model": "roberta"})["from_scratch"] == values["from_scratch"]


@pytest.mark.parametrize("fields", [[], ["num_hidden_layers=1"]], ids=["weights", "from scratch"])
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, PooledClassifier])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_half_precision_trains_in_float32(dtype, kind, fields, tmp_path, transformers_warnings):
    config = BertConfig(hidden_size=4, num_attention_heads=1, num_hidden_layers=2, vocab_size=300, is_decoder=True)
    BertModel(config).to(dtype).save_pretrained(tmp_path)
    args = RecipeArguments(str(tmp_path), "cola", from_scratch=fields)
    tokenizer = train_bpe(iter(["a text"] * 2), 270)
    model = build_model(args, types.SimpleNamespace(seed=1), kind, tokenizer)
    transformers_warnings.clear()  # of the head, which is new
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(filter_status(model)) == 2 - len(fields)


@pytest.mark.parametrize(("name", "causal"), [("bert", False), ("gpt2", True), ("roberta", True)])
def test_the_perplexity_of_a_model_that_reads_ahead_is_refused(name, causal, transformers_warnings):
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(name, **sizes, **({"is_decoder": True} if name == "roberta" else {}))
    model = AutoModelForCausalLM.from_config(config)
    if causal:
        language_modeling.check_causal(patch_model(model, "gfsa", w_K=0.3))
    else:
        with pytest.raises(GraphFilterError, match="reads the tokens that it is to predict"):
            language_modeling.check_causal(model)
    transformers_warnings.clear()  # which says so too, and goes on


def test_a_model_that_learned_to_read_ahead_is_refused(monkeypatch, tmp_path, capsys):
    """Say by a filter that starts at 0."""

    def fit(args, training, model, *rest, **options):
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, tokens: tokens + tokens.flip(1))

    monkeypatch.setattr(language_modeling, "fit", fit)
    (tmp_path / "train.txt").write_text("one two three four\n" * 9)
    argv = [*DECODER, *SHORT, "--task", "text", "--data", tmp_path, "--output_dir", tmp_path / "run"]
    with pytest.raises(SystemExit):
        runs.main(language_modeling.RECIPE, [*map(str, argv)])
    assert "reads the tokens that it is to predict: name a causal --model and --filter" in capsys.readouterr().err


@pytest.fixture
def zero3():
    """The settings of DeepSpeed ZeRO-3, which transformers finds while they are alive."""

    class ZeRO3:
        def is_zero3(self):
            return True

    settings = ZeRO3()
    set_hf_deepspeed_config(settings)
    yield settings
    unset_hf_deepspeed_config()


def test_weights_that_zero3_has_spread_are_not_checked(capsys):
    model = BertModel(BertConfig(hidden_size=4, num_attention_heads=1, is_decoder=True))
    for parameter in model.parameters():
        parameter.data, parameter.ds_id = torch.empty(0), 0
    language_modeling.check_causal(model)
    assert "it is not checked whether the model reads later tokens" in capsys.readouterr().err


def test_one_process_writes_the_card_under_zero3(zero3, tmp_path):
    """Loading under ZeRO-3 begins with ``import deepspeed``."""
    BertForSequenceClassification(BertConfig(hidden_size=4, num_attention_heads=1)).save_pretrained(tmp_path)
    values = {"model": "bert", "task": "cola", "output_dir": str(tmp_path / "run")}
    run = {"recipe": "glue", "task": "cola", "seed": 1, "metrics": {}, "settings": {}}
    runs.write_card(Settings(glue.RECIPE), tmp_path, run, values)
    assert "Fine-tuned on cola with seed 1" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("flags", [["--pretrain", "denoise"], ["--positions", "gru"]])
def test_what_sets_weights_is_refused_under_zero3(flags, zero3, tmp_path):
    argv = ["--config", "sequences/small.yaml", "--task", "bbc", "--data", tmp_path, "--pooling", "mean", "--use_cpu"]
    with pytest.raises(GraphFilterError, match="set weights, which ZeRO-3 has spread over processes"):
        parse("sequences", *argv, *flags)


def test_a_finished_seed_is_not_run_again_and_other_settings_are_refused(asked, capsys):
    argv = [*README_COMPARISON[1:], "2"]
    runs.main(glue.RECIPE, argv)
    runs.main(glue.RECIPE, argv)
    assert [seed for _, seed, _ in asked] == [1, 2]
    Path("runs/glue/cola-gfsa/seed-2/record.json").unlink()
    runs.main(glue.RECIPE, argv)
    assert [seed for _, seed, _ in asked] == [1, 2, 2]
    with pytest.raises(SystemExit) as stopped:
        runs.main(glue.RECIPE, [*argv, "--learning_rate", "1"])
    assert stopped.value.code == 1
    assert "holds a run with other settings (learning_rate differ)" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_from_its_checkpoint(cola, tmp_path, monkeypatch, capsys, transformers_warnings):
    def argv(folder):
        saving = ["--save_strategy", "steps", "--save_steps", "2", "--logging_steps", "1"]
        return [
            *map(str, [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / folder, *SHORT]),
            *saving,
        ]

    runs.main(glue.RECIPE, argv("whole"))
    begun = []

    class Stop(training.CoefficientCallback):
        def on_step_end(self, args, state, control, **_):
            begun.append(state.global_step)
            if state.global_step == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(training, "CoefficientCallback", Stop)
    with pytest.raises(SystemExit) as stopped:
        runs.main(glue.RECIPE, argv("broken"))
    assert stopped.value.code == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        runs.main(glue.RECIPE, [*argv("broken"), "--learning_rate", "1"])
    assert "other settings (learning_rate differ)" in capsys.readouterr().err
    half_written = tmp_path / "broken" / "seed-1" / "checkpoint-4"
    half_written.mkdir()
    (half_written / "config.json").write_text("{}")
    Stop.on_step_end = lambda self, args, state, control, **_: begun.append(state.global_step)
    runs.main(glue.RECIPE, argv("broken"))
    transformers_warnings.clear()  # of times on this file system, when an old checkpoint is deleted
    assert begun == [1, 2, 3, 3, 4]
    for name in ("metrics", "coefficients", "moved"):
        assert record(tmp_path / "broken")[name] == record(tmp_path / "whole")[name]


@some(2)
def test_a_run_that_dies_at_a_write_is_run_to_the_same_end(points, cola, tmp_path, transformers_warnings):
    def command(folder):
        argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", folder, *SHORT, "--save_strategy", "steps"]
        runs.main(glue.RECIPE, [*map(str, argv), "--save_steps", "2"])
        return {name: record(folder)[name] for name in ("metrics", "coefficients", "moved", "steps", "settings")}

    for folder, expected in deaths(tmp_path, points, command):
        assert command(folder) == expected, folder
        assert (folder / "seed-1" / "README.md").is_file()
        transformers_warnings.clear()  # of times on this file system, when an old checkpoint is deleted


DAMAGES = ["", "{", "[]", '{"global_step": 1e99}', '{"global_step": 10000000000}', '{"global_step": "4"}', "\0" * 50]


def test_damaged_files_of_a_run_are_left_out_and_named(cola, tmp_path, capsys, transformers_warnings):
    """An empty trainer_state.json, say, after the disk was full."""
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT]
    argv = [*map(str, argv), "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "4"]
    runs.main(glue.RECIPE, argv)
    expected, folder = record(tmp_path / "run"), tmp_path / "run" / "seed-1"
    capsys.readouterr()  # of bars, which a test before may have switched on
    for damage in DAMAGES:
        (folder / "record.json").write_text(damage)
        (folder / "begun.json").write_text("")
        (folder / "checkpoint-4" / "trainer_state.json").write_text(damage)
        (folder / "checkpoint-final").mkdir(exist_ok=True)
        assert checkpoints.last_checkpoint(folder) == str(folder / "checkpoint-2")
        ignored = capsys.readouterr().err.splitlines()
        assert len(ignored) == 1
        assert ignored[0].startswith(f"ignored: {folder / 'checkpoint-4' / 'trainer_state.json'} ")
    runs.main(glue.RECIPE, argv)
    transformers_warnings.clear()
    assert record(tmp_path / "run")["metrics"] == expected["metrics"]
    said = capsys.readouterr().err
    assert [f"ignored: {folder / name} is no readable JSON" in said for name in ("record.json", "begun.json")] == [1, 1]
    for name in ("optimizer.pt", "scheduler.pt", "model.safetensors"):
        file = folder / "checkpoint-4" / name
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert checkpoints.last_checkpoint(folder) == str(folder / "checkpoint-2")
        assert f"ignored: {file} is damaged" in capsys.readouterr().err
        file.write_bytes(content)
    assert checkpoints.last_checkpoint(folder) == str(folder / "checkpoint-4")
    for file in folder.glob("*.json"):
        file.unlink()
    (folder / "config.yaml").write_text("{")
    with pytest.raises(SystemExit):
        runs.main(glue.RECIPE, argv)
    assert "config.yaml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"runs": 3}', '{"runs": [3]}', '{"runs": [{}]}', "[" * 100_000, '{"runs": [], "variants": 3}']
)
def test_a_damaged_results_file_is_refused(text, asked, capsys):
    file = Path("runs/glue/glue-cola.json")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(SystemExit):
        compare.main(README_COMPARISON)
    assert "compare.py: runs/glue/glue-cola.json is no results file of compare.py: " in capsys.readouterr().err
    assert file.read_text() == text


def test_one_command_at_a_time_has_a_run(asked, capsys):
    """A second one would write over what the first has found."""
    argv = [*ENCODER, "--task", "cola", "--output_dir", "run", "--save_strategy", "no"]
    runs.main(glue.RECIPE, argv)
    before = record(Path("run"))
    with FileLock("run/seed-1/.lock"), pytest.raises(SystemExit):
        runs.main(glue.RECIPE, argv)
    locked = "another command is training this: run/seed-1/.lock is locked; wait for its end"
    assert locked in capsys.readouterr().err
    assert record(Path("run")) == before
    assert len(asked) == 1


def test_runs_that_were_found_finished_do_not_shorten_the_time_that_is_left(asked, capsys):
    compare.main([*README_COMPARISON, "--variants", "even layers"])
    assert capsys.readouterr().out.count("done in ") == 2
    Path("runs/glue/glue-cola.json").unlink()
    compare.main([*README_COMPARISON, "--seeds", "1", "2", "--variants", "even layers"])
    said = " ".join(capsys.readouterr().out.split())
    assert (said.count("finished before"), said.count("done in ")) == (2, 2)


def test_two_commands_share_a_comparison(asked, capsys, monkeypatch):
    """What another command trains is left to it, or trained when that has given it up; nothing is moved under it."""
    held = Path("runs/glue/glue-cola/even-layers/seed-1/.lock")
    held.parent.mkdir(parents=True)
    lock = FileLock(held)
    lock.acquire()
    with pytest.raises(SystemExit):
        compare.main([*README_COMPARISON, "--fresh"])
    assert f"another command is making this comparison: {held} is locked" in capsys.readouterr().err
    waited = []
    monkeypatch.setattr(records.time, "sleep", lambda seconds: (waited.append(seconds), lock.release()))
    compare.main([*README_COMPARISON, "--seeds", "1", "2", "--variants", "even layers"])
    assert waited == [1]
    out = capsys.readouterr().out
    assert "waiting for other commands, which train 1 of the missing runs" in out
    assert out.count("even layers, seed 1\n") == 1
    found = json.loads(Path("runs/glue/glue-cola.json").read_text())
    assert [(r["seed"], r["variant"]) for r in found["runs"]] == [
        *itertools.product((1, 2), ("plain", "even layers"))
    ], "in this order, whoever finished first"
    assert len(asked) == 4
    file = Path("runs/glue/glue-cola.json")
    del (
        found["variants"],
        found["summary"],
    )  # of an earlier version; one run is of a variant that is no longer asked for
    earlier = {**found, "runs": [*found["runs"], {**found["runs"][0], "variant": "old"}]}
    file.write_text(json.dumps(earlier))
    compare.main([*README_COMPARISON, "--seeds", "1", "2", "--variants", "even layers"])
    runs_now = json.loads(file.read_text())["runs"]
    assert sorted(map(str, runs_now)) == sorted(map(str, earlier["runs"])), "none is lost"
    monkeypatch.setattr(records, "WAIT", 0.1)
    with FileLock("runs/glue/glue-cola.json.lock"), pytest.raises(SystemExit):
        compare.main(README_COMPARISON)
    assert "another command is writing these results: runs/glue/glue-cola.json.lock" in capsys.readouterr().err


OWN_CSV = "text,label\n" + "".join(f"a {('good', 'bad')[i % 2]} film {i},{('good', 'bad')[i % 2]}\n" for i in range(20))
OWN_PAIRS = [{"Sentence1": f"one {i}", "Sentence2": f"two {i}", "score": i / 7} for i in range(20)]


def test_texts_of_ones_own(tmp_path, monkeypatch, transformers_warnings):
    """A file is cut into parts, a folder has them, and a data set of the Hub names classes and keeps some secret."""
    file = tmp_path / "films.csv"
    file.write_text(OWN_CSV)
    runs.main(glue.RECIPE, [*ENCODER, *SHORT, "--task", "texts", "--data", str(file), "--output_dir", str(tmp_path)])
    assert record(tmp_path)["metrics"].keys() >= {"validation/accuracy", "validation/f1_macro"}
    parts, classes = own_texts.load_own(False, str(file), None, None)
    assert classes == ["bad", "good"]
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 16, "validation": 4}
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, OWN_PAIRS)))
    parts, classes = own_texts.load_own(True, str(folder), None, None)
    assert not classes
    found = list(parts["validation"])  # in another order: a source may be sorted by class
    assert {"text_a": "one 7", "text_b": "two 7", "label": 1.0} in found
    assert [row["text_a"] for row in found] != sorted(row["text_a"] for row in found)
    labels = Dataset.from_dict({"text": ["a", "b"], "label": ["yes", "no"]}).class_encode_column("label")
    secret = Dataset.from_dict({"text": ["a", "b"], "label": [-1, -1]})
    hub = DatasetDict(train=labels, val=labels, test=secret)
    monkeypatch.setattr(own_texts, "load_dataset", lambda name, config: hub)
    parts, classes = own_texts.load_own(False, None, "somebody/answers", None)
    assert classes == ["no", "yes"]
    read = {part: {row["text_a"]: row["label"] for row in rows} for part, rows in parts.items()}
    assert read == {"train": {"a": 1, "b": 0}, "validation": {"a": 1, "b": 0}}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "cut \ud83d", "label": 1}], r"row 1 has 'cut \\ud83d' as text, a text was expected"),
        ([{"text": "a", "label": ["x", "y"]}], r"row 1 has \['x', 'y'\] as label, a text or a number"),
        ([{"text": "a", "label": 1}, {"text": "b", "label": 0}], "has 2 rows: training and evaluation need three"),
    ],
)
def test_tables_of_ones_own_that_cannot_be_used_are_named(rows, message, tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(GraphFilterError, match=message):
        own_texts.load_own(False, str(tmp_path / "mine.jsonl"), None, None)


def test_labels_of_ones_own_may_be_texts_and_numbers(tmp_path):
    rows = [{"text": f"a {i}", "label": label} for i, label in enumerate([1, "1", 0, "spam"])]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert own_texts.load_own(False, str(tmp_path / "mine.jsonl"), None, None)[1] == ["0", "1", "spam"]


def test_the_columns_of_ones_own_are_those_that_are_named(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("text,question,answer,label\n" + "".join(f"t{i},q,a,{i % 2}\n" for i in range(6)))
    assert own_texts.load_own(False, str(file), None, None)[0]["train"].column_names == ["text_a", "label"]
    file.write_text("text,text,label\na,b,1\nc,d,0\n")
    with pytest.raises(GraphFilterError, match="has two columns called text"):
        own_texts.load_own(False, str(file), None, None)


def test_labels_of_ones_own_are_what_they_say(tmp_path, monkeypatch, capsys):
    """pandas writes classes as 1.0 where a column had gaps, and the gaps as empty cells."""
    (tmp_path / "train.csv").write_text("text,label\na,1.0\nb,2.0\nc,3.0\n")
    (tmp_path / "test.csv").write_text("text,label\na,1\nb,2\n")
    (tmp_path / "valid.csv").write_text("text,label\nc,3.0\n")
    parts, classes = own_texts.load_own(False, str(tmp_path), None, None)
    assert classes == ["1", "2", "3"]
    assert {row["text_a"]: classes[row["label"]] for row in parts["test"]} == {"a": "1", "b": "2"}
    (tmp_path / "train.csv").write_text("text,label\na,spam\nb,ham\n")
    with pytest.raises(GraphFilterError, match=r"row 1 has the label '[13]', expected ham or spam"):
        own_texts.load_own(False, str(tmp_path), None, None)
    for label, numbers, message in (
        ("", False, "has no label"),
        (" ", True, "has no label"),
        ("nan", True, "expected a number"),
    ):
        (tmp_path / "train.csv").write_text(f"text,label\na,1\nb,{label}\nc,2\n")
        with pytest.raises(GraphFilterError, match=f"row 2 .*{message}"):
            own_texts.load_own(numbers, str(tmp_path), None, None)
    rows = [{"text": text, "label": label} for text, label in zip("abc", (-2.0, -1.0, 1.0), strict=True)]
    hub = DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows))
    monkeypatch.setattr(own_texts, "load_dataset", lambda name, config: hub)
    for numbers in (True, False):
        parts, _ = own_texts.load_own(numbers, None, "somebody/ratings", None)
        assert len(parts["validation"]) == 3, "-1 is a rating, and a class"
    hub["test"] = Dataset.from_dict({"text": ["a"], "label": [-1.0]})
    own_texts.load_own(False, None, "somebody/ratings", None)
    assert "the part 'test' has no labels and is left out" in capsys.readouterr().err
    labels = Dataset.from_dict({"text": ["a", "b"], "label": [0, -1]}).cast_column(
        "label", ClassLabel(names=["x", "y"])
    )
    hub["train"] = labels
    with pytest.raises(GraphFilterError, match="1 of 2 rows of the part 'train' have no label"):
        own_texts.load_own(False, None, "somebody/ratings", None)


def test_hidden_files_are_no_documents(tmp_path):
    for name in ("a.txt", ".DS_Store"):
        (tmp_path / "good").mkdir(exist_ok=True)
        (tmp_path / "good" / name).write_text("text")
    assert len(read_texts(tmp_path, ["good"])) == 1


def test_a_comparison_says_what_else_differs(capsys):
    settings = Settings(glue.RECIPE)
    values, sections = parse("glue", "--config", "glue/minilm.yaml", "--task", "cola", "--use_cpu")
    for sweep in (["task=cola,mrpc"], ["max_eval_samples=8,9"], ["seeds=1,2"], ["held_out=0.1"]):
        name = sweep[0].partition("=")[0]
        with pytest.raises(GraphFilterError, match=f"changes {name}, which all models of a comparison share"):
            choose_variants(settings, values, sections, sweep)
    speech_settings = Settings(speech.RECIPE)
    recordings, _ = speech_settings.parse(["--config", "speech/small.yaml", "--task", "digits", "--data", "d"])
    texts_settings = Settings(language_modeling.RECIPE)
    texts, _ = texts_settings.parse([*DECODER, "--task", "text", "--data", "d"])
    for of_task, given, sweep in (
        (speech_settings, recordings, "max_seconds=1,3"),
        (speech_settings, recordings, "too_long=skip,cut"),
        (texts_settings, texts, "train_tokenizer=261,300"),
        (texts_settings, texts, "tokenizer=words"),
    ):
        with pytest.raises(GraphFilterError, match="which all models of a comparison share"):
            choose_variants(of_task, given, {"sweep": {}, "variants": {}}, [sweep])
    choose_variants(speech_settings, recordings, {"sweep": {}, "variants": {}}, ["train_tokenizer=261,300"])
    sweep = ["model=gpt2,other"]  # perplexity is that of a token
    choose_variants(texts_settings, texts, {"sweep": {}, "variants": {}}, sweep)
    texts |= {"from_scratch": [], "train_tokenizer": None}
    with pytest.raises(GraphFilterError, match=r"with it the tokenizer, .* --tokenizer gpt2"):
        choose_variants(texts_settings, texts, {"sweep": {}, "variants": {}}, sweep)
    choose_variants(texts_settings, texts | {"tokenizer": "gpt2"}, {"sweep": {}, "variants": {}}, sweep)
    capsys.readouterr()
    choose_variants(settings, values, sections, ["K=2,3", "filter_lr=1e-3", "layers=all,even"])
    assert not capsys.readouterr().err
    choose_variants(settings, values, sections, ["learning_rate=1e-5,1e-2"])
    assert f"the baseline keeps learning_rate={values['learning_rate']}" in capsys.readouterr().err


def test_the_filter_of_others_does_not_change_the_plain_model():
    a = {"filter": "none", "filter_lr": 1e-2, "filter_options": ["K=3"], "layers": "all"}
    b = {"filter": "none", "filter_lr": 1e-3, "filter_options": [], "layers": "even"}
    assert identities.list_differences(a, b) == []
    assert identities.list_differences(a | {"filter": "gfsa"}, b | {"filter": "gfsa"}) == [*sorted(a)][1:]
    a, b = ({**settings, "contents": {"import": text}} for settings, text in ((a, "1"), (b, "2")))
    assert identities.list_differences(a, b) == [], "which the baseline does not use"


def test_options_have_no_order():
    for name in ("filter_options", "from_scratch", "model_options"):
        options = {name: ["K=5", "w_K=0.1"]}
        assert identities.list_differences(options, {name: ["w_K=0.1", "K=5"]}) == []
        assert identities.list_differences(options, {name: ["w_K=0.1", "K=4"]}) == [name]
        assert identities.list_differences(options, {name: ["K=5"]}) == [name]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "texts"], "--task texts needs either --data"),
        (["--task", "cola", "--dataset_name", "imdb"], "--dataset_name goes with --task texts"),
        (["--task", "texts", "--data", "nowhere.csv"], "there is no file or folder nowhere.csv"),
        (["--task", "texts", "--data", "one.csv"], "one.csv must hold two classes at least"),
        (["--task", "texts", "--data", "empty.csv"], "empty.csv: row 2 has an empty text"),
        (["--task", "ratings", "--data", "two.csv"], "two.csv: row 1 has the label 'x', expected a number"),
        (["--task", "texts", "--data", "columns.csv"], "columns.csv has no column 'text' or 'sentence'"),
        (["--task", "ratings", "--data", "numbers.csv", "--label_smoothing_factor", "0.1"], "factor is for classes"),
    ],
)
def test_texts_of_ones_own_that_cannot_be_used(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("one.csv").write_text("text,label\na,x\nb,x\n")
    Path("two.csv").write_text("text,label\na,x\nb,y\n")
    Path("empty.csv").write_text("text,label\na,x\n ,y\n")
    Path("numbers.csv").write_text("text,label\na,1\nb,2\nc,3\n")
    Path("columns.csv").write_text("words,label\na,x\nb,y\n")
    with pytest.raises(SystemExit):
        runs.main(glue.RECIPE, [*ENCODER, *SHORT, *flags, "--output_dir", "run"])
    assert message in capsys.readouterr().err


def test_a_comparison_is_given_to_slurm(tmp_path, monkeypatch, capsys):
    """A stand-in of sbatch takes the jobs: what it is given has the flags and the command."""
    (tmp_path / "srun").touch(0o755)
    (tmp_path / "sbatch").write_text("#!/bin/sh\ncat $1 > job.$$\necho Submitted batch job $$\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    compare.main([*README_COMPARISON, "--jobs", "2", "--slurm", "partition=gpu,gres=gpu:1,time=2:00:00"])
    given = [file.read_text() for file in tmp_path.glob("job.*")]
    assert len(given) == 2
    for flag in ("partition=gpu", "gres=gpu:1", "time=2:00:00"):
        assert all(f"#SBATCH --{flag}\n" in text for text in given)
    assert "slurm jobs " in capsys.readouterr().out


def test_jobs_of_this_machine_share_the_gpus_that_the_command_sees(tmp_path, monkeypatch):
    submitit, commands = pytest.importorskip("submitit"), []
    done = types.SimpleNamespace(job_id="1", result=lambda: "")

    def submit(executor, function):
        commands.append(function.command)
        return done

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(submitit.AutoExecutor, "submit", submit)
    compare.main([*README_COMPARISON, "--jobs", "3"])
    assert [command[:2] for command in commands] == [["env", f"CUDA_VISIBLE_DEVICES={gpu}"] for gpu in (2, 5, 2)]
    assert commands[0][2] == sys.executable


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs 0: at least one job"),
        (["--slurm", "partition=gpu"], "give their number with --jobs"),
        (["--jobs", "2", "--slurm", "gpu"], "found 'gpu' without a value"),
        (["--jobs", "2", "--slurm", "partition=gpu"], "no sbatch is found"),
        (["--jobs", "2", "--fresh"], "--fresh moves the runs that jobs share"),
    ],
)
def test_jobs_that_cannot_be_started(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        compare.main([*README_COMPARISON, *flags])
    assert message in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.json")]


def test_a_run_that_goes_on_has_waited_as_long_for_an_improvement(cola, tmp_path, monkeypatch, transformers_warnings):
    """Nothing improves at a learning rate of 0: three measurements after the first it ends."""
    saving = ["--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    saving += ["--early_stopping_patience", "3", "--metric_for_best_model", "loss", "--load_best_model_at_end"]
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, *saving]
    argv = [*map(str, argv), "--max_steps", "9", "--learning_rate", "0", "--filter", "none"]

    class Stop(training.Clock):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "Clock", Stop)
        with pytest.raises(SystemExit):
            runs.main(glue.RECIPE, argv)
    runs.main(glue.RECIPE, argv)
    transformers_warnings.clear()  # of times on this file system, when an old checkpoint is deleted
    assert record(tmp_path / "run")["steps"] == 4


def test_texts_of_one_s_own_are_the_task(monkeypatch, tmp_path, capsys):
    """Of all other tasks it says nothing where the data lie."""
    made, seen = {}, []

    def run(args, training):
        seen.append(args.data)
        return {"metrics": {"validation/perplexity": 9.0}, "moved": {}, "coefficients": {}, "filter_parameters": 0}

    recipe = dataclasses.replace(language_modeling.RECIPE, run=run)
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", "one two three"), ("b", "four five six seven"), ("moved/a", "one two three")):
        made[name] = tmp_path / "texts" / name
        made[name].mkdir(parents=True)
        (made[name] / "train.txt").write_text(words)
    argv = [*DECODER, "--task", "text", "--filter", "none", "--save_strategy", "no", "--data"]
    for name in ("a", "a", "moved/a"):
        runs.main(recipe, [*argv, str(made[name])])
    assert seen == [str(made["a"])]
    with pytest.raises(SystemExit):
        runs.main(recipe, [*argv, str(made["b"])])
    assert "holds a run with other settings (the files of data differ)" in capsys.readouterr().err
    with pytest.raises(GraphFilterError, match="1 lines leave nothing to validate on"):
        language_modeling.load.__wrapped__("text", str(made["a"]))


def test_files_of_the_same_name_are_told_apart(tmp_path):
    """Models that lie in folders of one name, and data of one size."""
    for which in ("a", "b", "copied/a"):
        (tmp_path / which / "model").mkdir(parents=True)
        (tmp_path / which / "model" / "model.safetensors").write_text(which[-1])
        (tmp_path / which / "model" / "README.md").write_text(which)
        (tmp_path / which / "data" / "CoLA").mkdir(parents=True)
        (tmp_path / which / "data" / "CoLA" / "dev.tsv").write_text(which[-1])
        (tmp_path / which / "data" / "others.tsv").write_text(which)

    def of(model, data):
        return settings.identity(
            {"task": "cola", "model": tmp_path / model / "model", "data": tmp_path / data / "data"}
        )

    settings = Settings(glue.RECIPE)
    assert of("a", "a")["model"] == "model"
    assert settings.list_differences(of("a", "a"), of("copied/a", "copied/a")) == []
    assert settings.list_differences(of("a", "a"), of("b", "a")) == ["the files of model"]
    assert settings.list_differences(of("a", "a"), of("a", "b")) == ["the files of data"]
    (tmp_path / "a" / "data" / "CoLA" / ".DS_Store").write_text("stray")
    (tmp_path / "a" / "data" / "CoLA" / "NOTES.md").write_text("stray")
    before = of("copied/a", "copied/a")
    identities.mark_data.cache_clear()
    assert settings.list_differences(before, of("a", "a")) == []
    assert "contents" not in settings.identity({"task": "cola", "model": "m", "data": tmp_path / "elsewhere"})
    of_hub = settings.identity({"task": "cola", "model": tmp_path / "a" / "model"})
    assert settings.list_differences(of_hub, of("a", "a")) == ["the files of data"], "of the Hub, or of a folder"
    for code in ("first", "second"):
        (tmp_path / f"{code}.py").write_text(code)
    own = [
        settings.identity({"task": "cola", "import": (str(tmp_path / f"{code}.py"),)}) for code in ("first", "second")
    ]
    assert settings.list_differences(*own) == ["the files of import"]
    logged = [settings.identity({"task": "cola", "eval_strategy": "steps", "logging_steps": n}) for n in (5, 9)]
    assert settings.list_differences(*logged) == ["eval_steps"], "which the Trainer takes from them"
    best = {"task": "cola", "load_best_model_at_end": True, "save_strategy": "steps", "eval_steps": 100}
    saved = [settings.identity(best | steps) for steps in ({"save_steps": 100}, {}, {"save_steps": 500})]
    assert settings.list_differences(*saved[:2]) == ["best_of_steps"]
    assert settings.list_differences(*saved[1:]) == [], "the default"
    assert settings.list_differences(saved[0], best) == [], "an earlier record"
    earlier = {name: value for name, value in of("a", "a").items() if name != "contents"}
    assert settings.list_differences(earlier, of("b", "b")) == []
    texts = [settings.identity({"task": "texts", "data": tmp_path / which}) for which in ("a", "copied/a")]
    assert settings.list_differences({"task": "texts", "data": texts[0]["data"]}, texts[1]) == ["data"], (
        "an earlier record"
    )


@pytest.mark.parametrize("task", ["text", "cola"])
def test_files_that_are_no_data_do_not_change_a_run(task, tmp_path):
    """Notes, hidden files and those in hidden folders; earlier records count the last."""

    def of_now():
        identities.mark_data.cache_clear()
        return identities.identity({"task": task, "data": str(tmp_path)})

    (tmp_path / "train.txt").write_text("one two")
    bare = of_now()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_text("1")
    earlier = of_now()
    earlier["contents"].pop("visible data")
    assert identities.list_differences(earlier, of_now()) == []
    (tmp_path / "README.md").write_text("notes")
    (tmp_path / ".DS_Store").write_text("stray")
    before = of_now()
    (tmp_path / ".git" / "index").write_text("2")
    for other in (bare, before):
        assert identities.list_differences(other, of_now()) == []
    (tmp_path / "train.txt").write_text("two one")
    for other in (bare, before, earlier):
        assert identities.list_differences(other, of_now()) == ["the files of data"]


def test_a_run_depends_on_the_table_of_its_task_alone(tmp_path):
    """Also where its folder holds others; earlier records have a mark of the folder."""

    def of_now():
        identities.mark_data.cache_clear()
        return identities.identity({"task": "esol", "data": str(tmp_path)}, ("raw/esol.csv", "esol.csv"))

    (tmp_path / "esol.csv").write_text("smiles,y")
    before = of_now()
    earlier = before | {"contents": {k: v for k, v in before["contents"].items() if k == "data"}}
    assert identities.list_differences(earlier, of_now()) == []
    (tmp_path / "other.csv").write_text("smiles,y")
    assert identities.list_differences(before, of_now()) == []
    assert identities.list_differences(earlier, of_now()) == ["the files of data"]
    (tmp_path / "esol.csv").write_text("smiles,z")
    assert identities.list_differences(before, of_now()) == ["the files of data"]


def test_the_marks_of_data_stay_those_of_earlier_records(tmp_path, monkeypatch):
    """Of 600 tables, notes, an image, and hidden files and folders, which are listed once."""
    files = {f"{number}.csv": f"text,label\n{number},a\n" for number in range(600)}
    files |= {name: name for name in (".git/1.json", "a/notes.md", "a/.DS_Store", "a/picture.png")}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    walked = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *args, **options: walked.append(args) or walk(*args, **options))
    of_all = {"data": "678ac1782a2ae85f", "tables": "36bf45a9a2fbce0d"}
    of_visible = {"visible data": "343f5d432e6654d4", "visible tables": "a27bd2fe0c3c4cf7"}
    settings = {"task": "text", "data": str(tmp_path)}
    earlier = {"task": "text", "data": "ed1f6275e413c118", "contents": of_all | of_visible}
    assert identities.identity(settings) == identities.identity(settings) == earlier
    assert len(walked) == 1
    for part, sizes, contents in (
        ("a", "79684f9ff486b6f2", "c3f49213dc64f464"),
        ("1.csv", "1a839c32a94549a3", "4c247a3a9fd0a7e0"),
        (".git", "22e1c0bc67821a24", "84e4a70a9cf10a2c"),
    ):
        marked = identities.identity(settings | {"data": str(tmp_path / part)})
        assert marked == {"task": "text", "data": sizes, "contents": {"data": contents}}


def test_the_transcripts_of_many_recordings_are_known_again(tmp_path):
    """Of very many files the contents of a part count, but always those of the tables."""
    marks = []
    for texts in ("a,b", "b,a"):
        folder = tmp_path / texts
        (folder / "audio").mkdir(parents=True)
        for number in range(601):
            (folder / "audio" / f"{number}.wav").touch()
        (folder / "metadata.csv").write_text(texts)
        marks.append(identities.identity({"task": "mboshi", "data": str(folder)}))
    assert identities.list_differences(*marks) == ["the files of tables"]
    earlier = {"task": "mboshi", "contents": {"data": marks[0]["contents"]["data"]}}
    assert identities.list_differences(earlier, marks[0]) == []


def test_the_rows_of_a_step_are_those_of_all_processes(monkeypatch):
    settings = Settings(glue.RECIPE)
    half, whole, default = ({"task": "cola", "per_device_train_batch_size": n} for n in (16, 32, 8))
    alone = settings.identity(whole)
    assert settings.list_differences(settings.identity({"task": "cola"}), settings.identity(default)) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert settings.list_differences(alone, settings.identity(half)) == []
    assert settings.list_differences(alone, settings.identity(whole)) == ["per_device_train_batch_size"]
    assert settings.identity({"task": "cola"})["per_device_train_batch_size"] == 16


def test_the_data_of_an_interrupted_run_are_known_again(asked, cola, monkeypatch, capsys):
    def stopped(args, training):
        Path(training.output_dir, "checkpoint-1").mkdir(parents=True)
        raise KeyboardInterrupt

    argv = ["--model", "m", "--task", "cola", "--data", str(cola), "--use_cpu", "--save_strategy", "no"]
    with pytest.raises(SystemExit):
        runs.main(dataclasses.replace(glue.RECIPE, run=stopped), argv)
    train = cola / "CoLA" / "train.tsv"
    before = train.read_text()
    train.write_text(before.replace("cat", "cow"))
    identities.mark_data.cache_clear()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        runs.main(glue.RECIPE, argv)
    assert "other settings (the files of data differ)" in capsys.readouterr().err
    train.write_text(before)
    identities.mark_data.cache_clear()
    runs.main(glue.RECIPE, argv)
    assert [*Path("runs/glue/cola-gfsa/seed-1").glob("*.json")] == [Path("runs/glue/cola-gfsa/seed-1/record.json")]


def test_rows_of_like_lengths_come_in_the_order_of_seed_and_epoch(tmp_path):
    """Whatever a model draws between; later epochs have orders of their own."""
    rows = Dataset.from_dict({"input_ids": [[1] * (1 + i % 7) for i in range(40)]})
    orders = []
    for drawn in (0, 3):
        options = {"train_sampling_strategy": "group_by_length", "report_to": "none", "use_cpu": True}
        arguments = Seq2SeqTrainingArguments(tmp_path, per_device_train_batch_size=4, seed=3, **options)
        model = BertModel(BertConfig(vocab_size=4, hidden_size=4, num_attention_heads=1, num_hidden_layers=1))
        loader = training.make_trainer(None, arguments, model, train_dataset=rows).get_train_dataloader()
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            torch.rand(drawn)
            orders.append([*loader.batch_sampler])
    assert orders[0] == orders[2]
    assert orders[1] == orders[3]
    assert orders[0] != orders[1]


def test_several_gpus_in_one_process_are_refused(tmp_path):
    arguments = Seq2SeqTrainingArguments(tmp_path, report_to="none", use_cpu=True)
    arguments._n_gpu = 2
    with pytest.raises(GraphFilterError, match="2 GPUs in one process multiply the rows of a step: set CUDA_VISIBLE"):
        training.make_trainer(None, arguments, torch.nn.Linear(1, 1))


def test_a_run_that_resumes_within_an_epoch_has_the_order_of_that_epoch(tmp_path):
    """Of several processes accelerate sets the epoch of the batches that it wraps, which then hide the sampler."""
    rows = Dataset.from_dict({"input_ids": [[1] * (1 + i % 9) for i in range(99)]})
    options = {"train_sampling_strategy": "group_by_length", "report_to": "none", "use_cpu": True}
    arguments = Seq2SeqTrainingArguments(tmp_path, per_device_train_batch_size=4, **options)
    model = BertModel(BertConfig(vocab_size=4, hidden_size=4, num_attention_heads=1, num_hidden_layers=1))
    trainer = training.make_trainer(None, arguments, model, train_dataset=rows)
    loader = trainer.get_train_dataloader()
    loader.set_epoch(1)
    expected = [*loader.batch_sampler]
    loader.set_epoch(0)
    trainer.state.epoch = 1.5
    trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
    assert [*loader.batch_sampler] == expected
    gc.collect()
    held = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert held() is None, "it is freed at once, and its model with it"
    finally:
        gc.enable()


def test_batches_of_like_lengths_come_in_random_order():
    like = LengthGroupedSampler(4, lengths=[*range(386)])  # four groups of 96, and two rows
    order = [*training.Order(like, seed=0)]
    assert sorted(order) == [*range(386)]
    assert order[0] == 385  # so that memory runs out at once
    batches = np.array(order[:384]).reshape(96, 4)
    assert np.ptp(batches, 1).max() < 80
    descents = (np.diff(batches.mean(1)) < 0).sum()
    assert 35 <= descents <= 65  # 92 if the batches of each group came sorted
    of_two = np.array([*training.Order(like, seed=0, processes=2)][:384]).reshape(48, 8)
    assert np.ptp(of_two, 1).max() < 80  # the batches of two processes in one step


def test_a_run_that_kept_no_checkpoint_has_none_to_save_or_push(asked, capsys):
    argv = ["--model", "m", "--task", "cola", "--use_cpu"]
    runs.main(glue.RECIPE, [*argv, "--save_strategy", "no"])
    for more in ([], ["--push_to_hub"]):
        with pytest.raises(SystemExit):
            runs.main(glue.RECIPE, [*argv, *more])
        assert "was run with --save_strategy no and has no checkpoint" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_no_record(cola, tmp_path, monkeypatch, capsys):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training.Trainer, "save_model", full)
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT]
    with pytest.raises(SystemExit) as stopped:
        runs.main(glue.RECIPE, [*map(str, argv), "--save_strategy", "steps", "--save_steps", "100"])
    assert stopped.value.code == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("glue.py: [Errno 28] No space left on device; finished seeds and checkpoints are kept")
    assert not (tmp_path / "run" / "seed-1" / "record.json").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--model", "roberta", "--from_scratch", "hiden_size=3"],
            r"no field 'hiden_size' \(did you mean 'hidden_size'\?\)",
        ),
        (["--filter_options", "k=3"], "GFSAConfig has no option 'k'"),
        (["--layers", "7"], "7 is out of range"),
        (["--layers", "some"], "layers='some': a text is 'all'"),
        (["--model", "nowhere/nothing"], "nowhere/nothing"),
        (["--model", "nowhere/nothing", "--train_tokenizer", "280"], "--train_tokenizer needs --from_scratch"),
        (
            [*ENCODER[2:6], "intermediate_size=64", "max_position_embeddings=10"],
            "sequences of [0-9]+ tokens .* and the model has places for 8",
        ),
        (["--max_length", "2"], "--max_length 2: the tokenizer alone adds 2 tokens to each row"),
        (["--resume_from_checkpoint", "nowhere"], "leave out --resume_from_checkpoint"),
    ],
)
def test_what_a_model_cannot_take_is_one_line(argv, message, cola, tmp_path, capsys):
    base = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT]
    base = [*map(str, base)]
    if argv[:2] == ["--model", "nowhere/nothing"]:
        base = [x for x in base if "=" not in x and x not in ("--from_scratch", "--train_tokenizer", "280")]
    with pytest.raises(SystemExit) as stopped:
        runs.main(glue.RECIPE, [*base, *argv])
    assert stopped.value.code == 1
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert found.startswith("glue.py: ")
    assert re.search(message, found), found


def test_a_checkpoint_without_a_tokenizer_needs_one(cola, tmp_path, capsys, transformers_warnings):
    """transformers makes one of special tokens, to which all texts are the same."""
    FAMILIES["bert"].build().save_pretrained(tmp_path / "bert")
    argv = ["--model", tmp_path / "bert", "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT]
    with pytest.raises(SystemExit):
        runs.main(glue.RECIPE, [*map(str, argv)])
    transformers_warnings.clear()
    assert "bert has no tokenizer: name one with --tokenizer" in capsys.readouterr().err


T5 = ["--model", "t5", "--from_scratch", "num_layers=2", "d_model=32", "num_heads=2", "d_kv=16", "d_ff=64"]


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("defect", ENCODER),
        ("defect", [*T5, *ENCODER[-4:]]),
        ("clone", ENCODER),
        ("clone", [*ENCODER, "--pairs", "apart"]),
        pytest.param("clone", [*T5, *ENCODER[-4:], "--pairs", "apart"], marks=pytest.mark.slow),
    ],
    ids=["defect-encoder", "defect-generated", "clone", "clone-apart", "clone-apart-t5"],
)
def test_recipe_of_code(task, model, tmp_path):
    if task == "defect":
        rows = [{"func": f"int f{i}() {{ return {('bad', 'good')[i % 2]}; }}", "target": i % 2} for i in range(60)]
        (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        rows = [{"func": f"int f{i}() {{ return {i}; }}", "idx": i} for i in range(30)]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        lines = [f"{a}\t{b}\t{(a + b) % 2}" for a, b in itertools.combinations(range(30), 2)]
        (tmp_path / "test.txt").write_text("\n".join(lines))
    source_code.load.cache_clear()
    argv = [*model, "--task", task, "--data", tmp_path, "--output_dir", tmp_path / "run", *SHORT]
    runs.main(source_code.RECIPE, [*map(str, argv)])
    found = record(tmp_path / "run")
    assert set(found["metrics"]) >= {"validation/accuracy", "validation/f1", "test/accuracy", "test/f1"}
    assert all(0 <= found["metrics"][f"test/{name}"] <= 1 for name in ("accuracy", "f1"))
    assert found["moved"]["w_K"] > 0
    assert "official test part" in found["split"]


def test_a_generated_label_is_read_back():
    tokenizer = train_bpe(iter(["return true or false;"] * 9), 300)
    ids = torch.tensor(tokenizer(["true", "false", "nonsense"], padding=True)["input_ids"])
    ids[ids == tokenizer.pad_token_id] = -100
    assert source_code.read_words(tokenizer, ids.numpy()) == [1, 0, 0]


# ---------------------------------------------------------------------------------------------------- comparisons


def test_compare_pairs_the_seeds_and_goes_on_at_the_first_missing_one(cola, tmp_path, capsys):
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, "--seeds", 1, 2]
    argv = ["glue", *map(str, argv)]
    compare.main(argv)
    file = tmp_path / "glue-cola.json"
    first = json.loads(file.read_text())
    assert [(r["seed"], r["variant"]) for r in first["runs"]] == [
        (seed, variant) for seed in (1, 2) for variant in ("plain", "gfsa")
    ]
    values = {v: list(first["summary"][v]["values"].values()) for v in ("plain", "gfsa")}
    expected = paired_comparison(values["plain"], values["gfsa"])
    assert first["summary"]["gfsa"]["difference"]["mean"] == pytest.approx(expected.mean)
    assert first["metric"] == "validation/matthews_correlation"
    # the same model and data for both: what differs is the filter
    plain, patched = (next(r for r in first["runs"] if r["variant"] == v) for v in ("plain", "gfsa"))
    assert Settings(glue.RECIPE).list_differences(plain["settings"], patched["settings"]) == ["filter"]

    first["runs"] = [r for r in first["runs"] if (r["seed"], r["variant"]) != (2, "gfsa")]
    file.write_text(json.dumps(first))
    capsys.readouterr()
    compare.main(argv)
    out = capsys.readouterr().out
    assert out.count(": at hand") == 3
    assert f"results: {file}, 3 runs at hand" in out
    assert "plan: 2 variants x 2 seeds = 4 runs, 1 of them to do" in out
    assert f"figure: {tmp_path / 'glue-cola.png'}\nruns: " in out
    assert (tmp_path / "glue-cola.png").stat().st_size > 10_000
    assert "finished before" in out, "its folder has the record"
    assert len(json.loads(file.read_text())["runs"]) == 4
    before = file.read_text()
    for seeds in ([], ["--seeds", "3"]):
        with pytest.raises(SystemExit):
            compare.main([*argv, "--learning_rate", "1", *seeds])
        assert "seed 1 was run with other settings (learning_rate differ)" in capsys.readouterr().err
        assert file.read_text() == before, "what is refused changes nothing"


def test_a_run_that_diverged_is_counted_and_not_compared(asked, monkeypatch):
    def run(args, training):
        diverged = args.filter == "gfsa" and training.seed == 2
        metrics = {"validation/matthews_correlation": training.seed / 10, "validation/loss": 1.0}
        metrics = dict.fromkeys(metrics, math.nan) if diverged else metrics
        return {"metrics": metrics, "moved": {}, "coefficients": {}, "filter_parameters": 0}

    monkeypatch.setattr(glue, "RECIPE", dataclasses.replace(glue.RECIPE, run=run))
    compare.main([*README_COMPARISON, "--seeds", "1", "2", "3"])
    content = records.read_results(Path("runs/glue/glue-cola.json"))
    assert {run["seed"] for run in content["runs"]} == {1, 2, 3}
    assert {content["summary"]["as published"][name]["pairs"] for name in ("difference", "loss difference")} == {2}
    rows = {row[0]: row[2] for row in summary.summary_rows(content)[1]}
    assert rows["as published"] == "0.2000 ± 0.1414, 1 of 3 diverged"


def test_a_loss_that_is_no_number_is_a_run_that_diverged(asked, monkeypatch, capsys):
    """Of logits that are none the first class is the largest, so that some are right."""

    def run(args, training):
        loss = math.nan if args.filter == "gfsa" and training.seed == 2 else 1.0
        metrics = {"validation/matthews_correlation": 0.9, "validation/loss": loss}
        return {"metrics": metrics, "moved": {}, "coefficients": {}, "filter_parameters": 0}

    monkeypatch.setattr(glue, "RECIPE", dataclasses.replace(glue.RECIPE, run=run))
    compare.main([*README_COMPARISON, "--seeds", "1", "2", "3"])
    content = records.read_results(Path("runs/glue/glue-cola.json"))
    assert {content["summary"]["as published"][name]["pairs"] for name in ("difference", "loss difference")} == {2}
    rows = {row[0]: row[2] for row in summary.summary_rows(content)[1]}
    assert rows["as published"] == "0.9000 ± 0.0000, 1 of 3 diverged"
    capsys.readouterr()
    runs.main(glue.RECIPE, [*README_COMPARISON[1:], "2", "--output_dir", "runs/by-itself"])
    assert "1 of 2 diverged" in capsys.readouterr().out


def test_a_comparison_in_equal_time(asked, monkeypatch, capsys):
    """The table has the filter's difference from the longer baseline too."""

    def run(args, training):
        asked.append((args.filter, training.seed, training.num_train_epochs, training.max_steps))
        score = training.seed / 10 + 0.02 * (training.num_train_epochs == 6.25) + 0.05 * (args.filter == "gfsa")
        metrics = {"validation/matthews_correlation": score, "validation/loss": 1.0}
        return {"metrics": metrics, "moved": {}, "coefficients": {}, "filter_parameters": 0}

    monkeypatch.setattr(glue, "RECIPE", dataclasses.replace(glue.RECIPE, run=run))
    argv = ["glue", *ENCODER, "--task", "cola", "--save_strategy", "no", "--seeds", "1", "2", "--equal_time"]
    compare.main([*argv, "1.25"])
    assert [call[2] for call in asked if call[:2] == ("none", 1)] == [5, 6.25]
    assert "gfsa - baseline, 1.25 times the steps, validation/matthews_correlation: +0.0300" in capsys.readouterr().out
    content = records.read_results(Path("runs/glue/glue-cola.json"))
    assert [*content["variants"]] == ["plain", "plain, 1.25 times the steps", "gfsa"]
    header, rows = summary.summary_rows(content)
    cells = {row[0]: row[header.index("difference from baseline, 1.25 times the steps")] for row in rows}
    assert [*cells] == ["baseline", "baseline, 1.25 times the steps", "gfsa"]
    assert cells["gfsa"].startswith("+0.0300")
    assert cells["baseline"] == cells["baseline, 1.25 times the steps"] == ""
    compare.main([*argv, "1.25"])
    assert len(asked) == 6, "all at hand"
    compare.main([*argv, "1.1", "--max_steps", "15", "--name", "steps.json"])
    assert [call[3] for call in asked[6:9]] == [15, 17, 15]
    settings = Settings(RECIPES["imagenet"])  # whose flag for the epochs has another name
    parsed = settings.parse(["--config", "imagenet/small-24", "--task", "cifar10"])
    chosen = compare.choose_variants(settings, *parsed, equal_time=1.1)
    assert chosen["plain, 1.1 times the steps"] == {"filter": "none", "epochs": 6.6}
    for flags in (["1"], ["nan"], ["1.2", "--sweep", "K=2,3"]):
        with pytest.raises(SystemExit):
            compare.main([*argv, *flags])
        assert "--equal_time" in capsys.readouterr().err


def test_a_comparison_on_what_is_held_out_of_training(monkeypatch, tmp_path):
    """There the part that the task is compared by, test, is not measured."""

    def run(args, training):
        metrics = {"validation/f1": training.seed / 10, "validation/loss": 1.0}
        return {"metrics": metrics, "moved": {}, "coefficients": {}, "filter_parameters": 0}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source_code, "RECIPE", dataclasses.replace(source_code.RECIPE, run=run))
    compare.main(["code", "--config", "code/small.yaml", "--task", "clone", "--seeds", "1", "--held_out", "0.2"])
    content = records.read_results(Path("runs/code/code-clone.json"))
    assert content["metric"] == "validation/f1"
    assert content["summary"]["plain"]["values"] == {"1": 0.1}


def test_the_card_says_what_was_measured_and_compared(cola, tmp_path, monkeypatch):
    argv = [*map(str, [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT])]
    compare.main(["glue", *argv])
    for name, said in (
        ("gfsa", "validation/matthews_correlation: +0.0000 with one seed, which carries no claim.\n"),
        ("none", "RobertaForSequenceClassification, without a graph filter"),
    ):
        argv = [x.replace(str(tmp_path / "run"), str(tmp_path / name)) for x in argv] + ["--filter", name]
        runs.main(glue.RECIPE, [*argv, "--save_strategy", "steps", "--output_dir", str(tmp_path / name)])
        card = (tmp_path / name / "seed-1" / "README.md").read_text()
        assert said in card
        found = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"][0]["metrics"][0]
        assert found == {
            "type": "matthews_correlation",
            "value": record(tmp_path / name)["metrics"]["validation/matthews_correlation"],
        }
    settings, made, elsewhere = Settings(glue.RECIPE), record(tmp_path / "gfsa"), {"output_dir": "else/where"}
    assert runs.describe_comparison(settings, made, elsewhere) == "", "the shipped ones have other settings"
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert runs.describe_comparison(settings, made, elsewhere).endswith(
        "no claim (measured by the authors of the recipes)."
    )
    file = tmp_path / "glue-cola.json"
    content = json.loads(file.read_text())
    content["runs"] += [{**run, "seed": 2} for run in content["runs"]]
    file.write_text(json.dumps(content))
    assert "with each of 2 seeds, which gives no interval" in runs.describe_comparison(settings, made, elsewhere)


def test_a_comparison_in_a_fresh_clone_trains(asked, tmp_path, capsys):
    """The shipped results are not one's own, and stay as they are."""
    shipped = (records.RESULTS / "glue-cola.json").read_bytes()
    compare.main(README_COMPARISON)
    assert asked == [("none", 1, True)] + 4 * [("gfsa", 1, True)]
    assert "results: runs/glue/glue-cola.json, no runs at hand" in capsys.readouterr().out
    compare.main(README_COMPARISON)
    assert len(asked) == 5, "finished"
    for number in (1, 2):
        compare.main([*README_COMPARISON, "--fresh"])
        out = capsys.readouterr().out
        assert f"moved aside: runs/glue/glue-cola.json is now runs/glue/glue-cola.json.{number}\n" in out
        assert len(asked) == 5 + 5 * number
    assert sorted(p.name for p in (tmp_path / "runs" / "glue").iterdir() if p.suffix != ".lock") == [
        *("glue-cola", "glue-cola.1", "glue-cola.2", "glue-cola.json", "glue-cola.json.1", "glue-cola.json.2"),
        *("glue-cola.png", "glue-cola.png.1", "glue-cola.png.2"),
    ]
    assert (records.RESULTS / "glue-cola.json").read_bytes() == shipped


def test_shipped_results_are_shown_or_gone_on_with_when_asked_for(asked, capsys, monkeypatch):
    compare.main([*README_COMPARISON, "--against", "shipped"])
    out = capsys.readouterr().out
    assert len(asked) == 5
    assert f"other: {records.RESULTS}/glue-cola.json (2026-" in out
    assert "settings that differ: model\n" in out
    assert re.search(r"even layers +│ 1 +│ 0.1000.*\n│ +other +│ 5 +│ 0.0000 ± 0.0000", out)
    monkeypatch.setattr(records, "RESULTS", Path("runs/glue"))
    compare.main([*README_COMPARISON, "--results", "runs/glue", "--against", "shipped"])
    assert len(asked) == 5
    with pytest.raises(SystemExit):
        compare.main([*README_COMPARISON, "--against", "nowhere"])
    assert "--against nowhere: nowhere has no results glue-cola.json; there are: none" in capsys.readouterr().err
    Path("runs/glue/glue-cola.json").write_text("[]")
    with pytest.raises(SystemExit):
        compare.main(README_COMPARISON)
    assert "compare.py: runs/glue/glue-cola.json is no results file of compare.py: " in capsys.readouterr().err


def test_shipped_results_have_the_settings_of_the_configurations(monkeypatch):
    """So that the same command goes on with them: a machine that has no bf16 says so."""
    monkeypatch.setattr(recipe_settings, "bf16_pays", lambda use_cpu: True)
    arena = {
        "lra-listops-200": "--max_length 200",
        "lra-listops-2000": "--max_length 2000 --num_train_epochs 2 --per_device_train_batch_size 8",
        "lra-image": "--num_train_epochs 6 --per_device_train_batch_size 16",
        "lra-imdb-1024": "--max_length 1024 --num_train_epochs 4 --per_device_train_batch_size 8",
        "lra-imdb-4096": "--max_length 4096 --num_train_epochs 2 --per_device_train_batch_size 8",
    }
    shorter = {"graphs-zinc-sweep": "--num_train_epochs 40"}
    ablations = (
        "--from_scratch hidden_size=64 num_attention_heads=4 intermediate_size=256 --lr_scheduler_type linear "
        "--warmup_steps 0.1 --eval_steps 0.05 --load_best_model_at_end false"
    )
    arena |= {f"ablations-{task}": ablations for task in ("JapaneseVowels", "BasicMotions", "Handwriting")}
    names = {"ablations": "sequences/agf-uea", **dict.fromkeys(arena, "sequences/lra-small")}
    names |= {"finetune": "imagenet/deit-t-finetune", "24-layers": "imagenet/small-24", "glue": "glue/minilm"}
    names |= {"imdb": "sequences/converter-small", "converted": "glue/converted", "fillets": "speech/whisper"}
    names |= dict.fromkeys(("JapaneseVowels", "BasicMotions", "Handwriting"), "sequences/uea-small")
    files = sorted(records.RESULTS.glob("*.json"))
    assert files
    for file in files:
        content = records.read_results(file)
        settings = Settings(RECIPES[content["recipe"]])
        config = next((c for part, c in names.items() if part in file.stem), f"{content['recipe']}/small")
        flags = (arena | shorter).get(file.stem, "").split()
        flags += [] if content["task"] == "movie-snippets" else ["--data", "elsewhere"]
        values, sections = settings.parse(["--config", config, "--task", content["task"], *flags])
        only = [*content["variants"]][1:] if file.stem in arena else None
        equal_time = 1.125 if file.stem == "graphs-zinc" else None
        chosen = compare.choose_variants(settings, values, sections, only=only, equal_time=equal_time)
        for variant, overrides in chosen.items():
            if variant not in content["variants"]:
                continue  # was added to the file after these were run
            found = next(run["settings"] for run in content["runs"] if run["variant"] == variant)
            resolved = settings.identity(settings.override(values, overrides))
            copies = {"model", "tokenizer"} if "converted" in file.stem else {"model"}
            assert {*settings.list_differences(found, resolved)} <= copies, "a local copy has another name"


def test_a_comparison_of_some_variants_only():
    settings = Settings(sequences.RECIPE)
    values, sections = settings.parse(["--config", "sequences/lra-small", "--task", "listops"])
    chosen = compare.choose_variants(settings, values, sections, only=["gru alone", "agf"])
    assert [*chosen] == ["plain", "agf", "gru alone"]
    with pytest.raises(GraphFilterError, match="--variants 'afg': the YAML file has 'gfsa', 'agf', "):
        compare.choose_variants(settings, values, sections, only=["afg"])
    for sweep, found in ((["lr=1"], sections), (None, sections | {"variants": {}})):
        with pytest.raises(GraphFilterError, match="--variants chooses from the `variants` of a YAML file"):
            compare.choose_variants(settings, values, found, sweep, ["agf"])


@pytest.mark.parametrize("name", ["agf", "none"])
def test_the_filter_of_a_flag_is_not_that_of_named_variants(name):
    settings = Settings(sequences.RECIPE)
    argv = ["--config", "sequences/lra-small", "--task", "listops", "--filter", name]
    with pytest.raises(GraphFilterError, match=f"--filter {name}: the `variants` of the YAML file name their filters"):
        choose_variants(settings, *settings.parse(argv))
    assert len(choose_variants(settings, *settings.parse([*argv[:-1], "agf"]), ["residual=1,2"])) == 3, "a sweep"


def test_a_variant_imports_its_filter(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_FILTER.format(name="recipes-test-variant"))
    variant = {"filter": "recipes-test-variant", "import": [str(tmp_path / "mine.py")]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"model": "m", "variants": {"mine": variant}}))
    settings = Settings(glue.RECIPE)
    values, sections = settings.parse(["--config", str(tmp_path / "a.yaml"), "--task", "cola", "--use_cpu"])
    variant = settings.override(values, choose_variants(settings, values, sections)["mine"])
    settings.check(variant)
    assert variant["filter"] == "recipes-test-variant"


def test_the_sweep_of_a_file_is_written_as_options_are(tmp_path):
    axes = {"residual": [True, False], "bf16": [True], "learn": [["w_0", "w_K"], "w_K"]}
    content = {"model": "m", "filter": "singularformer", "sweep": axes}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    settings = Settings(glue.RECIPE)
    values, sections = settings.parse(["--config", str(tmp_path / "a.yaml"), "--task", "cola", "--use_cpu"])
    points = choose_variants(settings, values, sections, [])
    assert [*points][1] == 'residual=true, bf16=True, learn=["w_0","w_K"]', "settings keep their names"
    assert points["residual=false, bf16=True, learn=w_K"]["filter_options"] == ["residual=false", "learn=w_K"]
    del sections["sweep"]["learn"]
    for overrides in choose_variants(settings, values, sections, []).values():
        settings.check(settings.override(values, overrides))


@pytest.mark.parametrize("name", ["plain", "baseline"])
def test_no_variant_takes_the_place_of_the_baseline(name):
    settings = Settings(sequences.RECIPE)
    values, sections = settings.parse(["--config", "sequences/lra-small", "--task", "listops"])
    with pytest.raises(GraphFilterError, match=f"its own baseline: give the variant '{name}' another name"):
        compare.choose_variants(settings, values, sections | {"variants": {name: {"filter": "gfsa"}}})


@pytest.mark.parametrize("pays", [True, False])
def test_configurations_for_a_laptop_need_no_flag(pays, asked, monkeypatch, capsys):
    """bf16 on a CPU that is quick with it, else float32; the Trainer would refuse to decide."""
    monkeypatch.setattr(recipe_settings, "has_accelerator", lambda: False)
    monkeypatch.setattr(recipe_settings, "bf16_pays", lambda use_cpu: pays)
    compare.main(README_COMPARISON)
    assert {bf16 for *_, bf16 in asked} == {pays}
    assert ("computes slowly in bf16, or not at all: float32" in capsys.readouterr().err) is not pays
    settings = records.read_results(Path("runs/glue/glue-cola.json"))["runs"][0]["settings"]
    assert settings["bf16"] is pays
    asked.clear()
    runs.main(glue.RECIPE, [*README_COMPARISON[1:], "--bf16"])
    assert asked == [("gfsa", 1, True)], "asked for on the command line"


def test_sweep_over_an_option_and_a_setting_draws_a_figure(cola, tmp_path, capsys):
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT, "--seeds", 1]
    compare.main(
        ["glue", *map(str, argv), "--results", str(tmp_path), "--sweep", "K=1,3", "layers=all,even", "--max_steps", "1"]
    )
    found = json.loads((tmp_path / "glue-cola-sweep.json").read_text())
    names = ["plain", "K=1, layers=all", "K=1, layers=even", "K=3, layers=all", "K=3, layers=even"]
    assert list(found["summary"]) == names
    assert [r["filter_parameters"] for r in found["runs"]] == [0, 4, 2, 4, 2]
    assert found["runs"][1]["settings"]["filter_options"] == ["K=1"]
    assert (tmp_path / "glue-cola-sweep.png").stat().st_size > 10_000
    argv = ["glue", *map(str, argv), "--results", str(tmp_path), "--max_steps", "1"]
    compare.main([*argv, "--sweep", "K=2", "layers=all"])
    found = json.loads((tmp_path / "glue-cola-sweep.json").read_text())
    assert list(found["summary"]) == [*names, "K=2, layers=all"], "what was run before stays"
    assert len(found["runs"]) == 6
    with pytest.raises(SystemExit):
        compare.main([*argv, "--sweep", "K=4", "layers=all", "--filter_lr", "0.5"])
    assert "K=1, layers=all, seed 1 was run with other settings (filter_lr differ)" in capsys.readouterr().err


def test_a_sweep_is_drawn_in_its_order_where_a_run_diverged(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(summary, "save_figure", lambda figure, file: figures.append(figure))
    values = {"plain": 0.5, "K=2, a": math.nan, "K=3, a": 0.3, "K=4, a": 0.4, "K=2, b": 0.2, "K=3, b": 0.3}
    content = {"metric": "test/wer", "model": "m", "task": "t"}
    content["summary"] = {name: {"values": {"1": value}} for name, value in values.items()}
    summary.plot_sweep(content, tmp_path / "sweep.png")
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "3", "4"]
    drawn = [line[0].get_xydata().tolist() for line in axes.containers]
    assert drawn == [[[1, 0.3], [2, 0.4]], [[0, 0.2], [1, 0.3]]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sweep"], "--sweep needs axes"),
        (["--sweep", "K="], "--sweep needs axes"),
        (["--sweep", "K=2", "K=3"], "--sweep names an axis twice: write all of its values in one, K=2,3,4"),
        (["--config", "empty.yaml", "--sweep"], "--sweep needs axes"),
        (["--config", "numbers.yaml"], "`variants` in numbers.yaml must hold, by names, a dict each"),
        (["--config", "alike.yaml"], "'a b' and 'a-b' would share the folder a-b: rename one of them"),
        (["--sweep", "K=2", "--filter", "none"], "--sweep varies a filter"),
        (["--filter", "none"], "nothing to compare"),
        (["--push_to_hub"], "a comparison pushes nothing"),
        (["--sweep", "seeds=1,2"], "changes seeds, which all models of a comparison share: give --seeds"),
    ],
)
def test_wrong_comparisons_are_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "empty": "sweep: {K: []}",
        "numbers": "variants: {3: {filter_lr: 0.1}}",
        "alike": "variants: {a b: {filter_lr: 0.1}, a-b: {filter_lr: 0.2}}",
    }.items():
        Path(f"{name}.yaml").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        compare.main(["glue", "--model", "m", "--task", "cola", "--use_cpu", *argv])
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err


def test_names_of_repositories(monkeypatch):
    def create_repo(self, name, **options):
        return types.SimpleNamespace(repo_id=f"me/{name}")

    monkeypatch.setattr(runs.HfApi, "create_repo", create_repo)
    values = {"model": "openai/whisper-tiny", "task": "facebook/voxpopuli:en", "filter": "gfsa"}
    assert runs.create_repository(values) == "me/whisper-tiny-voxpopuli-en-gfsa"
    monkeypatch.undo()
    with pytest.raises(GraphFilterError, match=r"--hub_model_id me/a b: Repo id must.*nothing is lost"):
        runs.create_repository(values | {"hub_model_id": "me/a b"})


# ----------------------------------------------------------------------------------------------- as a user runs it


PUSH = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from huggingface_hub import HfApi
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from hub_server import TOKEN
from hf_graphfilter import filter_status
from recipes import glue, runs

def run(token):
    try:
        runs.main(glue.RECIPE, [*{argv!r}, "--hub_token", token])
    except SystemExit as stopped:
        print("exit", stopped.code)

run("hf_wrong")
run(TOKEN)
model = AutoModelForSequenceClassification.from_pretrained("me/roberta-cola-gfsa", token=TOKEN)
AutoTokenizer.from_pretrained("me/roberta-cola-gfsa", token=TOKEN)
print("loaded", len(filter_status(model)))
runs.HfApi = lambda token: HfApi(endpoint="http://127.0.0.1:9", token=token)
run(TOKEN)
"""


def test_push_to_a_stand_in_of_the_hub_and_load_from_it(cola, tmp_path):
    argv = [*ENCODER, "--task", "cola", "--data", cola, "--output_dir", tmp_path / "run", *SHORT]
    argv = [*map(str, argv), "--save_strategy", "steps", "--push_to_hub"]
    program = PUSH.format(root=str(ROOT), tests=str(ROOT / "tests"), argv=argv)
    with Hub() as hub:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=hub.environment(tmp_path / "home"),
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("exit") == 2, done.stdout
    assert "loaded 2" in done.stdout
    assert TOKEN not in done.stderr + done.stdout
    refused, unreachable = [line for line in done.stderr.splitlines() if line.startswith("glue.py: ")]
    assert "refused the token (hf auth login, or --hub_token); nothing is lost" in refused
    assert "http://127.0.0.1:9: " in unreachable
    assert "run the same command again" in unreachable
    files = hub.repos["me/roberta-cola-gfsa"]
    assert set(files) == {
        *("README.md", "config.json", "model.safetensors", "record.json", "tokenizer.json", "tokenizer_config.json")
    }
    card = files["README.md"].decode()
    assert 'from_pretrained("me/roberta-cola-gfsa")' in card
    measured = record(tmp_path / "run")["metrics"]["validation/matthews_correlation"]
    assert yaml.safe_load(card.split("---")[1])["model-index"][0]["results"][0]["metrics"] == [
        {"type": "matthews_correlation", "value": measured}
    ]
    kept = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert not any(TOKEN.encode() in content for content in [*files.values(), *kept])
    assert not any(str(tmp_path).encode() in content for content in files.values())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        pytest.param(
            ["FOLDER/source_code.py", "--help"], "python recipes/source_code.py --config", marks=pytest.mark.slow
        ),
        (["-m", "recipes.compare", "--help"], "python recipes/compare.py glue"),
    ],
    ids=["file", "module"],
)
def test_scripts_run_from_any_folder_and_explain_themselves(argv, said, tmp_path):
    done = subprocess.run(
        [sys.executable, *(word.replace("FOLDER", str(ROOT / "recipes")) for word in argv)],
        capture_output=True,
        text=True,
        cwd=ROOT if "-m" in argv else tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in " ".join(done.stdout.split())


def test_data_sets_of_the_hub_are_read_by_their_columns(monkeypatch):
    """Their columns as the Hub shows them; no network here."""
    parts = ("train", "validation", "test")
    at_hand = {
        "nyu-mll/glue": {
            "cola": ({"sentence": ["a"], "label": [1], "idx": [0]}, parts),
            "mnli": (
                {"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [0]},
                ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"),
            ),
        },
        "ptb-text-only/ptb_text_only": {None: ({"sentence": ["a b"]}, parts)},
        "me/texts": {"small": ({"text": ["a", "b"], "n": [1, 2]}, ("train",)), None: ({"body": ["a"]}, ("train",))},
        source_code.HUB["defect"]: {None: ({"id": [0], "func": ["f"], "target": [True]}, parts)},
        source_code.HUB["clone"]: {None: ({"func1": ["f"], "func2": ["g"], "label": [False]}, parts)},
    }

    def load_dataset(name, config=None, **_):
        rows, names = at_hand[name][config]
        return DatasetDict({part: Dataset.from_dict(rows) for part in names})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert glue.load.__wrapped__("cola", None)["validation"][0] == {"text_a": "a", "label": 1}
    mnli = glue.load.__wrapped__("mnli", None)
    assert set(mnli) == {"train", "validation", "validation_mismatched"}
    assert mnli["train"][0] == {"text_a": "a", "text_b": "b", "label": 2}
    assert language_modeling.load.__wrapped__("ptb", None)["test"]["text"][:] == ["a b"]
    texts = language_modeling.load.__wrapped__("me/texts:small", None)
    assert {k: v["text"][:] for k, v in texts.items()} == {"train": ["a"], "validation": ["b"]}
    with pytest.raises(GraphFilterError, match="me/texts has no column 'text' or 'sentence'; its columns are 'body'"):
        language_modeling.load.__wrapped__("me/texts", None)
    defects, split = source_code.load.__wrapped__("defect", None)
    assert (defects["train"][0], split) == ({"text_a": "f", "label": 1}, "official")
    assert source_code.load.__wrapped__("clone", None)[0]["test"][0] == {"text_a": "f", "text_b": "g", "label": 0}
    monkeypatch.undo()
    with pytest.raises(GraphFilterError, match=r"the data set nyu-mll/glue cannot be loaded .* --data"):
        glue.load.__wrapped__("cola", None)


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data is absent")
@pytest.mark.parametrize("task", ["cola", "sst2", "mrpc", "rte", "qnli", "qqp", "mnli"])
def test_official_glue_files(task):
    folder = {"qnli": "glue-subsets", "qqp": "glue-subsets", "mnli": "glue-subsets"}.get(task, "glue")
    data = glue.load.__wrapped__(task, str(DATA / folder))
    sizes = {"cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "rte": (2490, 277)}
    assert (len(data["train"]), len(data["validation"])) == sizes.get(task, (8999, 1000))
    assert set(data["validation"]["label"]) == set(range(len(glue.TASKS[task].labels)))


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data is absent")
def test_official_files_of_code_and_text():
    data, _ = source_code.load.__wrapped__("defect", str(DATA / "devign"))
    assert {k: len(v) for k, v in data.items()} == {"train": 1912, "validation": 274, "test": 546}
    data, _ = source_code.load.__wrapped__("clone", str(DATA / "bigclonebench"))
    assert min(len(part) for part in data.values()) > 20
    for task, folder in (("wikitext-2", "wikitext-2"), ("ptb", "ptb")):
        data = language_modeling.load.__wrapped__(task, str(DATA / folder))
        assert list(data) == ["train", "validation", "test"]
