"""Decoding with caches: the same as without, whatever the cache and the way to decode."""

import contextlib
import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from filters import cases, filters
from models import FAMILIES, TEXT, TRANSFORMERS_5_17, output, turn_on
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import vmap
from transformers import (
    BartForConditionalGeneration,
    Cache,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import QuantizedLayer, StaticLayer
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager_attention

from hf_graphfilter import DenseShift, GraphFilterError, filter_parameters, patch_model, set_blend
from hf_graphfilter.filters.far_field import FarFieldConfig
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.ops.few_rows import form_rows

GENERATORS = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "t5": T5ForConditionalGeneration,
    "bart": BartForConditionalGeneration,
    "whisper": WhisperForConditionalGeneration,
}


DECODING = filters(lambda entry: entry.everywhere and not entry.encoders_only)
WITH_ROWS = filters(lambda entry: entry.everywhere and entry.keeps_rows)
WITH_SCORES = filters(lambda entry: entry.everywhere and not entry.replaces)
NO_STATE = "cannot hold it: use a DynamicCache"
NO_CROP = "cannot take the last ones out again .*assisted decoding does not work"


def generator(name, entry):
    family = FAMILIES[name]
    model = dataclasses.replace(family, model_class=GENERATORS[name]).build().double()
    inputs = {k: v for k, v in family.inputs(torch.float64).items() if not k.startswith("decoder")}
    if family.kind == "decoder":
        inputs["attention_mask"][0, :3] = 0  # left padding
    return turn_on(family.patch(model, entry), scale=0.2), inputs


def llama(entry):
    """A model in float64 with the filter on, and ids."""
    family = FAMILIES["llama"]
    return turn_on(family.patch(family.build().double(), entry)), family.inputs()["input_ids"]


OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 1}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    ("entry", "beams"),
    [
        # greedy steps quick for one filter: those of a beam are greedy's and a reordered cache
        pytest.param(entry, beams, id=f"{name}-{beams}", marks=[pytest.mark.slow] * (not quick))
        for name, entry in cases()
        for beams, quick in ((1, name == "gfsa"), (3, entry.quick))
    ],
)
@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(i, marks=pytest.mark.feature(f"Generation: greedy and beam search, {i or 'dynamic'} cache"))
        for i in (None, "static", "offloaded")
    ],
)
def test_decoding_with_a_cache_equals_without(name, beams, implementation, entry, refuses, transformers_warnings):
    model, inputs = generator(name, entry)
    options = {**OPTIONS, "num_beams": beams}
    if implementation == "offloaded" and not torch.cuda.is_available():
        pytest.skip("offloads from a GPU")
    if implementation == "static" and not entry.keeps_rows and not entry.encoders_only:
        with refuses(NO_STATE):
            model.generate(**inputs, **options, cache_implementation=implementation)
        transformers_warnings.clear()
        return
    cached = model.generate(**inputs, **options, cache_implementation=implementation)
    again = model.generate(**inputs, **options, cache_implementation=implementation)  # a static cache is used again
    plain = model.generate(**inputs, **options, use_cache=False)
    transformers_warnings.clear()  # about generation settings
    assert torch.equal(cached, plain)
    assert torch.equal(again, plain)


@pytest.mark.feature("Generation: sampling, beam sampling, prompt lookup, prefill in pieces", family="llama")
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
@WITH_ROWS
def test_ways_to_decode(options, implementation, entry, transformers_warnings):
    model, inputs = generator("llama", entry)
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


@pytest.mark.feature("Generation: assisted decoding", family="llama")
@DECODING
def test_a_smaller_model_proposes_tokens(entry, refuses, transformers_warnings):
    model, inputs = generator("llama", entry)
    inputs = {name: value[1:] for name, value in inputs.items()}
    assistant, _ = generator("llama", entry)
    with torch.no_grad():
        next(filter_parameters(assistant)).add_(0.5)  # another filter: some proposals are refused
    expected = model.generate(**inputs, **OPTIONS)
    refusal = rf"{NO_CROP}|requires a cache that can be cropped"  # transformers 5.24 asks the cache itself
    with contextlib.nullcontext() if entry.keeps_rows else refuses(refusal, ValueError):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=assistant), expected)
    transformers_warnings.clear()


def steps(model, ids, cache):
    found = [model(ids[:, a:b], **{CACHE: cache}).last_hidden_state for a, b in ((0, 4), (4, 7), (7, 8), (8, 9))]
    return torch.cat(found, 1)


@pytest.mark.feature("Generation: static cache handed in, reset and used again", family="llama")
@filters(lambda entry: entry.keeps_rows)
def test_static_cache(entry):
    model, ids = llama(entry)
    expected, cache = output(model, {"input_ids": ids}), StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        torch.testing.assert_close(steps(model, ids, cache), expected, atol=1e-9, rtol=1e-9)
        cache.reset()
        torch.testing.assert_close(steps(model, ids, cache), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="of later transformers")
def test_a_static_cache_that_is_cropped_to_nothing_begins_again():
    model, ids = turn_on(patch_model(FAMILIES["llama"].build(), "gfsa")), torch.randint(5, 99, (2, 6))
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        expected = model(ids, **{CACHE: cache}).last_hidden_state
        cache.crop(-6)
        torch.testing.assert_close(model(ids, **{CACHE: cache}).last_hidden_state, expected)


@pytest.mark.feature("Generation: compiled step with a static cache", family="llama")
@WITH_ROWS
def test_a_step_with_a_static_cache_is_compiled_once(entry):
    model, ids = llama(entry)
    expected = output(model, {"input_ids": ids})
    cache = StaticCache(config=model.config, max_cache_len=16)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        model(ids[:, :4], **{CACHE: cache})
        found = [step(ids[:, i : i + 1], **{CACHE: cache}).last_hidden_state for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 4:], atol=1e-9, rtol=1e-9)
    assert counter.frame_count == 1


@pytest.mark.feature("Generation: a cache handed in and used across turns", family="llama")
@filters(lambda entry: not entry.encoders_only)
@pytest.mark.parametrize("configured", [False, True])
def test_cached_logits(entry, configured):
    model, ids = llama(entry)
    expected, cache = output(model, {"input_ids": ids}), DynamicCache(config=model.config if configured else None)
    torch.testing.assert_close(steps(model, ids, cache), expected, atol=1e-9, rtol=1e-9)
    assert cache.get_seq_length() == 9
    if entry.keeps_rows:
        cache.crop(-3)
        again = model(ids[:, 6:], **{CACHE: cache}).last_hidden_state
        torch.testing.assert_close(again, expected[:, 6:], atol=1e-9, rtol=1e-9)
    else:
        with pytest.raises(GraphFilterError, match=NO_CROP):
            cache.crop(-3)
        cache.crop(0)
    cache.reset()
    if cache.get_seq_length() == 0:  # transformers 5.17 keeps the tokens and zeroes them
        torch.testing.assert_close(model(ids, **{CACHE: cache}).last_hidden_state, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@WITH_ROWS
def test_many_tokens(mode, entry):
    """Rows are written into room that is made from time to time; the modes of autograd may change between tokens."""
    model, _ = llama(entry)
    ids, cache = torch.randint(5, 99, (2, 60)), DynamicCache(config=model.config)
    expected = output(model, {"input_ids": ids})
    with torch.inference_mode():
        found = [model(ids[:, :4], **{CACHE: cache}).last_hidden_state]
    with mode():
        found += [model(ids[:, i : i + 1], **{CACHE: cache}).last_hidden_state for i in range(4, 60)]
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=1e-9)


def in_pieces(model, batch, cache, ends=(0, 4, 7, 8, 9)):
    """The pieces of the last hidden state, through a cache."""
    for begin, end in itertools.pairwise(ends):
        given = {"input_ids": batch["input_ids"][:, begin:end], "attention_mask": batch["attention_mask"][:, :end]}
        yield model(**given, **{CACHE: cache}, use_cache=True).last_hidden_state


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.feature("Generation: training in pieces through a cache, gradients of one pass")
@filters(lambda entry: not entry.encoders_only, quick=lambda _: True)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_through_a_cache(family, entry):
    """Those of one pass: what a filter remembers of earlier pieces has a gradient, as keys and values have."""
    family = FAMILIES[family]
    model, batch = turn_on(family.patch(family.build().double(), entry)), family.inputs()
    batch["attention_mask"][0, :3] = 0
    toward = torch.randn(2, 9, 32).double() * batch["attention_mask"][..., None]
    expected = gradients(model, (model(**batch, use_cache=False).last_hidden_state * toward).sum())
    pieces = in_pieces(model, batch, DynamicCache(config=model.config))
    torch.testing.assert_close(gradients(model, (torch.cat([*pieces], 1) * toward).sum()), expected)


@pytest.mark.feature("Generation: training in pieces through a cache that is detached between them", family="llama")
@filters(lambda entry: not entry.encoders_only, quick=lambda _: True)
def test_gradients_through_a_detached_cache(entry):
    """Truncated backpropagation as transformers' caches allow it: earlier pieces are constants for later ones."""
    family = FAMILIES["llama"]
    model, batch = turn_on(family.patch(family.build().double(), entry)), family.inputs()
    found = []
    for constant in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.set_grad_enabled(not constant):
            loss = sum(piece.square().sum() for piece in in_pieces(model, batch, cache, (0, 4, 6)))
        if not constant:
            loss.backward()
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        (piece,) = in_pieces(model, batch, cache, (6, 9))
        found.append(gradients(model, piece.square().sum()))
    torch.testing.assert_close(*found)


@filters(lambda entry: entry.keeps_rows)
def test_gradients_through_a_cache_that_is_cropped_and_used_again(entry):
    """What is decoded without gradients, after a crop, does not overwrite what autograd has saved."""
    model, ids = llama(entry)
    found = []
    for crops in (False, True):
        cache = DynamicCache(config=model.config)
        loss = model(ids, **{CACHE: cache}).last_hidden_state.square().sum()
        if crops:
            cache.crop(-3)
            with torch.no_grad():
                model(ids[:, :3], **{CACHE: cache})
        found.append(gradients(model, loss))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.fixture
def sdpa_calls(monkeypatch):
    """Numbers of the query tokens of every SDPA call so far."""
    queries, sdpa = [], F.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        queries.append(query.shape[2])
        return sdpa(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_pass_over_the_keys_equals_two_calls(name, kind, dtype, sdpa_calls, monkeypatch):
    model, ids = FAMILIES[name].build().to(dtype), torch.randint(5, 99, (2, 9))
    layers = model.config.num_hidden_layers

    def decoded(model):
        sdpa_calls.clear()
        cache = StaticCache(config=model.config, max_cache_len=12) if kind == "static" else DynamicCache()
        with torch.no_grad():
            return steps(model, ids, cache)

    plain = decoded(model)
    assert torch.equal(decoded(patch_model(model, "gfsa")), plain)  # at the start
    turn_on(model)
    found = decoded(model)
    assert sdpa_calls == [4] * 2 * layers  # of the prompt
    monkeypatch.setattr("hf_graphfilter.ops.few_rows.FEW", 0)
    expected = decoded(model)
    assert len(sdpa_calls) == 4 * 2 * layers
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "padding", "hidden from all", "additive", "one a head"])
def test_few_rows_are_what_sdpa_applies(mask, groups, tokens):
    keys = 7
    query, key, value = (torch.randn(2, n, m, 5).double() for n, m in ((4, tokens), (groups, keys), (groups, keys)))
    visible = torch.ones(2, 1, tokens, keys, dtype=torch.bool)
    visible[1, :, :, :3] = False
    hidden = visible.clone()
    hidden[0, :, 0] = False
    masks = {
        "none": None,
        "padding": visible,
        "hidden from all": hidden,
        "additive": torch.randn(2, 1, tokens, keys).double().masked_fill(~visible, torch.finfo(torch.float64).min),
        "one a head": torch.randn(2, 4, tokens, keys).double().masked_fill(~visible, -torch.inf),
    }
    expected = F.scaled_dot_product_attention(query, key, value, masks[mask], scale=0.7, enable_gqa=True)
    found = DenseShift(form_rows(query, key, masks[mask], scale=0.7))(value)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-14)


def test_eager_attention_is_formed_once(monkeypatch):
    """In evaluation: what a second call would compute is what the first one returned."""
    model, ids = patch_model(FAMILIES["llama"].build("eager"), "gfsa", w_K=0.3), torch.randint(5, 99, (2, 9))
    found, calls = output(model, {"input_ids": ids}), []
    eager = llama_eager_attention
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.eager_attention_forward",
        lambda *args, **kwargs: (calls.append(1), (eager(*args, **kwargs)[0], None))[1],
    )
    assert torch.equal(found, output(model, {"input_ids": ids}))
    assert len(calls) == 2 * model.config.num_hidden_layers


MISTRAL = MistralConfig(**{**TEXT, "num_hidden_layers": 2}, num_key_value_heads=2, sliding_window=4)


@pytest.mark.feature("Generation: sliding windows")
@WITH_SCORES
def test_sliding_window_cache(entry):
    model = turn_on(patch_model(MistralForCausalLM(MISTRAL).eval().double(), entry.config))
    ids = torch.randint(5, 99, (2, 6))
    cached, plain = (model.generate(ids, **OPTIONS, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("name", "window"), [("gfsa", None), ("gfsa", 4), ("far_field", None)])
def test_decoding_within_vmap_and_on_the_meta_device(name, window):
    """Neither has a kernel for every operator of PyTorch."""
    config = copy.deepcopy(MISTRAL)
    config.sliding_window = window
    model = turn_on(patch_model(MistralForCausalLM(config).eval(), name))

    def decode(ids):
        cache = DynamicCache(config=config)
        return [model(part, **{CACHE: cache}).logits for part in ids.split((4, 1, 1), 1)]

    ids = torch.randint(5, 99, (3, 6))
    with torch.no_grad():
        found = vmap(lambda row: decode(row[None]))(ids)
        torch.testing.assert_close([part[:, 0] for part in found], decode(ids))
        model.to("meta")
        with torch.device("meta"):
            assert decode(ids.to("meta"))[-1].shape == (3, 1, 99)


SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def stepwise(model, ids, past=None, ends=(0, 4, 5, 6, 9)):
    """Logits by a cache, and at once."""
    found = []
    with torch.no_grad():
        for begin, end in itertools.pairwise(ends):
            step = model(input_ids=ids[:, begin:end], **{CACHE: past}, use_cache=True)
            past = step[CACHE]
            found.append(step.logits)
        return torch.cat(found, 1), model(input_ids=ids, use_cache=False).logits


@DECODING
def test_a_cache_by_its_earlier_name(entry):
    """GPT-NeoX's attention is handed ``layer_past``."""
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)).double().eval()
    found, expected = stepwise(turn_on(patch_model(model, entry.config)), torch.randint(5, 99, (2, 9)))
    assert torch.allclose(found, expected, atol=1e-10)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_cache_by_the_name_that_callers_used_before_transformers_5_24():
    model = turn_on(patch_model(FAMILIES["llama"].build().double(), "gfsa"))
    ids = torch.randint(5, 99, (2, 9))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        found = [model(part, past_key_values=cache).last_hidden_state for part in ids.split([5, 1, 3], 1)]
        torch.testing.assert_close(torch.cat(found, 1), model(ids, use_cache=False).last_hidden_state)


@DECODING
@pytest.mark.parametrize("static", [False, True])
def test_attention_that_is_computed_twice_a_pass_is_right_or_refused(entry, static):
    """By DiffLlama, of two parts of the values: of past tokens a filter cannot tell the one from the other."""
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**SMALL, num_key_value_heads=2)).double().eval()
    model, ids = turn_on(patch_model(model, entry.config)), torch.randint(5, 99, (2, 9))
    if not static:
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids, use_cache=False).logits), "no past yet"
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    refusal = r"computes attention several times in a pass|use a DynamicCache"
    with pytest.raises(GraphFilterError, match=refusal):
        stepwise(model, ids, past=cache)
    cache.reset()
    with pytest.raises(GraphFilterError, match=refusal):
        stepwise(model, ids, past=cache, ends=(0, 1, 2, 3))


@pytest.mark.parametrize("name", ["gfsa", "far_field"])
def test_attention_that_is_computed_twice_a_compiled_pass_is_right_or_refused(name):
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**{**SMALL, "num_hidden_layers": 1}, num_key_value_heads=2))
    model, ids = turn_on(patch_model(model.double().eval(), name)), torch.randint(5, 99, (2, 9))
    expected = model(input_ids=ids, use_cache=False).logits
    torch.compiler.reset()
    step, cache = torch.compile(model, backend="eager"), DynamicCache(config=model.config)
    with torch.no_grad():
        assert torch.allclose(step(input_ids=ids, **{CACHE: cache}).logits, expected), "no past yet"
        # the compiler of torch 2.11 fails to raise the error of others, and raises one of its own
        kind, message = (Exception, None) if TRANSFORMERS_5_17 else (GraphFilterError, "several times in a pass")
        with pytest.raises(kind, match=message):
            step(input_ids=ids[:, :1], **{CACHE: cache})


@DECODING
def test_a_layer_whose_keys_others_read_keeps_them(entry):
    config = Gemma4TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "sliding_window": 32, "pad_token_id": 0},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
    )
    model, ids = Gemma4ForCausalLM(config).double().eval(), torch.randint(5, 99, (2, 9))
    patched = turn_on(patch_model(copy.deepcopy(model), entry.config, layers=[1]))
    found, expected = stepwise(patched, ids)
    assert torch.allclose(found, expected, atol=1e-10)
    with pytest.raises(GraphFilterError, match=r"keys and values of an earlier layer.*exclude it with layers="):
        stepwise(turn_on(patch_model(model, entry.config, layers=[3])), ids)


@pytest.mark.skipif(TRANSFORMERS_5_17, reason="its cache gives the model more tokens than its mask has")
@WITH_SCORES
@pytest.mark.parametrize("grad", [False, True])
def test_a_sliding_window_that_is_gone_back_in(entry, grad):
    """As an assistant's cache: what was proposed is taken out again, and earlier tokens come back into the window."""
    model = turn_on(patch_model(MistralForCausalLM(MISTRAL).eval().double(), entry.config))
    ids, junk = torch.randint(5, 99, (2, 20)), torch.randint(5, 99, (2, 4))
    with torch.set_grad_enabled(grad):
        expected, cache = model(ids, use_cache=False).logits[:, -6:], DynamicCache(config=model.config)
        cache.activate_past_recording()
        for part in (ids[:, :10], *ids[:, 10:14].split(1, 1), *junk.split(1, 1)):
            model(part, **{CACHE: cache})
        cache.crop(-4)
        found = torch.cat([model(part, **{CACHE: cache}).logits for part in (ids[:, 14:15], ids[:, 15:])], 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.feature("Generation: a cache filled by the unpatched model", family="llama")
@DECODING
def test_a_cache_from_the_plain_model_is_refused(entry, refuses):
    model, ids = FAMILIES["llama"].build(), FAMILIES["llama"].inputs()["input_ids"]
    cache = model(ids[:, :5], use_cache=True)[CACHE]
    patch_model(model, entry.config)
    with refuses("holds 9 tokens but the filter has seen 4.*unpatched model" if entry.keeps_rows else "filled without"):
        model(ids[:, 5:], **{CACHE: cache})
    if not entry.keeps_rows:
        return
    static, plain = StaticCache(config=model.config, max_cache_len=16), FAMILIES["llama"].build()
    plain(ids[:, :5], **{CACHE: static})
    with pytest.raises(GraphFilterError, match=r"static cache holds 9 tokens but the filter has seen 4.*unpatched"):
        model(ids[:, 5:], **{CACHE: static})
    static.reset()
    model(ids, **{CACHE: static})
    static.reset()  # the rows are there now, of another text
    plain(ids[:, :5], **{CACHE: static})
    with pytest.raises(GraphFilterError, match=r"static cache holds 9 tokens but the filter has seen 4.*unpatched"):
        model(ids[:, 5:], **{CACHE: static})


BLEND = FarFieldConfig(window=2, sinks=0, init="blend")


@pytest.mark.parametrize("kind", ["static", "dynamic", "sliding", "blend"])
def test_a_cache_that_the_plain_model_continued_is_refused(kind):
    """Between two calls of the patched model, its keys grew and what the filter keeps of them did not."""
    config = LlamaConfig(**{**TEXT, "num_hidden_layers": 1}, num_key_value_heads=2)
    plain = MistralForCausalLM(MISTRAL) if kind == "sliding" else LlamaForCausalLM(config)
    model = patch_model(copy.deepcopy(plain), BLEND if kind == "blend" else "gfsa")
    turn_on(model)
    if kind == "blend":
        set_blend(model, 0.5)
    cache = StaticCache(config=config, max_cache_len=16) if kind == "static" else DynamicCache(config=plain.config)
    first, second, third = torch.randint(5, 99, (2, 13)).split([10, 2, 1], 1)
    with torch.no_grad():
        model(first, **{CACHE: cache})
        plain(second, **{CACHE: cache})
        with pytest.raises(GraphFilterError, match=r"that the filter has not seen: .*unpatched"):
            model(third, **{CACHE: cache})
        if TRANSFORMERS_5_17 and kind != "static":
            return  # its cache is reset to zeros
        cache.reset()
        expected = model(torch.cat([first, second], 1), use_cache=False).logits
        found = [model(part, **{CACHE: cache}).logits for part in (first, *second.split(1, 1))]
        torch.testing.assert_close(torch.cat(found, 1), expected)
        cache.reset()
        plain(first, **{CACHE: cache})
        with pytest.raises(GraphFilterError, match=r"that the filter has not seen|but the filter has seen 1 of them"):
            model(third, **{CACHE: cache})


@pytest.mark.skipif(TRANSFORMERS_5_17, reason="its cache keeps the tokens, as zeros")
@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(["gfsa", "far_field", "blend"], 2)])
def test_a_cache_that_was_reset_serves_another_filter(first, second):
    ids, cache = torch.randint(5, 99, (2, 9)), DynamicCache(config=FAMILIES["llama"].build().config)
    with torch.no_grad():
        for name in (first, second):
            model = turn_on(patch_model(FAMILIES["llama"].build().double(), BLEND if name == "blend" else name))
            if name == "blend":
                set_blend(model, 0.5)
            cache.reset()
            expected = model(ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(steps(model, ids, cache), expected)


def assign(layer, change):
    layer.keys, layer.values = change(layer.keys), change(layer.values)


REPLACED = {
    "pruned": lambda cache: [assign(layer, lambda x: x[:, :, ::2]) for layer in cache.layers],
    "sorted": lambda cache: [assign(layer, lambda x: x.flip(2)) for layer in cache.layers],
    "pruned-and-cropped": lambda cache: [REPLACED["pruned"](cache), cache.crop(-1)],
    "pruned-and-reordered": lambda cache: [REPLACED["pruned"](cache), cache.reorder_cache(torch.tensor([1, 0]))],
    "selected": lambda cache: [assign(layer, lambda x: x[[1, 0]]) for layer in cache.layers],
}


@pytest.mark.feature("Generation: keys and values replaced by other code (kvpress)", family="llama")
@pytest.mark.parametrize("change", REPLACED)
@DECODING
def test_a_cache_changed_behind_the_filter_is_refused(entry, change, refuses):
    model, ids = llama(entry)
    static = change == "sorted" and entry.keeps_rows
    cache = StaticCache(config=model.config, max_cache_len=9) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :6], **{CACHE: cache})
        if not entry.keeps_rows and "crop" in change:
            pytest.skip("a state is not cropped")
        REPLACED[change](cache)
        with refuses(r"layers.0.self_attn: the keys and values in the cache were replaced without the filter"):
            model(ids[:, 6:], **{CACHE: cache})
        if TRANSFORMERS_5_17 and not static:
            return  # its cache keeps the tokens, as zeros
        cache.reset()
        expected = model(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(model(ids, **{CACHE: cache}).last_hidden_state, expected)


@pytest.mark.parametrize("name", ["gated", "attnscale", "xsa", "dex"])
def test_filters_that_keep_nothing_follow_a_pruned_cache(name):
    """One step over the tokens that are left equals the mask that hides the others."""
    model = turn_on(patch_model(FAMILIES["llama"].build("eager", num_hidden_layers=1).double(), name))
    ids, cache, left = FAMILIES["llama"].inputs()["input_ids"], DynamicCache(config=model.config), [0, 1, 4, 7]
    mask, position = torch.ones_like(ids), {"position_ids": torch.tensor([[8]])}
    mask[:, [i for i in range(8) if i not in left]] = 0
    with torch.no_grad():
        model(ids[:, :8], **{CACHE: cache})
        hidden = model(ids[:, 8:], attention_mask=mask, **position, **{CACHE: copy.deepcopy(cache)})
        assign(cache.layers[0], lambda x: x[:, :, left])
        found = model(ids[:, 8:], **position, **{CACHE: cache})
    # Llama computes its norms and its eager softmax in float32, whatever the model's dtype
    torch.testing.assert_close(found.last_hidden_state, hidden.last_hidden_state, rtol=1e-6, atol=1e-6)


class Rounded(QuantizedLayer):
    """A quantized cache without a package that quantizes."""

    def _quantize(self, tensor, axis):
        return tensor.half()

    def _dequantize(self, tensor):
        return tensor.float()


@pytest.mark.feature("Generation: quantized cache", family="llama")
@DECODING
def test_a_quantized_cache_is_refused(entry, refuses):
    model, ids = patch_model(FAMILIES["llama"].build(), entry.config), FAMILIES["llama"].inputs()["input_ids"]
    cache = Cache(layers=[Rounded() for _ in range(3)])
    FAMILIES["llama"].build()(ids, **{CACHE: Cache(layers=[Rounded() for _ in range(3)])})  # the plain model takes it
    with refuses(r"Cache \(Rounded\).* use a DynamicCache"):
        model(ids, **{CACHE: cache})


class PagedAttentionCache:
    """What a module reads of the cache of continuous batching before it updates it."""

    def update(self, key, value, layer_idx, kwargs):
        assert kwargs["read_index"] == []
        return key, value


@pytest.mark.parametrize("name", ["gfsa", "far_field"])
def test_continuous_batching_is_refused(name):
    attention = patch_model(FAMILIES["llama"].build(), name).layers[0].self_attn
    hidden, rotation = torch.randn(1, 9, 32), (torch.ones(1, 9, 8), torch.zeros(1, 9, 8))
    with pytest.raises(GraphFilterError, match=r"layers.0.self_attn: paged attention .* cannot be filtered"):
        attention(hidden, rotation, None, **{CACHE: PagedAttentionCache()}, read_index=[], write_index=[])


@pytest.mark.feature("Generation: static cache with sliding windows", family="llama")
@WITH_SCORES
def test_a_static_cache_with_sliding_windows_is_refused(entry, refuses):
    model = patch_model(MistralForCausalLM(MISTRAL).eval(), entry.config)
    with refuses(r"StaticCache \(StaticSlidingWindowLayer\) cannot hold them: use a DynamicCache"):
        model(torch.randint(5, 99, (2, 6)), **{CACHE: StaticCache(config=model.config, max_cache_len=16)})
