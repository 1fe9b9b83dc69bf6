"""``GraphFilterAttention``, and training and looking at models of PyTorch by a loop of one's own."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from filters import FILTERS
from models import turn_on
from torch import nn
from torch_models import CAUSAL, FAMILIES, TOKENS, inputs

from hf_graphfilter import (
    GFSAConfig,
    GraphFilterAttention,
    GraphFilterError,
    collect_penalties,
    create_model_card,
    filter_parameters,
    filter_status,
    load_filter,
    parameter_groups,
    patch_model,
    save_filter,
    unpatch_model,
)
from hf_graphfilter.analysis import frequency_response, smoothing
from hf_graphfilter.analysis.report import report

HEADS, FEATURES = 4, 8
SEEN = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.7
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": SEEN | torch.eye(TOKENS, dtype=torch.bool)},
    "additive": {"attn_mask": CAUSAL.double()},
}


def signals(key_heads=HEADS):
    g = torch.Generator().manual_seed(0)
    shapes = [(2, heads, TOKENS, FEATURES) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_equals_explicit_matrices(mask, key_heads):
    query, key, value = signals(key_heads)
    attend = GraphFilterAttention("gfsa", HEADS, FEATURES, key_heads=key_heads, K=3).double()
    original = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **MASKS[mask])
    torch.testing.assert_close(attend(query, key, value, **MASKS[mask]), original)
    turn_on(attend)
    scores = query @ key.repeat_interleave(HEADS // key_heads, 1).mT * FEATURES**-0.5
    seen = MASKS[mask].get("attn_mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    seen = CAUSAL == 0 if mask in ("causal", "additive") else seen
    A = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    H = FILTERS["gfsa-default"].formula(A, attend.graph_filter.coefficients(), GFSAConfig(K=3), None)
    expected = H @ value.repeat_interleave(HEADS // key_heads, 1)
    found = attend(query, key, value, **MASKS[mask])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    gradients = (torch.autograd.grad(x.square().sum(), [query, key, value]) for x in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("shape", [(HEADS, TOKENS, TOKENS), (TOKENS, 1)])
def test_the_mean_of_what_is_seen_takes_any_mask(shape):
    """One per head over grouped keys, as Doge makes it, and one that is the same for all keys."""
    query, key, value = signals(2)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0] = True
    attend = turn_on(GraphFilterAttention("attnscale", HEADS, FEATURES, key_heads=2)).double()
    full = GraphFilterAttention("attnscale", HEADS, FEATURES).double()
    full.load_state_dict(attend.state_dict())
    key_of_each, value_of_each = (x.repeat_interleave(HEADS // 2, 1) for x in (key, value))
    found = attend(query, key, value, attn_mask=mask)
    expected = full(query, key_of_each, value_of_each, attn_mask=mask.expand(2, HEADS, TOKENS, TOKENS))
    torch.testing.assert_close(found, expected)


def test_a_filter_that_reads_the_input():
    attend = GraphFilterAttention("agf", HEADS, FEATURES, hidden_size=32).double()
    assert attend(*signals(), hidden=torch.randn(2, TOKENS, 32, dtype=torch.float64)).shape == (2, 4, TOKENS, 8)
    with pytest.raises(GraphFilterError, match="needs the model's projections and input"):
        attend(*signals())
    with pytest.raises(GraphFilterError, match="GraphFilterAttention"):
        GraphFilterAttention("agf", HEADS, FEATURES)


class Block(nn.Module):
    """A causal layer that calls the attention itself."""

    def __init__(self, filter):
        super().__init__()
        self.qkv, self.attend = nn.Linear(32, 96), GraphFilterAttention(filter, HEADS, FEATURES)

    def forward(self, x):
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def network(filter=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Block(filter), Block(filter)))


def test_it_is_patched_saved_and_unpatched_as_any_other(tmp_path):
    x = torch.randn(2, TOKENS, 32)
    built, patched = network("gfsa"), patch_model(network(), "gfsa")
    assert built.state_dict().keys() == patched.state_dict().keys()
    assert [row.module for row in filter_status(built)] == ["0.0.attend", "0.1.attend"]
    turn_on(built)
    patched.load_state_dict(built.state_dict())
    assert torch.equal(patched(x), built(x))
    save_filter(built, tmp_path)
    assert torch.equal(load_filter(network(), tmp_path)(x), built(x))
    assert torch.equal(load_filter(network("gfsa"), tmp_path)(x), built(x))
    with pytest.raises(GraphFilterError, match="already patched"):
        patch_model(built, "gfsa")
    twin = copy.deepcopy(built)
    assert torch.equal(unpatch_model(twin)(x), network()(x))
    torch.testing.assert_close(torch.compile(built, backend="eager")(x), built(x))
    assert "load_filter(model" in str(create_model_card(built, repo_id="me/net"))


def test_its_filter_has_the_dtype_of_the_model():
    """It has no weights itself that would tell."""
    assert {p.dtype for p in filter_parameters(patch_model(network().double(), "gfsa"))} == {torch.float64}


def test_its_coefficients_are_float32_where_it_is_made_in_half_precision():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        built, patched = (GraphFilterAttention(name, HEADS, FEATURES, hidden_size=32) for name in ("agf", None))
        patch_model(nn.Sequential(patched), "agf")
    finally:
        torch.set_default_dtype(default)
    dtypes = {name: parameter.dtype for name, parameter in built.named_parameters()}
    assert dtypes == {name: parameter.dtype for name, parameter in patched.named_parameters()}
    assert torch.bfloat16 in dtypes.values(), "its other weights"
    assert {tensor.dtype for tensor in built.graph_filter.coefficient_tensors().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, q, k, v: a(q[0], k, v), "takes queries"),
        (lambda a, q, k, v: a(q[:, :2], k, v), "takes queries"),
        (lambda a, q, k, v: a(q[:, :, -1:], k, v), "a cache of keys have no square matrix"),
        (lambda a, q, k, v: a(q, k[:, :2], v[:, :2]), "takes keys"),
        (lambda a, q, k, v: a(q, k, v, CAUSAL.double(), is_causal=True), "got both"),
        (lambda a, q, k, v: a(q, k, v, None, 0.1), "got 0.1: pass what follows the value by name"),
        (lambda a, q, k, v: GraphFilterAttention("gfsa", 4, 8, key_heads=3), "cannot share"),
        (lambda a, q, k, v: GraphFilterAttention("gfsa", 4, 0), "head_dim must be a positive integer"),
        (lambda a, q, k, v: GraphFilterAttention("gfsaa", 4, 8), "gfsaa"),
        (lambda a, q, k, v: GraphFilterAttention("gfsa", 4, 8, k=3), "no option 'k'"),
    ],
)
def test_what_it_refuses(call, message):
    with pytest.raises(GraphFilterError, match=message):
        call(GraphFilterAttention("gfsa", HEADS, FEATURES), *signals())


@pytest.mark.parametrize("family", ["encoder", "tokens-first", "torchvision-vit"])
def test_analysis_reads_layers_of_either_layout(family):
    model, given = FAMILIES[family].build(), inputs(family)
    before = model(**given)
    layers = smoothing(model, [given])
    assert len({layer for layer, _ in layers.bands}) == FAMILIES[family].patched + 1
    if family == "tokens-first":
        turned = FAMILIES["encoder"].build()
        turned.load_state_dict(model.state_dict())
        expected = smoothing(turned, [inputs("encoder")])
        assert str(layers) == str(expected)
    assert torch.equal(model(**given), before)


def test_padding_is_left_out_of_an_analysis():
    model, given = FAMILIES["encoder"].build(), inputs("encoder")
    short = [{"src": given["src"][:1]}, {"src": given["src"][1:, :6]}]
    mask = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [6]])
    padded, apart = smoothing(model, [{**given, "src_key_padding_mask": mask}]), smoothing(model, short)
    assert str(padded) == str(apart)


@pytest.mark.slow
def test_a_report(tmp_path):
    model = turn_on(patch_model(FAMILIES["encoder"].build(), "gfsa"))
    page = report(model, [inputs("encoder")]).to_html(tmp_path / "report.html")
    assert "w_K" in page.read_text() or "gfsa" in page.read_text()
    assert str(frequency_response(model, [inputs("encoder")]))


def test_a_loop_of_ones_own_with_penalties():
    torch.manual_seed(0)
    model = patch_model(FAMILIES["encoder"].build().train(), "agf", constrain_theta=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, filter_lr=1e-1))
    before = [p.detach().clone() for p in filter_parameters(model)]
    with collect_penalties(model) as penalties:
        loss = model(**inputs("encoder")).square().mean()
        (loss + penalties.total()).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, filter_parameters(model), strict=True))
    assert max(row.moved or 0 for row in filter_status(model)) > 0


def _train(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = patch_model(FAMILIES["encoder"].build().train(), "gfsa")
    model = nn.parallel.DistributedDataParallel(model)
    given = inputs("encoder")["src"][rank : rank + 1]
    model(given).square().sum().backward()
    torch.save([p.grad for p in filter_parameters(model)], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_get_the_same_gradients(tmp_path):
    torch.multiprocessing.spawn(partial(_train), args=(tmp_path,), nprocs=2)
    mine, theirs = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    model = patch_model(FAMILIES["encoder"].build().train(), "gfsa")
    (model(**inputs("encoder")).square().sum() / 2).backward()
    for a, b, p in zip(mine, theirs, filter_parameters(model), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-5)
