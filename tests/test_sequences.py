"""The recipe of sequences: runs from scratch, words and bytes as tokens, the pooling head."""

import json

import pytest
import torch
from transformers import AutoModel, BertConfig, DistilBertConfig

from hf_graphfilter import filter_status, patch_model
from recipes import runs, sequences
from recipes.classifier import POOLINGS, PooledClassifier, pool
from recipes.models import train_bpe, train_words

SMALL = ["--model", "bert", "--from_scratch", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2"]
SMALL += ["intermediate_size=64", "max_position_embeddings=32", "--max_length", "16", "--train_tokenizer", "280"]
SMALL += ["--use_cpu", "--smoke", "--disable_tqdm", "true"]


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
        (["--filter", "singularformer", "--pooling", "mean_max", "--tokenizer", "words"], "PooledClassifier"),
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
    assert len(filter_status(model)) == 2 * filtered
    card = (folder / "README.md").read_text()
    assert "Trained from scratch on bbc with seed 7" in card
    assert ("from recipes.classifier import PooledClassifier" in card) == filtered


def test_an_unknown_head_is_one_sentence(documents, tmp_path, capsys):
    argv = [*SMALL, "--task", "bbc", "--data", documents, "--output_dir", tmp_path / "run", "--pooling", "max"]
    with pytest.raises(SystemExit):
        runs.main(sequences.RECIPE, [*map(str, argv)])
    assert "sequences.py: --pooling max: it is one of mean_max, mean, first" in capsys.readouterr().err


def test_tokens_are_words_or_bytes():
    words = train_words(iter(["Hello, world! it's"] * 3 + ["once"]), 30)
    assert words.tokenize("hello, WORLD once") == ["hello", ",", "world", "<unk>"]
    assert words("hello")["input_ids"] == [words.bos_token_id, words.vocab["hello"], words.eos_token_id]
    letters = train_bpe(iter(["abc abc abc"]), 261)
    text = "wörld\n ∞"
    ids = letters(text)["input_ids"]
    assert (len(letters), len(ids)) == (261, len(text.encode()) + 2)
    assert letters.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_head_leaves_padding_out_and_is_saved(pooling, tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3)
    config.update({"vocab_size": 50, "pooling": pooling})
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
    assert [pool(hidden, there, name).tolist() for name in POOLINGS] == [[[-2.0, -1.0]], [[-2.0]], [[-1.0]]]
    assert pool(hidden, torch.zeros_like(there), "mean_max").tolist() == [[0.0, 0.0]]
