"""The menu of filters: what holds for each, beside the common tester."""

import copy
import math
from functools import partial

import pytest
import test_common
import torch
from filters import FILTERS, MENU, cases
from models import FAMILIES, output, turn_on, use
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3Model,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2Model,
    StableLmConfig,
    StableLmModel,
    SwinConfig,
    SwinModel,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig

from hf_graphfilter import AttentionSite, GraphFilterAttention, GraphFilterError, patch_model, unpatch_model
from hf_graphfilter.analysis import attention_maps, response_curves
from hf_graphfilter.analysis.report import report
from hf_graphfilter.filters.arma import ARMAConfig
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.filters.core.build import build_filter
from hf_graphfilter.filters.core.overview import HEADER, overview
from hf_graphfilter.filters.core.power_series import FromFirstLayerConfig
from hf_graphfilter.filters.core.registry import get_filter
from hf_graphfilter.filters.hedgehog import HedgehogConfig
from hf_graphfilter.filters.polynomial import PolynomialConfig
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.shift.attention import AttentionCall, AttentionShift
from hf_graphfilter.shift.earlier_layers import EarlierLayers
from hf_graphfilter.testing import check_filter

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES)).eval()


@pytest.mark.parametrize(
    "name",
    [name if name == "neutreno" else pytest.param(name, marks=pytest.mark.slow) for name in MENU],
)
def test_each_passes_the_checks_of_a_filter(name):
    check_filter(MENU[name].config)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "vit"])
@pytest.mark.parametrize("name", MENU)
def test_each_equals_its_dense_form(family, name):
    """Of all families among the slow tests of the common tester."""
    test_common.test_equals_the_dense_form(FAMILIES[family], FILTERS[name], "sdpa")


def test_filters_read_what_their_own_kind_left():
    left = EarlierLayers()
    for name, kind in (("0", "value-residual"), ("1", "singularformer"), ("2", "value-residual")):
        left.begin_call(name)
        left.leave(name, torch.tensor(float(name)), kind)
    left.begin_call("3")
    assert left.left_before("3", "singularformer") == [torch.tensor(1.0)]
    assert left.left_before("3", "value-residual") == [torch.tensor(0.0), torch.tensor(2.0)]


@pytest.mark.parametrize("name", MENU)
def test_coefficients_that_are_shown_are_learned(name):
    model = patch_model(bert(), MENU[name].config)
    for _, graph_filter in filters_of(model):
        assert graph_filter.learned_coefficients().keys() == graph_filter.coefficients().keys()
        assert all(len(c) == 4 for c in graph_filter.coefficients().values())


@pytest.mark.parametrize("basis", ["monomial", "chebyshev", "legendre", "jacobi", "bernstein"])
@pytest.mark.parametrize("theta", ["free", "tanh"])
def test_a_polynomial_starts_as_attention_bit_for_bit(basis, theta):
    model, ids = bert(), torch.arange(20).view(2, 10)
    expected = model(ids).last_hidden_state
    patch_model(model, "polynomial", basis=basis, K=5, theta=theta)
    assert torch.equal(model(ids).last_hidden_state, expected)
    for curve in response_curves(model).values():
        torch.testing.assert_close(curve.response, curve.at.expand(4, -1))


def test_poles_converge_as_stated():
    """What the steps cut off is at most |b|^(steps+1) / (1 - |b|) of a signal, for rows that sum to 1."""
    torch.manual_seed(0)
    A = torch.rand(6, 6, dtype=torch.float64).softmax(-1)
    for b in (0.9, -0.9, 0.3):
        exact = torch.linalg.inv(torch.eye(6, dtype=torch.float64) - b * A)
        for steps in (1, 4, 20):
            cut = sum(b**k * torch.matrix_power(A, k) for k in range(steps + 1))
            assert (exact - cut).abs().sum(-1).max() <= abs(b) ** (steps + 1) / (1 - abs(b)) + 1e-12
    model = patch_model(bert(), "arma", order=3, bound=0.8)
    for _, graph_filter in filters_of(model):
        torch.nn.init.normal_(graph_filter.shift_of_pole, std=50)
        assert graph_filter.poles.abs().max() <= 0.8


def test_pagerank_is_what_its_name_says():
    model = patch_model(bert(), "ppr", K=200, alpha=0.2)
    (_, first), *_ = filters_of(model)
    torch.nn.init.ones_(first.g)
    at, response, _ = next(iter(response_curves(model).values()))
    torch.testing.assert_close(response, (0.2 / (1 - 0.8 * at)).expand(4, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"K": 0}, "K must be 1 to 1000, got 0"),
        ("polynomial", {"K": 15, "basis": "chebyshev"}, "K=15 is too high for the chebyshev basis, .* K <= 14, or"),
        ("polynomial", {"K": 13, "basis": "bernstein"}, "K=13 is too high for the bernstein basis"),
        ("polynomial", {"K": 1000, "basis": "bernstein"}, "K=1000 is too high for the bernstein basis, .* K <= 12"),
        ("polynomial", {"a": 1.0}, "a and b belong to the Jacobi basis, but basis is 'chebyshev'"),
        ("polynomial", {"basis": "jacobi", "a": -1.0, "b": -1.0, "K": 2}, "no step k=2"),
        ("polynomial", {"basis": "jacobi", "a": -1.0, "b": -1.0, "K": 1}, "the first Jacobi polynomial is constant"),
        ("polynomial", {"basis": "jacobi", "a": 2e5, "b": 2e5, "K": 1}, "choose a and b nearer to 0"),
        ("ppr", {"alpha": 1.0}, "alpha must lie between 0 and 1, got 1.0"),
        ("ppr", {"kernel": "heat", "t": 0.0}, "t must be > 0, got 0.0"),
        ("arma", {"bound": 1.0}, "bound must lie between 0 and 1, got 1.0"),
        ("arma", {"order": 0}, "order must be 1 to 8, got 0"),
        ("contranorm", {"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ("contranorm", {"temperature": 1e-39}, "temperature must be >= 1e-38, got 1e-39"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(GraphFilterError, match=message.replace("(", r"\(")):
        patch_model(bert(), name, **options)


@pytest.mark.parametrize("name", ["attnscale", "centered", "featscale"])
def test_means_over_more_than_float16_can_add_up(name):
    """3,000 values of 30, in a sliding window, where the mask is applied as a matrix."""
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "sliding_window": 2500}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "layer_types": ["sliding_attention"]}
    model = Qwen2Model(Qwen2Config(**sizes, **heads, use_sliding_window=True)).half().eval()
    with torch.no_grad():
        model.layers[0].self_attn.v_proj.bias.fill_(30.0)
        ids = torch.randint(0, 50, (1, 3000))
        expected = model(ids, use_cache=False).last_hidden_state
        assert torch.equal(patch_model(model, name)(ids, use_cache=False).last_hidden_state, expected)


@pytest.mark.parametrize("name", ["attnscale", "centered", "featscale", "contranorm"])
def test_the_mask_of_timm_s_shifted_windows_is_honoured(name):
    swin = pytest.importorskip("timm.models.swin_transformer").SwinTransformer
    sizes = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2,), "num_heads": (2,)}
    model, images = swin(**sizes, num_classes=3).eval(), torch.randn(2, 3, 16, 16)
    expected = model(images)
    assert torch.equal(patch_model(model, name)(images), expected)
    seen, shifted = [], model.layers[0].blocks[1].attn
    shifted.graph_filter.register_forward_pre_hook(lambda _, given: seen.append(given[0].seen()[0]))
    model(images)
    assert torch.equal(seen[0][:4, 0], model.layers[0].blocks[1].attn_mask == 0), "four windows an image"
    assert torch.equal(seen[0][4:], seen[0][:4])


def test_contranorm_of_a_causal_model_needs_no_matrix_of_a_mask():
    model = patch_model(Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=2)), "contranorm")
    seen, ids = [], torch.arange(10).view(2, 5)
    model.layers[0].self_attn.graph_filter.register_forward_pre_hook(lambda _, given: seen.append(given[0].seen()))
    model(ids)
    model(ids, attention_mask=torch.tensor([[1] * 5, [0, 1, 1, 1, 1]]))
    assert seen[0] == (None, True)
    assert seen[1][0].shape == (2, 1, 5, 5)


def test_a_time_of_diffusion_that_float32_cannot_hold():
    model, ids = bert(), torch.arange(8).view(1, 8)
    expected = model(ids).last_hidden_state
    assert torch.equal(patch_model(model, "ppr", kernel="heat", t=1e-46)(ids).last_hidden_state, expected)


def test_coefficients_of_a_basis_are_not_rounded_by_autocast():
    model = patch_model(bert(), "polynomial", K=10, basis="bernstein")
    (_, graph_filter), *_ = filters_of(model)
    torch.nn.init.normal_(graph_filter.theta)
    expected = graph_filter.series(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(graph_filter.series(torch.float32), expected)


@pytest.mark.parametrize("order", [3, 8, 12])
def test_half_precision_resolves_each_bernstein_polynomial(order):
    """Powers of A would be off by two thirds at order 12; here errors grow with the order, from 2^-8 an application."""
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 32, 8, generator=g, dtype=torch.float64).bfloat16()
    attend = GraphFilterAttention("polynomial", 4, 8, K=order, basis="bernstein")
    theta = torch.eye(order + 1)[order // 2].expand(4, -1)
    attend.graph_filter.theta.data.copy_(theta)
    A = (query.double() @ key.double().mT * 8**-0.5).softmax(-1)
    eye, rest, k = torch.eye(32, dtype=torch.float64), order - order // 2, order // 2
    T = math.comb(order, k) * torch.linalg.matrix_power(A, k) @ torch.linalg.matrix_power(eye - A, rest)
    expected = (A + T) @ value.double()
    error = (attend(query, key, value).double() - expected).norm() / expected.norm()
    assert error < order * 2**-8


@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "bernstein"])
def test_float32_resolves_order_12_in_each_basis(basis):
    """Sums of powers of A would be off by a hundredth in the Bernstein basis of order 12."""
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 32, 8, generator=g)
    attend = GraphFilterAttention("polynomial", 4, 8, K=12, basis=basis)
    torch.nn.init.uniform_(attend.graph_filter.theta, -1, 1, generator=g)
    rounded, expected = attend(query, key, value), attend.double()(query.double(), key.double(), value.double())
    assert (rounded - expected).abs().max() < 1e-5 * expected.abs().max()


def test_float64_resolves_the_bernstein_basis():
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 32, 8, generator=g, dtype=torch.float64)
    attend = GraphFilterAttention("polynomial", 4, 8, K=12, basis="bernstein").double()
    theta = torch.nn.init.uniform_(attend.graph_filter.theta, -1, 1, generator=g).detach()
    A = (query @ key.mT * 8**-0.5).softmax(-1)
    eye, powers = torch.eye(32, dtype=torch.float64), torch.linalg.matrix_power
    T = [math.comb(12, k) * powers(A, k) @ powers(eye - A, 12 - k) for k in range(13)]
    expected = (A + sum(theta[:, k, None, None] * T[k] for k in range(13))) @ value
    assert (attend(query, key, value) - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.parametrize("name", MENU)
def test_values_narrower_than_queries(name):
    """Multi-head latent attention."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8}
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2}
    model, ids = DeepseekV3Model(DeepseekV3Config(**sizes, **heads, **widths)).eval(), torch.arange(14).view(2, 7)
    with torch.no_grad():
        original = model(ids).last_hidden_state
        start = patch_model(model, MENU[name].config)(ids).last_hidden_state
        assert start.shape == original.shape
        assert torch.equal(start, original) or not MENU[name].config.starts_as_original
        found = turn_on(model)(ids).last_hidden_state
        expected = use(model, "eager")(ids).last_hidden_state
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, original), "the filter does nothing"


def test_the_highest_orders_are_those_that_float32_can_add_up():
    highest = {"chebyshev": 14, "legendre": 15, "jacobi": 14, "bernstein": 12}
    assert {basis: max(K for K in range(1, 30) if _accepted(basis, K)) for basis in highest} == highest
    assert _accepted("monomial", 1000)


def _accepted(basis, K):
    try:
        return bool(PolynomialConfig(K=K, basis=basis))
    except GraphFilterError:
        return False


@pytest.mark.parametrize("name", ["neutreno", "value-residual"])
def test_a_layer_that_the_first_did_not_run_before_says_so(name):
    model = patch_model(bert(), name)
    model.encoder.layer[0].forward = lambda hidden_states, *_, **__: hidden_states  # as if dropped
    with pytest.raises(GraphFilterError, match="did not run before it"):
        model(torch.arange(10).view(2, 5))


@pytest.mark.parametrize("name", ["neutreno", "value-residual"])
def test_layers_that_hand_nothing_on_are_refused_when_patched(name):
    model = StableLmModel(StableLmConfig(**SIZES))
    with pytest.raises(GraphFilterError, match="the layers of this model pass nothing on to each other besides the"):
        patch_model(model, name)
    assert not filters_of(model)


@pytest.mark.parametrize("name", ["neutreno", "value-residual"])
def test_the_first_layer_must_be_among_the_chosen(name):
    model = bert()
    with pytest.raises(GraphFilterError, match=r"the first chosen layer is encoder\.layer\.1\.attention\.self"):
        patch_model(model, name, layers=[1, 2])
    assert not list(filters_of(model))
    patch_model(patch_model(model, name, layers=[0, 1]), name, layers=[2])  # it may be there already
    with pytest.raises(GraphFilterError, match="attends within windows"):
        patch_model(SwinModel(SwinConfig(embed_dim=8, depths=[2], num_heads=[2], image_size=16, patch_size=2)), name)


def test_the_first_layer_alone_is_no_filter_of_neutreno():
    model = bert()
    with pytest.raises(GraphFilterError, match=r"layer\.0\.attention\.self is the first layer.* nothing would change"):
        patch_model(model, "neutreno", layers=[0])
    assert not list(filters_of(model))


def test_the_first_layer_alone_is_refused_where_no_list_holds_the_layers():
    model = bert()
    model.encoder.layer = nn.Sequential(*model.encoder.layer)
    with pytest.raises(GraphFilterError, match="nothing would change"):
        patch_model(model, "neutreno", layers=[0])


def two_layers(first, second):
    """A decoder whose layers have these numbers of key heads."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    model, other = (Qwen2Model(Qwen2Config(**sizes, num_key_value_heads=heads)).eval() for heads in (first, second))
    model.layers.append(other.layers[0])
    model.layers[1].self_attn.layer_idx = 1
    model.config.layer_types, model.config.num_hidden_layers = ["full_attention"] * 2, 2
    return model


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4), (4, 1)])
def test_value_residual_of_layers_with_other_key_heads_is_refused(first, second):
    message = f"adds the values of the first layer, {first} key heads, but layers.1.self_attn has {second}"
    with pytest.raises(GraphFilterError, match=message):
        patch_model(two_layers(first, second), "value-residual")


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1, 1, 0], [1] * 5])], ids=["no mask", "padding"])
def test_value_residual_adds_a_single_key_head_to_all(mask):
    model = turn_on(patch_model(two_layers(1, 4), "value-residual"))
    assert model(torch.arange(10).view(2, 5), attention_mask=mask).last_hidden_state.isfinite().all()


ONE_LAYER = {"bert": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}, "whisper": {"decoder_layers": 1}}


@pytest.mark.parametrize("family", ONE_LAYER)
def test_one_layer_of_attention_is_no_filter_of_neutreno(family):
    model = FAMILIES[family].build(**ONE_LAYER[family])
    with pytest.raises(GraphFilterError, match=r"nothing would change: .* another filter if there are none"):
        patch_model(model, "neutreno")
    assert not list(filters_of(model))


@pytest.mark.parametrize("name", ["neutreno", "value-residual"])
def test_layers_that_were_copied_are_unpatched_as_others(name):
    model = patch_model(bert(), name)
    model.encoder.layer = copy.deepcopy(model.encoder.layer)
    unpatch_model(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def two_images():
    """A vision tower whose modules apply attention image by image, and what it is called with: 8 and 16 patches."""
    sizes = {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "in_channels": 3, "patch_size": 4}
    torch.manual_seed(0)
    model = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**sizes)).eval()
    return model, torch.randn(24, 3 * 2 * 4 * 4), torch.tensor([[1, 2, 4], [1, 4, 4]])


@pytest.mark.parametrize("name", ["neutreno", "value-residual"])
def test_each_image_reads_its_own_first_layer(name):
    model, patches, grid = two_images()
    turn_on(patch_model(model, name))
    both = model(patches, grid_thw=grid).last_hidden_state
    alone = [model(part, grid_thw=grid[i : i + 1]).last_hidden_state for i, part in enumerate(patches.split([8, 16]))]
    torch.testing.assert_close(both, torch.cat(alone))


@pytest.mark.parametrize("name", [*FILTERS, "hedgehog, no window"])
def test_each_image_is_filtered_by_itself_or_refused(name):
    model, patches, grid = two_images()
    config = FILTERS[name].config if name in FILTERS else HedgehogConfig(window=0)
    try:
        turn_on(patch_model(model, config))
        both = model(patches, grid_thw=grid).last_hidden_state
    except GraphFilterError:
        assert config.module.reads_hidden, "the others need no more than A and V"
        assert name in FILTERS, "its input is handed to Hedgehog, which does not read it"
        return
    alone = [model(part, grid_thw=grid[i : i + 1]).last_hidden_state for i, part in enumerate(patches.split([8, 16]))]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_a_checkpoint_of_the_first_layer_alone_still_loads(monkeypatch, tmp_path):
    """As earlier code wrote them."""
    with monkeypatch.context() as before:
        before.setattr(get_filter("neutreno"), "check_sites", FromFirstLayerConfig.check_sites)
        patch_model(bert(), "neutreno", layers=[0]).save_pretrained(tmp_path)
    assert [name for name, _ in filters_of(BertModel.from_pretrained(tmp_path))] == ["encoder.layer.0.attention.self"]


def test_an_input_that_is_not_a_row_a_token_is_said():
    model, patches, grid = two_images()
    patch_model(model, "gated")
    with pytest.raises(GraphFilterError, match=r"'gated' reads a row of the module's input .* shape \(24, 32\)"):
        model(patches, grid_thw=grid)


@pytest.mark.parametrize("name", ["neutreno", "value-residual"])
def test_shared_weights_that_are_checkpointed_are_said(name):
    model = turn_on(patch_model(FAMILIES["albert"].build(), name)).train()
    group = model.encoder.albert_layer_groups[0]
    group.forward = partial(checkpoint, group.forward, use_reentrant=False)
    out = output(model, FAMILIES["albert"].inputs())
    with pytest.raises(GraphFilterError, match="applied 3 times in one forward pass, so that gradient checkpointing"):
        out.sum().backward()


def test_a_first_layer_with_another_cache_is_said():
    """Of layers with and without a sliding window, once this has left tokens behind."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    config = Gemma3TextConfig(**sizes, **heads, layer_types=["sliding_attention", "full_attention"], pad_token_id=0)
    model = patch_model(Gemma3ForCausalLM(config).eval(), "value-residual")
    past = model(torch.randint(5, 99, (1, 6)), use_cache=True)[CACHE]
    with pytest.raises(
        GraphFilterError, match=r"first layer, which have 4 tokens, but its own have 7.*use_cache=False"
    ):
        model(torch.randint(5, 99, (1, 1)), **{CACHE: past})


@pytest.mark.parametrize("name", [name for name, entry in MENU.items() if not entry.config.module.linear])
def test_what_is_no_matrix_has_no_map_and_the_report_leaves_it_out(name):
    model, batch = patch_model(bert(), MENU[name].config), {"input_ids": torch.arange(20).view(2, 10)}
    with pytest.raises(GraphFilterError, match="is no matrix times values"):
        attention_maps(model, batch)
    assert len(attention_maps(model, batch, filtered=False)[0]) == 3
    found = report(model, [batch])
    assert found.summary()
    assert {quantity for _, quantity in found.measured.response.bands} == {"attention_gain"}
    assert "coefficients" in found.figures() or not any(row.coefficients for row in found.measured.status)


def test_the_overview_has_a_row_for_each_filter():
    rows = {row[0].strip("`"): row for row in overview()}
    assert not any("\\" in row[-1] for row in rows.values()), "as TeX has it"
    assert rows.keys() >= {type(entry.config).filter for entry in MENU.values()} | {"gfsa", "agf", "singularformer"}
    for name, row in rows.items():
        assert len(row) == len(HEADER)
        if name in {type(entry.config).filter for entry in MENU.values()}:
            assert all(row), name
            assert get_filter(name).citation.startswith("@")
    assert rows["arma"][3] == str(2 * ARMAConfig().order)
    assert math.isclose(float(rows["gated"][3].replace(",", "")), 64 * 768)


def of_a_site(config, values):
    """What a filter makes of values, beside what attention makes of them."""
    place = nn.Linear(16, 16)
    site = AttentionSite("site", place, 2, False, "encoder", "", 0, hidden_size=16, head_dim=8, stack_module=place)
    torch.manual_seed(0)
    graph_filter, (query, key) = build_filter(config, site), torch.randn(2, *values.shape).to(values.dtype)

    def attend(key, value):
        return scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    hidden = torch.randn(1, values.shape[2], 16).to(values.dtype)
    shift = AttentionShift(AttentionCall(attend, query, key, hidden=hidden))
    return graph_filter, (lambda: graph_filter(shift, values)), attend(key, values)[0].transpose(1, 2)


@pytest.mark.parametrize(
    "name", [name for name, entry in cases(lambda entry: not entry.replaces) if entry.config.starts_as_original]
)
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float16", 6e4), ("bfloat16", 1e18), ("bfloat16", 1e30), ("float32", 1e18), ("float32", 1e30)],
)
def test_values_of_any_size_start_as_attention(name, dtype, largest):
    torch.manual_seed(0)
    values = torch.rand(1, 2, 5, 8).mul(largest).to(getattr(torch, dtype))
    _, filtered, attended = of_a_site(FILTERS[name].config, values)
    assert attended.isfinite().all()
    torch.testing.assert_close(filtered(), attended)


@pytest.mark.parametrize("name", ["xsa", "contranorm"])
@pytest.mark.parametrize("largest", [1e-9, 1e-6, 1, 1e12, 1e18, 1e30])
def test_what_is_learned_of_values_of_any_size(name, largest):
    torch.manual_seed(0)
    values = torch.rand(1, 2, 5, 8) * largest
    graph_filter, filtered, y = of_a_site(FILTERS[name].config, values)
    nn.init.constant_(getattr(graph_filter, graph_filter.per_head[0]), 0.5)
    y, v = y.double(), values.double()
    if name == "xsa":
        expected = y - 0.5 * (y * v).sum(-1, keepdim=True) * v / v.square().sum(-1, keepdim=True).clamp(min=1e-12)
    else:
        expected = 1.5 * y - 0.5 * (y @ y.mT).softmax(-1) @ y
    if name == "xsa" or largest < 1e18:  # larger ones are alike within what float32 can hold
        torch.testing.assert_close(filtered().double(), expected, rtol=1e-5, atol=1e-5 * largest)
    filtered().div(largest).sum().backward()
    assert filtered().isfinite().all()
    assert all(p.grad.isfinite().all() for p in graph_filter.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_contranorm_takes_the_joint_form_where_it_is_faster(causal, monkeypatch):
    torch.manual_seed(0)
    small = {**SIZES, "num_key_value_heads": 2}
    model = Qwen2Model(Qwen2Config(**small)) if causal else BertModel(BertConfig(**SIZES))
    patch_model(model.eval(), "contranorm")
    for _, graph_filter in filters_of(model):
        nn.init.constant_(graph_filter.s, 0.5)
    ids = torch.randint(0, 50, (2, 10))
    expected = model(ids)[0]
    monkeypatch.setattr("hf_graphfilter.ops.polynomial_form.FEWEST_ENTRIES", 1)
    found = model(ids)[0]
    assert not torch.equal(found, expected), "the joint form was not used"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
