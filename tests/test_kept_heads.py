"""Key heads that keep their attention beside ``far_field``: values, caches, files, errors, and their choice."""

import copy
import json

import pytest
import torch
from models import FAMILIES
from oracle import dense_twin, far_field_matrix
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_graphfilter import FarFieldConfig, FilterConfig, GraphFilterError, load_filter, patch_model, save_filter
from hf_graphfilter.analysis import attention_maps
from hf_graphfilter.fitting import choose_heads, linearize
from hf_graphfilter.fitting.head_choice import score_heads
from hf_graphfilter.fitting.probes import make_probes
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.ops.heads import HeadPart, merge_heads

KEEP = {"llama": {0: [1], 2: [0]}, "gpt2": {1: [0, 2]}, "t5": {0: [1], 1: [0, 3]}}


def build(family="llama", move=True, plain=None, **options):
    torch.manual_seed(0)
    plain = FAMILIES[family].build() if plain is None else copy.deepcopy(plain)
    given = {"window": 4, "sinks": 3, "keep": KEEP[family], **options}
    if family == "t5":
        given |= {"position_bias": "drop", "stack": "decoder"}
    model = patch_model(plain.eval(), "far_field", **given)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "graph_filter" in name and move:
                p.add_(0.3 * torch.randn_like(p))
    return model


def padded(tokens, padding):
    torch.manual_seed(0)
    ids, mask = torch.randint(1, 90, (2, tokens)), torch.ones(2, tokens, dtype=torch.long)
    mask[0, :padding] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def test_parts_of_heads_are_taken_and_put_together_again():
    x = torch.randn(2, 10, 3)
    parts = [HeadPart(5, (0, 1, 4)), HeadPart(5, (2, 3))]
    assert [part.runs for part in parts] == [((0, 2), (4, 5)), ((2, 4),)]
    assert torch.equal(parts[0].take(x), x[:, [0, 1, 2, 3, 8, 9]])
    assert torch.equal(merge_heads((part, part.take(x)) for part in parts), x)
    assert HeadPart(5, (0, 1, 2, 3, 4)).take(x) is x


@pytest.mark.parametrize(("backend", "padding"), [("sdpa", 0), ("sdpa", 5), ("eager", 0)])
@pytest.mark.parametrize(("family", "memory"), [("llama", 0), ("llama", 6), ("gpt2", 0)])
def test_kept_heads_have_their_attention_and_the_others_the_filter(family, memory, padding, backend):
    plain = FAMILIES[family].build(backend).eval().double()
    model = build(family, plain=plain, memory=memory)
    twin = dense_twin(plain, model, far_field_matrix)
    ids, mask, positions = padded(27, padding)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    close = {"rtol": 0, "atol": 1e-5} if backend == "eager" else {}  # whose softmax is that of float32
    torch.testing.assert_close(model(ids, **given)[0][mask.bool()], twin(ids, **given)[0][mask.bool()], **close)


def test_kept_heads_of_a_decoder_with_a_learned_bias_keep_it():
    plain, inputs = FAMILIES["t5"].build().eval().double(), FAMILIES["t5"].inputs(tokens=21)
    model = build("t5", plain=plain)
    twin = dense_twin(plain, model, far_field_matrix)
    torch.testing.assert_close(model(**inputs, use_cache=False)[0], twin(**inputs, use_cache=False)[0])


def pieces(model, ids, sizes, mask, positions):
    cache, outputs, at = None, [], 0
    for size in sizes:
        here, at = slice(at, at + size), at + size
        given = {} if mask.all() else {"attention_mask": mask[:, :at]}
        out = model(ids[:, here], position_ids=positions[:, here], use_cache=True, **{CACHE: cache}, **given)
        cache = out[1]
        outputs.append(out[0])
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize(
    ("sizes", "padding", "options"),
    [
        ([5, 1, 1, 7, *[1] * 7], 0, {"memory": 0}),
        ([5, 1, 1, 7, *[1] * 7], 6, {"memory": 6}),
        ([5, 1, 1, 7, *[1] * 7], 6, {"init": "blend"}),
        ([20, 1], 6, {"memory": 0}),
        pytest.param([1] * 21, 6, {"memory": 0}, marks=pytest.mark.slow),
        pytest.param([1] * 21, 0, {"memory": 6}, marks=pytest.mark.slow),
        pytest.param([1] * 21, 0, {"init": "blend"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decoding_by_any_pieces_gives_what_one_pass_gives(sizes, padding, options):
    model, (ids, mask, positions) = build(**options), padded(21, padding)
    full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
    found, _ = pieces(model, ids, sizes, mask, positions)
    torch.testing.assert_close(found[mask.bool()], full[mask.bool()], rtol=0, atol=3e-6)


@pytest.mark.parametrize("memory", [0, 6])
def test_a_cache_holds_kept_heads_only_and_follows_its_rows(memory):
    model, (ids, mask, positions) = build(memory=memory), padded(40, 0)
    with torch.no_grad():
        _, cache = pieces(model, ids[:, :29], [28, 1], mask, positions)
    states = [layer.kept for layer in cache.layers]
    assert [s["kept_key"].shape[1:3] if "kept_key" in s else None for s in states] == [(1, 29), None, (1, 29)]
    assert [s["key"].shape[1] for s in states] == [1, 2, 1]
    assert all(layer.keys.shape[2] == 0 for layer in cache.layers)
    copied = copy.deepcopy(cache)
    copied.reorder_cache(torch.tensor([1, 0]))
    later = [model(x[:, 29:40], use_cache=True, **{CACHE: c})[0] for x, c in ((ids, cache), (ids.flip(0), copied))]
    torch.testing.assert_close(later[0], later[1].flip(0))


def test_what_is_kept_is_saved_and_coefficients_fit_whatever_is_kept(tmp_path):
    model, (ids, _, _) = build(), padded(30, 0)
    model.save_pretrained(tmp_path / "model")
    record = json.loads((tmp_path / "model" / "config.json").read_text())["graph_filter"]
    assert record["filters"][0]["config"]["keep"] == {"0": [1], "2": [0]}
    again = LlamaModel.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(again(ids)[0], model(ids)[0])
    assert again.layers[2].self_attn.graph_filter.config == FarFieldConfig(window=4, sinks=3, keep={2: [0], 0: [1, 1]})
    save_filter(build(keep=None), tmp_path / "filter")
    assert "keep" not in (tmp_path / "filter" / "graph_filter.json").read_text()
    other = load_filter(build(move=False), tmp_path / "filter")
    assert torch.equal(other(ids)[0], model(ids)[0])


def test_training_reaches_the_parameters_of_filtered_heads_alone():
    model = build()
    model(padded(30, 0)[0]).last_hidden_state.square().sum().backward()
    gradient = model.layers[0].self_attn.graph_filter.map_key.weight.grad
    assert not gradient[1].any()
    assert gradient[0].any()


@pytest.mark.slow
def test_a_compiled_graph_computes_the_same():
    model, (ids, mask, positions) = build(), padded(30, 4)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, **given)[0][mask.bool()], model(ids, **given)[0][mask.bool()])


@pytest.mark.parametrize(
    ("keep", "options", "wanted"),
    [
        ({0: [2]}, {}, "key head 2, but the module has 2"),
        ({1: [0, 1]}, {}, "keeps all 2 key heads: exclude the layer"),
        ({3: [0]}, {}, "names layer 3, which does not get the filter: name some of 0, 1, 2"),
        ({0: [1]}, {"layers": [1]}, "names layer 0, which does not get the filter: name some of 1"),
        ("20%", {}, "only linearize"),
        ([0], {}, "key heads by layer"),
        ({-1: [0]}, {}, "whole numbers from 0"),
        ({0: [-1]}, {}, "whole numbers from 0"),
        ({0: 1}, {}, "key heads by layer"),
        ({0: [0], "0": [1]}, {}, "key heads by layer"),
    ],
    ids=str,
)
def test_heads_that_cannot_be_kept_raise_and_leave_the_model_alone(keep, options, wanted):
    model = FAMILIES["llama"].build()
    with pytest.raises(GraphFilterError, match=wanted):
        patch_model(model, "far_field", window=4, keep=keep, **options)
    assert not hasattr(model.layers[0].self_attn, "graph_filter")


def test_encoders_keep_no_heads():
    with pytest.raises(GraphFilterError, match="decoders only"):
        patch_model(FAMILIES["bert"].build(), "far_field", keep={0: [1]})


def test_a_config_is_read_from_json():
    config = FarFieldConfig(keep={1: [2, 0], 4: []})
    assert FilterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.keep == {1: (0, 2)}
    assert FarFieldConfig(keep={}).to_dict() == FarFieldConfig().to_dict()


def language_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    model = LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        p.data *= 6 if "q_proj" in name or "k_proj" in name else 1
    return model


def texts(count=6):
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 90, (2, 40), generator=draw)} for _ in range(count)]


def test_heads_are_scored_by_what_answers_read_far_away():
    model, ids = language_model(), texts(1)[0]["input_ids"][:1]
    labels = torch.full_like(ids, -100)
    labels[0, [20, 33]] = 5
    scores = score_heads(model, [{"input_ids": ids, "labels": labels}], reach=7, sinks=2)
    (maps,) = attention_maps(model, {"input_ids": ids})
    for layer, matrix in maps.items():
        far = [matrix[:, row, 2 : row - 7].amax(-1) for row in (19, 32)]
        expected = torch.stack(far).mean(0).view(2, 2).mean(1)
        torch.testing.assert_close(torch.tensor(scores[layer.index]), expected)


def test_the_heads_that_read_one_far_token_are_chosen_and_one_is_left_per_layer():
    model, config = language_model(), FarFieldConfig(window=3, sinks=1)
    scores = score_heads(model, make_probes(texts(2), 5, 2048), reach=5, sinks=1)
    best = max((score, layer, head) for layer, row in scores.items() for head, score in enumerate(row))
    assert choose_heads(model, texts(2), 0.17, config) == {best[1]: (best[2],)}
    assert sum(map(len, choose_heads(model, texts(2), 0.5, config).values())) == 3
    tensors = [batch["input_ids"] for batch in texts(2)]
    assert choose_heads(model, tensors, 0.5, config) == choose_heads(model, texts(2), 0.5, config)
    assert choose_heads(model, iter(texts(2)), "50%", config) == choose_heads(model, texts(2), 0.5, config)
    for share in (None, [1], -0.1):
        with pytest.raises(GraphFilterError, match="share must be a number such as"):
            choose_heads(model, texts(2), share, config)
    with pytest.raises(GraphFilterError, match=r"keep='2000.*%'.* above 0 and below 100"):
        choose_heads(model, texts(2), 20, config)
    assert len(choose_heads(model, texts(2), 0.5, config, layers=[0, 2])) == 2
    two = [{"input_ids": torch.randint(3, 5, (1, 40))}]  # different ids
    with pytest.raises(GraphFilterError, match=r"give the heads as keep=\{4: \[0, 2\]\}"):
        choose_heads(model, two, 0.5, config)
    with pytest.raises(GraphFilterError, match="keeps 4 heads, and the filter needs one per layer"):
        choose_heads(model, texts(2), 0.7, config)


def test_linearize_chooses_a_share_of_the_heads():
    model = language_model()
    options = {"budget": 200, "holdout": 2, "window": 3, "evaluations": 1, "progress": False}
    report = linearize(model, texts(), keep="17%", **options)
    ((layer, heads),) = report.config["keep"].items()
    assert model.model.layers[int(layer)].self_attn.graph_filter.kept.chosen == tuple(heads)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"keep": "0%"}, "given as '20%'"),
        ({"keep": "some"}, "given as '20%'"),
        ({"keep": "20%", "filter": "agf"}, "no option 'keep'"),
        ({"keep": "20%", "layers": "auto:50%"}, "give one of them"),
        ({"keep": {0: [0]}, "layers": "auto:50%"}, "give one of them"),
    ],
    ids=str,
)
def test_shares_that_linearize_cannot_keep_raise(options, wanted):
    with pytest.raises(GraphFilterError, match=wanted):
        linearize(language_model(), texts(), budget=200, holdout=2, window=3, progress=False, **options)


def test_heads_of_encoders_are_not_chosen():
    with pytest.raises(GraphFilterError, match="decoders with one stack"):
        choose_heads(FAMILIES["bert"].build(), texts(2), 0.2)
