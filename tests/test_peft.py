"""LoRA on a patched model: the filter is trained, stored in the adapter, switched and merged with it."""

import copy
import json

import pytest
import torch
from filters import FILTERS, combinations, filters, llama_or_bert
from models import FAMILIES, TRANSFORMERS_5_17, turn_on, without_record
from test_pipelines import tokenizer
from transformers import BertForMaskedLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_graphfilter import (
    CoefficientCallback,
    GFSAConfig,
    GraphFilterError,
    create_model_card,
    filter_optimizer,
    filter_parameters,
    filter_status,
    load_filter,
    parameter_groups,
    patch_model,
    save_filter,
    unpatch_model,
)

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # asked for by peft

FAMILY = FAMILIES["llama"]
STARTED = GFSAConfig(K=3, w_K=0.1)


@pytest.fixture
def base(tmp_path, request):
    """Llama, or BERT where that is the ``family`` among the parameters."""
    bert = hasattr(request.node, "callspec") and request.node.callspec.params.get("family") == "bert"
    model = (BertForMaskedLM(FAMILIES["bert"].config) if bert else LlamaForCausalLM(FAMILY.config)).eval().double()
    model.save_pretrained(tmp_path / "base")
    return model


@pytest.fixture
def ids():
    return FAMILY.inputs()["input_ids"]


def lora(**options):
    options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["graph_filter"], **options}
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "init_lora_weights": False, **options})


def adapted(base, config=STARTED, **options):
    if isinstance(base, BertForMaskedLM):
        options |= {"target_modules": ["query", "value"], "task_type": None}
    return peft.get_peft_model(patch_model(copy.deepcopy(base), config), lora(**options))


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def rewrite(folder, change):
    config = json.loads((folder / "adapter_config.json").read_text())
    change(config)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def recorded(folder):
    return json.loads((folder / "adapter_config.json").read_text()).get("graph_filter")


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], "all-linear"])
def test_a_filter_that_reads_the_input_after_lora(targets, ids):
    """Its size is that of the projections' input, also where PEFT has wrapped them; here the heads are wider."""
    config = LlamaConfig(**{**FAMILY.config.to_dict(), "head_dim": 16})
    model = LlamaForCausalLM(config).eval()
    assert config.num_attention_heads * config.head_dim != config.hidden_size
    expected = logits(patch_model(copy.deepcopy(model), "agf"), ids)
    torch.manual_seed(0)
    peft.get_peft_model(model, lora(target_modules=targets, modules_to_save=None, init_lora_weights=True))
    patch_model(model, "agf")
    assert logits(model, ids).shape == expected.shape


@pytest.mark.feature("PEFT: LoRA with the filter stored, loaded, merged")
@combinations(("llama", "bert"), llama_or_bert, quick=lambda family, entry: entry.quick)
def test_the_adapter_holds_the_filter(family, entry, base, ids, tmp_path):
    model = adapted(base, entry.config)
    status = filter_status(model)
    assert len(status) == 3
    assert status[0].module == filter_status(patch_model(copy.deepcopy(base), entry.config))[0].module, (
        "as in the base model"
    )
    trained = list(filter_parameters(model))
    assert trained
    assert all(p.requires_grad for p in trained)
    turn_on(model)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "adapter")

    fresh = patch_model(type(base).from_pretrained(tmp_path / "base"), entry.config)
    plain = logits(fresh, ids)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter", is_trainable=True)
    assert str(filter_status(again)) == str(filter_status(model))
    torch.testing.assert_close(logits(again, ids), expected)
    over_plain = peft.PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(over_plain, ids), expected)
    with again.disable_adapter():
        torch.testing.assert_close(logits(again, ids), plain)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-9, rtol=1e-9)
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(base).from_pretrained(tmp_path / "merged")
    assert len(filter_status(loaded)) == 3
    torch.testing.assert_close(logits(loaded, ids), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.feature("PEFT: generation with an adapter", filter="gfsa", family="llama")
def test_decoding_with_an_adapter(base, ids):
    model = turn_on(adapted(base))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


@pytest.mark.feature("PEFT: adapters switched", filter="gfsa", family="llama")
def test_adapters_are_switched_with_their_filters(base, ids):
    model = adapted(base)
    turn_on(model)
    first = logits(model, ids)
    model.add_adapter("second", lora())
    model.set_adapter("second")
    assert [row.coefficients["w_K"].mean().item() for row in filter_status(model)] == pytest.approx([0.1] * 3)
    assert not torch.allclose(logits(model, ids), first)
    model.set_adapter("default")
    torch.testing.assert_close(logits(model, ids), first)


@pytest.mark.feature("PEFT: trained by the Trainer", filter="gfsa", family="llama")
def test_trained_with_a_rate_of_its_own(base, ids, tmp_path):
    model = adapted(base)
    groups = parameter_groups(model, lr=1e-3)
    assert groups[-1]["lr"] == 1e-2
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in filter_parameters(model)}
    counted = [id(p) for group in groups for p in group["params"]]
    assert sorted(counted) == sorted(id(p) for p in model.parameters() if p.requires_grad)

    args = TrainingArguments(
        output_dir=tmp_path, max_steps=3, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids] * 4,
        optimizer_cls_and_kwargs=filter_optimizer(args),
        callbacks=[CoefficientCallback()],
    )
    trainer.train()
    logged = [entry["filter/0/w_K"] for entry in trainer.state.log_history if "filter/0/w_K" in entry]
    assert len(logged) == 3
    assert logged[-1] != pytest.approx(0.1)
    assert logged[-1] == pytest.approx(filter_status(model)[0].coefficients["w_K"].mean().item(), abs=1e-5)


def test_the_filter_alone_is_saved_from_an_adapter_and_patches_a_fresh_base(base, ids, tmp_path):
    model = turn_on(adapted(base))
    model.save_pretrained(tmp_path / "adapter")
    save_filter(model, tmp_path / "adapter")
    fresh = load_filter(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


def test_the_verbs_work_through_the_wrapper(base, ids, tmp_path):
    model = turn_on(adapted(base))
    expected = logits(model, ids)
    save_filter(model, tmp_path / "filter")
    other = adapted(base)
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "graph_filter" not in k}, strict=False)
    assert load_filter(other, tmp_path / "filter") is other
    torch.testing.assert_close(logits(other, ids), expected)

    card = create_model_card(model, repo_id="me/adapter", base_model="me/base")
    assert (card.data.library_name, card.data.base_model_relation) == ("peft", "adapter")
    for part in ('AutoModelForCausalLM.from_pretrained("me/base")', 'PeftModel.from_pretrained(model, "me/adapter")'):
        assert part in card.text
    assert "load_filter" not in card.text
    lacking = adapted(base, modules_to_save=None)
    assert "load_filter" in create_model_card(lacking, repo_id="me/adapter", base_model="me/base").text

    assert unpatch_model(model) is model
    assert not filter_status(model)
    plain = logits(model, ids)
    assert not torch.allclose(plain, expected)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(again, ids), plain)

    without = peft.get_peft_model(copy.deepcopy(base), lora(modules_to_save=None))
    with pytest.raises(GraphFilterError, match="patch the base model first"):
        load_filter(without, tmp_path / "filter")
    for verb in (unpatch_model, create_model_card):
        with pytest.raises(GraphFilterError, match="has no graph filter"):
            verb(without)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_state_with_entries_that_are_no_tensors_is_loaded(base):
    quantized = torch.ao.quantization.quantize_dynamic(patch_model(copy.deepcopy(base), "agf"), {torch.nn.Linear})
    assert quantized.load_state_dict(quantized.state_dict()).missing_keys == []


def test_nothing_is_silently_unfiltered(base, tmp_path):
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    without_record(tmp_path / "adapter")
    with pytest.raises(GraphFilterError, match=r"no filter for, first at layers.0.self_attn: patch .*load_filter"):
        peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    with pytest.raises(GraphFilterError, match="hold a graph filter"):
        copy.deepcopy(base).load_state_dict(patch_model(copy.deepcopy(base)).state_dict(), strict=False)
    other = patch_model(copy.deepcopy(base), "xsa")
    with pytest.raises(GraphFilterError, match=r"those of another filter, with w_0 \(4,\), .* has alpha \(4,\)"):
        other.load_state_dict(patch_model(copy.deepcopy(base)).state_dict(), strict=False)
    for name, K in (("polynomial", 2), ("gfsa", 3)):
        weights = patch_model(copy.deepcopy(base), name, K=K).state_dict()
        with pytest.raises(GraphFilterError, match=r"has theta \(4, 4\): patch it as it was"):
            patch_model(copy.deepcopy(base), "polynomial", K=3).load_state_dict(weights, strict=False)
    without = peft.get_peft_model(copy.deepcopy(base), lora(modules_to_save=None))
    with pytest.raises(GraphFilterError, match=r"patch the base model first, .*modules_to_save"):
        patch_model(without)
    with pytest.warns(UserWarning, match="has no filter, so that the adapter trains none: call patch_model before"):
        peft.get_peft_model(copy.deepcopy(base), lora())
    frozen = peft.get_peft_model(patch_model(copy.deepcopy(base)), lora(modules_to_save=None))
    with pytest.raises(GraphFilterError, match=r"is frozen: with PEFT, use modules_to_save"):
        parameter_groups(frozen, lr=1e-3)


@pytest.mark.parametrize("route", ["PeftModel", "AutoPeftModel", "load_adapter", "AutoModel"])
def test_an_adapter_patches_a_plain_base_as_it_was(route, base, ids, tmp_path):
    if route in ("load_adapter", "AutoModel") and TRANSFORMERS_5_17:
        pytest.skip("it loads no modules_to_save: refused")
    model = turn_on(adapted(base, GFSAConfig(K=7, w_K=0.1)))
    model.save_pretrained(tmp_path / "adapter")
    rewrite(tmp_path / "adapter", lambda config: config.update(base_model_name_or_path=str(tmp_path / "base")))
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    if route == "PeftModel":
        again = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    elif route == "AutoPeftModel":
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype="auto")
    elif route == "load_adapter":
        again = plain
        again.load_adapter(tmp_path / "adapter")
    else:
        again = LlamaForCausalLM.from_pretrained(tmp_path / "adapter", dtype="auto")
    assert [row.filter for row in filter_status(again)] == [row.filter for row in filter_status(model)]
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


@pytest.mark.skipif(TRANSFORMERS_5_17, reason="it loads no modules_to_save")
def test_the_only_adapter_that_transformers_loaded_takes_its_filter_along(base, ids, tmp_path, monkeypatch):
    """Else a filter with start values would run, and those of AGF are far from attention."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)  # it asks for PEFT 0.22
    turn_on(adapted(base, FILTERS["agf"].config)).save_pretrained(tmp_path)
    model = copy.deepcopy(base)
    model.load_adapter(tmp_path)
    assert not torch.allclose(logits(model, ids), logits(base, ids), atol=1e-3)
    model.delete_adapter("default")
    assert not list(filter_parameters(model))
    torch.testing.assert_close(logits(model, ids), logits(base, ids))


def test_a_merged_filter_is_the_own_one_of_its_model(base, ids, tmp_path):
    """It came with an adapter, and stays when later adapters leave; adapters that were trained over it load."""
    turn_on(adapted(base)).save_pretrained(tmp_path / "first")
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "first").merge_and_unload()
    over = peft.get_peft_model(copy.deepcopy(merged), lora(modules_to_save=None))
    over.save_pretrained(tmp_path / "second")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(merged), tmp_path / "second")
    torch.testing.assert_close(logits(again, ids), logits(over, ids))
    expected, rows = logits(merged, ids), str(filter_status(merged))
    model = peft.get_peft_model(merged, lora(modules_to_save=None))
    model.delete_adapter("default")
    assert str(filter_status(merged)) == rows
    torch.testing.assert_close(logits(merged, ids), expected)


def test_an_adapter_is_not_laid_over_another_filter(base, tmp_path):
    """Of the same shapes, which PEFT would not notice."""
    adapted(base).save_pretrained(tmp_path / "adapter")
    for other in (GFSAConfig(K=7, w_K=0.1), FILTERS["agf"].config):
        patched = patch_model(copy.deepcopy(base), other)
        with pytest.raises(GraphFilterError, match=r"'K': 3.* on 3 layers, and this Llama.* is patched with .* on 3 l"):
            peft.PeftModel.from_pretrained(patched, tmp_path / "adapter")
    half = patch_model(copy.deepcopy(base), STARTED, layers="even")
    with pytest.raises(GraphFilterError, match=r"patched with .* on 2 layers"):
        peft.PeftModel.from_pretrained(half, tmp_path / "adapter")
    plain = copy.deepcopy(base)
    plain.config.num_hidden_layers, plain.model.layers = 2, plain.model.layers[:2]
    with pytest.raises(GraphFilterError, match="names 1 of 3 modules that are no self-attention"):
        peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert not filter_status(plain), "as it was"
    rewrite(tmp_path / "adapter", lambda config: config["graph_filter"].update(version=2))
    with pytest.raises(GraphFilterError, match="version 2 of graph_filter in its configuration is unknown"):
        peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")


def test_an_adapter_without_the_filter_is_not_laid_over_a_plain_base(base, ids, tmp_path):
    model = turn_on(adapted(base, modules_to_save=None))
    for parameter in filter_parameters(model):
        parameter.requires_grad_()  # trained, and lost
    model.save_pretrained(tmp_path / "adapter")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(GraphFilterError, match=r"was trained on a model with .* does not hold the filter"):
        peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    save_filter(model, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load_filter(plain, tmp_path / "adapter"), tmp_path / "adapter")
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


def test_an_adapter_is_of_the_model_that_saves_it(base, ids, tmp_path):
    """Whatever other models have its configuration, and whatever became of its own since."""
    config = lora()
    first, second = (peft.get_peft_model(patch_model(copy.deepcopy(base), K=K), config) for K in (3, 7))
    with pytest.warns(UserWarning, match="has no filter"):
        peft.get_peft_model(copy.deepcopy(base), config)
    unpatch_model(second)
    for model, kept in ((first, "3"), (second, "none"), (copy.deepcopy(first), "copied")):
        model.save_pretrained(tmp_path / kept)
    assert recorded(tmp_path / "3")["filters"][0]["config"]["K"] == 3
    assert recorded(tmp_path / "copied") == recorded(tmp_path / "3")
    assert recorded(tmp_path / "none") is None
    after = peft.get_peft_model(copy.deepcopy(base), lora(modules_to_save=None))
    patch_model(after.get_base_model(), K=5, layers="even")
    after.save_pretrained(tmp_path / "after")
    assert len(recorded(tmp_path / "after")["filters"][0]["modules"]) == 2
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "3")
    peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**again.peft_config["default"].to_dict()))
    assert not filter_status(peft.get_peft_model(copy.deepcopy(base), again.peft_config["default"])), "not loaded"


def test_an_adapter_of_another_filter_is_not_loaded_beside_or_again(base, ids, tmp_path):
    for K in (3, 7):
        turn_on(adapted(base, GFSAConfig(K=K, w_K=0.1))).save_pretrained(tmp_path / str(K))
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "3")
    for name in ("second", "default"):
        with pytest.raises(GraphFilterError, match="was trained on a model with"):
            model.load_adapter(tmp_path / "7", name)
    assert [*model.peft_config] == ["default"]
    model.load_adapter(tmp_path / "3", "second")
    model.load_adapter(tmp_path / "3", "default")
    lacking = adapted(base, modules_to_save=None)
    lacking.save_pretrained(tmp_path / "lacking")
    with pytest.raises(GraphFilterError, match="does not hold the filter, which another adapter brought"):
        model.load_adapter(tmp_path / "lacking", "third")
    adapted(base, modules_to_save=["layers.0.self_attn.graph_filter"]).save_pretrained(tmp_path / "partly")
    with pytest.raises(GraphFilterError, match="does not hold the filter"):
        peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "partly")
    plain = peft.get_peft_model(copy.deepcopy(base), lora(modules_to_save=None))
    with pytest.raises(GraphFilterError, match="holds adapters that were trained without it: load it before them"):
        plain.load_adapter(tmp_path / "3", "second")
    assert not filter_status(plain)


def test_a_failed_load_leaves_no_filter(base, tmp_path):
    adapted(base, FILTERS["agf"].config).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0")
    with pytest.raises(Exception, match="header"):
        peft.PeftModel.from_pretrained(base, tmp_path)
    assert not filter_status(base)
    assert not hasattr(base.config, "graph_filter")


def test_an_adapter_with_the_whole_attention(base, ids, tmp_path):
    model = turn_on(adapted(base, modules_to_save=["self_attn"], target_modules=["up_proj"]))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    again.load_adapter(tmp_path, "second")
    torch.testing.assert_close(logits(again, ids), logits(model, ids))
    assert "load_filter" not in create_model_card(model, repo_id="me/adapter", base_model="me/base").text


def test_loaded_with_empty_adapters(base, ids, tmp_path):
    model = turn_on(adapted(base))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, low_cpu_mem_usage=True)
    assert not any(p.is_meta for p in again.parameters())
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


def test_prompts_of_a_patched_model_are_not_loaded_into_a_plain_one(base, tmp_path):
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(patch_model(copy.deepcopy(base)), prompts).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(patch_model(copy.deepcopy(base)), tmp_path)
    with pytest.raises(GraphFilterError, match="does not hold the filter"):
        peft.PeftModel.from_pretrained(base, tmp_path)


KEEP_NOTHING = ("test-damped", "attnscale", "xsa", "dex", "gated", "neutreno", "value-residual")
PREFIX = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
PROMPTS = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8, encoder_dropout=0.0
    ),
}


@pytest.mark.parametrize("way", PROMPTS)
@filters(lambda entry: not entry.encoders_only, quick=lambda entry: entry.everywhere)
@pytest.mark.feature("PEFT: prompt tuning and P-tuning", family="llama")
def test_virtual_tokens(way, entry, base, ids):
    """As embeddings they are tokens as others."""
    turn_on(patch_model(base, entry.config))
    model = peft.get_peft_model(base, PROMPTS[way]()).double().eval()
    whole = torch.cat([model.get_prompt(batch_size=len(ids)), base.get_input_embeddings()(ids)], 1)
    expected = base(inputs_embeds=whole, use_cache=False).logits
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated", "ignore:Position ids are not supported")
@filters(lambda entry: not entry.encoders_only, quick=lambda entry: entry.everywhere)
@pytest.mark.feature("PEFT: prefix tuning", family="llama")
def test_virtual_keys(entry, base, ids, refuses):
    """They have no rows of A, which some filters need."""
    turn_on(patch_model(base, entry.config))
    model = peft.get_peft_model(base, copy.deepcopy(PREFIX)).double().eval()
    if entry.config.filter in KEEP_NOTHING:
        found = model(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids[:, :5]).logits, found[:, :5])  # by their places among the keys
        unpatch_model(base)
        assert not torch.allclose(model(input_ids=ids).logits, found), "the filter does nothing"
        return
    with refuses("prefix tuning, whose virt"):
        model(input_ids=ids)


def test_a_patched_model_within_another_is_adapted_as_before(base, tmp_path):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = patch_model(copy.deepcopy(base)), torch.nn.Linear(4, 2)

    model = peft.get_peft_model(Head(), lora(task_type=None))
    model.save_pretrained(tmp_path)
    assert recorded(tmp_path) is None
    mixed = peft.get_peft_model(patch_model(base), lora(), mixed=True)
    mixed.add_adapter("second", peft.LoHaConfig(target_modules=["v_proj"]))
    adapted(LlamaForCausalLM(FAMILY.config)).save_pretrained(tmp_path)
    mixed = peft.PeftMixedModel.from_pretrained(LlamaForCausalLM(FAMILY.config), tmp_path)
    mixed.load_adapter(tmp_path, "second")
    assert len(filter_status(mixed.base_model.model)) == 3
    for name in ("second", "default"):
        mixed.delete_adapter(name)
    assert not list(filter_parameters(mixed.base_model.model)), "it came with the adapters"


@pytest.mark.skipif(TRANSFORMERS_5_17, reason="it loads no modules_to_save: refused")
def test_transformers_loads_the_adapter_with_its_filter(base, ids, tmp_path, transformers_warnings):
    model = turn_on(adapted(base)).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = patch_model(copy.deepcopy(base), STARTED)
    loaded.load_adapter(tmp_path / "adapter")
    transformers_warnings.clear()  # the filter beneath the adapter's is not in its file
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


def test_all_linear_layers_leave_the_weights_of_a_filter_alone(base, ids, tmp_path):
    model = turn_on(adapted(base, FILTERS["agf"].config, target_modules="all-linear"))
    assert not any("lora" in n for n, _ in model.named_parameters() if "graph_filter" in n)
    expected = logits(model, ids)
    torch.testing.assert_close(logits(model.merge_and_unload(), ids), expected, atol=1e-9, rtol=1e-9)


def test_the_weights_of_a_filter_beneath_adapters_are_saved_as_they_are(base, ids, tmp_path):
    model = turn_on(adapted(base, FILTERS["agf"].config, target_modules="all-linear", modules_to_save=None))
    assert any("lora" in n for n, _ in model.named_parameters() if "graph_filter" in n)
    model.save_pretrained(tmp_path / "adapter")
    save_filter(model, tmp_path / "filter")
    again = peft.PeftModel.from_pretrained(load_filter(copy.deepcopy(base), tmp_path / "filter"), tmp_path / "adapter")
    torch.testing.assert_close(logits(again, ids), logits(model, ids))
    load_filter(again, tmp_path / "filter")
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


@pytest.mark.feature("PEFT: prepare_model_for_kbit_training", filter="gfsa", family="llama")
def test_prepared_for_training_on_quantized_weights(base, ids):
    patched = peft.prepare_model_for_kbit_training(patch_model(copy.deepcopy(base)), use_gradient_checkpointing=True)
    model = peft.get_peft_model(patched, lora()).train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(model))


def test_a_model_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    plain = timm.create_model("deit_tiny_patch16_224", depth=2, embed_dim=48, num_classes=7).eval().double()
    config = peft.LoraConfig(target_modules=["qkv"], modules_to_save=["graph_filter", "head"], init_lora_weights=False)
    model = turn_on(peft.get_peft_model(patch_model(copy.deepcopy(plain), K=3), config)).eval()
    images = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    expected = model(images)
    assert len(filter_status(model)) == 2
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(again.eval()(images), expected)
    torch.testing.assert_close(model.merge_and_unload()(images), expected, atol=1e-9, rtol=1e-9)


def test_filters_around_a_projection_of_timm_with_lora(tmp_path):
    """A patched model saved below adapters; its filters loaded where there are adapters, and patched there."""
    timm = pytest.importorskip("timm")
    plain = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_classes=7)
    config = peft.LoraConfig(target_modules=["qkv"])
    model = turn_on(peft.get_peft_model(patch_model(copy.deepcopy(plain), K=3), config))
    save_filter(model, tmp_path)
    again = load_filter(peft.inject_adapter_in_model(config, copy.deepcopy(plain)), tmp_path)
    for own, other in zip(filter_parameters(again), filter_parameters(model), strict=True):
        assert torch.equal(own, other)
    load_filter(copy.deepcopy(plain), tmp_path)
    assert len(filter_status(patch_model(peft.inject_adapter_in_model(config, plain)))) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_adapters_around_a_sentence_transformer_without_an_encoder():
    """The hooks leave models alone that hold no single transformers model."""
    package = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    embedding = modules.StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=8)
    sentences = package.SentenceTransformer(modules=[embedding, modules.Dense(8, 4)], device="cpu")
    model = peft.get_peft_model(sentences, peft.LoraConfig(target_modules=["linear"]))
    state = peft.get_peft_model_state_dict(model)
    assert len(state) == 2
    assert not peft.set_peft_model_state_dict(model, state).unexpected_keys
    model.delete_adapter("default")
    assert not model.peft_config
