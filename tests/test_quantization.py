"""Quantized base models: the filter stays as it is and is trained, beside adapters too (QLoRA)."""

import copy

import pytest
import torch
from filters import filters
from models import turn_on
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from hf_graphfilter import filter_parameters, filter_status, patch_model

CONFIG = LlamaConfig(
    vocab_size=99,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
)
KINDS = {
    "torchao int8": ("torchao", {}, 0.05),
    "bitsandbytes 8-bit": ("bitsandbytes", {"load_in_8bit": True}, 0.05),
    "bitsandbytes 4-bit": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 0.4),
}


def quantization(kind):
    package, options, tolerance = KINDS[kind]
    pytest.importorskip(package)
    if package == "bitsandbytes":
        return BitsAndBytesConfig(**options), tolerance
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig()), tolerance


kinds = pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.feature(f"Quantization: {k}, LoRA on it", family="llama")) for k in KINDS],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),  # theirs
    pytest.mark.slow,
]


@kinds
@filters(lambda entry: entry.everywhere and not entry.encoders_only)
@pytest.mark.parametrize("order", ["patched checkpoint", "patched afterwards"])
def test_quantized(kind, entry, order, tmp_path, transformers_warnings):
    peft = pytest.importorskip("peft")
    config, tolerance = quantization(kind)
    plain = LlamaForCausalLM(CONFIG).eval()
    reference = turn_on(patch_model(copy.deepcopy(plain), entry.config))
    (reference if order == "patched checkpoint" else plain).save_pretrained(tmp_path)

    def load():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu").eval()
        if order == "patched afterwards":
            patch_model(model, entry.config)
            filters = {k: v for k, v in reference.state_dict().items() if "graph_filter" in k}
            model.load_state_dict(filters, strict=False)
        transformers_warnings.clear()
        return model

    model, ids = load(), torch.randint(0, 99, (2, 9))
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight).__name__ in ("Int8Tensor", "Int8Params", "Params4bit")
    assert {(type(p), p.dtype) for p in filter_parameters(model)} == {(torch.nn.Parameter, torch.float32)}
    assert str(filter_status(model)) == str(filter_status(reference))
    with torch.no_grad():
        found, expected = model(ids).logits, reference(ids).logits
    assert (found - expected).norm() / expected.norm() < tolerance
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))

    # a fresh one: bitsandbytes' 4 bits on the CPU give no gradients after inference, plain models neither
    prepared = peft.prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], modules_to_save=["graph_filter"])
    adapted = peft.get_peft_model(prepared, lora).train()
    adapted(ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(adapted))
    adapted.save_pretrained(tmp_path / "adapter")
    transformers_warnings.clear()
