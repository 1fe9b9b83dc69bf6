"""PEFT's tuners on a patched model: those that wrap attention, merging, and what changes an adapter that is in use."""

import copy
import inspect

import pytest
import torch
from models import FAMILIES, TRANSFORMERS_5_17, turn_on, without_record
from transformers import LlamaForCausalLM

from hf_graphfilter import (
    GFSAConfig,
    GraphFilterError,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    save_filter,
)

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # asked for by peft

KEPT = {"modules_to_save": ["graph_filter"]}
STARTED = GFSAConfig(K=3, w_K=0.1)
PROJECTIONS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
TUNERS = {
    "lora": peft.LoraConfig(**PROJECTIONS, **KEPT, init_lora_weights=False),
    "ia3": peft.IA3Config(**PROJECTIONS, **KEPT, feedforward_modules=[]),
    "loha": peft.LoHaConfig(**PROJECTIONS, **KEPT),
    "lokr": peft.LoKrConfig(**PROJECTIONS, **KEPT),
    "vera": peft.VeraConfig(**PROJECTIONS, **KEPT),
    "hra": peft.HRAConfig(**PROJECTIONS, **KEPT),
    "oft": peft.OFTConfig(**PROJECTIONS, **KEPT, oft_block_size=8, r=0),
    "ln": peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM", **KEPT),
    "whole": peft.IA3Config(
        **{**PROJECTIONS, "target_modules": ["up_proj"]}, modules_to_save=["self_attn"], feedforward_modules=[]
    ),
}


@pytest.fixture
def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(FAMILIES["llama"].config).eval().double()


@pytest.fixture
def ids():
    return FAMILIES["llama"].inputs()["input_ids"]


def adapted(base, config, filter=STARTED, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(patch_model(copy.deepcopy(base), filter), copy.deepcopy(config), **options)


def trained(model, seed=2):
    """The model, with other values of all that is trained."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
    return model.eval()


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def of_peft(model):
    return [name for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]


@pytest.mark.feature("PEFT: a prompt around attention modules", filter="gfsa", family="llama")
@pytest.mark.parametrize("filter", ["gfsa", "agf"])
def test_a_tuner_that_wraps_attention_modules(filter, base, ids, tmp_path):
    torch.manual_seed(1)
    patched = patch_model(copy.deepcopy(base), filter)
    before = logits(patched, ids)
    tuner = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2)
    model = peft.get_peft_model(copy.deepcopy(patched), tuner)
    torch.testing.assert_close(logits(model, ids), before)
    expected = logits(trained(model), ids)
    assert not torch.allclose(expected, before)
    model.save_pretrained(tmp_path)
    save_filter(model, tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(patched), tmp_path)
    torch.testing.assert_close(logits(again, ids), expected)
    again = peft.PeftModel.from_pretrained(load_filter(copy.deepcopy(base), tmp_path), tmp_path)
    torch.testing.assert_close(logits(again, ids), expected)
    load_filter(model, tmp_path)
    with pytest.raises(GraphFilterError, match="was trained on a model with"):
        peft.PeftModel.from_pretrained(patch_model(copy.deepcopy(base), "xsa"), tmp_path)


@pytest.mark.filterwarnings("ignore:Unmerge result can be", "ignore:Unsupported layer type")
@pytest.mark.feature("PEFT: other tuners than LoRA, merged", filter="gfsa", family="llama")
@pytest.mark.parametrize("filter", ["gfsa", "agf", "gated"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_the_trained_copy_becomes_the_filter_of_a_merged_model(tuner, filter, base, ids, tmp_path):
    model = trained(adapted(base, TUNERS[tuner], filter))
    expected, values = logits(model, ids), [p.clone() for p in filter_parameters(model)]
    model.merge_adapter()
    torch.testing.assert_close(logits(model, ids), expected)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model, ids), expected)
    unloaded = copy.deepcopy(model).unload()
    merged = model.merge_and_unload()
    for whole in (unloaded, merged):
        assert of_peft(whole) == []
        assert len(filter_status(whole)) == 3
        for own, value in zip(filter_parameters(whole), values, strict=True):
            assert torch.equal(own, value)
    torch.testing.assert_close(logits(merged, ids), expected)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(LlamaForCausalLM.from_pretrained(tmp_path), ids), expected)


OPTIONS = {
    "AdaLora": {"total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FourierFT": {"n_frequency": 10},
    "Gralora": {"r": 8},
    "IA3": {"feedforward_modules": []},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "Miss": {"r": 8},
    "OFT": {"oft_block_size": 8, "r": 0},
    "Psoft": {"r": 8},
    "Road": {"group_size": 8},
    "Shira": {"r": 2},
    "VBLoRA": {"vector_length": 8, "num_vectors": 16, "topk": 2},
    "WaveFT": {"n_frequency": 16},
}


# not Poly and XLora, which need inputs or adapters of their own, nor Shadow, of which transformers warns
CONFIGS = {
    config.__name__.removesuffix("Config"): config
    for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if kind in peft.PEFT_TYPE_TO_TUNER_MAPPING
    and {"modules_to_save", "target_modules"} <= inspect.signature(config).parameters.keys()
    and config.__name__ not in ("PolyConfig", "ShadowConfig", "XLoraConfig")
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cls", sorted(CONFIGS))
def test_every_tuner_that_keeps_modules(cls, base, ids, tmp_path):
    config = CONFIGS[cls](**{**PROJECTIONS, **KEPT, **OPTIONS.get(cls, {})})
    base = base.float()
    model = trained(adapted(base, config, "gfsa"))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(logits(again, ids), expected)
    try:
        merged = model.merge_and_unload()
    except (NotImplementedError, ValueError):  # of PEFT: it cannot merge this kind
        return
    assert of_peft(merged) == []
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-4, rtol=1e-4)


def test_the_adapter_that_is_merged_gives_its_filter(base, ids, tmp_path):
    model = trained(adapted(base, TUNERS["lora"]))
    model.add_adapter("second", TUNERS["lora"])
    model.set_adapter("second")
    expected = logits(trained(model, seed=3), ids)
    model.set_adapter("default")
    first = logits(model, ids)
    with pytest.raises(GraphFilterError, match=r"\['default', 'second'\] hold a graph filter each"):
        model.merge_and_unload(adapter_names=["default", "second"])
    torch.testing.assert_close(logits(model, ids), first)
    torch.testing.assert_close(logits(model.merge_and_unload(adapter_names=["second"]), ids), expected)


def test_a_failed_merge_leaves_the_copies(base, ids):
    model = trained(adapted(base, peft.LilyConfig(**PROJECTIONS, **KEPT)))
    expected = logits(model, ids)
    with pytest.raises(NotImplementedError):
        model.merge_and_unload()
    assert any("graph_filter.modules_to_save" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(logits(model, ids), expected)


@pytest.mark.parametrize("filter", ["gfsa", "agf"])
def test_saved_as_lora(filter, base, ids, tmp_path):
    config = peft.LoHaConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **KEPT)
    model = trained(adapted(base, config, filter))
    model.add_adapter("second", config)  # whose filter is another
    expected = logits(model, ids)
    peft.save_as_lora(tmp_path, model, rank=32)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(logits(again, ids), expected, atol=1e-5, rtol=1e-5)  # of an SVD in float32
    with pytest.raises(GraphFilterError, match="was trained on a model with"):
        peft.PeftModel.from_pretrained(patch_model(copy.deepcopy(base), "xsa"), tmp_path)


@pytest.mark.parametrize("filter", ["gfsa", "agf"])
def test_an_adapter_is_swapped_with_its_filter(filter, base, ids, tmp_path):
    from peft.utils.hotswap import hotswap_adapter

    first, second = (trained(adapted(base, TUNERS["lora"], filter), seed) for seed in (2, 3))
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "first")
    hotswap_adapter(model, tmp_path / "second", "default", torch_device="cpu")
    torch.testing.assert_close(logits(model, ids), logits(second, ids))

    unfiltered = peft.LoraConfig(**PROJECTIONS, init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(base), unfiltered).save_pretrained(tmp_path / "unfiltered")
    adapted(base, TUNERS["lora"], "xsa").save_pretrained(tmp_path / "xsa")
    for name, reason in (("unfiltered", "holds nothing at .*graph_filter"), ("xsa", "was trained on a model with")):
        with pytest.raises(GraphFilterError, match=reason):
            hotswap_adapter(model, tmp_path / name, "default", torch_device="cpu")
    torch.testing.assert_close(logits(model, ids), logits(second, ids))
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "unfiltered")
    without_record(tmp_path / "first")
    with pytest.raises(GraphFilterError, match=r"has no filter for, first at .*self_attn"):
        hotswap_adapter(plain, tmp_path / "first", "default", torch_device="cpu")


@pytest.mark.parametrize("route", ["PeftModel", "load_adapter"])
def test_a_configuration_of_the_callers_has_the_record_of_the_file(route, base, ids, tmp_path):
    if route == "load_adapter" and TRANSFORMERS_5_17:
        pytest.skip("it loads no modules_to_save: refused")
    model = trained(adapted(base, TUNERS["lora"]))
    model.save_pretrained(tmp_path)

    def load(over, config=TUNERS["lora"]):
        config = copy.deepcopy(config)
        if route == "PeftModel":
            return peft.PeftModel.from_pretrained(over, tmp_path, config=config)
        over.load_adapter(tmp_path, peft_config=config)
        return over

    again = load(copy.deepcopy(base))
    assert [row.filter for row in filter_status(again)] == [STARTED] * 3
    torch.testing.assert_close(logits(again, ids), logits(model, ids))
    with pytest.raises(GraphFilterError, match="was trained on a model with"):
        load(patch_model(copy.deepcopy(base), "gfsa", K=7))
    over = copy.deepcopy(base)
    with pytest.raises(GraphFilterError, match="does not hold the filter"):
        load(over, peft.LoraConfig(**PROJECTIONS))
    assert of_peft(over) == []
    assert not filter_status(over)


@pytest.mark.parametrize("filter", ["gfsa", "agf"])
def test_the_only_adapter_is_deleted(filter, base, ids, tmp_path):
    """The base is what it was: patched, or plain where the adapter brought the filter."""
    model = trained(adapted(base, TUNERS["lora"], filter))
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    patched = patch_model(copy.deepcopy(base), filter)
    for over, filters in ((patched, 3), (base, 0)):
        before = logits(over, ids)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(over), tmp_path)
        again.delete_adapter("default")
        assert len(filter_status(again)) == filters
        torch.testing.assert_close(logits(again.base_model.model, ids), before)
        again.load_adapter(tmp_path, "another")
        again.set_adapter("another")
        torch.testing.assert_close(logits(again, ids), logits(model, ids))


def test_the_filter_of_the_copy_that_runs_is_saved_alone(base, ids, tmp_path):
    """Of copies of whole attention modules."""
    config = peft.LoraConfig(**{**PROJECTIONS, "target_modules": ["up_proj"]}, modules_to_save=["self_attn"])
    model = trained(adapted(base, config))
    model.add_adapter("second", config)
    assert len(filter_status(model)) == 3
    save_filter(model, tmp_path)
    alone = load_filter(copy.deepcopy(base), tmp_path)
    for own, value in zip(filter_parameters(alone), filter_parameters(model), strict=True):
        assert torch.equal(own, value)
    plain = peft.inject_adapter_in_model(config, copy.deepcopy(base))
    with pytest.raises(GraphFilterError, match="copies of whole attention modules"):
        load_filter(plain, tmp_path)
    assert not filter_status(plain)


def test_an_earlier_adapter_is_not_loaded_into_a_plain_model_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    plain = timm.create_model("deit_tiny_patch16_224", depth=2, embed_dim=48, num_classes=7).eval()
    config = peft.LoraConfig(target_modules=["qkv"], modules_to_save=["graph_filter", "head"], init_lora_weights=False)
    model = turn_on(peft.get_peft_model(patch_model(copy.deepcopy(plain), K=3), config)).eval()
    model.save_pretrained(tmp_path)
    without_record(tmp_path)
    with pytest.raises(
        GraphFilterError, match=r"holds 6 filter coefficients that this VisionTransformer has no filter"
    ):
        peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path)
    images = torch.randn(1, 3, 224, 224)
    again = peft.PeftModel.from_pretrained(patch_model(plain, K=3), tmp_path).eval()
    torch.testing.assert_close(again(images), model(images))
