"""Decoding with caches: the same as without, whatever the cache and the way to decode."""

import pytest
import torch
from models import FAMILIES, TEXT, output, turn_on
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    BartForConditionalGeneration,
    Cache,
    DynamicCache,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import QuantizedLayer

from hf_graphfilter import GraphFilterError, filter_parameters, patch_model

GENERATORS = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "t5": T5ForConditionalGeneration,
    "bart": BartForConditionalGeneration,
    "whisper": WhisperForConditionalGeneration,
}


def generator(name):
    family = FAMILIES[name]
    model = type(family)(GENERATORS[name], family.config, family.kind, family.patched).build().double()
    inputs = {k: v for k, v in family.inputs(torch.float64).items() if not k.startswith("decoder")}
    if family.kind == "decoder":
        inputs["attention_mask"][0, :3] = 0  # left padding
    return turn_on(patch_model(model, learn=("w_0", "w_1", "w_K")), scale=0.2), inputs


OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 1}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(
            i, marks=pytest.mark.feature(f"Generation: greedy and beam search, {i or 'dynamic'} cache", filter="gfsa")
        )
        for i in (None, "static", "offloaded")
    ],
)
def test_decoding_with_a_cache_equals_without(name, beams, implementation, transformers_warnings):
    model, inputs = generator(name)
    options = {**OPTIONS, "num_beams": beams}
    if implementation == "offloaded" and not torch.cuda.is_available():
        pytest.skip("offloads from a GPU")
    cached = model.generate(**inputs, **options, cache_implementation=implementation)
    again = model.generate(**inputs, **options, cache_implementation=implementation)  # a static cache is used again
    plain = model.generate(**inputs, **options, use_cache=False)
    transformers_warnings.clear()  # about generation settings
    assert torch.equal(cached, plain)
    assert torch.equal(again, plain)


@pytest.mark.feature(
    "Generation: sampling, beam sampling, prompt lookup, prefill in pieces", filter="gfsa", family="llama"
)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 20},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 4},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"penalty_alpha": None, "repetition_penalty": 1.3},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("implementation", [None, "static"])
def test_ways_to_decode(options, implementation, transformers_warnings):
    model, inputs = generator("llama")
    if implementation == "static" and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers has no assisted decoding with a static cache")
    if "prompt_lookup_num_tokens" in options:
        inputs = {name: value[1:] for name, value in inputs.items()}
    found = []
    for further in ({"cache_implementation": implementation}, {"use_cache": False}):
        torch.manual_seed(0)
        if further == {"use_cache": False}:
            options = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "prompt_lookup_num_tokens")}
        found.append(model.generate(**inputs, **{**OPTIONS, **options}, **further))
    transformers_warnings.clear()
    assert torch.equal(*found)


@pytest.mark.feature("Generation: assisted decoding", filter="gfsa", family="llama")
def test_a_smaller_model_proposes_tokens(transformers_warnings):
    model, inputs = generator("llama")
    inputs = {name: value[1:] for name, value in inputs.items()}
    assistant, _ = generator("llama")
    with torch.no_grad():
        next(filter_parameters(assistant)).add_(0.5)  # another filter: some proposals are refused
    found = model.generate(**inputs, **OPTIONS, assistant_model=assistant)
    expected = model.generate(**inputs, **OPTIONS)
    transformers_warnings.clear()
    assert torch.equal(found, expected)


def steps(model, ids, cache):
    found = [model(ids[:, a:b], past_key_values=cache).last_hidden_state for a, b in ((0, 4), (4, 7), (7, 8), (8, 9))]
    return torch.cat(found, 1)


@pytest.mark.feature("Generation: static cache handed in, reset and used again", filter="gfsa", family="llama")
@pytest.mark.parametrize("approximation", ["taylor", "none"])
def test_static_cache(approximation):
    family = FAMILIES["llama"]
    model = turn_on(patch_model(family.build().double(), K=4, approximation=approximation, learn=("w_0", "w_1", "w_K")))
    ids = family.inputs()["input_ids"]
    expected, cache = output(model, {"input_ids": ids}), StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        torch.testing.assert_close(steps(model, ids, cache), expected, atol=1e-9, rtol=1e-9)
        cache.reset()
        torch.testing.assert_close(steps(model, ids, cache), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.feature("Generation: compiled step with a static cache", filter="gfsa", family="llama")
def test_a_step_with_a_static_cache_is_compiled_once():
    model, ids = turn_on(patch_model(FAMILIES["llama"].build().double())), FAMILIES["llama"].inputs()["input_ids"]
    expected = output(model, {"input_ids": ids})
    cache = StaticCache(config=model.config, max_cache_len=16)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        found = [step(ids[:, i : i + 1], past_key_values=cache).last_hidden_state for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 4:], atol=1e-9, rtol=1e-9)
    assert counter.frame_count == 1


@pytest.mark.feature("Generation: a cache handed in and used across turns", filter="gfsa", family="llama")
@pytest.mark.parametrize("approximation", ["taylor", "none"])
def test_cached_logits(approximation):
    family = FAMILIES["llama"]
    model = turn_on(patch_model(family.build().double(), K=4, approximation=approximation, learn=("w_0", "w_1", "w_K")))
    ids = family.inputs()["input_ids"]
    expected, cache = output(model, {"input_ids": ids}), DynamicCache(config=model.config)
    torch.testing.assert_close(steps(model, ids, cache), expected, atol=1e-9, rtol=1e-9)
    cache.crop(-3)
    again = model(ids[:, 6:], past_key_values=cache).last_hidden_state
    torch.testing.assert_close(again, expected[:, 6:], atol=1e-9, rtol=1e-9)
    cache.reset()
    if cache.get_seq_length() == 0:  # transformers 5.17 keeps the tokens and zeroes them
        torch.testing.assert_close(model(ids, past_key_values=cache).last_hidden_state, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_many_tokens(mode):
    """Rows are written into room that is made from time to time; the modes of autograd may change between tokens."""
    model = turn_on(patch_model(FAMILIES["llama"].build().double(), learn=("w_0", "w_1", "w_K")))
    ids, cache = torch.randint(5, 99, (2, 60)), DynamicCache(config=model.config)
    expected = output(model, {"input_ids": ids})
    with torch.inference_mode():
        found = [model(ids[:, :4], past_key_values=cache).last_hidden_state]
    with mode():
        found += [model(ids[:, i : i + 1], past_key_values=cache).last_hidden_state for i in range(4, 60)]
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=1e-9)


MISTRAL = MistralConfig(**{**TEXT, "num_hidden_layers": 2}, num_key_value_heads=2, sliding_window=4)


@pytest.mark.feature("Generation: sliding windows", filter="gfsa")
def test_sliding_window_cache():
    model = turn_on(patch_model(MistralForCausalLM(MISTRAL).eval().double()))
    ids = torch.randint(5, 99, (2, 6))
    cached, plain = (model.generate(ids, **OPTIONS, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)


def test_caches_that_cannot_hold_the_rows_are_refused():
    model, ids = patch_model(MistralForCausalLM(MISTRAL).eval()), torch.randint(5, 99, (2, 6))
    with pytest.raises(GraphFilterError, match=r"StaticCache \(StaticSlidingWindowLayer\) cannot hold them: use a Dyn"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=32))


@pytest.mark.feature("Generation: a cache filled by the plain model", filter="gfsa", family="llama")
def test_a_cache_from_the_plain_model_is_refused(refuses):
    model, ids = FAMILIES["llama"].build(), FAMILIES["llama"].inputs()["input_ids"]
    cache = model(ids[:, :5], use_cache=True).past_key_values
    patch_model(model)
    with refuses(r"holds 9 tokens but the filter has seen 4.*unpatched model"):
        model(ids[:, 5:], past_key_values=cache)
    static, plain = StaticCache(config=model.config, max_cache_len=16), FAMILIES["llama"].build()
    plain(ids[:, :5], past_key_values=static)
    with pytest.raises(GraphFilterError, match=r"static cache holds 9 tokens but the filter has seen 4.*unpatched"):
        model(ids[:, 5:], past_key_values=static)
    static.reset()
    model(ids, past_key_values=static)
    static.reset()  # the rows are there now, of another text
    plain(ids[:, :5], past_key_values=static)
    with pytest.raises(GraphFilterError, match=r"static cache holds 9 tokens but the filter has seen 4.*unpatched"):
        model(ids[:, 5:], past_key_values=static)


class Rounded(QuantizedLayer):
    """A quantized cache without a package that quantizes."""

    def _quantize(self, tensor, axis):
        return tensor.half()

    def _dequantize(self, tensor):
        return tensor.float()


@pytest.mark.feature("Generation: quantized cache", family="llama")
@pytest.mark.parametrize("name", ["gfsa", "agf"])
def test_a_quantized_cache_is_refused(name, refuses):
    model, ids = patch_model(FAMILIES["llama"].build(), name), FAMILIES["llama"].inputs()["input_ids"]
    cache = Cache(layers=[Rounded() for _ in range(3)])
    FAMILIES["llama"].build()(
        ids, past_key_values=Cache(layers=[Rounded() for _ in range(3)])
    )  # the plain model takes it
    with refuses(r"Cache \(Rounded\).* use a DynamicCache"):
        model(ids, past_key_values=cache)


@pytest.mark.feature("Generation: static cache with sliding windows", filter="gfsa", family="llama")
def test_a_static_cache_with_sliding_windows_is_refused(refuses):
    model = patch_model(MistralForCausalLM(MISTRAL).eval())
    with refuses(r"StaticCache \(StaticSlidingWindowLayer\) cannot hold them: use a DynamicCache"):
        model(torch.randint(5, 99, (2, 6)), past_key_values=StaticCache(config=model.config, max_cache_len=16))
