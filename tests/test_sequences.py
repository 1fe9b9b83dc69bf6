"""The recipe of sequences: runs from scratch, words and bytes as tokens, the pooling head."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from processes import run_two
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModel, BertConfig, BertModel, DistilBertConfig

from hf_graphfilter import GraphFilterError, filter_status, patch_model
from recipes import runs, sequences
from recipes.classifier import POOLINGS, Denoiser, PooledClassifier, pool
from recipes.inputs import Batches, HiddenBatches, report_truncation, statistics
from recipes.metrics import several_labels
from recipes.models import make_symbol_tokenizer, train_bpe, train_symbols, train_words

SMALL = ["--model", "bert", "--from_scratch", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2"]
SMALL += ["intermediate_size=64", "max_position_embeddings=32", "--max_length", "16", "--train_tokenizer", "280"]
SMALL += ["--use_cpu", "--smoke", "--disable_tqdm", "true"]

BLENDED = ["--filter", "singularformer", "--filter_options", "init=blend"]


@pytest.fixture
def documents(tmp_path):
    """A folder with twelve documents in each of two classes, in which the class is a word."""
    for number in range(24):
        folder = tmp_path / "data" / ("cats", "dogs")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.txt").write_text(f"Number {number} is a {('cat', 'dog')[number % 2]}.")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([*BLENDED, "--pooling", "mean_max", "--tokenizer", "words"], "PooledClassifier"),
        (["--filter", "none"], "BertForSequenceClassification"),
    ],
    ids=["pooled", "own head"],
)
def test_a_run_trains_saves_and_is_loaded(options, kind, documents, tmp_path, transformers_warnings):
    argv = [*SMALL, "--task", "bbc", "--data", documents, "--output_dir", tmp_path / "run", "--seeds", 7, *options]
    runs.main(sequences.RECIPE, [*map(str, argv), "--save_strategy", "steps", "--save_steps", "4"])
    transformers_warnings.clear()  # of times on this file system
    folder, filtered = tmp_path / "run" / "seed-7", "singularformer" in options
    record = json.loads((folder / "record.json").read_text())
    assert set(record["metrics"]) == {"validation/accuracy", "validation/loss", "test/accuracy", "test/loss"}
    assert record["rows"] == {"train": 13, "validation": 3, "test": 8}
    assert record["split"].startswith("70/30 of the documents")
    logged = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"][0]
    assert {"ortho_loss", "diagonal_loss"} & {*logged} == ({"ortho_loss", "diagonal_loss"} if filtered else set())
    model = sequences.RECIPE.load(folder)
    assert (type(model).__name__, model.config.id2label) == (kind, {0: "cats", 1: "dogs"})
    status = filter_status(model)
    assert len(status) == 2 * filtered
    assert all(bool((row.coefficients["gate"] == 1).all()) for row in status), (
        "carried from the attention to the filter"
    )
    card = (folder / "README.md").read_text()
    assert "Trained from scratch on bbc with seed 7" in card
    assert ("from recipes.classifier import PooledClassifier" in card) == filtered


@pytest.fixture
def tasks(tmp_path, documents):
    """A folder of samples, one of each kind, by task."""
    random = np.random.default_rng(0)
    for part in ("TRAIN", "TEST"):
        rows = [":".join(",".join(f"{x:.3f}" for x in random.normal(7, 3, 4 + n)) for _ in "ab") for n in (0, 1, 2) * 4]
        head = ["@problemName x", "@univariate false", "@classLabel true a b", "@data"]
        file = tmp_path / "series" / f"BasicMotions_{part}.ts"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(head + [f"{row}:{'ab'[n % 2]}" for n, row in enumerate(rows)]))
        for number in range(12):
            image = tmp_path / "pixels" / part.lower() / "ab"[number % 2] / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (32, 32), dtype=np.uint8)).save(image)
    for folder, names, row in (
        ("symbols", ("basic_train", "basic_val", "basic_test"), "( ( ( [MAX {0} ) 3 ) ] )\t{1}"),
        (
            "pairs",
            ("new_aan_pairs.train", "new_aan_pairs.eval", "new_aan_pairs.test"),
            "{1}\tA\tB\tone {0}\ttwo, longer",
        ),
    ):
        for name in names:
            rows = ["Source\tTarget"] * (folder == "symbols") + [row.format(n % 9, n % 2) for n in range(12)]
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    return {"BasicMotions": tmp_path / "series", "image": tmp_path / "pixels", "listops": tmp_path / "symbols"} | {
        "retrieval": tmp_path / "pairs",
        "bbc": documents,
    }


def arguments(task, tasks, folder, *options):
    return [*map(str, (*SMALL, "--task", task, "--data", tasks[task], "--output_dir", folder, *options))]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CONVERTER = ["--model", "converter", "--from_scratch", "hidden_size=16", "intermediate_size=32"]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("BasicMotions", ["--pooling", "mean", "--positions", "gru", "--filter", "agf"]),
        ("retrieval", ["--pooling", "mean_max", "--positions", "none", "--filter", "singularformer"]),
        ("listops", [*CONVERTER, "--filter", "none"]),
        slow(
            "BasicMotions",
            ["--pooling", "flatten", "--train_sampling_strategy", "group_by_length", "--filter", "kernelution"],
        ),
        slow("bbc", ["--pooling", "flatten", "--tokenizer", "words", "--filter", "none"]),
        slow("image", ["--pooling", "mean", "--model", "roberta-prelayernorm", "--filter", "none"]),
        slow("listops", ["--pooling", "first", "--positions", "sinusoidal", "--filter", "gfsa"]),
        slow("retrieval", [*CONVERTER, "--filter", "none"]),
        slow("retrieval", ["--filter", "none"]),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x).replace("--", ""),
)
def test_every_kind_of_input_is_denoised_trained_and_loaded(task, options, tasks, tmp_path, transformers_warnings):
    argv = arguments(task, tasks, tmp_path / "run", "--pretrain", "denoise", "--max_steps", 1, *options)
    argv += ["--save_strategy", "steps", "--save_steps", "1"]
    runs.main(sequences.RECIPE, [x for x in argv if "max_position_embeddings" not in x])
    transformers_warnings.clear()  # of times on this file system
    folder = tmp_path / "run" / "seed-1"
    record = json.loads((folder / "record.json").read_text())
    assert math.isfinite(record["metrics"]["test/loss"])
    assert record["pretraining"]["loss"] > 0
    assert record["peak_mb"] > 100
    assert record["epoch_seconds"] > 0
    filtered = "none" not in options[-1:]
    model = sequences.RECIPE.load(folder)
    assert len(filter_status(model)) == 2 * filtered
    trained = load_file(folder / "model.safetensors")
    assert len(load_file(folder / "pretrained" / "model.safetensors").keys() & trained.keys()) > 10
    if task == "BasicMotions":
        assert "type: time-series-classification" in (folder / "README.md").read_text()
        assert model.channels == 2
        torch.testing.assert_close(model.mean, torch.tensor([7.0, 7.0]), atol=2, rtol=0)


@pytest.mark.parametrize(
    "kind", ["tokens", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pairs", "series"))]
)
def test_self_pretraining_is_carried_over_and_not_repeated(
    kind, tasks, tmp_path, monkeypatch, capsys, transformers_warnings
):
    task = {"tokens": "listops", "pairs": "retrieval", "series": "BasicMotions"}[kind]
    seen, hide = {}, HiddenBatches.__call__

    def count(self, rows):
        hidden = hide(self, rows)
        assert len(next(iter(hidden.values()))) == len(rows) * (1 + (kind == "pairs")), "both texts of a pair"
        return hidden

    monkeypatch.setattr(HiddenBatches, "__call__", count)
    original = sequences.fit

    def fit(args, training, model, *rest, **options):
        seen["before"] = {name: value.clone() for name, value in model.state_dict().items()}
        return original(args, training, model, *rest, **options)

    monkeypatch.setattr(sequences, "fit", fit)
    argv = arguments(task, tasks, tmp_path / "run", "--pretrain", "denoise", "--pooling", "mean", "--filter", "agf")
    runs.main(sequences.RECIPE, argv)
    weights = load_file(tmp_path / "run" / "seed-1" / "pretrained" / "model.safetensors")
    shared = weights.keys() & seen["before"].keys()
    assert any("graph_filter" in name for name in shared)
    for name in shared:
        assert torch.equal(weights[name], seen["before"][name]), name
    first = seen["before"]
    (tmp_path / "run" / "seed-1" / "record.json").unlink()
    before = json.loads((tmp_path / "run" / "seed-1" / "pretrained" / "record.json").read_text())
    monkeypatch.setattr("recipes.pretraining.make_trainer", None)  # is not needed again
    with pytest.raises(SystemExit):
        runs.main(sequences.RECIPE, [*argv, "--mask_ratio", "0.2"])
    assert "holds a run with other settings (mask_ratio differ)" in capsys.readouterr().err
    runs.main(sequences.RECIPE, argv)
    transformers_warnings.clear()
    assert all(torch.equal(first[name], seen["before"][name]) for name in shared)
    record = json.loads((tmp_path / "run" / "seed-1" / "record.json").read_text())
    assert record["pretraining"] == before


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
FSDP2 |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["listops", "BasicMotions"])
def test_self_pretraining_is_carried_over_under_fsdp2(task, tasks, tmp_path):
    """The denoiser's parameters are in shards; its buffers and the classifier are whole."""
    options = ["--pretrain", "denoise", "--pretrain_lr", "1e-3", "--learning_rate", "0", "--filter_lr", "0"]
    options += ["--save_strategy", "steps", "--save_steps", "1"]
    argv = arguments(task, tasks, tmp_path / "run", "--pooling", "mean", "--filter", "agf", *options)
    run_two(Path(__file__).with_name("recipe_in_processes.py"), *argv, **FSDP2)
    denoiser, trained = (load_file(tmp_path / "run" / "seed-1" / x / "model.safetensors") for x in ("pretrained", ""))
    shared = denoiser.keys() & trained.keys()
    assert any("graph_filter" in name for name in shared)
    for name in shared:
        assert torch.equal(denoiser[name], trained[name]), name


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("bbc", ["--pooling", "max"], "--pooling max: it is one of mean_max, mean, first, flatten"),
        (
            "bbc",
            ["--positions", "rotary", "--pooling", "mean"],
            "--positions rotary: it is one of gru, sinusoidal, none",
        ),
        ("bbc", ["--positions", "gru"], "--positions and series need --pooling"),
        ("BasicMotions", [], "--positions and series need --pooling"),
        ("BasicMotions", CONVERTER, "converter reads tokens"),
        ("bbc", ["--validation", "none", "--eval_strategy", "epoch"], "add --eval_strategy no"),
        ("bbc", ["--validation", "some"], "--validation some: it is one of auto, fold, test, none"),
        ("bbc", ["--pretrain", "rest"], "--pretrain rest: it is one of denoise"),
        ("bbc", ["--pretrain", "denoise", "--mask_ratio", "1"], "--mask_ratio 1.0: it is a part of the input"),
        ("bbc", ["--pretrain", "denoise", "--pretrain_epochs", "0"], "--pretrain_epochs 0.0: it is more than 0"),
        ("bbc", ["--max_length", "2"], "--max_length 2: at least 3, a token between <s> and </s>"),
        (
            "bbc",
            [*SMALL[2:7], "max_position_embeddings=8"],
            "sequences of 16 tokens (a multiple of 8 that texts are padded to) or steps, and the model has",
        ),
        (
            "bbc",
            ["--tokenizer", "words", "--train_tokenizer", "5"],
            "--train_tokenizer 5: a vocabulary has 5 special tokens and others",
        ),
        ("bbc", ["--max_eval_samples", "0"], "--max_eval_samples 0: at least one row is needed"),
        ("bbc", ["--seeds", "-1"], "--seeds [-1]: a seed is from 0 to"),
        ("bbc", ["--from_scratch", "vocab_size=9"], "--from_scratch: vocab_size is set by the recipe, leave it out"),
        ("bbc", ["--from_scratch", "dtype=bfloat16"], "--from_scratch: dtype is set by the recipe, leave it out"),
        ("bbc", ["--from_scratch", "hidden_size=31"], "bert cannot be made: The hidden size (31) is not a multiple"),
        (
            "bbc",
            ["--model", "funnel", "--from_scratch", SMALL[4]],
            "funnel cannot be made: This model does not support the setting of",
        ),
        (
            "bbc",
            ["--model", "t5", "--from_scratch", "d_model=8", "--pooling", "mean"],
            "T5Model is no encoder of tokens",
        ),
        (
            "bbc",
            ["--pooling", "mean", "--positions", "gru", "--model", "roformer"],
            "positions are for encoders with learned ones, which they replace, and RoFormerModel has none",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(task, options, message, tasks, tmp_path, capsys):
    argv = arguments(task, tasks, tmp_path / "run", "--filter", "none", *options)
    with pytest.raises(SystemExit):
        runs.main(sequences.RECIPE, argv)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    if task == "BasicMotions" or "--pretrain" in options:
        assert not (tmp_path / "run").exists(), "flags are refused before anything is written"


def test_hidden_parts_are_visible_ones_and_those_asked_for():
    torch.manual_seed(0)
    tokenizer = make_symbol_tokenizer("abcdefgh")
    rows = [tokenizer("a b c d e f g h " * count, return_attention_mask=False) for count in (20, 10)]
    batch = HiddenBatches(tokenizer, 0.25)(rows)
    hidden = batch["labels"] != -100
    assert (batch["input_ids"][hidden] == tokenizer.mask_token_id).all()
    assert hidden[batch["attention_mask"] == 0].sum() == 0
    assert hidden[:, 0].sum() == 0, "special tokens stay"
    assert 0.15 < hidden[0].float().mean() < 0.35
    series = [{"inputs_embeds": [[float(step)] for step in range(length)]} for length in (40, 20)]
    batch = HiddenBatches(None, 0.25)(series)
    assert batch["hidden_steps"].sum(1).tolist() == [10, 5]
    assert not batch["hidden_steps"][1, 20:].any()


def test_a_denoiser_does_not_see_what_is_hidden():
    model = Denoiser.from_config(small(channels=3, vocab_size=1)).eval()
    model.normalise_by(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 2.0]))  # the second one is constant
    series, hidden = torch.randn(2, 6, 3), torch.zeros(2, 6, dtype=torch.bool)
    hidden[:, 2] = True
    other = series.clone()
    other[:, 2] += 1
    with torch.no_grad():
        out, same = (model(inputs_embeds=x, hidden_steps=hidden) for x in (series, other))
    torch.testing.assert_close(out.logits, same.logits)
    error = out.logits[:, 2] - (series[:, 2] - torch.tensor([1.0, 2.0, 3.0])) / torch.tensor([1.0, 1.0, 2.0])
    torch.testing.assert_close(out.loss, error.square().mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", [None, "gru", "sinusoidal", "none"])
def test_positions_take_the_place_of_learned_ones(positions, tmp_path):
    config = small(positions=positions, pooling="mean")
    model = PooledClassifier.from_config(config).eval()
    ids, mask = torch.randint(5, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad():
        padded, alone, turned = model(ids, mask), model(ids[1:, :6]), model(ids[1:, :6].flip(1))
    torch.testing.assert_close(padded.logits[1:], alone.logits)
    assert torch.allclose(alone.logits, turned.logits, atol=1e-6) == (positions == "none"), "order counts"
    table = model.bert.embeddings.position_embeddings.weight
    assert (table.requires_grad, bool(table.any())) == (positions is None,) * 2
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(PooledClassifier.from_pretrained(tmp_path).eval()(ids, mask).logits, padded.logits)


@pytest.mark.parametrize("fields", [{"positions": "none"}, {"positions": "gru"}, {"channels": 2}], ids=str)
def test_pretrained_weights_take_the_place_of_new_ones(fields, tmp_path, transformers_warnings):
    BertModel(small()).save_pretrained(tmp_path)
    model = PooledClassifier.from_pretrained(tmp_path, pooling="mean", **fields)
    assert model.config.pooling == "mean"
    assert all(value.isfinite().all() for value in model.state_dict().values()), "none is undefined"
    embeddings = model.bert.embeddings
    if model.channels:
        assert not embeddings.word_embeddings.weight.requires_grad
    else:
        table = embeddings.position_embeddings.weight
        assert (table.requires_grad, bool(table.any())) == (False, False)
    model.save_pretrained(tmp_path / "saved")
    transformers_warnings.clear()  # of new weights in the head
    loaded = PooledClassifier.from_pretrained(tmp_path / "saved")
    assert {n for n, p in loaded.named_parameters() if not p.requires_grad} == {
        n for n, p in model.named_parameters() if not p.requires_grad
    }


def test_series_are_normalised_by_the_model(tmp_path):
    series = [[[1.0, 10.0], [3.0, 30.0]], [[5.0, 20.0]]]
    mean, deviation = statistics(series)
    assert mean.tolist() == [3.0, 20.0]
    model = PooledClassifier.from_config(small(channels=2, vocab_size=1, pooling="flatten", flattened=4)).eval()
    batch = Batches(None)([{"inputs_embeds": one, "label": 0} for one in series])
    unit = {**batch, "inputs_embeds": (batch["inputs_embeds"] - mean.float()) / deviation.float()}
    with torch.no_grad():
        expected = model(**unit).logits
        model.normalise_by(mean, deviation)
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-4)
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(PooledClassifier.from_pretrained(tmp_path)(**batch).logits, model(**batch).logits)
        with pytest.raises(GraphFilterError, match="a sequence of 5 tokens, and the head takes 4"):
            model(inputs_embeds=torch.zeros(1, 5, 2))


def test_pairs_are_read_by_the_same_weights():
    model = PooledClassifier.from_config(small(num_sequences=2, pooling="mean")).eval()
    a, b = torch.randint(5, 50, (2, 1, 7))
    u, v = (model.features(ids, None, None) for ids in (a, b))
    expected = model.output(model.dense(torch.cat([u, v, u * v, u - v], -1)).relu())
    torch.testing.assert_close(model(a, input_ids_2=b).logits, expected)


def test_symbols_are_what_stands_between_spaces():
    tokenizer = train_symbols(["[MAX 2 9 ]", "[MIN 5 ]"])
    assert tokenizer.tokenize("[MIN 9 2 ]") == ["[MIN", "9", "2", "]"]
    assert tokenizer.tokenize("[MED") == ["<unk>"]
    pixels = make_symbol_tokenizer(map(str, range(256)), ends=False)
    assert pixels("0 255 17")["input_ids"] == [0, 255, 17]


def test_tokens_are_words_or_bytes():
    words = train_words(iter(["Hello, world! it's"] * 3 + ["once"]), 30)
    assert words.tokenize("hello, WORLD once") == ["hello", ",", "world", "<unk>"]
    assert words("hello")["input_ids"] == [words.bos_token_id, words.vocab["hello"], words.eos_token_id]
    letters = train_bpe(iter(["abc abc abc"]), 261)
    text = "wörld\n ∞"
    ids = letters(text)["input_ids"]
    assert (len(letters), len(ids)) == (261, len(text.encode()) + 2)
    assert letters.decode(ids, skip_special_tokens=True) == text


def small(vocab_size=50, **fields):
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3)
    config.update({"vocab_size": vocab_size, **fields})
    return config


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_head_leaves_padding_out_and_is_saved(pooling, tmp_path):
    config = small(pooling=pooling, flattened=9)
    model = patch_model(PooledClassifier.from_config(config).eval(), "singularformer")
    ids, mask = torch.randint(5, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    with torch.no_grad():
        padded, alone = model(ids, mask, labels=torch.tensor([0, 2])), model(ids[1:, :4])
    torch.testing.assert_close(padded.logits[1:], alone.logits)
    torch.testing.assert_close(padded.loss, torch.nn.functional.cross_entropy(padded.logits, torch.tensor([0, 2])))
    model.save_pretrained(tmp_path)
    loaded = PooledClassifier.from_pretrained(tmp_path).eval()
    assert len(filter_status(loaded)) == 2
    with torch.no_grad():
        assert torch.equal(loaded(ids, mask).logits, padded.logits)


def test_the_head_takes_the_weights_of_an_encoder(tmp_path, transformers_warnings):
    config = DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=50)
    encoder = AutoModel.from_config(config)
    encoder.save_pretrained(tmp_path)
    model = PooledClassifier.from_pretrained(tmp_path, pooling="mean", num_labels=4)
    transformers_warnings.clear()  # of the new head
    assert (model.config.pooling, model.output.out_features) == ("mean", 4)
    for ours, theirs in zip(model.base_model.parameters(), encoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_pooling_by_hand():
    hidden = torch.tensor([[[9.0], [-1.0], [-3.0], [9.0]]])
    there = torch.tensor([[False, True, True, False]])
    assert [pool(hidden, there, name).tolist() for name in POOLINGS[:3]] == [[[-2.0, -1.0]], [[-2.0]], [[-1.0]]]
    flat = torch.nn.functional.gelu(torch.tensor([[0.0, -1.0, -3.0, 0.0, 0.0]]))
    torch.testing.assert_close(pool(hidden, there, "flatten", 5), flat)
    assert pool(hidden, torch.zeros_like(there), "mean_max").tolist() == [[0.0, 0.0]]


def test_texts_that_are_cut_are_counted(capsys):
    parts = {"train": Dataset.from_dict({"input_ids": [[1, 2], [1, 2, 3, 4], [5, 6, 7, 8]]})}
    assert report_truncation(DatasetDict(parts), 4)["train"].num_rows == 3
    assert (
        "2 of 3 training texts have 4 tokens or more: what is beyond --max_length 4 is cut" in capsys.readouterr().err
    )
    report_truncation(DatasetDict(parts), 5)
    assert not capsys.readouterr().err


FIXED = {
    "nystromformer": {"num_landmarks": 4, "num_hidden_layers": 1, "intermediate_size": 8},
    "reformer": {
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "attn_layers": ["lsh"],
        "attention_head_size": 4,
        "feed_forward_size": 8,
        "axial_pos_embds": False,
        "num_buckets": 2,
        "hash_seed": 0,
    },
}


@pytest.mark.parametrize("name", FIXED)
def test_models_of_fixed_lengths_are_padded_to_them(name):
    shape = FIXED[name] | {"hidden_size": 8, "num_attention_heads": 2}
    texts = [f"{key}={json.dumps(value)}" for key, value in shape.items()]
    args = SimpleNamespace(model=name, from_scratch=texts, pooling="mean", positions=None, embedding_dropout=None)
    ids = [[7, 8, 9, 3, 4], [5, 6, 7, 8, 9, 5, 4, 3, 4]]
    data = {"train": Dataset.from_dict({"input_ids": ids, "label": [0, 1]})}
    found = sequences.fields(args, None, data, longest=10)
    assert found["padded_to"] == {"nystromformer": 12, "reformer": 4}[name]
    model = PooledClassifier.from_config(CONFIG_MAPPING[name](**shape | found, vocab_size=10)).train()
    batch = torch.tensor([row + [0] * (9 - len(row)) for row in ids])
    mask = (batch != 0).long()
    model(input_ids=batch, attention_mask=mask, labels=torch.tensor([0, 1])).loss.backward()
    assert model.get_input_embeddings().weight.grad.isfinite().all()
    model.eval()
    hidden = model.encode(batch, mask, None)
    assert hidden.shape == (2, 9, 16 if name == "reformer" else 8)
    embeds = model.get_input_embeddings()(batch[1:])
    padding = 1e-2 if name == "nystromformer" else 0  # is in its landmarks, and is of zeros here
    torch.testing.assert_close(model.encode(None, None, embeds)[0], hidden[1], atol=1e-5 + padding, rtol=1e-5)


def test_embeddings_have_a_dropout_of_their_own(tmp_path):
    model = PooledClassifier.from_config(small(pooling="mean", embedding_dropout=0.25))
    model.save_pretrained(tmp_path)
    for found in (model, PooledClassifier.from_pretrained(tmp_path)):
        assert found.base_model.embeddings.dropout.p == 0.25
        assert found.base_model.encoder.layer[0].output.dropout.p != 0.25
    with pytest.raises(GraphFilterError, match="XLNetModel has no dropout of its embeddings"):
        PooledClassifier.from_config(CONFIG_MAPPING["xlnet"](d_model=8, n_head=2, n_layer=1, embedding_dropout=0.1))


def test_texts_with_several_labels(tmp_path):
    """MIMIC-III 50, as CAML's code writes it: the loss is of each code, the scores of all codes of a text."""
    kinds = ('"fever, and more",b;c', '"a cough, too",a;b')
    rows = [f"{n},{n},{kinds[n % 2]},4" for n in range(12)]
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}_50.csv").write_text("\n".join(["SUBJECT_ID,HADM_ID,TEXT,LABELS,length", *rows]))
    argv = [*SMALL, "--task", "mimic-iii-50", "--data", tmp_path, "--output_dir", tmp_path / "run", "--pooling", "mean"]
    runs.main(sequences.RECIPE, [*map(str, argv), "--filter", "singularformer", "--save_strategy", "no"])
    metrics = json.loads((tmp_path / "run" / "seed-1" / "record.json").read_text())["metrics"]
    assert 0 <= metrics["test/accuracy"] <= metrics["test/f1"] <= 1
    assert 0.4 < metrics["test/loss"] < 1, "near log 2 per code"


def test_scores_of_several_labels():
    labels = np.array([[1.0, 0.0], [1.0, 1.0]])
    prediction = SimpleNamespace(predictions=np.array([[2.0, -1.0], [0.5, -0.1]]), label_ids=labels)
    assert several_labels(prediction) == {"accuracy": 0.5, "f1": pytest.approx(0.8)}
