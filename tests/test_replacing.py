"""A filter in the place of attention is one file: all that the package does with such filters, done with another."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from linear_attention import LinearAttentionConfig
from models import FAMILIES, output, turn_on
from test_penalties import train
from transformers import BertForSequenceClassification, BertModel, SiglipVisionConfig, SiglipVisionModel

from hf_graphfilter import (
    BlendSchedule,
    GraphFilterError,
    RegularizerCallback,
    ReplacingConfig,
    ReplacingFilter,
    check_filter,
    collect_penalties,
    drop_blend,
    filter_status,
    load_filter,
    patch_model,
    register_filter,
    save_filter,
    set_blend,
    transfer_attention,
)
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.ops import visibility

FILE = Path(__file__).parent / "linear_attention.py"


def build(name="bert", **options):
    torch.manual_seed(0)
    family = FAMILIES[name]
    return patch_model(family.build().double(), LinearAttentionConfig(**options))


@pytest.mark.slow  # docs/write_filter.md, which a quick test runs, checks a filter of this kind
def test_it_passes_the_checks_for_filters():
    check_filter(LinearAttentionConfig())


@torch.no_grad()
def test_blend():
    plain, patched = FAMILIES["bert"].build().double(), build(init="blend")
    patched.load_state_dict(plain.state_dict(), strict=False)
    inputs = FAMILIES["bert"].inputs()
    assert torch.equal(output(patched, inputs), output(plain, inputs))
    with pytest.raises(GraphFilterError, match="its gate is 0, not 1"):
        drop_blend(patched)
    expected = output(set_blend(patched, 1.0), inputs)
    torch.testing.assert_close(output(drop_blend(patched), inputs), expected)
    assert patched.config.graph_filter["filters"][0]["config"]["init"] == "copy"
    assert "gate" not in filter_status(patched)[0].coefficients


def test_blend_and_penalty_under_the_trainer(tmp_path):
    torch.manual_seed(0)
    patched = patch_model(
        BertForSequenceClassification(FAMILIES["bert"].config).double(), LinearAttentionConfig(init="blend")
    )
    callbacks = [BlendSchedule(end=0.5), RegularizerCallback()]
    changes, trainer = train(tmp_path, patched, gamma=None, callbacks=callbacks, max_steps=4)
    assert [entry["blend_gate"] for entry in trainer.state.log_history[:4]] == [0.5, 1.0, 1.0, 1.0]
    assert trainer.state.log_history[0]["sharpness_loss"] == pytest.approx(1.0)
    assert any(change.abs().max() > 0 for name, change in changes.items() if name.endswith("sharpness"))


def test_penalty_by_hand():
    patched = build(sharpness=3.0).train()
    with collect_penalties(patched) as penalties:
        output(patched, FAMILIES["bert"].inputs())
    assert penalties.total().item() == pytest.approx(9.0 * 1e-2)


def test_transfer():
    batches = [FAMILIES["bert"].inputs() for _ in range(4)]
    report = transfer_attention(build(sharpness=5.0), batches, steps=10, holdout=1, progress=False)
    assert report.mean_after < 0.99 * report.mean_before


@torch.no_grad()
@pytest.mark.parametrize("init", ["copy", "blend"])
def test_saved_and_loaded(tmp_path, init):
    patched, inputs = turn_on(build(init=init)), FAMILIES["bert"].inputs()
    expected = output(patched, inputs)
    patched.save_pretrained(tmp_path / "whole")
    loaded = BertModel.from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
    torch.testing.assert_close(output(loaded, inputs), expected)
    save_filter(patched, tmp_path / "filter")
    laid = load_filter(build(init=init), tmp_path / "filter")
    torch.testing.assert_close(output(laid, inputs), expected)


@torch.no_grad()
@pytest.mark.parametrize("init", ["copy", "blend"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoding_keeps_a_state(name, init):
    model, ids = turn_on(build(name, init=init)), FAMILIES[name].inputs()["input_ids"]
    whole = model(ids, use_cache=False).last_hidden_state
    first = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], **{CACHE: first[CACHE]}).last_hidden_state
    torch.testing.assert_close(torch.cat([first.last_hidden_state, rest], 1), whole)


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear-attention", "far_field", "agf", "hedgehog"])
def test_a_decoder_that_sees_all_tokens_keeps_no_cache(name):
    """A state holds past tokens alone, so that it would make attention causal in silence."""
    torch.manual_seed(0)
    options = {} if name == "linear-attention" else {"window": 2, "sinks": 1}
    model, ids = FAMILIES["llama"].build().eval(), FAMILIES["llama"].inputs()["input_ids"]
    everything = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    plain = model(ids, attention_mask=everything)[0]
    patch_model(model, name, **options)
    with pytest.raises(GraphFilterError, match=r"mask is not causal, and the state that .* pass use_cache=False"):
        model(ids, attention_mask=everything)
    found = model(ids, attention_mask=everything, use_cache=False)[0]
    assert found.shape == plain.shape
    assert not torch.equal(found, model(ids, use_cache=False)[0])


def test_what_it_cannot_honour_is_refused():
    with pytest.raises(GraphFilterError, match=r"learned bias of positions.*LINEAR-ATTENTION has no scores"):
        patch_model(FAMILIES["t5"].build(), "linear-attention")
    patch_model(FAMILIES["t5"].build(), "linear-attention", position_bias="drop")


def test_what_its_author_may_have_forgotten():
    class Forgetful(ReplacingFilter):
        def filtered(self, shift, value):
            return value

    class Empty(ReplacingFilter):
        pass

    for name, cls in (("forgetful", Forgetful), ("empty", Empty)):
        register_filter(name)(dataclass(frozen=True)(type(name, (ReplacingConfig,), {"module": cls})))
    with pytest.raises(GraphFilterError, match=r"Empty has no filtered\(shift, value\)"):
        patch_model(FAMILIES["bert"].build(), "empty")
    model = patch_model(FAMILIES["gpt2"].build(), "forgetful")
    ids = FAMILIES["gpt2"].inputs()["input_ids"]
    model(ids, use_cache=False)
    with pytest.raises(GraphFilterError, match=r"filtered left shift\.state empty"):
        model(ids, use_cache=True)


@pytest.mark.parametrize("name", ["agf", "singularformer", "linear-attention"])
def test_a_layer_reads_the_mask_once(name, monkeypatch):
    """It may be n x n, and in inference mode no tensor remembers what was read of it."""
    model, inputs = patch_model(FAMILIES["bert"].build(), name, window=2), FAMILIES["bert"].inputs()
    inputs["attention_mask"][0, 5:] = 0
    reduce, readings = visibility._reduce, []
    monkeypatch.setattr(visibility, "_reduce", lambda *a: (readings.append(1), reduce(*a))[1])
    with torch.inference_mode():
        model(**inputs)
    assert len(readings) == 3


@pytest.mark.parametrize("name", ["agf", "singularformer", "hedgehog", "kernelution"])
def test_modules_that_keep_their_input_to_themselves_are_refused_when_patched(name):
    """SigLIP's attention takes any keyword argument and hands none on."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = SiglipVisionModel(SiglipVisionConfig(image_size=8, patch_size=4, **sizes))
    with pytest.raises(GraphFilterError, match="does not pass its input on"):
        patch_model(model, name)
    assert not filter_status(model)
    assert patch_model(model, "gfsa")(torch.randn(1, 3, 8, 8)).last_hidden_state.isfinite().all()
