"""AGF: polynomials, kernels and pure functions against the definition; decoding; what is refused."""

import itertools

import pytest
import torch
from models import FAMILIES, TOKENS, output, turn_on
from oracle import expansion, spectral_matrix
from scipy import special
from torch.autograd import gradcheck
from transformers import DynamicCache, MistralConfig, MistralModel

from hf_graphfilter import (
    AGFConfig,
    GraphFilterError,
    collect_penalties,
    filter_parameters,
    filter_status,
    patch_model,
    set_blend,
    unpatch_model,
)
from hf_graphfilter.analysis.branches import switch_off
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.functional import agf, gfsa, orthogonality_loss
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.ops import spectral
from hf_graphfilter.ops.nearby import attend_few, attend_nearby
from hf_graphfilter.ops.polynomials import expand, polynomials, recurrence
from hf_graphfilter.ops.visibility import visibility

B, H, N, D, DV = 2, 3, 11, 6, 5
PARAMETERS = [("jacobi", a, b) for a, b in ((2.0, -1.0), (1.5, 2.0), (2.0, -1.5), (1.0, 0.0), (1.0, 1.0))]
BASES = [*PARAMETERS, ("chebyshev", 1.0, 1.0), ("legendre", 1.0, 1.0), ("monomial", 1.0, 1.0)]
bases = pytest.mark.parametrize(("basis", "a", "b"), BASES)


def projections(n=N, dtype=torch.float64, grad=False, scale=1.0):
    u, sigma, v = (torch.randn(B, H, n, D, dtype=dtype) * scale for _ in range(3))
    value = torch.randn(B, H, n, DV, dtype=dtype)
    return [x.requires_grad_(grad) for x in (u, sigma, v, value)]


def allowed(n, causal, mask=None):
    seen = torch.ones(B, 1, n, n, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    return seen if mask is None else seen & mask[:, None, None]


def definition(u, sigma, v, value, theta, config, seen):
    return spectral_matrix(u, sigma, v, theta, config, seen.expand(B, H, -1, -1)) @ value


# -------------------------------------------------------------------------------------------------- polynomials


@bases
@pytest.mark.parametrize("K", [0, 1, 2, 5, 10])
def test_polynomials_against_scipy(basis, a, b, K):
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    functions = {
        "jacobi": lambda k: special.eval_jacobi(k, a, b, x.numpy()),
        "chebyshev": lambda k: special.eval_chebyt(k, x.numpy()),
        "legendre": lambda k: special.eval_legendre(k, x.numpy()),
        "monomial": lambda k: x.numpy() ** k,
    }
    found = list(polynomials(x, recurrence(basis, K, a, b)))
    assert len(found) == K + 1
    for k, t in enumerate(found):
        torch.testing.assert_close(t, torch.as_tensor(functions[basis](k)), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("a", "b", "K", "message"),
    [
        (1.0, -3.0, 3, r"no step k=2 for a=1, b=-3: its denominator k \+ a \+ b is zero"),
        (0.5, -2.5, 2, r"no step k=2 for a=0.5, b=-2.5: its denominator k \+ a \+ b is zero"),
        (-1.0, -1.0, 2, r"k=2 for a=-1, b=-1: its denominator k \+ a \+ b is zero"),
        (1.0, -5.0, 4, r"no step k=3 for a=1, b=-5: its denominator 2k \+ a \+ b - 2 is zero"),
    ],
)
def test_vanishing_denominators_are_named(a, b, K, message):
    with pytest.raises(GraphFilterError, match=message):
        recurrence("jacobi", K, a, b)
    with pytest.raises(GraphFilterError, match=r"AGFConfig: .*" + message):
        AGFConfig(K=K, a=a, b=b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": -1}, "K must be >= 0, got -1"),
        ({"basis": "fourier"}, "basis must be one of 'jacobi', 'chebyshev', 'legendre', 'monomial', got 'fourier'"),
        ({"gamma": -0.1}, "gamma must be >= 0"),
        ({"window": -2}, "window must be >= 0"),
        ({"init": "transfer"}, "init must be one of 'copy', 'blend'"),
        ({"a": float("nan")}, "a must be finite"),
        ({"a": 1e200}, "a must be in the range of float32"),
        ({"a": 3e38}, r"Jacobi polynomials up to K=3 for a=3e\+38, b=1 leave the range of float32 on \[0, 1\]"),
        ({"a": 1000, "K": 1000}, "leave the range of float32"),
        ({"K": 10**7}, "K must be at most 1000"),
        ({"window": 10**30}, "window must be at most 1000000"),
        ({"window": 4, "sinks": -1}, "sinks must be between 0 and 1000, got -1"),
        ({"sinks": 4}, "sinks need a window: give window= too"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(GraphFilterError, match=message):
        AGFConfig(**options)
    with pytest.raises(GraphFilterError, match="unknown basis 'fourier'"):
        recurrence("fourier", 2)
    with pytest.raises(GraphFilterError, match="K must be an integer >= 0"):
        recurrence("jacobi", -1)


# ------------------------------------------------------------------------------------------------- the definition


@bases
@pytest.mark.parametrize("K", [0, 3, 10])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_definition(basis, a, b, K, causal):
    config = AGFConfig(K=K, basis=basis, a=a, b=b)
    inputs, theta = projections(), torch.randn(H, K + 1, dtype=torch.float64)
    expected = definition(*inputs, theta, config, allowed(N, causal))
    found = agf(*inputs, theta, basis=basis, a=a, b=b, causal=causal)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)
    shared = agf(*inputs, theta[0], basis=basis, a=a, b=b, causal=causal)
    torch.testing.assert_close(shared, agf(*inputs, theta[:1].expand(H, -1), basis=basis, a=a, b=b, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1 << 4, 1 << 18])
def test_gradients_at_every_block_size(causal, block, monkeypatch):
    monkeypatch.setattr(spectral.blocks, "BLOCK", block)
    monkeypatch.setattr(spectral.causal, "CHUNK", 4)
    inputs = projections(grad=True)
    theta = torch.randn(H, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, :5] = mask[1, -2:] = False
    for keys in (None, mask):
        assert gradcheck(lambda *x, keys=keys: agf(*x, mask=keys, causal=causal), (*inputs, theta), fast_mode=True)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("tokens", [1, N])
@pytest.mark.parametrize("block", [1 << 4, 1 << 18])
def test_gradients_from_and_to_the_past(block, tokens, stable, monkeypatch):
    """Through the state that a pass begins with and the one that it leaves, as training in pieces has it."""
    monkeypatch.setattr(spectral.blocks, "BLOCK", block)
    monkeypatch.setattr(spectral.causal, "CHUNK", 4)
    monkeypatch.setattr(spectral.causal, "_underflows", lambda v, keys: stable)
    inputs = [x[:, :, :tokens].detach().requires_grad_() for x in projections()]
    past = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((B, H, D), (B, H, D, DV))]
    theta, steps = torch.randn(H, 3, dtype=torch.float64, requires_grad=True), recurrence("jacobi", 2)

    def filtered(u, sigma, v, value, theta, *state):
        left = spectral.Left(u, sigma, theta, steps)
        out, after = spectral.filter_causal(left, v, value, None, spectral.CausalState(*state))
        return out, *after

    assert gradcheck(filtered, (*inputs, theta, *past), fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_are_refused(causal):
    inputs = projections(grad=True)
    (gradient,) = torch.autograd.grad(
        agf(*inputs, torch.ones(2), causal=causal).square().sum(), inputs[2], create_graph=True
    )
    with pytest.raises(GraphFilterError, match="this filter has first derivatives only"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varied", range(5))
def test_vmap_over_any_of_the_inputs(varied, causal):
    inputs = [*projections(), torch.randn(3, dtype=torch.float64)]
    members = torch.stack([inputs[varied], -inputs[varied]])

    def filtered(member):
        return agf(*inputs[:varied], member, *inputs[varied + 1 :], causal=causal)

    expected = torch.stack([filtered(member) for member in members])
    torch.testing.assert_close(torch.func.vmap(filtered)(members), expected)
    gradient = torch.func.grad(lambda x: torch.func.vmap(filtered)(x).square().sum())(members)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: sum(filtered(m).square().sum() for m in x))(members))
    by_member = torch.func.vmap(torch.func.grad(lambda x: filtered(x).square().sum()))(members)
    torch.testing.assert_close(by_member, gradient)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_tokens_have_no_influence(causal, side):
    inputs, theta = projections(grad=True), torch.randn(3, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[:, :4] = side == "right"
    mask[:, -4:] = side == "left"
    kept = slice(4, None) if side == "left" else slice(None, -4)
    expected = agf(*(x[:, :, kept] for x in inputs), theta, causal=causal)
    found = agf(*inputs, theta, mask=mask, causal=causal)[:, :, kept]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    for gradient in torch.autograd.grad(found.square().sum(), inputs):
        hidden = gradient[:, :, :4] if side == "left" else gradient[:, :, -4:]
        assert not hidden.any()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_without_any_token_gives_zeros(causal, dtype):
    inputs = projections(dtype=dtype, grad=True)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1] = False
    found = agf(*inputs, torch.tensor([1.0, 0.2]), mask=mask, causal=causal)
    assert not found[1].any()
    assert found[0].any()
    found.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_model_survives_a_row_of_padding(name):
    family = FAMILIES[name]
    model, inputs = turn_on(patch_model(family.build().double(), "agf", window=2, correction=True)), family.inputs()
    whole = output(model, inputs)
    inputs["attention_mask"][1] = 0
    found = output(model, inputs)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], whole[0], atol=1e-9, rtol=1e-9)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 80.0])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
def test_causal_form_is_stable(dtype, scale, n):
    # the result is rounded to its dtype; before, in float32, rounded logits of this scale are exponentiated
    tolerance = 4 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps * (1 + scale)
    u, sigma, v, value = projections(n)
    v = (2 * torch.rand(v.shape, dtype=v.dtype) - 1) * scale
    inputs, theta = [x.to(dtype) for x in (u, sigma, v, value)], torch.tensor([1.0, 0.3, -0.2])
    inputs = [x.requires_grad_() for x in inputs]
    found = agf(*inputs, theta, causal=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = definition(*exact, theta.double(), AGFConfig(K=2), allowed(n, True)) if n < 300 else None
    if expected is None:
        expected = agf(*exact, theta.double(), causal=True)  # equal to the definition at the other lengths
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (found.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(inputs, exact, strict=True):
        if y.grad is not None:
            allowance = tolerance * (1 + y.grad.abs().max().item())
            torch.testing.assert_close(x.grad.double(), y.grad, atol=allowance, rtol=tolerance)


@pytest.mark.parametrize("scale", [1.0, 80.0])
def test_state_carries_the_past(scale):
    u, sigma, v, value = projections(150, torch.float32, scale=scale)
    theta, steps = torch.tensor([1.0, 0.1]), recurrence("jacobi", 1)

    def filtered(start, stop, state=None):
        left = spectral.Left(u[:, :, start:stop], sigma[:, :, start:stop], theta, steps)
        return spectral.filter_causal(left, v[:, :, start:stop], value[:, :, start:stop], None, state)

    whole, end = filtered(0, 150)
    state, parts = None, []
    for start, stop in ((0, 64), (64, 70), (70, 71), (71, 150)):
        out, state = filtered(start, stop, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-4 * scale, rtol=1e-4)
    torch.testing.assert_close(state.mean, end.mean, atol=1e-4, rtol=1e-4)
    assert state.mass.shape == (B, H, D)
    assert state.mean.shape == (B, H, D, DV)


def test_the_slow_form_is_for_steep_logits_only():
    v = torch.zeros(1, 1, 200, 2)
    v[..., 100, 0] = 60.0
    assert not spectral.causal._underflows(v, None)
    v[..., 100, 0] = 80.0
    assert spectral.causal._underflows(v, None)
    keys = torch.ones(1, 200, dtype=torch.bool)
    keys[:, 100] = False
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden, _ = spectral.blocks.hide(v.to(dtype), v.to(dtype), keys)
        assert not spectral.causal._underflows(hidden, keys)


def test_half_precision_takes_its_softmax_in_float32():
    inputs, theta = projections(400, torch.float32), torch.tensor([1.0, 0.1])
    exact = agf(*inputs, theta)
    half = agf(*(x.bfloat16() for x in inputs), theta)
    rounded = agf(*(x.bfloat16().float() for x in inputs), theta)  # only the inputs are rounded
    assert half.dtype == torch.bfloat16
    assert (half.float() - rounded).norm() < 0.01 * rounded.norm()
    assert (half.float() - exact).norm() < 0.05 * exact.norm()


def test_memory_is_linear_in_tokens():
    largest = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    self.largest = max(self.largest, t.numel())
            return out

    for causal in (False, True):
        for n in (512, 2048):
            inputs, watch = [torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(4)], Watch()
            watch.largest = 0
            with watch:
                agf(*inputs, torch.tensor([1.0, 0.1]), causal=causal).sum().backward()
            largest[causal, n] = watch.largest
        assert largest[causal, 2048] <= 4 * largest[causal, 512]
        assert largest[causal, 2048] <= 8 * inputs[0].numel()


# ------------------------------------------------------------------------------------------------- pure functions


def test_functional_gfsa_is_equation_5():
    q, k, v = torch.randn(3, B, H, N, D, dtype=torch.float64)
    w_0, w_1, w_K = torch.randn(3, H, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, -3:] = False
    for causal, keys in ((False, None), (True, None), (False, mask), (True, mask)):
        scores = (q @ k.mT * D**-0.5).masked_fill(~allowed(N, causal, keys), -torch.inf)
        A, eye = scores.softmax(-1), torch.eye(N, dtype=torch.float64)
        c = [x.view(-1, 1, 1) for x in (w_0, w_1, w_K)]
        expected = (c[0] * eye + c[1] * A + c[2] * (A + 3 * (A @ A - A))) @ v
        found = gfsa(q, k, v, w_0, w_1, w_K, 4, causal=causal, mask=keys)
        torch.testing.assert_close(found, expected)
    exact = gfsa(q, k, v, 0.1, 1.0, 0.25, 3, approximation="none")
    A = (q @ k.mT * D**-0.5).softmax(-1)
    torch.testing.assert_close(exact, 0.1 * v + A @ v + 0.25 * (A @ A @ A @ v))
    grouped = gfsa(q[:, :2], k[:, :1], v[:, :1], 0.1, 1.0, 0.2, 3)
    repeated = gfsa(q[:, :2], k[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1, -1), 0.1, 1.0, 0.2, 3)
    torch.testing.assert_close(grouped, repeated)


@pytest.mark.parametrize("norm", ["mean_abs", "frobenius"])
def test_orthogonality_loss_is_equation_11(norm):
    u, _, v, _ = projections(grad=True)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, -3:] = False
    expected = []
    for row, n in ((0, N), (1, N - 3)):
        for x in (u[row, :, :n].softmax(-1), v[row, :, :n].softmax(-2)):
            deviation = x.mT @ x - torch.eye(D, dtype=x.dtype)
            per_head = deviation.abs().mean((1, 2)) if norm == "mean_abs" else deviation.norm(dim=(1, 2)) / n**2
            expected.append(per_head.mean())
    found = orthogonality_loss(u, v, mask, norm=norm)
    torch.testing.assert_close(found, 2 * torch.stack(expected).mean())
    wanted = torch.autograd.grad(2 * torch.stack(expected).mean(), (u, v))
    for gradient, other in zip(torch.autograd.grad(found, (u, v)), wanted, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: agf(t, t[:, :, :3], t, t, torch.ones(2)), r"got u \(2, 3, 4, 5\), sigma \(2, 3, 3, 5\)"),
        (
            lambda t: agf(t, t, t, t, torch.ones(2, 3)),
            r"theta is \(K\+1,\) or \(heads, K\+1\) with 3 heads, got \(2, 3\)",
        ),
        (lambda t: agf(t, t, t, t, torch.ones(2), mask=torch.ones(2, 9)), r"mask is \(batch, tokens\), here \(2, 4\)"),
        (lambda t: agf(t, t, t, t, torch.ones(2), mask=torch.zeros(2, 4)), "mask .* is bool, .* got torch.float32"),
        (
            lambda t: agf(t, t, t.long(), t, torch.ones(2)),
            "agf: v must be real .* numbers, got torch.int64",
        ),
        (lambda t: agf(t, t, t.double(), t, torch.ones(2)), "all float64 or none of them is, .* torch.float64 and"),
        (lambda t: agf(t, t, t, t, torch.ones(3), a=1.0, b=-3.0), "a=1, b=-3: its denominator"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 0), "K must be an integer >= 1"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 2.5), r"K must be an integer >= 1, got 2\.5"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 2, approximation="exact"), "'taylor' or 'none', got 'exact'"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 2, mask=torch.ones(4, 4).bool()), r"mask\[None, None\] has; got \(4, 4\)"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 2, mask=torch.ones(1, 2, 4, 4).bool()), r"got \(1, 2, 4, 4\)"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 2, mask=torch.zeros(2, 4)), "is bool, .* got torch.float32"),
        (lambda t: gfsa(t, t, t, 0, 1, 0, 2, mask=torch.ones(1, 1, 4, 4).long()), "of queries by keys is bool or"),
        (lambda t: gfsa(t, t[:, :, :2], t[:, :, :2], 0, 1, 0, 2), "A must be square"),
        (lambda t: gfsa(t, t, t, 0, 1, torch.ones(2), 2), r"w_K is a number or a tensor \(3,\), got shape \(2,\)"),
        (lambda t: orthogonality_loss(t, t, norm="l2"), "norm='l2': use 'mean_abs', 'frobenius' or 'off_diagonal'"),
        (
            lambda t: orthogonality_loss(t, t, rho="Sigmoid"),
            "rho='Sigmoid': use 'softmax', 'sigmoid', 'tanh' or 'none'",
        ),
        (lambda t: orthogonality_loss(t, t[0]), r"got \(2, 3, 4, 5\), \(3, 4, 5\)"),
    ],
)
def test_functions_name_what_they_got(call, message):
    with pytest.raises(GraphFilterError, match=message):
        call(torch.randn(2, 3, 4, 5))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "window"), [(7, 2), (50, 5), (100, 40), (33, 60)])
def test_window(causal, n, window):
    q, k, v = torch.randn(3, B, H, n, D, dtype=torch.float64)
    keys = torch.ones(B, n, dtype=torch.bool)
    keys[1, n // 2 :] = False
    t = torch.arange(n)
    near = allowed(n, causal, keys) & ((t[:, None] - t).abs() <= window)
    scores = (q @ k.mT * 0.3).masked_fill(~near, -torch.inf)
    out, mass = attend_nearby(q, k, v, window, 0.3, causal, keys)
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num() @ v)
    seen = near.any(-1, keepdim=True).expand_as(mass)
    torch.testing.assert_close(mass[seen], scores.logsumexp(-1, keepdim=True)[seen])


def penalties_of(model, inputs):
    if not dict(filters_of(model)).popitem()[1].config.penalties:
        return []
    with collect_penalties(model.train()) as penalties:
        model(**inputs)
    return penalties.losses().values()


@pytest.mark.parametrize("name", ["agf", "hedgehog", "singularformer", "kernelution"])
def test_a_mask_for_all_texts(name, monkeypatch):
    """Of batch size 1, over texts that are more than a block of numbers."""
    monkeypatch.setattr(spectral.blocks, "BLOCK", 64)
    model, inputs = patch_model(FAMILIES["bert"].build(), name), FAMILIES["bert"].inputs(batch=3)
    inputs["attention_mask"][:, -2:] = 0
    expected = output(model, inputs)[:, :-2]
    whole = inputs["attention_mask"].bool()[:1, None, None].expand(1, 1, TOKENS, TOKENS)
    found = output(model, {**inputs, "attention_mask": whole})[:, :-2]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for loss in penalties_of(model, {**inputs, "attention_mask": whole}):
        assert loss.isfinite()


def test_a_gate_of_zero_hides_what_half_precision_cannot_hold():
    """Without a softmax, the output of the filter grows with the tokens and with the square of the projections."""
    model, ids = FAMILIES["bert"].build(), torch.randint(0, 50, (1, 64))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(40 if name.endswith(("query.weight", "key.weight", "value.weight")) else 1)
    expected = model.half()(ids).last_hidden_state
    assert expected.isfinite().all()
    assert torch.equal(patch_model(model, "agf", rho="none", init="blend")(ids).last_hidden_state, expected)


def test_scores_that_half_precision_cannot_hold_before_they_are_scaled():
    """q k of 40 x 40 x 64 is above 65,504, what float16 ends at; scaled it is an eighth."""
    q, k, v = torch.full((1, 1, 6, 64), 40.0), torch.full((1, 1, 6, 64), 40.0), torch.randn(1, 1, 6, 64)
    keys = torch.ones(1, 6, dtype=torch.bool)
    for causal in (False, True):
        wide = attend_nearby(q, k, v, 2, 64**-0.5, causal, keys)[0]
        half = attend_nearby(q.half(), k.half(), v.half(), 2, 64**-0.5, causal, keys)[0]
        torch.testing.assert_close(half.float(), wide, rtol=2e-3, atol=2e-3)
        assert attend_few(q.half(), k.half(), v.half(), 64**-0.5, keys[:, None])[0].isfinite().all()


@pytest.mark.parametrize(("n", "window", "causal"), [(3, 5, False), (70, 4, False), (70, 4, True), (100, 40, False)])
def test_a_bias_is_added_in_the_window(n, window, causal):
    q, k, v = torch.randn(3, B, H, n, D, dtype=torch.float64)
    bias = torch.randn(1, H, n, n, dtype=torch.float64, requires_grad=True)
    keys = torch.ones(B, n, dtype=torch.bool)
    keys[1, n // 2 :] = False
    t = torch.arange(n)
    near = allowed(n, causal, keys) & ((t[:, None] - t).abs() <= window)
    scores = (q @ k.mT * 0.3 + bias).masked_fill(~near, -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    out, mass = attend_nearby(q, k, v, window, 0.3, causal, keys, bias)
    torch.testing.assert_close(out, expected)
    seen = near.any(-1, keepdim=True).expand_as(mass)
    torch.testing.assert_close(mass[seen], scores.logsumexp(-1, keepdim=True)[seen])
    torch.testing.assert_close(*(torch.autograd.grad(x[:1].sum(), bias)[0] for x in (out, expected)))
    if causal:
        last = attend_nearby(q[:, :, -1:], k, v, window, 0.3, True, keys, bias[:, :, -1:])[0]
        torch.testing.assert_close(last, out[:, :, -1:])


@pytest.mark.parametrize(("window", "sinks"), [(14, 0), (3, 10)])
def test_the_bias_of_positions_in_the_window(window, sinks):
    """Window and sinks that see all of a text are the original's attention, padding included."""
    model = FAMILIES["t5"].build().double()
    ids = torch.randint(5, 99, (2, 10))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    encoder = model.get_encoder()
    expected = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    options = {"window": window, "sinks": sinks, "stack": "encoder"}
    patch_model(model, "agf", position_bias="window", **options)
    modules = [f for _, f in filters_of(model)]
    with switch_off("far", modules):
        found = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    is_present = mask.bool()
    torch.testing.assert_close(found[is_present], expected[is_present])
    patch_model(unpatch_model(model), "agf", position_bias="drop", **options)
    with switch_off("far", [f for _, f in filters_of(model)]):
        found = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    assert not torch.allclose(found[is_present], expected[is_present])


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize(("window", "sinks"), [(16, 0), (2, 16), (5, 12)])
def test_texts_that_window_and_sinks_span_have_the_original_attention(name, window, sinks):
    model = FAMILIES[name].build().double()
    ids, mask = torch.randint(5, 99, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    expected = output(model, inputs)
    turn_on(patch_model(model, "agf", window=window, sinks=sinks, far="beyond"))
    found = output(model, inputs)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
    if window >= len(ids[0]) - 1:
        assert torch.equal(found[mask.bool()], expected[mask.bool()]), "by the model's own call"
    turn_on(patch_model(unpatch_model(model), "agf", window=window, sinks=sinks))
    again = output(model, inputs)
    assert not torch.allclose(again[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_within_the_window_all_gradients_are_those_of_the_original(name):
    """Those of the filter are zero, and there: DistributedDataParallel waits for them."""
    dropout = ("dropout_rate",) if name == "t5" else ("attention_probs_dropout_prob", "hidden_dropout_prob")
    model = FAMILIES[name].build(**dict.fromkeys(dropout, 0.3)).double().train()
    options = {"stack": "encoder", "position_bias": "window"} if name == "t5" else {}
    inputs = FAMILIES[name].inputs()
    gradients = []
    for patched in (False, True):
        if patched:
            turn_on(patch_model(model, "agf", window=64, far="beyond", **options))
        torch.manual_seed(0)  # for dropout
        model(**inputs)[0].square().sum().backward()
        own = {id(p) for p in filter_parameters(model)}
        trained = [(n, p.grad.clone()) for n, p in model.named_parameters() if id(p) not in own and p.grad is not None]
        gradients.append(dict(trained))
        filter_gradients = [p.grad.clone() for p in filter_parameters(model)] if patched else []
        model.zero_grad(set_to_none=False)
    assert filter_gradients
    assert not any(grad.any() for grad in filter_gradients)
    assert gradients[0].keys() == gradients[1].keys()
    for name, grad in gradients[0].items():
        assert torch.equal(gradients[1][name], grad), name


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("t5", {"window": 2}, "keeps no bias for the tokens of a cache.*stack="),
        ("t5", {"stack": "encoder"}, "position_bias='window' needs a window"),
        ("beit", {"window": 2}, "has the bias within its mask or scores.*position_bias='drop'"),
    ],
)
def test_windows_that_cannot_have_the_bias_of_positions(family, options, message):
    model = FAMILIES[family].build()
    with pytest.raises(GraphFilterError, match=message):
        patch_model(model, "agf", position_bias="window", **options)
    assert not filter_status(model)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "past"), [(6, 0), (40, 0), (1, 6), (1, 0), (5, 50)])
def test_a_window_beyond_the_tokens_costs_no_more_than_they(causal, tokens, past):
    n = tokens + past
    q, k, v = torch.randn(3, B, H, n, D, dtype=torch.float64)
    keys = torch.ones(B, n, dtype=torch.bool)
    keys[1, : n // 2] = False
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max(largest, out.numel()) if isinstance(out, torch.Tensor) else largest
            return out

    with Watch():
        found = attend_nearby(q[:, :, past:], k, v, 2048, 0.3, causal, keys)
    expected = attend_nearby(q[:, :, past:], k, v, n, 0.3, causal, keys)
    near = allowed(n, causal, keys)[:, :, past:]
    scores = (q[:, :, past:] @ k.mT * 0.3).masked_fill(~near, -torch.inf)
    torch.testing.assert_close(found[0], scores.softmax(-1).nan_to_num() @ v)
    torch.testing.assert_close(found, expected)
    block = max(32, tokens)
    assert largest <= B * H * block * max(D, block + 2 * n)


# ---------------------------------------------------------------------------------------------------------- masks


def test_visibility():
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, :2] = False
    square = padding[:, None, None, :].expand(2, 1, 6, 6)
    earlier = torch.ones(6, 6, dtype=torch.bool).tril()

    def additive(m):
        return torch.zeros(m.shape).masked_fill(~m, torch.finfo(torch.float32).min)

    assert visibility(None, True, 6) == (True, None)
    for mask, causal in ((square, False), (square & earlier, True)):
        for form in (mask, additive(mask)):
            found, keys = visibility(form, not causal, 6)
            assert found is causal
            assert torch.equal(keys, padding)
    assert visibility(torch.ones(1, 1, 6, 6, dtype=torch.bool), True, 6) == (False, None)
    assert visibility((earlier & torch.ones(1, 1, 6, 6, dtype=torch.bool))[:, :, 4:], False, 2) == (True, None)
    assert torch.equal(visibility(padding.long(), True, 6)[1], padding)
    single = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    single[..., 0] = True  # one token and padding: every query sees the same, causal or not
    for causal in (True, False):
        assert visibility(single, causal, 6)[0] is causal
    mask = square.clone()
    visibility(mask, False, 6)
    mask[0, :, :, 3] = False  # the same tensor, changed in place
    assert not visibility(mask, False, 6)[1][0, 3]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.ones(1, 1, 6, 6, dtype=torch.bool).tril().triu(-2),
            r"shape \(1, 1, 6, 6\) is neither padding nor causal",
        ),
        (torch.randn(1, 2, 6, 6), "carries a bias"),
        ("block", "a str cannot be read"),
    ],
)
def test_other_masks_are_refused(mask, message):
    with pytest.raises(GraphFilterError, match=message):
        visibility(mask, False, 6)


def test_modules_that_agf_cannot_honour_are_refused():
    model = FAMILIES["t5"].build()
    with pytest.raises(GraphFilterError, match=r"adds a learned bias of positions.*position_bias='drop'"):
        patch_model(model, "agf")
    assert not filter_status(model)
    config = MistralConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8, sliding_window=4
    )
    with pytest.raises(GraphFilterError, match="sliding window of 4 tokens, but AGF sees all"):
        patch_model(MistralModel(config), "agf")


def test_parameters_are_where_the_issue_puts_them():
    model = patch_model(FAMILIES["bert"].build(), "agf", K=3)
    names = {n.split("graph_filter.")[1]: tuple(p.shape) for n, p in model.named_parameters() if "graph_filter" in n}
    assert names == {"theta": (3,), "sigma.weight": (32, 32)}
    assert list(filter_status(model)[0].coefficients.items()) == [
        ("theta_0", torch.ones(1)),
        *((f"theta_{k}", torch.zeros(1)) for k in (1, 2, 3)),
    ]
    assert filter_status(model)[0].trained == {"theta_1", "theta_2", "theta_3"}, "theta_0 is 1 always"
    heads = patch_model(FAMILIES["bert"].build(), "agf", K=0, theta="per_head", constrain_theta=False)
    names = {n.split("graph_filter.")[1]: tuple(p.shape) for n, p in heads.named_parameters() if "graph_filter" in n}
    assert names == {"theta": (4, 1)}


# -------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("gpt2", marks=pytest.mark.feature("Generation: state of constant size", filter="agf"))],
)
def test_the_state_has_constant_size(family):
    """In memory too: a slice of the keys keeps all of them."""
    model, cache = patch_model(FAMILIES[family].build(), "agf", window=2, sinks=2), DynamicCache()
    sizes = []
    for tokens in (3, 1, 20, 1):
        model(torch.randint(5, 99, (2, tokens)), **{CACHE: cache})
        layer = cache.layers[0]
        kept = {
            t.untyped_storage().data_ptr(): t.untyped_storage()
            for t in (*layer.kept.values(), layer.keys, layer.values)
        }
        sizes.append(sum(storage.nbytes() for storage in kept.values()))
    assert len(set(sizes)) == 1
    assert cache.get_seq_length() == 25


@pytest.mark.parametrize("far", ["all", "beyond"])
def test_sinks_are_the_first_tokens_that_are_there(far):
    """Also where they come one by one, and after padding."""
    model = turn_on(patch_model(FAMILIES["llama"].build().double(), "agf", window=2, sinks=3, far=far))
    ids = torch.randint(5, 99, (3, 14))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :7] = 0, 0
    places = (mask.cumsum(1) - 1).clamp(min=0)

    def run(ids, part=slice(None), **cache):
        inputs = {"attention_mask": mask[:, : part.stop], "position_ids": places[:, part]}
        return model(ids[:, part], **inputs, **cache).last_hidden_state

    whole = run(ids, use_cache=False)
    for ends in ([*range(15)], [0, 2, 3, 11, 14]):
        cache = DynamicCache()
        found = torch.cat([run(ids, slice(*p), **{CACHE: cache}) for p in itertools.pairwise(ends)], 1)
        assert torch.allclose(found[mask.bool()], whole[mask.bool()], atol=1e-9)
    ids[0, 0] += 1
    changed = run(ids, use_cache=False)
    assert not torch.equal(changed[0, -1], whole[0, -1]), "the first token is seen from far away"
    assert torch.equal(changed[1:], whole[1:])


def test_the_plain_model_does_not_take_a_cache_without_keys():
    model, ids = patch_model(FAMILIES["llama"].build(), "agf"), FAMILIES["llama"].inputs()["input_ids"]
    cache = model(ids[:, :5], use_cache=True)[CACHE]
    with pytest.raises(GraphFilterError, match="holds no keys and values for a module without it"):
        unpatch_model(model)(ids[:, 5:], **{CACHE: cache})


def test_some_layers_agf_and_some_gfsa_decode_together():
    family = FAMILIES["llama"]
    model = turn_on(patch_model(patch_model(family.build().double(), "agf", layers=[0]), "gfsa", layers=[2]))
    ids = family.inputs()["input_ids"]
    expected, cache = output(model, {"input_ids": ids}), DynamicCache()
    found = [model(ids[:, a:b], **{CACHE: cache}).last_hidden_state for a, b in ((0, 5), (5, 6), (6, 9))]
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=1e-9)


def test_expand_and_the_oracle_agree():
    x, theta = torch.rand(1, H, 4, D, dtype=torch.float64), torch.randn(H, 4, dtype=torch.float64)
    config = AGFConfig(K=3, a=1.5, b=-0.5)
    torch.testing.assert_close(expand(x, theta, recurrence("jacobi", 3, 1.5, -0.5)), expansion(x, theta, config))


def test_set_blend_refuses():
    model = FAMILIES["bert"].build()
    with pytest.raises(GraphFilterError, match="has no blended layer"):
        set_blend(patch_model(model, "agf"), 0.5)
    blended = patch_model(FAMILIES["bert"].build(), "agf", init="blend")
    with pytest.raises(GraphFilterError, match=r"between 0 and 1, got 1\.5"):
        set_blend(blended, 1.5)


@pytest.mark.parametrize("name", ["beit", "beit-shared", "swin"])
def test_a_bias_within_the_mask_is_refused_unless_it_is_to_be_dropped(name):
    family = FAMILIES[name]
    with pytest.raises(GraphFilterError, match=r"adds a learned bias of positions .* position_bias='drop'"):
        patch_model(family.build(), "agf")


def test_shifted_windows_are_named():
    model = patch_model(FAMILIES["swin"].build(), "agf", position_bias="drop", layers="odd")
    with pytest.raises(GraphFilterError, match=r"neither padding nor causal \(.*shifted windows.* layers="):
        model(**FAMILIES["swin"].inputs())


@pytest.mark.parametrize("spread", [1.0, 60.0, 300.0])
def test_running_mass(spread):
    v = torch.randn(2, 2, 40, 3, dtype=torch.float64).mul(spread / 8).requires_grad_()
    found, expected = spectral.running_mass(v), v.logcumsumexp(2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(x, v, weights)[0] for x in (found, expected)))


def test_threads_may_change_before_the_backward_pass(monkeypatch):
    """The blocks of a causal filter depend on their number, and so do the states that it saves."""
    u, sigma, v, value = (x.requires_grad_() for x in projections(300, torch.float64))
    theta, threads = torch.tensor([1.0, 0.3], dtype=torch.float64), torch.get_num_threads()
    weights = torch.randn_like(value)

    def differentiate(before, after):
        try:
            torch.set_num_threads(before)
            out = agf(u, sigma, v, value, theta, causal=True)
            torch.set_num_threads(after)
            return torch.autograd.grad(out, (u, sigma, v, value), weights)
        finally:
            torch.set_num_threads(threads)

    monkeypatch.setattr("hf_graphfilter.ops.spectral.blocks.BLOCK", 2**10)
    expected = differentiate(1, 1)
    for before, after in ((1, 2), (2, 1)):
        torch.testing.assert_close(differentiate(before, after), expected)


@pytest.mark.parametrize("keys", [None, torch.tensor([[False] * 3 + [True] * 17] * B)], ids=["all", "padded"])
def test_one_chunk_equals_the_scan(keys):
    u, sigma, v, value = (x.requires_grad_() for x in projections(20, torch.float64))
    theta = torch.tensor([1.0, 0.1], dtype=torch.float64).requires_grad_()
    left, inputs = spectral.Left(u, sigma, theta, recurrence("jacobi", 1)), (u, sigma, theta, v, value)
    (found, after), (expected, _) = (
        spectral.filter_causal(left, v, value, keys, needs_state=needs_state) for needs_state in (False, True)
    )
    assert after is None
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs, weights) for x in (found, expected)))
