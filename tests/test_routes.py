"""Nothing is silently unfiltered: routes that could lead past the filter give the filtered outputs, or an error."""

import copy
import re

import pytest
import torch
from filters import FILTERS, cases, filters
from models import FAMILIES, assert_equal_in_float32, output, turn_on
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoConfig, AutoModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_graphfilter import GraphFilterError, filter_status, patch_model, unpatch_model

GFSA = FILTERS["gfsa"]


def patched(family, entry):
    return turn_on(FAMILIES[family].patch(FAMILIES[family].build(), entry)).double()


def at_load(model, folder):
    return AutoModel.from_pretrained(folder, attn_implementation="eager")


def at_load_in_the_config(model, folder):
    return AutoModel.from_pretrained(folder, config=AutoConfig.from_pretrained(folder, attn_implementation="eager"))


def set_later(model, folder):
    for part in (m for m in model.modules() if hasattr(m, "set_attn_implementation")):
        part.set_attn_implementation("eager")  # transformers 5.17 leaves the stacks of T5 out
    return model


def written_into_the_config(model, folder):
    for module in model.modules():
        if hasattr(module, "base_model_prefix"):
            module.config._attn_implementation = "eager"
    return model


def from_config(model, folder):
    made = AutoModel.from_config(AutoConfig.from_pretrained(folder)).eval()
    made.load_state_dict(model.state_dict())
    return made


def resized(model, folder):
    if model.get_input_embeddings().__class__ is torch.nn.Embedding:
        model.resize_token_embeddings(120)
    return model


def tied_again(model, folder):
    model.tie_weights()
    return model


def other_weights_loaded(model, folder):
    plain = {k: v for k, v in model.state_dict().items() if "graph_filter" not in k}
    model.load_state_dict(plain, strict=False)
    return model


def copied(model, folder):
    return copy.deepcopy(copy.deepcopy(model)).train().eval().float().double()


def saved_and_loaded_twice(model, folder):
    AutoModel.from_pretrained(folder).save_pretrained(folder / "again")
    return AutoModel.from_pretrained(folder / "again")


def offloaded(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device="cpu")


def adapters_added(model, folder):
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION)
    targets = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "graph_filter" not in n]
    model.add_adapter(peft.LoraConfig(target_modules=targets))
    return model.eval()


def compiled(model, folder):
    torch.compiler.reset()
    return torch.compile(model, backend="eager")


TO_EAGER = [at_load, at_load_in_the_config, set_later, written_into_the_config]
ROUTES = [
    *(*TO_EAGER, from_config, resized, tied_again, copied),
    *(other_weights_loaded, saved_and_loaded_twice, offloaded, adapters_added, compiled),
]


def is_quick(entry, family, route):
    """Return whether the filter takes the route among the quick tests: GFSA with all families, the others in BERT."""
    if route is compiled:  # as in test_compile.py; agf-blend is of the class of agf
        return family == "bert" and entry in (GFSA, FILTERS["agf"])
    return entry.quick and (entry is GFSA or family == "bert")


def cells(model):
    """What filter_status says, but for the backend and what is trained, which adapters change."""
    return re.sub(r"-{3,}|sdpa|eager|\(fixed\)", "", str(filter_status(model))).split()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("entry", "family", "route"),
    [
        pytest.param(
            entry,
            family,
            r,
            id=f"{name}-{family}-{r.__name__}",
            marks=[
                pytest.mark.feature(f"Routes past the filter: {r.__name__.replace('_', ' ')}"),
                *([] if is_quick(entry, family, r) else [pytest.mark.slow]),
            ],
        )
        for name, entry in cases()
        for family in ("bert", "albert", "llama", "t5", "vit")
        for r in ROUTES
    ],
)
def test_the_filter_stays(route, family, entry, tmp_path, transformers_warnings):
    model, inputs = patched(family, entry), FAMILIES[family].inputs(torch.float64)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, rows = output(model, inputs), cells(model)
        changed = route(model, tmp_path)
        if route in TO_EAGER:
            assert_equal_in_float32(output(changed, inputs), expected, model, inputs)
        else:
            torch.testing.assert_close(output(changed, inputs), expected, atol=1e-9, rtol=1e-9)
    assert cells(changed) == rows
    transformers_warnings.clear()


@filters(quick=lambda entry: entry is FILTERS["gfsa"])
@pytest.mark.feature("Routes past the filter: patched and unpatched after torch.compile", family="bert")
def test_a_compiled_model_notices_the_patch(entry):
    model, inputs = FAMILIES["bert"].build().double(), FAMILIES["bert"].inputs()
    torch.compiler.reset()
    run = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = output(run, inputs)
        turn_on(patch_model(model, entry.config))
        filtered = output(run, inputs)
        torch.testing.assert_close(filtered, output(model, inputs), atol=1e-9, rtol=1e-9)
        assert not torch.allclose(filtered, plain, atol=1e-2)
        unpatch_model(model)
        torch.testing.assert_close(output(run, inputs), plain, atol=1e-9, rtol=1e-9)


@filters()
@pytest.mark.feature("Routes past the filter: dynamic quantization swaps the linear layers", family="bert")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_linear_layers_swapped(entry):
    model, inputs = patched("bert", entry).float(), FAMILIES["bert"].inputs()
    swapped = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    with torch.no_grad():
        expected, found = output(model, inputs), output(swapped, inputs)
        plain = output(unpatch_model(copy.deepcopy(model)), inputs)
    assert type(swapped.encoder.layer[0].intermediate.dense) is not torch.nn.Linear
    assert (found - expected).norm() < 0.3 * (found - plain).norm()


@filters()
@pytest.mark.feature("Routes past the filter: an attention module swapped for a new one", family="bert")
def test_a_module_without_its_filter_is_neither_saved_nor_loaded(entry, tmp_path, refuses, transformers_warnings):
    model = patched("bert", entry)
    model.save_pretrained(tmp_path)
    layer = model.encoder.layer[1].attention
    layer.self = type(layer.self)(model.config)
    assert len(filter_status(model)) == 2
    with refuses(r"records a filter at encoder\.layer\.1\.attention\.self, which no longer exists \(its module was"):
        model.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    with refuses(r"lacks \d+ of its \d+ filter coefficients"):
        AutoModel.from_pretrained(tmp_path)
    transformers_warnings.clear()


@filters()
def test_parts_of_a_model_are_filtered_too(entry):
    model, inputs = patched("t5", entry), FAMILIES["t5"].inputs()
    with torch.no_grad():
        whole = model(**inputs).encoder_last_hidden_state
        part = model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    torch.testing.assert_close(part.last_hidden_state, whole)


def test_our_own_name_as_a_backend_is_refused():
    model = FAMILIES["bert"].build()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "hf_graphfilter"
    with pytest.raises(GraphFilterError, match="has no graph filter: use patch_model"):
        output(model, FAMILIES["bert"].inputs())


def test_our_own_name_as_the_backend_of_a_patched_model_is_refused():
    model = patched("bert", GFSA)
    model.config._attn_implementation_internal = "hf_graphfilter"
    with pytest.raises(GraphFilterError, match=r"encoder\.layer\.0\.attention\.self .*: choose a backend"):
        output(model, FAMILIES["bert"].inputs())


REROUTED = [None, "sdpa", "eager", "sglang", "vllm"]


@filters()
@pytest.mark.parametrize("implementation", REROUTED)
@pytest.mark.feature("Routes past the filter: an engine writes its attention into a patched module's config")
def test_a_rerouted_module_raises(entry, implementation, refuses):
    model, inputs = patched("llama", entry), FAMILIES["llama"].inputs()
    expected = output(model, inputs)
    config = model.layers[1].self_attn.config
    for _ in range(2):
        config._attn_implementation = implementation
    twin = copy.deepcopy(model)
    for rerouted in (model, twin):
        with refuses(rf"layers\.1\.self_attn is patched, but {implementation!r} was written .*vLLM and SGLang"):
            output(rerouted, inputs)
    config._attn_implementation = "hf_graphfilter"
    assert torch.equal(output(model, inputs), expected)
    unpatch_model(twin)
    assert not any("graph_filter" in name for name in twin.state_dict())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_attention_of_engines_is_refused(engine, monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping})
    AttentionInterface.register(engine, sdpa_attention_forward)
    config = patched("llama", GFSA).config
    config._attn_implementation = engine  # what their transformers backends do before they build the model
    model = AutoModel.from_config(config)
    with pytest.raises(GraphFilterError, match=f"attention by '{engine}' cannot be filtered; vLLM and SGLang"):
        output(model, FAMILIES["llama"].inputs())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@filters()
def test_attention_weights_that_a_filter_has_not_are_refused(family, entry, transformers_warnings):
    """transformers would leave the layer out, and those of later layers would move up."""
    if entry.encoders_only and family != "bert":
        pytest.skip("a filter without a causal form")
    model, inputs = patch_model(FAMILIES[family].build("eager"), entry.config, layers=[1]), FAMILIES[family].inputs()
    if entry.replaces and not entry.config.starts_as_original:
        with pytest.raises(
            GraphFilterError, match=rf"1\..*output_attentions .* '{entry.config.filter}' replaces attention and"
        ):
            model(**inputs, output_attentions=True)
    else:
        assert len(model(**inputs, output_attentions=True).attentions) == 3
    model.set_attn_implementation("sdpa")  # which gives no weights, patched or not
    model(**inputs, output_attentions=True)
    transformers_warnings.clear()
