"""The filter ``far_field``: exact near tokens, block states of far ones, decoding."""

import copy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from models import FAMILIES, output, turn_on
from oracle import dense_twin, far_field_matrix
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from hf_graphfilter import (
    FarFieldConfig,
    GraphFilterError,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    save_filter,
)
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.ops import block_attention, joint_softmax
from hf_graphfilter.ops.block_attention import FarMeans


def test_running_means_are_a_softmax_over_all_tokens_before_however_far_the_weights_lie_apart():
    torch.manual_seed(0)
    blocks, block = 2 * block_attention.CHUNK + 3, 2
    logits = 40 * torch.randn(1, 2, blocks, block, 3, dtype=torch.float64)
    value = torch.randn(1, 2, blocks, block, 5, dtype=torch.float64)
    alone = block_attention.summarize_blocks(logits, value)
    found = block_attention.accumulate_blocks(alone)
    start = FarMeans(found.mass[:, :, 9:10], found.mean[:, :, 9:10])
    resumed = block_attention.accumulate_blocks(FarMeans(*(x[:, :, 10:] for x in alone)), start)
    for b in (0, 1, 9, block_attention.CHUNK, blocks - 1):
        before = logits[:, :, : b + 1].flatten(2, 3)
        mean = before.softmax(2).mT @ value[:, :, : b + 1].flatten(2, 3)
        torch.testing.assert_close(found.mean[:, :, b], mean)
        torch.testing.assert_close(found.mass[:, :, b], before.logsumexp(2))
        if b > 9:
            torch.testing.assert_close(resumed.mean[:, :, b - 10], mean)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("batch", "texts"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("by_column", [False, True])  # the kernel itself reads such features as if they were rows
def test_fused_kernel_equals_plain_operations(heads, batch, texts, by_column, monkeypatch):
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        x = torch.randn(batch, 2, 3, *shape, generator=g, dtype=torch.float64)
        return (x.mT.contiguous().mT if by_column else x).requires_grad_()

    query, far, weight = random(heads, 4, 5), random(heads, 4, 5), random(heads, 4, 5).detach()
    key, value, score = random(9, 5), random(9, 5), random(heads, 4)
    seen = torch.rand(texts, 3, 4, 9, generator=g) > 0.4
    seen[:, 1, 2] = False  # a query that sees the far field alone
    seen[:, 0, 1] = False  # and one that sees nothing, as at padding before a text
    near_only = torch.arange(3).eq(0).view(3, 1, 1).expand(3, heads, 4)
    inputs = (query, key, value, score, far)
    fused, results = Mock(wraps=joint_softmax._attend_fused), []
    monkeypatch.setattr(joint_softmax, "_attend_fused", fused)
    for dtypes in ((torch.float64,), ()):
        monkeypatch.setattr(joint_softmax, "FUSED", dtypes)
        estimate = score.masked_fill(near_only, -torch.inf)
        out = joint_softmax.attend_fields(query, key, value, seen, 0.5, estimate, far)
        results.append([out, *torch.autograd.grad(out, inputs, weight)])
    assert fused.call_count == 1
    torch.testing.assert_close(*results)
    assert all(out[:, :, 0, :, 1].eq(0).all() for out, *_ in results)

    def attend(*inputs):
        return joint_softmax.attend_fields(
            *inputs[:3], seen[:1], 0.5, inputs[3].masked_fill(near_only, -torch.inf), inputs[4]
        )

    for dtypes in ((torch.float64,), ()) if batch == heads == 1 else ():
        monkeypatch.setattr(joint_softmax, "FUSED", dtypes)
        assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("fused", [True, False])
def test_padding_before_a_text_reads_no_later_tokens(fused, monkeypatch):
    monkeypatch.setattr(joint_softmax, "FUSED", joint_softmax.FUSED if fused else ())
    model, ids = build(), torch.randint(5, 90, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    other = ids.clone()
    other[:, 6] = 95
    found, expected = (model(x, attention_mask=mask, use_cache=False)[0][:, :6] for x in (other, ids))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_text_of_two_blocks_gets_the_original_attention(family):
    plain, ids = FAMILIES[family].build().eval(), FAMILIES[family].inputs()["input_ids"][:, :9]
    model = patch_model(copy.deepcopy(plain), "far_field", window=4, sinks=2)
    no_cache = {"use_cache": False} if family == "llama" else {}
    assert torch.equal(model(ids[:, :8], **no_cache)[0], plain(ids[:, :8], **no_cache)[0])
    torch.testing.assert_close(model(ids[:, :8])[0], plain(ids[:, :8])[0])
    assert not torch.allclose(model(ids)[0], plain(ids)[0], atol=1e-6)


def build(**options):
    torch.manual_seed(0)
    return patch_model(FAMILIES["llama"].build().eval(), "far_field", **{"window": 4, "sinks": 3, **options})


def pieces(model, ids, sizes, mask):
    """The logits, call by call with a cache."""
    cache, outputs, at = None, [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for size in sizes:
        here, at = slice(at, at + size), at + size
        given = {} if mask.all() else {"attention_mask": mask[:, :at]}
        out = model(ids[:, here], position_ids=positions[:, here], use_cache=True, **{CACHE: cache}, **given)
        cache = out[1]
        outputs.append(out[0])
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize("memory", [0, 6])
@pytest.mark.parametrize("padding", [0, 1, 6])
@pytest.mark.parametrize("sizes", [[1] * 21, [5, 1, 1, 7, *[1] * 7], [20, 1], [2, 19]], ids=str)
def test_decoding_by_any_pieces_gives_what_one_pass_gives(sizes, padding, memory):
    model = build(memory=memory)
    torch.manual_seed(0)
    ids, mask = torch.randint(1, 90, (2, 21)), torch.ones(2, 21, dtype=torch.long)
    mask[0, :padding] = 0
    full = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False)[0]
    found, _ = pieces(model, ids, sizes, mask)
    torch.testing.assert_close(found[mask.bool()], full[mask.bool()], rtol=0, atol=2e-6)


def test_a_model_in_float64_keeps_a_state_in_float64():
    _, cache = pieces(build().double(), torch.randint(1, 90, (1, 13)), [13], torch.ones(1, 13))
    assert {x.dtype for x in cache.layers[0].kept.values()} == {torch.float64}


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_calls(model, cache, ids):
    with Calls() as calls, torch.no_grad():
        cache = model(ids, use_cache=True, **{CACHE: cache})[1]
    return calls.count, cache


@pytest.mark.feature("Generation: state of constant size", filter="far_field", family="llama")
def test_a_step_of_decoding_takes_few_calls_and_the_state_has_constant_size():
    model, sizes = build(), set()
    plain = FAMILIES["llama"].build().eval()
    ids, all_there = torch.randint(1, 90, (1, 77)), torch.ones(1, 77)
    cache, plain_cache = (pieces(m, ids[:, :33], [33], all_there[:, :33])[1] for m in (model, plain))
    before, _ = count_calls(plain, plain_cache, ids[:, :1])
    for step in range(4):
        calls, cache = count_calls(model, cache, ids[:, :1])
        sizes.add(sum(x.numel() for x in cache.layers[0].kept.values()))
        if step < 2:  # within a block
            assert calls <= before + 30 * model.config.num_hidden_layers
    assert len(sizes) == 4  # it grows by one token until the block ends
    _, longer = pieces(model, ids, [77], all_there)
    assert sum(x.numel() for x in longer.layers[0].kept.values()) in sizes


def test_a_layer_takes_at_most_a_hundred_calls_a_step():
    """And attention about 72: the time of a small model's step is that of its calls."""
    counts = []
    for layers in (2, 3):
        config = copy.deepcopy(FAMILIES["llama"].config)
        config.num_hidden_layers = layers
        model = patch_model(LlamaModel(config).eval(), "far_field", window=8, sinks=2)
        ids, there = torch.randint(1, 90, (1, 33)), torch.ones(1, 33)
        calls, _ = count_calls(model, pieces(model, ids, [33], there)[1], ids[:, :1])
        counts.append(calls)
    assert counts[1] - counts[0] <= 100


def test_bad_options_raise():
    for options, wanted in (
        ({"window": 0}, "window must be"),
        ({"window": 2, "sinks": 3}, "sinks must be at most window=2"),
        ({"far": "all"}, "far must be 'beyond'"),
        ({"position_bias": "window"}, "use 'drop' or 'refuse'"),
        ({"memory": -1}, "memory must be"),
    ):
        with pytest.raises(GraphFilterError, match=wanted):
            FarFieldConfig(**options)


def test_a_memory_is_refused_where_tokens_do_not_become_far_in_turn():
    with pytest.raises(GraphFilterError, match="needs a causal module"):
        patch_model(FAMILIES["bert"].build(), "far_field", memory=4)
    model = build(memory=4)
    with pytest.raises(GraphFilterError, match="cannot be exported"):
        torch.export.export(model, (torch.arange(12)[None],), {"use_cache": False})


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("memory", [0, 1, 4, 7])
def test_a_memory_holds_the_tokens_that_the_oracle_holds(memory, padding):
    torch.manual_seed(0)
    plain = FAMILIES["llama"].build().eval().double()
    model = patch_model(copy.deepcopy(plain), "far_field", window=4, sinks=3, memory=memory)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "graph_filter" in name:
                p.add_(0.3 * torch.randn_like(p))
    twin = dense_twin(plain, model, far_field_matrix)
    ids, mask = torch.randint(1, 90, (2, 27)), torch.ones(2, 27, dtype=torch.long)
    mask[0, :padding] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    torch.testing.assert_close(model(ids, **given)[0][mask.bool()], twin(ids, **given)[0][mask.bool()])


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_little_in_encoders_and_decoders(family, dtype):
    plain, inputs = FAMILIES[family].build(), FAMILIES[family].inputs(tokens=27)
    model = turn_on(patch_model(copy.deepcopy(plain), "far_field", window=4, sinks=3))
    original, expected = output(plain, inputs), output(model, inputs)
    with torch.autocast("cpu", dtype):
        found = output(model, inputs)
    assert (found - expected).norm() < 0.3 * (found - original).norm()
    found.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in filter_parameters(model))


def test_a_memory_of_all_far_tokens_gives_the_original_attention():
    plain, ids = FAMILIES["llama"].build().eval(), torch.randint(1, 90, (2, 31))
    model = patch_model(copy.deepcopy(plain), "far_field", window=4, sinks=2, memory=31)
    torch.testing.assert_close(model(ids)[0], plain(ids)[0])


@pytest.mark.parametrize(("sinks", "memory"), [(0, 0), (1, 3), (3, 2), (2, 9), (0, 4), (4, 0), (4, 1), (4, 4)])
def test_a_text_of_the_exact_span_gets_the_original_attention(sinks, memory):
    torch.manual_seed(0)
    plain = FAMILIES["llama"].build().eval()
    model = patch_model(copy.deepcopy(plain), "far_field", window=4, sinks=sinks, memory=memory)
    ids = torch.randint(1, 90, (1, filter_of(model).exact_span + 1))
    found, expected = (m(ids, use_cache=False)[0] for m in (model, plain))
    torch.testing.assert_close(found[:, :-1], expected[:, :-1])
    assert not torch.allclose(found[:, -1], expected[:, -1], atol=1e-4)
    encoder = patch_model(FAMILIES["bert"].build(), "far_field", window=4, sinks=sinks)
    assert encoder.encoder.layer[0].attention.self.graph_filter.exact_span == 8, "its first tokens see no third block"


def test_a_memory_has_constant_size_and_follows_the_rows_of_a_cache():
    model, ids, there = build(memory=6), torch.randint(1, 90, (2, 61)), torch.ones(2, 61)
    sizes = [sum(x.numel() for x in pieces(model, ids, [n], there)[1].layers[0].kept.values()) for n in (29, 61)]
    assert sizes[0] == sizes[1]
    with torch.no_grad():
        _, cache = pieces(model, ids[:, :29], [29], there[:, :29])
    copied = copy.deepcopy(cache)
    copied.reorder_cache(torch.tensor([1, 0]))
    later = [model(x[:, 29:40], use_cache=True, **{CACHE: c})[0] for x, c in ((ids, cache), (ids.flip(0), copied))]
    torch.testing.assert_close(later[0], later[1].flip(0))
    with pytest.raises(GraphFilterError, match="crop"):
        cache.crop(20)


def test_a_filter_file_without_a_memory_loads_into_a_model_with_one(tmp_path):
    model, ids = build(), torch.randint(1, 90, (1, 30))
    with torch.no_grad():
        model.layers[0].self_attn.graph_filter.map_key.weight.mul_(2)
    save_filter(model, tmp_path)
    other = load_filter(build(memory=30), tmp_path)
    assert filter_of(other).config.memory == 30
    assert torch.equal(filter_of(other).map_key.weight, filter_of(model).map_key.weight)
    assert not torch.allclose(other(ids)[0], model(ids)[0])
    with pytest.raises(GraphFilterError, match="unpatch_model first"):
        load_filter(build(window=5), tmp_path)


def filter_of(model):
    return model.layers[0].self_attn.graph_filter


SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "kind", "config"),
    [
        ("smollm2-far-field", LlamaForCausalLM, LlamaConfig(vocab_size=99, intermediate_size=32, **SMOLLM2)),
        ("smollm2-far-field-long", LlamaForCausalLM, LlamaConfig(vocab_size=99, intermediate_size=32, **SMOLLM2)),
        ("smollm2-far-field-keep", LlamaForCausalLM, LlamaConfig(vocab_size=99, intermediate_size=32, **SMOLLM2)),
        ("minilm-far-field", BertModel, BertConfig(vocab_size=99, intermediate_size=32, **MINILM)),
        ("minilm-far-field-128", BertModel, BertConfig(vocab_size=99, intermediate_size=32, **MINILM)),
    ],
)
def test_the_filters_of_the_model_cards_load(card, kind, config):
    """Into models of the same shape, whose weights are not here: the file says that they differ."""
    model = kind(config).eval()
    with pytest.warns(UserWarning, match="trained on a base with other weights"):
        load_filter(model, Path(__file__).parents[1] / "model_cards" / card)
    assert {row.filter.filter for row in filter_status(model)} == {"far_field"}
    assert model(torch.arange(200)[None] % 99)[0].isfinite().all()


def test_of_capped_scores_one_line_says_that_the_window_has_none(transformers_warnings):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 8}
    config = Gemma2Config(**sizes, num_key_value_heads=2, intermediate_size=16, attn_implementation="eager")
    patch_model(Gemma2ForCausalLM(config), "far_field", layers=[1, 3])  # the others see a sliding window
    (line,) = transformers_warnings
    assert line.startswith(
        "Gemma2Attention caps its attention scores (attn_logit_softcapping), which the window of FAR"
    )
    transformers_warnings.clear()
