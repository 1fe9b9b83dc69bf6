"""Quantized base models: the filter stays as it is and is trained, beside adapters too (QLoRA)."""

import copy

import pytest
import torch
from filters import combinations, llama_or_bert
from models import turn_on
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from hf_graphfilter import filter_parameters, filter_status, patch_model

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
LLAMA, BERT = LlamaConfig(**SIZES, num_key_value_heads=2), BertConfig(**SIZES)
MODELS = {  # with heads that are not quantized, their auto classes, and the projections that LoRA adapts
    "llama": (LlamaForCausalLM, LLAMA, AutoModelForCausalLM, ["q_proj", "v_proj"]),
    "bert": (BertForMaskedLM, BERT, AutoModelForMaskedLM, ["query", "value"]),
}
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
    [pytest.param(k, marks=pytest.mark.feature(f"Quantization: {k}, LoRA on it")) for k in KINDS],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),  # theirs
    pytest.mark.slow,
]


@kinds
@combinations(MODELS, llama_or_bert)
@pytest.mark.parametrize("order", ["patched checkpoint", "patched afterwards"])
def test_quantized(kind, family, entry, order, tmp_path, transformers_warnings):
    peft = pytest.importorskip("peft")
    config, tolerance = quantization(kind)
    model_class, model_config, auto_class, projections = MODELS[family]
    plain = model_class(model_config).eval()
    reference = turn_on(patch_model(copy.deepcopy(plain), entry.config))
    (reference if order == "patched checkpoint" else plain).save_pretrained(tmp_path)

    def load():
        model = auto_class.from_pretrained(tmp_path, quantization_config=config, device_map="cpu").eval()
        if order == "patched afterwards":
            patch_model(model, entry.config)
            filters = {k: v for k, v in reference.state_dict().items() if "graph_filter" in k}
            model.load_state_dict(filters, strict=False)
        transformers_warnings.clear()
        return model

    model, ids = load(), torch.randint(0, 99, (2, 9))
    weight = next(m.weight for name, m in model.named_modules() if name.endswith(projections[0]))
    assert type(weight).__name__ in ("Int8Tensor", "Int8Params", "Params4bit")
    assert {(type(p), p.dtype) for p in filter_parameters(model)} == {(torch.nn.Parameter, torch.float32)}
    assert str(filter_status(model)) == str(filter_status(reference))
    with torch.no_grad():
        found, expected = model(ids).logits, reference(ids).logits
    assert (found - expected).norm() / expected.norm() < tolerance
    if model.can_generate():
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))

    # a fresh one: bitsandbytes' 4 bits on the CPU give no gradients after inference, plain models neither
    prepared = peft.prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)
    lora = peft.LoraConfig(target_modules=projections, modules_to_save=["graph_filter"])
    adapted = peft.get_peft_model(prepared, lora).train()
    adapted(ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(adapted))
    adapted.save_pretrained(tmp_path / "adapter")
    transformers_warnings.clear()
