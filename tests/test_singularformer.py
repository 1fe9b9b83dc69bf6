"""Singularformer: the pure functions against the definitions, the losses, and what the filter refuses."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from models import FAMILIES, checkpointed, output, turn_on
from test_training import gradients, same_gradients_with_checkpointing
from timm import create_model
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from hf_graphfilter import (
    GraphFilterError,
    RegularizerCallback,
    SingularformerConfig,
    collect_penalties,
    filter_parameters,
    filter_status,
    patch_model,
    transfer_attention,
    unpatch_model,
)
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.functional import diagonal_loss, orthogonality_loss, singularformer
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE

B, H, N, D, R = 2, 4, 9, 5, 3
MASK = torch.arange(N) < torch.tensor([[N], [6]])


def tensors(dtype=torch.float64, value_features=D, key_heads=H):
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype)

    q, k, v = draw(B, H, N, D), draw(B, key_heads, N, D), draw(B, key_heads, N, value_features)
    return q, k, v, draw(B, N, R)


def by_definition(q, k, v, scores, mask=None, previous=None):
    """Eq. 8-14 and 18, a head and a sequence at a time."""
    outs, cores = torch.empty(B, H, N, v.shape[-1], dtype=v.dtype), torch.empty(B, H, R, R, dtype=v.dtype)
    for b in range(B):
        there = torch.ones(N, dtype=torch.bool) if mask is None else mask[b]
        alpha, gather = scores[b].softmax(-1), scores[b, there].T.softmax(-1)
        for h in range(H):
            group = h * k.shape[1] // H
            core = (gather @ q[b, h, there]) @ (gather @ k[b, group, there]).T / D**0.5
            core = core if previous is None else core + previous[b, h]
            outs[b, h], cores[b, h] = alpha @ core.softmax(-1) @ (gather @ v[b, group, there]), core
    return outs, cores


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
@pytest.mark.parametrize("previous", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("key_heads", "value_features"), [(H, D), (2, 7)])
def test_equals_the_definition(mask, previous, dtype, tolerance, key_heads, value_features):
    q, k, v, scores = tensors(dtype, value_features, key_heads)
    before = torch.randn(B, H, R, R, dtype=dtype) if previous else None
    out, core = singularformer(q, k, v, scores, mask=mask, previous=before)
    expected, expected_core = by_definition(q, k, v, scores, mask, before)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(core, expected_core, atol=tolerance, rtol=10 * tolerance)


def test_gradients():
    inputs = [x.requires_grad_() for x in tensors()]
    assert gradcheck(lambda *x: singularformer(*x, mask=MASK), inputs)
    losses = lambda s: orthogonality_loss(s[:, None], s[:, None], MASK, norm="off_diagonal")  # noqa: E731
    assert gradcheck(losses, [inputs[3]])
    assert gradcheck(diagonal_loss, [torch.randn(B, H, R, R, dtype=torch.float64, requires_grad=True)])


def test_the_losses_are_equations_15_and_16():
    *_, scores = tensors()
    off = 1 - torch.eye(R)
    total = 0.0
    for b in range(B):
        alpha, gather = scores[b, MASK[b]].softmax(-1), scores[b, MASK[b]].T.softmax(-1)
        total += sum(((x * off) ** 2).sum() / R**2 for x in (alpha.T @ alpha, gather @ gather.T)) / B
    found = orthogonality_loss(scores[:, None], scores[:, None], MASK, norm="off_diagonal")
    torch.testing.assert_close(found, total)
    core = torch.randn(B, H, R, R, dtype=torch.float64)
    expected = ((core.softmax(-1) * off) ** 2).sum((-1, -2)).mean() / R**2
    torch.testing.assert_close(diagonal_loss(core), expected)


@pytest.mark.parametrize("tokens", [0, 1])
def test_hardly_any_tokens(tokens):
    q, k, v, scores = (x[..., :tokens, :] for x in tensors())
    out, core = singularformer(q, k, v, scores)
    assert out.shape == (B, H, tokens, D)
    assert core.shape == (B, H, R, R)
    if tokens:
        torch.testing.assert_close(out, v)


def test_rotary_positions_may_make_query_and_key_wider():
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    scores = torch.randn(2, 5, 3)
    out, _ = singularformer(query, key, value.bfloat16(), scores)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), singularformer(query, key, value, scores)[0], atol=0.03, rtol=0.03)


def test_no_token_and_no_sequence():
    q, k, v, scores = tensors()
    nowhere = torch.zeros(B, N, dtype=torch.bool)
    assert singularformer(q, k, v, scores, mask=nowhere)[0].abs().max() == 0
    assert singularformer(*(x[:0] for x in (q, k, v, scores)))[0].shape == (0, H, N, D)


def test_a_mask_with_holes_has_no_influence():
    holes = torch.ones(B, N, dtype=torch.bool)
    holes[:, [0, 4]] = False
    q, k, v, scores = tensors()
    found = singularformer(q, k, v, scores, mask=holes)[0][:, :, holes[0]]
    short = singularformer(*(x[..., holes[0], :] for x in (q, k, v, scores)))[0]
    torch.testing.assert_close(found, short)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    exact = singularformer(*tensors())[0]
    found, core = singularformer(*tensors(torch.float64) if dtype is None else [x.to(dtype) for x in tensors()])
    assert (found.dtype, core.dtype) == (dtype, torch.float32)
    assert (found - exact).norm() <= 8 * torch.finfo(dtype).eps * exact.norm()


def test_half_precision_with_a_temperature_whose_scores_it_cannot_hold():
    model = patch_model(FAMILIES["bert"].build(), "singularformer", temperature=1e-5)
    assert output(model.half(), FAMILIES["bert"].inputs()).isfinite().all()


def test_the_core_is_wide_under_autocast():
    """40 x 40 x 64 is more than float16 holds; scaled it is an eighth."""
    q, v, scores = torch.full((1, 1, 6, 64), 40.0), torch.randn(1, 1, 6, 64), torch.randn(1, 6, 4)
    with torch.autocast("cpu", torch.float16):
        out, core = singularformer(q.half(), q.half(), v.half(), scores)
    assert core.dtype == torch.float32
    assert out.isfinite().all()
    torch.testing.assert_close(core, torch.full_like(core, 1600 * 64 / 8), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, s: (q[0], k, v, s), r"are \(batch, heads, tokens, features\), scores \(batch, tokens, r\)"),
        (lambda q, k, v, s: (q, k, v, s[:, :4]), "batch, tokens or features differ"),
        (lambda q, k, v, s: (q, k[..., :2], v, s), "batch, tokens or features differ"),
        (lambda q, k, v, s: (q, k[:, :3], v[:, :3], s), "the heads of the query are a multiple"),
        (lambda q, k, v, s: (q, k, v, s[..., :0]), "r >= 1"),
        (lambda q, k, v, s: (q, k[:, :0], v[:, :0], s), "the heads of the query are a multiple"),
        (lambda q, k, v, s: (q[..., :0], k[..., :0], v, s), "with a feature at least"),
        (lambda q, k, v, s: (q + 0j, k, v, s), "query must be real floating-point numbers, got torch.complex128"),
        (lambda q, k, v, s: (q, k, v, s.long()), "scores must be real floating-point numbers, got torch.int64"),
    ],
)
def test_wrong_shapes_are_one_clear_error(change, message):
    with pytest.raises(GraphFilterError, match=message):
        singularformer(*change(*tensors()))


def test_a_core_of_another_shape():
    with pytest.raises(GraphFilterError, match="previous is the core of the layer before"):
        singularformer(*tensors(), previous=torch.zeros(B, H, R, R + 1))
    with pytest.raises(GraphFilterError, match=r"core is \(batch, heads, r, r\)"):
        diagonal_loss(torch.zeros(B, H, R, R + 1))


@pytest.mark.parametrize("shape", [(), (N,), (3, N), (B, 1, 1, N)], ids=str)
def test_a_mask_of_another_shape(shape):
    with pytest.raises(GraphFilterError, match=rf"mask is \(batch, tokens\), here \({B}, {N}\)"):
        singularformer(*tensors(), mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_losses_of_what_is_not_real(dtype):
    with pytest.raises(GraphFilterError, match="diagonal_loss: core must be real floating-point numbers"):
        diagonal_loss(torch.ones(B, H, R, R, dtype=dtype))
    u = torch.ones(B, H, N, D, dtype=dtype)
    with pytest.raises(GraphFilterError, match="orthogonality_loss: u must be real floating-point numbers"):
        orthogonality_loss(u, u)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r must be 1 to 65536, got 0"),
        ({"r": 1.5}, "r must be an integer or None, got 1.5"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": 1e-39}, "temperature must be >= 1e-38"),
        ({"gamma_diagonal": -1.0}, "gamma_diagonal must be >= 0"),
    ],
)
def test_wrong_options_are_one_clear_error(options, message):
    with pytest.raises(GraphFilterError, match=message):
        patch_model(FAMILIES["bert"].build(), "singularformer", **options)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_modules_are_refused_with_the_reason(name):
    model = FAMILIES[name].build()
    with pytest.raises(GraphFilterError, match="is causal, and SINGULARFORMER mixes all tokens and has no causal form"):
        patch_model(model, "singularformer")
    assert not filters_of(model)


def test_decoders_are_left_out_by_their_stack():
    model = patch_model(FAMILIES["bart"].build(), "singularformer", stack="encoder")
    assert [name.partition(".")[0] for name, _ in filters_of(model)] == ["encoder"] * 2


def test_a_causal_mask_is_refused_when_it_comes():
    model = patch_model(FAMILIES["clip"].build(), "singularformer")
    with pytest.raises(GraphFilterError, match="the attention mask is causal"):
        output(model, FAMILIES["clip"].inputs())


def test_a_cache_is_refused():
    model = patch_model(FAMILIES["bert"].build(), "singularformer")
    with pytest.raises(GraphFilterError, match="got a cache of past tokens, and SINGULARFORMER"):
        model(**FAMILIES["bert"].inputs(), **{CACHE: DynamicCache()}, use_cache=True)


def test_new_parameters_and_r():
    model = patch_model(FAMILIES["bert"].build(), "singularformer")
    assert sum(p.numel() for p in filter_parameters(model)) == 3 * (32 * 8 + 8), "W_a and b_a, r = 32 / 4"
    wide = patch_model(FAMILIES["bert"].build(), "singularformer", r=50)  # more than there are tokens or features
    assert output(wide, FAMILIES["bert"].inputs()).isfinite().all()


def test_its_losses():
    patched = turn_on(patch_model(FAMILIES["bert"].build().double(), SingularformerConfig(gamma_diagonal=0.5))).train()
    with collect_penalties(patched) as penalties:
        output(patched, FAMILIES["bert"].inputs())
    losses = penalties.losses()
    assert set(losses) == {"orthogonality", "diagonal"}
    expected = 1e-2 * losses["orthogonality"] + 0.5 * losses["diagonal"]
    torch.testing.assert_close(penalties.total(), expected)
    assert RegularizerCallback({"diagonal": 0.0}).weights == {"diagonal": 0.0}


def test_transfer():
    torch.manual_seed(0)
    model = patch_model(FAMILIES["bert"].build().double(), "singularformer", r=9)
    batches = [FAMILIES["bert"].inputs() for _ in range(3)]
    report = transfer_attention(model, batches, steps=30, holdout=1, progress=False)
    assert report.mean_after < 0.9 * report.mean_before


def test_exported_with_free_sizes():
    model, inputs = patch_model(FAMILIES["bert"].build(), "singularformer"), FAMILIES["bert"].inputs()
    batch, tokens = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("tokens", min=2, max=32)
    sizes = {"input_ids": {0: batch, 1: tokens}, "attention_mask": {0: batch, 1: tokens}}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=sizes).module()
    other = FAMILIES["bert"].inputs(batch=3, tokens=13)
    other["attention_mask"][0, 7:] = 0
    torch.testing.assert_close(output(exported, other), output(model, other))


# ------------------------------------------------------------------------------------- scores of the layer before


def residual(name="bert", **options):
    model = patch_model(
        FAMILIES[name].build().double(),
        SingularformerConfig(r=R, residual=True, position_bias="drop"),
        stack="encoder",
        **options,
    )
    return turn_on(model), FAMILIES[name].inputs(torch.float64)


@pytest.mark.parametrize("layers", [None, [0, 2]])
@pytest.mark.parametrize("name", ["bert", "albert", "t5", "vit", "whisper"])
def test_the_core_of_the_layer_before_is_added(name, layers):
    model, inputs = residual(name, layers=layers if name in ("bert", "t5", "vit") else None)
    calls = []
    for _, graph_filter in filters_of(model):
        graph_filter.register_forward_hook(lambda part, args, out: calls.append((part, *args, out)))
    for _ in range(2):  # a pass knows nothing of the one before
        calls.clear()
        output(model, inputs)
        core = None
        for graph_filter, shift, value, out in calls:
            scores = graph_filter.alpha(shift.hidden)
            expected, core = singularformer(shift.query, shift.key, value, scores, previous=core, scale=shift.scaling)
            torch.testing.assert_close(out, expected)
    assert len(calls) > 1
    alone = singularformer(shift.query, shift.key, value, scores, scale=shift.scaling)[0]
    assert (out - alone).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["bert", "vit", "bart"])
def test_its_gradients_under_checkpointing(name, transformers_warnings):
    model, inputs = residual(name)
    assert same_gradients_with_checkpointing(model, inputs, reentrant=False)
    checkpointed(model, reentrant=True)
    with pytest.raises(GraphFilterError, match="reentrant checkpointing loses: use gradient_checkpointing_kwargs"):
        gradients(model, inputs)
    transformers_warnings.clear()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_reentrant_checkpointing_of_one_layer_is_refused(layer):
    """Where the layers around it are not run again, its core or that before it would have no gradient."""
    model, inputs = residual()
    module = model.encoder.layer[layer]
    forward = module.forward
    module.forward = lambda x, *args, **kwargs: checkpoint(lambda x: forward(x, *args, **kwargs), x, use_reentrant=True)
    with pytest.raises(GraphFilterError, match="reentrant checkpointing loses"):
        gradients(model, inputs)


def test_its_gradients_where_layers_share_their_weights():
    model, inputs = residual("albert")
    group = model.encoder.albert_layer_groups[0]
    group.forward = partial(checkpoint, group.forward, use_reentrant=False)
    with pytest.raises(GraphFilterError, match="applied 3 times in one forward pass, so that gradient checkpointing"):
        gradients(model, inputs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at tensors that it goes on with
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled(checkpointing, transformers_warnings):
    model, inputs = residual()
    expected = gradients(model.train(), inputs)
    if checkpointing:
        checkpointed(model, reentrant=False)
    torch.compiler.reset()
    model.compile(backend="aot_eager", fullgraph=not checkpointing)
    found = gradients(model, inputs)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    transformers_warnings.clear()


def test_passes_at_the_same_time_do_not_meet():
    model, inputs = residual()
    batches = [{**inputs, "input_ids": (inputs["input_ids"] + i) % 99} for i in range(8)]
    expected = [output(model, batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:  # as DataParallel's replicas run
        for found, alone in zip(pool.map(lambda batch: output(model, batch), batches), expected, strict=True):
            assert torch.equal(found, alone)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_nothing_of_it_stays_behind(copied):
    model, inputs = residual()
    expected = output(model, inputs)
    model = copied(model)
    assert torch.equal(output(model, inputs), expected)
    assert model.encoder._forward_pre_hooks
    assert not unpatch_model(model).encoder._forward_pre_hooks


def test_its_transfer():
    model, inputs = residual()
    report = transfer_attention(model, [inputs] * 3, steps=20, holdout=1, progress=False)
    assert report.mean_after < report.mean_before


def test_where_it_is_refused():
    model = create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(GraphFilterError, match="the layers of this model pass nothing on to each other"):
        patch_model(model, "singularformer", residual=True)
    assert not filters_of(model)
    model, _ = residual()
    with pytest.raises(GraphFilterError, match="did not receive the tensors of earlier layers"):
        model.encoder.layer[1](torch.zeros(1, 4, 32, dtype=torch.float64))
    model, inputs = residual(layers=[0])
    expected, before = output(model, inputs), str(filter_status(model))
    with pytest.raises(GraphFilterError, match=rf"1\..*: residual=True .* r is {R} at .*0\..* and 4 here"):
        patch_model(model, "singularformer", residual=True, r=4, layers=[1])
    assert str(filter_status(model)) == before
    assert torch.equal(output(model, inputs), expected)
