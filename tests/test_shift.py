"""The shift operator and the kernels under it, against explicit matrices."""

from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from models import FAMILIES, output, turn_on
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DeepseekV32Config,
    DeepseekV32Model,
    Gemma2Config,
    Gemma2Model,
    GptOssConfig,
    GptOssModel,
    MistralConfig,
    MistralModel,
)
from transformers.masking_utils import flash_attention_mask
from transformers.models.bert import modeling_bert

from hf_graphfilter import (
    AttentionCall,
    AttentionShift,
    AttentionSite,
    DenseShift,
    GFSAConfig,
    GraphFilterError,
    patch_model,
    unpatch_model,
)
from hf_graphfilter.functional import gfsa
from hf_graphfilter.hosts.transformers.base_attention import BaseAttention
from hf_graphfilter.ops import scratch
from hf_graphfilter.ops.attention_pieces import PIECE, ROWS, Workspace
from hf_graphfilter.ops.attention_polynomial import KEPT, apply_polynomial
from hf_graphfilter.ops.combine import combine
from hf_graphfilter.ops.polynomial_form import can_apply, polynomial_form
from hf_graphfilter.ops.scores import softmax_, softmax_backward_

B, H, N, D = 2, 4, 7, 5


def tensors(*shape, count=3, dtype=torch.float64, grad=False):
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for _ in range(count)]


def masks():
    """name -> (mask for SDPA, causal flag, the additive mask it means)."""
    padding = torch.ones(B, 1, N, N, dtype=torch.bool)
    padding[1, :, :, -2:] = False
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    bias = torch.randn(1, H, N, N, dtype=torch.float64)

    def additive(m):
        return torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, -torch.inf)

    return {
        "none": (None, False, torch.zeros(N, N, dtype=torch.float64)),
        "causal": (None, True, additive(causal)),
        "boolean": (padding, False, additive(padding)),
        "additive": (additive(padding & causal), False, additive(padding & causal)),
        "position bias": (bias + additive(padding), False, bias + additive(padding)),
    }


def matrix(query, key, additive):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return ((query @ key.mT) * query.shape[-1] ** -0.5 + additive).softmax(-1)


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("groups", [H, 2, 1])
def test_attention_shift_is_the_dense_one(mask, groups):
    mask, causal, additive = masks()[mask]
    query = torch.randn(B, H, N, D, dtype=torch.float64)
    key, value = tensors(B, groups, N, D, count=2)

    def attend(k, v):
        out = F.scaled_dot_product_attention(query, k, v, mask, is_causal=causal, enable_gqa=k.shape[1] != H)
        return out.transpose(1, 2), None

    shift, dense = AttentionShift(AttentionCall(attend, query, key)), DenseShift(matrix(query, key, additive))
    for found, expected in zip(shift.powers(value, 3), dense.powers(value, 3), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(shift.identity(value), dense.identity(value))
    torch.testing.assert_close(AttentionShift(AttentionCall(attend, query, key)).dense().matrix, dense.matrix)


def test_per_head_scaling_and_repeated_keys():
    """Whatever is bound into ``attend`` belongs to S: here a scale of its own for every head."""
    query, (key, value) = torch.randn(B, H, N, D, dtype=torch.float64), tensors(B, 2, N, D, count=2)
    scale = torch.rand(H, 1, 1, dtype=torch.float64) + 0.5

    def attend(k, v):
        out = F.scaled_dot_product_attention(query * scale, k, v, enable_gqa=k.shape[1] != H)
        return out.transpose(1, 2), None

    found = AttentionShift(AttentionCall(attend, query, key)).powers(value, 2)
    expected = DenseShift(matrix(query * scale, key, 0)).powers(value, 2)
    torch.testing.assert_close(found, expected)


def test_a_call_does_not_change_and_another_look_starts_afresh():
    query, key, value = tensors(1, 2, 3, 4, count=3)

    def attend(k, v):
        return F.scaled_dot_product_attention(query, k, v).transpose(1, 2), None

    call = AttentionCall(
        attend, query, key, hidden=value, scaling=0.5, bias=key, polynomial=lambda v, c, exact: (v, [v])
    )
    with pytest.raises(AttributeError):
        call.query = key
    shift = AttentionShift(call, state={})
    assert (shift.query, shift.key, shift.hidden, shift.scaling, shift.bias) == (query, key, value, 0.5, key)
    assert shift.polynomial(value, [None, *torch.ones(2, 2)]) is value
    again = shift.restart()
    assert (shift.applications, again.applications, again.state, again.hidden) == (2, 0, None, value)
    torch.testing.assert_close(again.polynomial(value, [None, torch.ones(2)]), attend(key, value)[0].transpose(1, 2))


def test_a_shift_takes_a_call():
    with pytest.raises(GraphFilterError, match=r"takes an AttentionCall, and got a function.*AttentionCall\(attend"):
        AttentionShift(lambda k, v: (v, None), *tensors(1, 2, 3, 4, count=2))


def test_cross_attention_is_refused():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    shift = AttentionShift(AttentionCall(lambda k, v: (torch.randn(1, 3, 2, 4), None), query, key))
    first = shift(torch.randn(1, 2, 5, 4))
    with pytest.raises(GraphFilterError, match="3 query tokens over 5 key tokens"):
        shift(first)


NARROW = D + 1  # signals of D features are stored by column, as texts of N tokens are no shorter than this


def set_sizes(monkeypatch, piece=PIECE, rows=ROWS, kept=KEPT):
    monkeypatch.setattr("hf_graphfilter.ops.attention_pieces.NARROW", NARROW)
    monkeypatch.setattr(scratch._held, "made", {})  # workspaces of other sizes
    monkeypatch.setattr("hf_graphfilter.ops.attention_pieces.PIECE", piece)
    monkeypatch.setattr("hf_graphfilter.ops.attention_pieces.ROWS", rows)
    monkeypatch.setattr("hf_graphfilter.ops.attention_polynomial.KEPT", kept)


def coefficients(K, grad=True):
    c = [torch.randn(H, dtype=torch.float64).requires_grad_(grad) for _ in range(K + 1)]
    return [None if (K, k) in ((2, 0), (4, 2)) else x for k, x in enumerate(c)]


def several_calls(q, k, v, c, mask=None, causal=False):
    """Return ``sum_k c_k S^k(V)`` and the powers but the last, by calls of PyTorch's attention."""
    signals = [v]
    for _ in c[1:]:
        signals.append(F.scaled_dot_product_attention(q, k, signals[-1], mask, is_causal=causal))
    total = sum(w.view(-1, 1, 1) * x for w, x in zip(c, signals, strict=True) if w is not None)
    return total, signals[1:-1]


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive", "of sequences"])
@pytest.mark.parametrize(
    ("piece", "rows", "kept"), [(PIECE, ROWS, KEPT), (PIECE, 3, 0), (N * N * H, 3, KEPT), (1, 1, 0)]
)
@pytest.mark.parametrize(("features", "width"), [(D, D), (NARROW, NARROW), (D, NARROW), (NARROW, D)])
def test_polynomial_equals_calls_of_attention(K, mask, piece, rows, kept, features, width, monkeypatch):
    set_sizes(monkeypatch, piece, rows, kept)
    if mask == "of sequences":
        mask, causal = torch.arange(N).expand(B, 1, 1, N) < torch.arange(1, B + 1).view(B, 1, 1, 1) * N // B, False
    else:
        mask, causal, _ = masks()[mask]
        mask = mask if mask is None or mask.dtype == torch.bool else mask.nan_to_num(neginf=-1e30)
    q, k = tensors(B, H, N, features, count=2, grad=True)
    v = tensors(B, H, N, width, count=1, grad=True)[0]
    c = coefficients(K)
    total, powers = apply_polynomial(q, k, v, c, mask, causal=causal)
    expected, expected_powers = several_calls(q, k, v, c, mask, causal)
    torch.testing.assert_close([total, *powers], [expected, *expected_powers])
    inputs, weights = [q, k, v, *(w for w in c if w is not None)], [*tensors(B, H, N, width, count=K)]
    for count in (1, K):  # of the sum alone, and of the powers, which a cache passes on, too
        found = torch.autograd.grad([total, *powers][:count], inputs, weights[:count], retain_graph=True)
        gradients = torch.autograd.grad(
            [expected, *expected_powers][:count], inputs, weights[:count], retain_graph=True
        )
        torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("shape", [(B, H, N, N), (1, H, N, N), (B, 1, 1, N), (N, N)])
@pytest.mark.parametrize("piece", [PIECE, N * N * H, 1])
def test_polynomial_passes_a_gradient_to_its_mask(shape, piece, monkeypatch):
    set_sizes(monkeypatch, piece)
    q, k, v = tensors(B, H, N, D, grad=True)
    mask, c = torch.randn(shape, dtype=torch.float64).requires_grad_(), coefficients(2)
    weight = tensors(B, H, N, D, count=1)[0]
    found = torch.autograd.grad(apply_polynomial(q, k, v, c, mask)[0], mask, weight)
    torch.testing.assert_close(found, torch.autograd.grad(several_calls(q, k, v, c, mask)[0], mask, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 15, 16, 17])
def test_softmax_of_short_rows(tokens, dtype):
    scores = 30 * torch.randn(4, tokens, tokens, dtype=dtype)  # exp() of some would overflow in float32
    scores[0, 0, tokens // 2 :] = -torch.inf if tokens > 1 else 0.0
    scores.requires_grad_()
    expected, weight = scores.softmax(-1), torch.randn_like(scores)
    (gradient,) = torch.autograd.grad(expected, scores, weight)
    found = softmax_(scores.detach().clone())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(softmax_backward_(weight.clone(), found), gradient)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_polynomial_in_rows_that_see_nothing(kind):
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)  # the first token sees nothing
    mask = mask if kind == "boolean" else torch.zeros(1, 1, 4, 4).masked_fill(~mask, -torch.inf)
    inputs = tensors(1, 2, 4, 3, grad=True)
    total, _ = apply_polynomial(*inputs, [None, *torch.ones(2, 2, dtype=torch.float64)], mask)
    assert total[:, :, 0].abs().max() == 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, inputs, total))


@pytest.mark.parametrize("causal", [False, True])
def test_polynomial_gradcheck_with_dropout(causal, monkeypatch):
    set_sizes(monkeypatch, rows=3)
    inputs = [*tensors(1, 2, 4, 3, grad=True), *torch.randn(3, 2, dtype=torch.float64).requires_grad_().unbind()]

    def fixed_masks(q, k, v, *c):
        torch.manual_seed(3)
        total, powers = apply_polynomial(q, k, v, c, dropout=0.3, causal=causal)
        return total, *powers

    assert gradcheck(fixed_masks, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_polynomial_in_float32_against_float64(causal):
    inputs, weight = tensors(1, 2, 150, 16, grad=True), tensors(1, 2, 150, 16, count=1)[0]
    c = [None, *torch.tensor([[1.0, 0.5], [0.3, -0.2]], dtype=torch.float64)]
    expected, _ = several_calls(*inputs, c, causal=causal)
    single = [x.detach().float().requires_grad_() for x in inputs]
    total, _ = apply_polynomial(*single, [None, *(w.float() for w in c[1:])], causal=causal)
    gradients = torch.autograd.grad(total, single, weight.float())
    for x, reference in zip(
        (total, *gradients), (expected, *torch.autograd.grad(expected, inputs, weight)), strict=True
    ):
        torch.testing.assert_close(x.double(), reference, atol=2e-5, rtol=1e-4)


def test_layers_of_other_sizes_and_dtypes_share_their_scratch_memory():
    for shape, dtype in (((2, 2, 70, 8), torch.float32), ((3, 4, 9, 4), torch.float64), ((2, 2, 70, 8), torch.float64)):
        q, k, v = (x.to(dtype) for x in tensors(*shape))
        c = [None, *torch.ones(2, shape[1], dtype=dtype)]
        with torch.inference_mode():
            found, _ = apply_polynomial(q, k, v, c)
        again, _ = apply_polynomial(q.clone().requires_grad_(), k, v, c)
        again.sum().backward()
        torch.testing.assert_close([found, again], [several_calls(q, k, v, c)[0]] * 2)


def test_dropout_masks_are_independent_and_unbiased():
    n, p = 5, 0.25
    q, k = torch.randn(1, 1, n, 4, requires_grad=True), torch.randn(1, 1, n, 4)
    many = 20_000
    eye = torch.eye(n).expand(many, 1, n, n)
    second, (first,) = apply_polynomial(
        q.expand(many, -1, -1, -1), k.expand(many, -1, -1, -1), eye, [None, None, torch.ones(1)], dropout=p
    )
    A = matrix(q, k, 0)[0, 0]
    torch.testing.assert_close(first.mean(0)[0], A, atol=0.01, rtol=0)
    # E[A_1 A_2] = A^2 holds for independent masks; one mask used twice gives another mean
    torch.testing.assert_close(second.mean(0)[0], A @ A, atol=0.01, rtol=0)
    assert ((first == 0).float().mean() - p).abs() < 0.01


def test_when_the_joint_form_is_used():
    c = [None, *torch.ones(2, 24)]
    q, k, v = tensors(2, 24, 64, 4, grad=True)
    few, short = ([x[part] for x in (q, k, v)] for part in (slice(1), (..., slice(16), slice(None))))

    def can(inputs, mask=None, causal=False, dropout=0.0, exact=False, c=c):
        return can_apply(*inputs, mask, c, causal, dropout, exact)

    for causal in (False, True):
        assert can((q, k, v), causal=causal)
        assert not can(short, causal=causal)
        assert can(short, causal=causal, dropout=0.1)
    assert can(few), "one sequence of 24 heads and 64 tokens has entries enough"
    assert not can([x[:, :6] for x in few])
    assert can([x[:, :6] for x in few], torch.zeros(64, 64, requires_grad=True)), "SDPA has no kernel for it"
    assert not can((q[:, :, :1], k, v), dropout=0.1)
    assert not can([x.bfloat16() for x in (q, k, v)])
    assert not can([x.float() for x in (q, k, v)], c=[None, *torch.ones(2, 24, dtype=torch.float64)])
    assert not can((q, k, v), exact=True)
    assert can((q, k, v), dropout=0.1, exact=True), "drawn at random anyway"
    with torch.autocast("cpu"):
        assert not can((q, k, v))
    with torch.no_grad():
        assert can((q, k, v)), "checkpointing must find the same numbers again"


@pytest.mark.parametrize("causal", [False, True])
def test_the_start_is_the_attention_call_itself_bit_for_bit(causal):
    """Also at sizes where the joint form, equal up to rounding, is the faster one."""
    query, key, value = tensors(1, 12, 130, 8, dtype=torch.float32)
    graph_filter = GFSAConfig(K=3).build(AttentionSite("self", torch.nn.Identity(), 12, causal, "encoder", "", 0))

    def attend(k, v):
        return F.scaled_dot_product_attention(query, k, v, is_causal=causal).transpose(1, 2), None

    def several(v, c, exact):
        return polynomial_form(query, key, v, None, c, causal=causal, exact=exact)

    def filtered(joint):
        return graph_filter(AttentionShift(AttentionCall(attend, query, key, polynomial=joint)), value)

    assert torch.equal(filtered(several), attend(key, value)[0].transpose(1, 2))
    torch.nn.init.constant_(graph_filter.w_K, 0.3)
    assert not torch.equal(filtered(several), filtered(None)), "the joint form was not used"
    torch.testing.assert_close(filtered(several), filtered(None))


def test_a_single_application_takes_the_joint_form_unless_exact():
    query, key, value = tensors(2, 12, 64, 8, dtype=torch.float32)

    def attend(k, v):
        return F.scaled_dot_product_attention(query, k, v).transpose(1, 2), None

    def several(v, c, exact):
        return polynomial_form(query, key, v, None, c, exact=exact)

    exact, other = (AttentionShift(AttentionCall(attend, query, key, polynomial=several)) for _ in range(2))
    other.exact = False
    expected = attend(key, value)[0].transpose(1, 2)
    assert torch.equal(exact(value), expected)
    first = other(value)
    assert not torch.equal(first, expected), "the joint form was not used"
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(other(first), exact(expected))
    assert exact.applications == other.applications == 2


def test_second_derivatives_need_calls_of_attention(monkeypatch):
    """Which are made where PyTorch is restricted to the mathematical form; elsewhere they are an error."""
    monkeypatch.setattr("hf_graphfilter.ops.polynomial_form.FEWEST_ENTRIES", 1)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    c = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([0.5, 1.0], [1.0, -0.3], [0.2, 0.4])]
    joint = polynomial_form(q, k, v, None, c, exact=False)
    assert joint is not None
    (gradient,) = torch.autograd.grad(joint[0].sum(), q, create_graph=True)  # of a sum: what comes in is constant
    with pytest.raises(GraphFilterError, match=r"first derivatives only.*sdpa_kernel\(SDPBackend.MATH\)"):
        gradient.square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        assert polynomial_form(q, k, v, None, c, exact=False) is None


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_second_derivatives_of_a_model_are_those_of_the_original(backend, monkeypatch):
    monkeypatch.setattr("hf_graphfilter.ops.polynomial_form.FEWEST_ENTRIES", 1)
    model = FAMILIES["bert"].build(backend)
    tokens = torch.randn(2, 9, model.config.hidden_size, dtype=model.dtype, requires_grad=True)

    def differentiate():
        with sdpa_kernel(SDPBackend.MATH):
            out = model(inputs_embeds=tokens).last_hidden_state
            (gradient,) = torch.autograd.grad(out.square().sum(), tokens, create_graph=True)
            return torch.autograd.grad(gradient.square().sum(), tokens)[0]

    expected = differentiate()
    patch_model(model, "gfsa", K=3)
    torch.testing.assert_close(differentiate(), expected)


@pytest.mark.parametrize("by_tokens", [True, False], ids=["by-tokens", "by-heads"])
def test_combine(by_tokens):
    coefficients, signals = tensors(H, grad=True), tensors(B, H, N, D, grad=True)
    if by_tokens:  # in memory, as projections leave them
        signals = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in signals]
    expected = sum(c.view(-1, 1, 1) * x for c, x in zip(coefficients, signals, strict=True))
    torch.testing.assert_close(combine(list(zip(coefficients, signals, strict=True))), expected)
    assert gradcheck(lambda *t: combine(list(zip(t[:3], t[3:], strict=True))), (*coefficients, *signals))


def test_combine_keeps_small_coefficients_in_half_precision():
    one, small = torch.ones(H), torch.full((H,), 1e-3)
    x = torch.ones(B, H, N, D, dtype=torch.bfloat16)
    for stored in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(combine([(one, stored), (-one, stored), (small, stored)]), torch.full_like(x, 1e-3))


SITE = AttentionSite("self", torch.nn.Identity(), H, False, "encoder", "", 0)


def stochastic(n, heads=H):
    return DenseShift(torch.randn(1, heads, n, n, dtype=torch.float64).mul(2).softmax(-1))


def built(**options):
    return GFSAConfig(**options).build(SITE).double()


@pytest.mark.parametrize("approximation", ["taylor", "none"])
@pytest.mark.parametrize("K", [1, 2, 3, 7])
def test_gfsa_is_equation_5(K, approximation):
    w = {"w_0": -0.25, "w_1": 0.75, "w_K": 0.375}  # exact in float32, as coefficients are made
    shift, value = stochastic(6), torch.randn(1, H, 6, D, dtype=torch.float64)
    A = shift.matrix
    power = torch.matrix_power(A, K) if approximation == "none" else A + (K - 1) * (A @ A - A)
    expected = (w["w_0"] * torch.eye(6, dtype=A.dtype) + w["w_1"] * A + w["w_K"] * power) @ value
    for learn in ((), ("w_K",), ("w_0", "w_1", "w_K")):
        torch.testing.assert_close(built(K=K, approximation=approximation, learn=learn, **w)(shift, value), expected)


def test_gfsa_reductions():
    shift, value = stochastic(6), torch.randn(1, H, 6, D, dtype=torch.float64)
    A = shift.matrix
    # K = 1: the vanilla GCN filter with w_1 + w_K; K = 2: the Taylor form is exact
    torch.testing.assert_close(built(K=1, w_1=0.5, w_K=0.25)(shift, value), 0.75 * A @ value)
    torch.testing.assert_close(
        built(K=2, w_K=0.3)(shift, value), built(K=2, w_K=0.3, approximation="none")(shift, value)
    )
    # no high-order term: one application of S, whatever K
    counted = []
    shift.powers = lambda v, count: counted.append(count) or [A @ v] * count
    assert torch.equal(built(K=9, approximation="none", learn=("w_0",), w_0=0.5)(shift, value), A @ value + 0.5 * value)
    assert counted == [1]


def test_gfsa_gradcheck():
    A = stochastic(5, heads=H).matrix.requires_grad_()
    value = torch.randn(1, H, 5, 3, dtype=torch.float64, requires_grad=True)
    graph_filter = built(K=3, learn=("w_0", "w_1", "w_K"), w_0=0.1, w_K=0.2)

    def run(A, value, *coefficients):
        values = dict(zip(("w_0", "w_1", "w_K"), coefficients, strict=True))
        return torch.func.functional_call(graph_filter, values, (DenseShift(A), value))

    assert gradcheck(run, (A, value, *(p.detach().clone().requires_grad_() for p in graph_filter.parameters())))


@given(
    n=st.integers(1, 12),
    K=st.integers(1, 12),
    sharpness=st.floats(0, 30),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_theorem_3_1(n, K, sharpness, causal, seed):
    """||A^K - (A + (K-1)(A^2 - A))||_inf <= 2K for row-stochastic A."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, n, dtype=torch.float64, generator=g) * sharpness
    eye = torch.eye(n, dtype=torch.float64)
    exact, approximate = (
        gfsa(*(x[None, None] for x in (scores, eye, eye)), 0.0, 0.0, 1.0, K, causal=causal, scale=1.0, approximation=a)
        for a in ("none", "taylor")
    )
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    A = scores.softmax(-1)
    torch.testing.assert_close(exact[0, 0], torch.matrix_power(A, K))
    error = exact - approximate
    assert error.abs().sum(-1).max() <= 2 * K + 1e-9


def test_attention_sinks_are_refused():
    config = GptOssConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    with pytest.raises(GraphFilterError, match="2 x GptOssAttention: attention sinks"):
        patch_model(GptOssModel(config))


def test_soft_capping_is_passed_on_or_refused():
    config = Gemma2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
    )
    config._attn_implementation = "eager"
    model, inputs = Gemma2Model(config).eval(), {"input_ids": torch.arange(5, 12)[None]}
    expected = output(model, inputs)
    assert torch.equal(output(patch_model(model), inputs), expected)
    model.config._attn_implementation_internal = "sdpa"  # as a model would that lets this through
    with pytest.raises(GraphFilterError, match=r"softcap=2\.0.*'eager'"):
        output(model, inputs)
    unpatch_model(model)
    with pytest.raises(GraphFilterError, match=r"softcap=2\.0.*'sdpa' attention drops"):
        patch_model(model)


VARLEN = "varlen"  # stands for FlashAttention, which receives packed sequences and windows without a mask


def varlen(module, query, key, value, attention_mask, scaling=None, sliding_window=None, cu_seq_lens_q=None, **_):
    assert attention_mask is None
    places = torch.arange(query.shape[2])
    sequence = (places[:, None] >= cu_seq_lens_q[1:]).sum(-1) if cu_seq_lens_q is not None else places * 0
    distance = places[:, None] - places
    seen = (distance >= 0) & (sequence[:, None] == sequence) & (distance < (sliding_window or len(places)))
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, keys, values, seen, scale=scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(VARLEN, varlen)
AttentionMaskInterface.register(VARLEN, flash_attention_mask)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("agf", "hedgehog", "centered", "attnscale", "contranorm")),
        ("far_field", {"window": 2, "sinks": 1}),
    ],
)
def test_packed_sequences_without_a_mask_are_refused(name, options):
    model = patch_model(FAMILIES["llama"].build(VARLEN), name, **options)
    ids = torch.randint(5, 99, (1, 7))
    positions, ends = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), torch.tensor([0, 3, 7])
    output(model, {"input_ids": ids})
    for packed in ({"position_ids": positions, "cu_seq_lens_q": ends}, {"position_ids": positions}):
        with pytest.raises(GraphFilterError, match=r"'varlen' attention receives packed sequences without a mask"):
            model(input_ids=ids, use_cache=False, **packed)


def test_a_sliding_window_without_a_mask_is_refused_by_filters_that_look_at_the_mask():
    config = MistralConfig(
        **{"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 8, "sliding_window": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 4},
    )
    config._attn_implementation = VARLEN
    model = patch_model(MistralModel(config).eval(), "centered")
    model(input_ids=torch.randint(5, 99, (1, 3)), use_cache=False)
    with pytest.raises(GraphFilterError, match=r"receives a sliding window of 3 tokens without a mask.*'centered'"):
        model(input_ids=torch.randint(5, 99, (1, 4)), use_cache=False)


def test_a_filter_of_the_operator_alone_keeps_packed_sequences_apart():
    model = turn_on(patch_model(FAMILIES["llama"].build(VARLEN), GFSAConfig(K=3)))
    ids = torch.randint(5, 99, (1, 7))
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    found = output(model, {"input_ids": ids, "use_cache": False, **packed})
    apart = [output(model, {"input_ids": part, "use_cache": False}) for part in (ids[:, :3], ids[:, 3:])]
    torch.testing.assert_close(found, torch.cat(apart, 1))


def test_memory_is_linear_in_tokens():
    """No n x n tensor on the SDPA path: the largest tensor that the filter makes grows as n."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.numel())
            return out

    family = FAMILIES["gpt2"]
    model = patch_model(family.build(n_positions=4096), "gfsa", w_K=0.1)
    sizes = {}
    for tokens in (2048, 4096):
        with Largest() as largest:
            output(model, family.inputs(batch=1, tokens=tokens)).sum().backward()
        sizes[tokens] = largest.size
    assert sizes[4096] <= 2 * sizes[2048]
    assert sizes[4096] < 4096 * 4096 // 8


def test_the_blocks_of_a_workspace_share_what_they_hide():
    workspace = Workspace((1, 2), 4096, 8, 8, 2, True, torch.float32, ROWS)
    assert len({block.hidden.untyped_storage().data_ptr() for block in workspace.blocks}) == 1
    assert len(workspace.blocks) > 1
    for block in workspace.blocks:
        rows, keys = (torch.arange(part.start or 0, part.stop) for part in (block.rows, block.seen))
        assert torch.equal(block.hidden.isinf(), keys > rows[:, None])


def test_threads_do_not_share_their_scratch_memory():
    q, k, v = tensors(4, 3, 70, 8)
    c = [None, *torch.ones(2, 3, dtype=torch.float64)]
    parts = [[x[i : i + 1].clone().requires_grad_() for x in (q, k, v)] for i in range(4)]

    def gradients(inputs):
        return [torch.autograd.grad(apply_polynomial(*inputs, c)[0].square().sum(), inputs) for _ in range(20)][-1]

    expected = [gradients(inputs) for inputs in parts]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(gradients, parts)]
    torch.testing.assert_close(found, expected)


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of a model's attention function."""
    made, call = [], BaseAttention.attend
    monkeypatch.setattr(BaseAttention, "attend", lambda self, *args: (made.append(1), call(self, *args))[1])
    return made


def eager_model(name, **overrides):
    torch.manual_seed(0)
    return turn_on(patch_model(FAMILIES[name].build("eager", **overrides), "gfsa", K=3)).double().train()


def gradients_of(model, inputs):
    model.zero_grad()
    output(model, inputs).sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


TEXTBOOK = {"bert", "bart", "graphormer", "speech_to_text", "wav2vec2", "whisper"}  # at least; llama shares its keys


@pytest.mark.parametrize("name", FAMILIES)
def test_eager_attention_in_training_takes_the_joint_form(name, monkeypatch, calls):
    """The gradients are those of matrices, and the weights are there once they are asked for."""
    model, inputs = eager_model(name), FAMILIES[name].inputs(torch.float64)
    monkeypatch.setattr("hf_graphfilter.ops.polynomial_form.FEWEST_ENTRIES", 1)
    with monkeypatch.context() as separately:
        separately.setattr(BaseAttention, "_is_unread_eager", lambda self: False)
        expected, separate = gradients_of(model, inputs), len(calls)
    calls.clear()
    found = gradients_of(model, inputs)
    assert separate >= 1
    assert len(calls) in ({0} if name in TEXTBOOK else {0, separate})
    assert found.keys() == expected.keys()
    for parameter, grad in found.items():  # what is in float32 is so in both
        torch.testing.assert_close(grad, expected[parameter], atol=1e-9, rtol=1e-7, msg=parameter)
    asked = model(**inputs, output_attentions=True)
    assert all(isinstance(x, torch.Tensor) for name, xs in asked.items() if "attentions" in name for x in xs)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_eager_attention_whose_weights_are_read_is_formed_once_if_nothing_is_dropped(dropout, calls):
    """The gradients are those of SDPA, which is called for each application."""
    family, grads = FAMILIES["bert"], {}
    for backend in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = family.build(num_hidden_layers=2, attention_probs_dropout_prob=dropout, hidden_dropout_prob=0.0)
        model.set_attn_implementation(backend)
        model = turn_on(patch_model(model, "gfsa", K=3)).double().train()
        for layer in model.encoder.layer:
            layer.attention.self.register_forward_hook(lambda *_: None)  # might read them
        calls.clear()
        grads[backend] = gradients_of(model, family.inputs())
    assert len(calls) == (2 if dropout == 0 else 4)
    if not dropout:
        assert grads["sdpa"].keys() == grads["eager"].keys()
        for name, grad in grads["eager"].items():
            torch.testing.assert_close(grad, grads["sdpa"][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("reader", ["hook", "output_attentions", "evaluation", "own function"])
def test_eager_attention_gives_its_weights_to_who_reads_them(reader, monkeypatch, calls):
    monkeypatch.setattr("hf_graphfilter.ops.polynomial_form.FEWEST_ENTRIES", 1)
    model, inputs, seen = eager_model("bert", num_hidden_layers=2), FAMILIES["bert"].inputs(), []
    if reader == "hook":
        model.encoder.layer[0].attention.self.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    elif reader == "evaluation":
        model.eval()
    elif reader == "own function":
        eager = modeling_bert.eager_attention_forward
        monkeypatch.setattr(modeling_bert, "eager_attention_forward", lambda *args, **kw: eager(*args, **kw))
    options = {"output_attentions": True} if reader == "output_attentions" else {}
    seen += model(**inputs, **options).attentions or []
    assert len(calls) == {"hook": 1}.get(reader, 2)
    assert all(weights.sum(-1).float().allclose(torch.ones(())) for weights in seen)
    assert len(seen) == {"hook": 1, "output_attentions": 2}.get(reader, 0)


def test_dropout_of_eager_attention_in_training_is_drawn_for_each_application(calls):
    """The mean over many masks is the result without dropout."""
    torch.manual_seed(0)
    model = eager_model("bert", num_hidden_layers=2)
    attention, hidden = model.encoder.layer[0].attention.self, torch.randn(4, 8, 32, dtype=torch.float64)
    expected = attention(hidden)[0]
    assert calls
    calls.clear()
    attention.dropout.p = 0.3
    with torch.no_grad():
        found = torch.stack([attention(hidden)[0] for _ in range(3000)])
    assert not calls
    assert (found.mean(0) - expected).abs().max() < 5 * (found.std(0) / 3000**0.5).max()


@pytest.mark.parametrize("causal", [False, True])
def test_gfsa_of_no_token(causal):
    nothing = torch.randn(1, 2, 0, 4)
    assert gfsa(nothing, nothing, nothing, 0.0, 1.0, 0.1, 3, causal=causal).shape == (1, 2, 0, 4)


def test_flash_attention_is_asked_for_by_its_own_name(monkeypatch):
    from transformers.integrations import flash_attention

    asked = []

    def flash(query, key, value, mask, softmax_scale, attn_implementation, **_):
        asked.append(attn_implementation)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale).transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash)
    model, ids = FAMILIES["bert"].build().eval(), torch.arange(8)[None]
    expected = model(input_ids=ids).last_hidden_state
    patch_model(model, "gfsa").config._attn_implementation_internal = "flash_attention_2"  # where that is installed
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected)
    assert set(asked) == {"flash_attention_2"}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_keys_that_a_module_selects_stay_selected(backend):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "q_lora_rank": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
    config = DeepseekV32Config(**sizes, first_k_dense_replace=1, attn_implementation=backend)
    torch.manual_seed(0)
    model, ids = DeepseekV32Model(config).eval(), torch.arange(16)[None]
    before = model(ids, use_cache=False).last_hidden_state
    assert torch.equal(patch_model(model, "gfsa")(ids, use_cache=False).last_hidden_state, before)
