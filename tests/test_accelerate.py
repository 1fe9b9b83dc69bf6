"""The configurations of accelerate for the recipes, and recipes in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import BertConfig, BertModel, BertTokenizer

from hf_graphfilter import GraphFilterError, patch_model
from recipes import ranks

ROOT = Path(__file__).parents[1]
KIT = ROOT / "recipes" / "accelerate"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TINY = "hidden_size=16 num_attention_heads=2 intermediate_size=16 num_hidden_layers=1"
NO_DROPOUT = "hidden_dropout_prob=0 attention_probs_dropout_prob=0 initializer_range=0.3"  # attention far from uniform
QUIET = "--disable_tqdm true --save_strategy no --use_cpu true --max_steps 4 --eval_strategy no --filter gfsa"
TEXT = f"glue --model bert --from_scratch {TINY} {NO_DROPOUT} --train_tokenizer 300 --task sst2 {QUIET}"
LANGUAGE = f"language_modeling --model gpt2 --from_scratch n_embd=16 n_head=2 n_layer=1 n_positions=32 resid_pdrop=0 \
embd_pdrop=0 attn_pdrop=0 --train_tokenizer 300 --task text --max_length 32 {QUIET}"


@pytest.mark.parametrize("file", sorted(KIT.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_the_configuration(file):
    config = load_config_from_file(str(file))
    assert config.num_processes >= 2
    if config.distributed_type == "DEEPSPEED":
        json.loads((ROOT / config.deepspeed_config["deepspeed_config_file"]).read_text())
    readme = (ROOT / "docs" / "scaling.md").read_text()
    assert f"recipes/accelerate/{file.name}" in readme


def test_processes_that_found_other_files_say_so(monkeypatch):
    monkeypatch.setattr(ranks, "PartialState", lambda cpu: SimpleNamespace(num_processes=2))
    monkeypatch.setattr(ranks, "gather_object", lambda facts: [facts[0], {**facts[0], "checkpoint": None}])
    with pytest.raises(GraphFilterError, match="process 1 found checkpoint None, and process 0 'checkpoint-4'"):
        ranks.check_ranks(settings={"K": 3}, checkpoint="checkpoint-4")


@pytest.mark.slow
@pytest.mark.parametrize("command", [TEXT, LANGUAGE], ids=["text", "language"])
def test_two_processes_train_as_one(command, tmp_path):
    """With half the rows per process and step; the order of the rows is the same."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.txt").write_text("a filter is a polynomial of attention\n" * 200)
    (data / "valid.txt").write_text("attention averages the tokens\n" * 40)
    (data / "test.txt").write_text("a filter averages the attention\n" * 40)
    words = ["a fine film", "two dull hours of it", "a story", "actors who know why"]
    rows = [f"{words[i % 4]} {words[i % 3]} {i}\t{i % 2}" for i in range(64)]
    for part in ("train", "dev"):
        (data / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    recipe, *flags = command.split()
    flags += ["--data", str(data)]
    program = [str(ROOT / "recipes" / f"{recipe}.py"), *flags, "--per_device_train_batch_size"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]  # accelerate starts one on a CPU
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    records = []
    for name, start, rows in (("one", [sys.executable], "8"), ("two", launch, "4")):
        argv = [*start, *program, rows, "--output_dir", str(tmp_path / name)]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        records.append(json.loads((tmp_path / name / "seed-1" / "record.json").read_text()))
    assert [record["steps"] for record in records] == [4, 4]
    one, two = (record["metrics"] for record in records)
    metric = {"glue": "validation/loss", "language_modeling": "test/perplexity"}[recipe]  # per token, not per batch
    assert two[metric] == pytest.approx(one[metric], rel=1e-5)
    assert records[1]["coefficients"]["w_K"] == pytest.approx(records[0]["coefficients"]["w_K"], abs=1e-5)


@pytest.mark.slow
def test_a_transfer_in_two_processes_is_saved_once(tmp_path):
    model = patch_model(BertModel(BertConfig(vocab_size=30, **SIZES)), "agf", window=2)
    model.save_pretrained(tmp_path / "patched")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "patched")
    (tmp_path / "text.txt").write_text("a b c d e f g h i j " * 200)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_graphfilter", "transfer"]
    options = ["--text", "text.txt", "--steps", "4", "--length", "16", "--batch-size", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path}
    done = subprocess.run([*argv, "patched", "fitted", *options], **run)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("saved to") == 1
    fitted = BertModel.from_pretrained(tmp_path / "fitted")
    assert any(not torch.equal(a, b) for a, b in zip(fitted.parameters(), model.parameters(), strict=True))
    assert not (tmp_path / "fitted" / ".transfer").exists()
