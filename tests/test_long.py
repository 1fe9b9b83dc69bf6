"""Long texts: the tasks are as they say, the measures are right, and the program resumes."""

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from hf_graphfilter import patch_model

ROOT = Path(__file__).parents[1]
BUDGETS = {"niah_multikey_3": 900, "cwe": 800, "copying": 64}  # bytes
BYTES = 600


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


def decoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=384, num_key_value_heads=1, max_position_embeddings=2048, **sizes)
    return LlamaForCausalLM(config).eval()


TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe", "key-value", "copying")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_holds_its_answer_fits_and_is_drawn_by_its_number(task, tokenizer):
    import retrieval

    assert set(retrieval.TASKS) == set(TASKS)
    tokens = BUDGETS.get(task, BYTES)
    sample = retrieval.make_sample(tokenizer, task, tokens, 0)
    assert 0.8 * tokens < len(sample) <= tokens
    assert sample == retrieval.make_sample(tokenizer, task, tokens, 0)
    assert sample.prompt != retrieval.make_sample(tokenizer, task, tokens, 1).prompt
    if task == "copying":
        assert sample.prompt + sample.answer == sample.prompt[:-1] * 2
        return
    prompt, answer = tokenizer.decode(sample.prompt), tokenizer.decode(sample.answer)
    words = sample.answers or (answer.strip(),)
    assert answer.strip() == " ".join(words)
    context = prompt[: prompt.rindex("\n")]  # the question says no part of the answer
    assert all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", context) for word in words)
    assert not any(word in prompt[len(context) :] for word in words)
    with pytest.raises(ValueError, match="does not fit into 20 tokens"):
        retrieval.make_sample(tokenizer, task, 20, 0)


def test_tasks_have_one_right_answer():
    """Of each task: what is asked for stands in the text once, or more often than all others."""
    import retrieval

    for number in range(20):
        prompt, _, names = retrieval.vt(Random(number), 10)
        value = re.search(r"= (\d+)", prompt)[1]
        chain = [line.split()[1:] for line in prompt.split("\n") if line.startswith("VAR ")]
        assert [line[0] for line in chain] == list(names), "each variable is set before it is read"
        assert [line[-1] for line in chain] == [value, *names[:-1]]
        prompt, _, common = retrieval.cwe(Random(number), 60)
        counts = Counter(re.findall(r"\d+\. (\S+)", prompt))
        assert sum(counts.values()) == 60
        assert {word for word, _ in counts.most_common(10)} == set(common)
        assert min(counts[word] for word in common) > max(counts[word] for word in counts if word not in common)
        prompt, _, frequent = retrieval.fwe(Random(number), 100)
        counts = Counter(word for word in prompt.split("\n")[1].split() if word != "...")
        assert [word for word, _ in counts.most_common(3)] == list(frequent)
        assert counts.most_common(4)[3][1] < counts[frequent[2]]
        for make in (retrieval.niah_multikey_2, retrieval.niah_multikey_3, retrieval.key_value):
            prompt, answer, _ = make(Random(number), 8)
            text = prompt[: prompt.rindex("\n")]
            key = re.search(r'for (\S+)\?|"(\d+)": "$', prompt[len(text) :])
            [line] = [line for line in text.split("\n") if (key[1] or key[2]) in line.split(answer.strip())[0]]
            assert answer.strip() in line


def test_words_do_not_run_out():
    import retrieval

    assert len(set(retrieval.draw_words(Random(0), 1000))) == 1000
    with pytest.raises(ValueError, match="names"):
        retrieval.draw_names(Random(0), 10**6)


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 150), (1.0, 300)])
def test_a_needle_lies_at_its_depth(depth, place, tokenizer):
    import retrieval

    least = len(retrieval.make_needle(tokenizer, 400, 0.0, 0).prompt)
    assert least == 395
    sample = retrieval.make_needle(tokenizer, 400, depth, 3)
    assert len(sample) == 400
    assert sample == retrieval.make_needle(tokenizer, 400, depth, 3)
    text, key = tokenizer.decode(sample.prompt), tokenizer.decode(sample.answer)
    room = 400 - len(retrieval.hide_key(tokenizer, [], key, 0))
    assert text.index(f" The pass key is {key}") == round(place / 300 * room)
    with pytest.raises(ValueError, match="does not fit"):
        retrieval.make_needle(tokenizer, 50, depth, 3)


class Parrot(torch.nn.Module):
    """Predicts the token that came after the last one where it stood before."""

    device = torch.device("cpu")

    def forward(self, input_ids, use_cache=False):
        logits = torch.zeros(*input_ids.shape, 400)
        for row, ids in zip(logits, input_ids.tolist(), strict=True):
            after = {}
            for i, token in enumerate(ids):
                row[i, after.get(token, 0)] = 10.0
                if i + 1 < len(ids):
                    after[token] = ids[i + 1]
        return type("Outputs", (), {"logits": logits})


def test_scores():
    from retrieval import Sample, score

    right = score(Parrot(), Sample([5, 6, 7, 8, 5], [6, 7]), None)
    assert right.right == 1.0
    assert right.log_probability == pytest.approx(10 - math.log(math.exp(10) + 399), rel=1e-3)
    assert score(Parrot(), Sample([5, 6, 7, 8, 5], [6, 8]), None).right == 0.0
    assert score(Parrot(), Sample([5, 6, 7, 8, 5], [6, 8], partly=True), None).right == 0.5


def test_several_answers_are_looked_for_in_what_is_generated(tokenizer):
    import retrieval

    model = patch_model(decoder(), "hedgehog", window=8, sinks=2)
    ids = torch.tensor([retrieval.encode(tokenizer, "some text, and some more of it: ")])
    written = retrieval.generate(model, ids, 13)
    expected = ids
    for _ in range(13):
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert written.tolist() == expected[:, ids.shape[1] :].tolist()

    class Words:
        def decode(self, ids):
            assert ids.tolist() == written[0].tolist()
            return "one, two; threes"

    sample = retrieval.Sample(ids[0].tolist(), [100, 101, 102, 103, 104, 105], ("two", "three", "one", "four"))
    found = retrieval.score(model, sample, Words())
    assert found.right == 0.5
    alone = retrieval.score(model, retrieval.Sample(sample.prompt, sample.answer), None)
    assert found.log_probability == pytest.approx(alone.log_probability, abs=1e-5)


@pytest.mark.parametrize(
    ("share", "count", "interval"),
    [(0.5, 10, (0.2366, 0.7634)), (0.0, 10, (0.0, 0.2775)), (1.0, 50, (0.9287, 1.0)), (0.9, 20, (0.6990, 0.9721))],
)
def test_wilson(share, count, interval):
    from retrieval import wilson

    assert wilson(share, count) == pytest.approx(interval, abs=5e-5)


def test_ndcg_by_hand():
    from encoders import ndcg

    relevant = {"a": 1, "b": 2}
    best = 2 / math.log2(2) + 1 / math.log2(3)
    assert ndcg(["x", "a", "b"], relevant) == pytest.approx((1 / math.log2(3) + 2 / math.log2(4)) / best)
    assert ndcg(["b", "a"], relevant) == 1.0
    assert ndcg([*"0123456789", "a"], relevant) == 0.0, "beyond the tenth"
    assert ndcg(["x", "b"], {"b": 1}) == pytest.approx(1 / math.log2(3))


def test_documents_are_ranked_whatever_their_batch():
    from encoders import rank

    documents = torch.nn.functional.normalize(torch.tensor([[1.0, 0], [0, 1], [1, 1]]), dim=-1)
    assert rank(torch.tensor([[1.0, 0.1], [0, 1]]), documents, ["x", "y", "z"], 2) == [["x", "z"], ["y", "z"]]


def test_repeated_four_grams():
    from long import repetition

    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([7] * 8) == pytest.approx(4 / 5)
    assert repetition([1, 2]) == 0.0


def test_the_program_resumes_and_its_tables_mark_what_the_original_cannot(tmp_path, monkeypatch, capsys, tokenizer):
    import long
    from pages import long_texts, sources

    folder = tmp_path / "shared" / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    (folder / "test.txt").write_text("words of a text that goes on and on " * 40)
    model = decoder()
    for name in ("original", "converted"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        patch_model(model, "hedgehog", window=8, sinks=2) if name == "original" else None
    monkeypatch.setattr(long, "GENERATED", 6)
    monkeypatch.setattr(long, "DEPTHS", (0.0, 1.0))
    monkeypatch.setattr(long, "FILLED", 16)
    monkeypatch.setattr(long, "STEPS", 2)
    monkeypatch.setitem(long.NAMES, "original", lambda: tmp_path / "original")
    common = ["--shared", str(tmp_path / "shared"), "--output", str(tmp_path / "long"), "--lengths", "160"]
    common += ["--samples", "2", "--tasks", "needle", "fwe", "copying", "--batches", "2", "--rounds", "2"]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["long.py", *arguments, *common])
        long.main()
        return capsys.readouterr().out.splitlines()

    converted = str(tmp_path / "converted"), "--original", "original"
    assert len(run("original")) == len(run(*converted)) == 2 + 4 + 3
    file = tmp_path / "long" / "converted.json"
    content = json.loads(file.read_text())
    assert content["original"] == "original"
    assert content["added"] > 0
    assert str(tmp_path) not in file.read_text()
    refused = [m["tokens"] for m in content["measurements"] if "refused" in m["values"]]
    assert refused == [160], "bytes are too few for fwe"
    content["measurements"] = content["measurements"][:-1]
    file.write_text(json.dumps(content))
    assert len(run(*converted)) == 1
    control = "original", "--filter", "hedgehog", "--set", "window=8", "sinks=2", "--without", "far"
    with pytest.raises(SystemExit, match="another model"):
        run(*control)
    assert len(run(*control, "--name", "window-8")) == 2 + 4, "all but speed"
    for refused in ((*control, "--name", "window-8", "--what", "speed"), ("original", "--without", "far")):
        with pytest.raises(SystemExit):
            run(*refused)
        assert "--without" in capsys.readouterr().err
    monkeypatch.setattr(sources, "RESULTS", tmp_path)
    assert "| `window-8` | " in long_texts.long_quality()
    assert re.search(r"\| copying \| 160 \| 2 \| 0\.\d\d †; -\d.* \| 0\.\d\d †; ", long_texts.long_retrieval())
    assert "| 0 % | 100 % |" in long_texts.long_depth()
    assert "| `converted` | decoding | 160 | 2 | " in long_texts.long_speed()
    content = json.loads(file.read_text())
    forms = {m["what"]: {*m["values"]} for m in content["measurements"]}
    assert forms["prefill"] == {"plain", "converted", "no attention"}
    assert forms["decoding"] == forms["prefill"] | {"plain, static cache"}
    common[common.index("--lengths") + 1 : common.index("--samples")] = ["64", "160"]
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)  # which a league sets for its workers
    assert len(run(*converted, "--what", "growth")) == 1
    growth = r"\| `converted` \| 64 to 160 \| \d\.\d to \d\.\d \| returned \| n\^-?\d\.\d\d \| n\^-?\d\.\d\d \|"
    assert re.search(growth, long_texts.long_speed())
    content = json.loads(file.read_text())
    assert long_texts.long_encoders() == "Not run yet."
    assert not long_texts.long_of_filter("abc"), "no filter file was loaded"
    content["loaded"] = "abc"
    file.write_text(json.dumps(content))
    card = long_texts.long_of_filter("abc")
    assert "`original`" in card
    assert "`window-8`" not in card
    assert card.count("| `converted` | decoding |") == 1


def test_an_encoder_finds_documents_and_classes(tmp_path, monkeypatch, capsys):
    import encoders
    import long
    from pages import long_texts, sources
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["apple", "pear", "plum", "stone", "iron", "gold"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=11, max_position_embeddings=64, **sizes))
    for name in ("original", "converted"):
        model.save_pretrained(tmp_path / name)
        BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / name)
        patch_model(model, "hedgehog", window=2, sinks=1) if name == "original" else None
    texts = {f"{i}": " ".join(words[i % 2 * 3 :][:3] * (i + 1)) for i in range(6)}
    collection = encoders.Collection(texts, dict.fromkeys("qr", texts["0"]), {name: {"0": 1} for name in "qr"})
    classes = {part: (list(texts.values()), [i % 2 for i in range(6)]) for part in ("train", "test")}
    monkeypatch.setattr(long, "scifact", lambda shared: collection)
    monkeypatch.setattr(long, "labelled", lambda shared, task: classes)
    monkeypatch.setitem(long.NAMES, "minilm", lambda: tmp_path / "original")
    for name in ("minilm", str(tmp_path / "converted")):
        monkeypatch.setattr(
            sys,
            "argv",
            ["long.py", name, "--rounds", "2", "--lengths", "32", "--output", str(tmp_path / "long")],
        )
        long.main()
    capsys.readouterr()
    monkeypatch.setattr(sources, "RESULTS", tmp_path)
    table = long_texts.long_encoders()
    assert "| `minilm` | 0 | 1.0000 | 1.0000 | 1.0000 |  |" in table
    assert "| `converted` | prefill | 32 | 1 | " in long_texts.long_speed()
    assert re.search(r"\| `converted` \| \d+ \| 1.0000 \| 1.0000 \| 1.0000 \| (0.99|1.00)\d\d \|", table)
