"""Converter's mathematics: the unitary matrix against the product of its rotations, the filters, the damping."""

import math
from typing import get_args

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck
from torch.autograd.functional import hessian
from torch.func import grad, vmap

from hf_graphfilter import GraphFilterError
from hf_graphfilter.functional import Kernel, gibbs_damping, kernel_polynomial_loss, kernelution, synvolution, unitary
from hf_graphfilter.ops.givens import lower_factor

KERNELS = get_args(Kernel)
FACTORS = ("lower", "upper", "phase")


def angles(n, batch=2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = [
        2 * math.pi * torch.rand(*shape, generator=g, dtype=dtype) for shape in [(batch, 3, n - 1)] * 2 + [(batch, n)]
    ]
    return dict(zip(FACTORS, draw, strict=True))


def signal(n, features=3, heads=None, dtype=torch.complex128, batch=2):
    shape = (batch, n, features) if heads is None else (batch, heads, n, features)
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def givens(alpha, beta, gamma):
    """Eq. 6, from its printed second form."""
    return torch.tensor(
        [
            [
                torch.exp(-1j * (alpha + beta) / 2) * torch.cos(gamma / 2),
                -torch.exp(1j * (alpha - beta) / 2) * torch.sin(gamma / 2),
            ],
            [
                torch.exp(-1j * (alpha - beta) / 2) * torch.sin(gamma / 2),
                torch.exp(1j * (alpha + beta) / 2) * torch.cos(gamma / 2),
            ],
        ],
        dtype=torch.complex128,
    )


def hessenberg(angles, order):
    """The product of the rotations, the first of ``order`` leftmost; each is the identity but for two rows."""
    n = angles.shape[-1] + 1
    product = torch.eye(n, dtype=torch.complex128)
    for i in order:  # product @ G_i changes two columns
        product[:, i : i + 2] = product[:, i : i + 2] @ givens(*angles[:, i])
    return product


def phi(lower, upper, phase):
    """Eq. 7 for one sequence."""
    n = len(phase)
    down, up = hessenberg(lower, range(n - 2, -1, -1)), hessenberg(upper, range(n - 1))
    return torch.exp(1j * phase)[:, None] * (down @ up)


@pytest.mark.parametrize("n", [2, 3, 16, 37, 257, 1024])
def test_equals_the_product_of_givens_matrices(n):
    x, factors = signal(n, batch=1), angles(n, batch=1)
    matrix = phi(*(factors[name][0] for name in FACTORS))
    torch.testing.assert_close(unitary(x, **factors)[0], matrix @ x[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(unitary(x, **factors, inverse=True)[0], matrix.mH @ x[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 32, 33, 37, 257])
@pytest.mark.parametrize("special", [None, 0.0, math.pi, 2 * math.pi], ids=["random", "identity", "swap", "minus"])
def test_is_unitary_and_of_full_rank(n, special):
    factors = angles(n)
    if special is not None:
        factors["lower"][:, 2], factors["upper"][:, 2, ::2] = special, special
    identity = torch.eye(n, dtype=torch.complex128).expand(2, -1, -1)
    matrix = unitary(identity, **factors)
    assert (matrix @ matrix.mH - identity).abs().max() <= 1e-12
    assert torch.linalg.matrix_rank(matrix).tolist() == [n, n]
    assert (unitary(identity, **factors, inverse=True) - matrix.mH).abs().max() <= 1e-12
    assert (unitary(matrix, **factors, inverse=True) - identity).abs().max() <= 1e-12


def test_every_token_reaches_every_other():
    assert unitary(torch.eye(70, dtype=torch.float64)[None], **angles(70, 1)).abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradients(n, dtype):
    x, *factors = [t.requires_grad_() for t in (signal(n, 2, dtype=dtype), *angles(n).values())]
    for inverse in (False, True):
        assert gradcheck(lambda *t, inverse=inverse: unitary(*t, inverse=inverse), [x, *factors])
    eigenvalues = torch.rand(2, n, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *t: kernelution(*t, kernel="jackson"), [x, eigenvalues, w, *factors])


def test_gradients_by_example_and_no_second_ones():
    x, factors = signal(6, 2, dtype=torch.float64), [t[:2].contiguous() for t in angles(6).values()]

    def loss(x, *factors):
        return unitary(x[None], *(t[None] for t in factors)).real.square().sum()

    examples = [x, *factors]
    found = vmap(grad(loss, 1))(*examples)
    for i, gradient in enumerate(found):
        torch.testing.assert_close(gradient, grad(loss, 1)(*(t[i] for t in examples)))
    with pytest.raises(GraphFilterError, match="this filter has first derivatives only"):
        hessian(lambda f: loss(x[0], f, *(t[0] for t in factors[1:])), factors[0][0])


def test_gradients_across_blocks_and_where_a_rotation_is_none():
    n = 70
    factors = angles(n, batch=1)
    factors["lower"][:, 2, ::2] = 0.0
    factors["upper"][:, 2, ::3] = math.pi
    inputs = [t.requires_grad_() for t in (signal(n, 1, batch=1), *factors.values())]
    assert gradcheck(unitary, inputs, fast_mode=True)


def test_compiled():
    shapes = (2, 20, 4), (2, 20), (2, 3, 19), (2, 3, 19), (2, 20)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def loss(*tensors):
        z = synvolution(*tensors)
        return (z.real + 0.3 * z.imag).square().sum()

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*inputs), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(loss(*inputs), inputs))

    with torch.no_grad():  # another path through Dynamo
        torch.testing.assert_close(torch.compile(loss, backend="aot_eager")(*inputs), loss(*inputs))


def test_one_graph_for_lengths_of_more_than_a_block(monkeypatch):
    """Those of which all blocks are full among them."""
    monkeypatch.setattr("hf_graphfilter.ops.givens.BLOCK", 4)  # of which graphs are made in less time
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(lower_factor, backend=counter, dynamic=True)
    for n in (6, 4, 7, 11):
        rotations = angles(n)["lower"]
        torch.testing.assert_close(compiled(rotations), lower_factor(rotations))
    assert counter.frame_count == 1


def test_four_orders_are_the_fourier_transform_of_eight_points():
    """Proposition 2, without permutations: gradients find the angles. Two orders, ceil(n / 4), were not enough."""
    n, orders = 8, 4
    wanted = torch.fft.fft(torch.eye(n, dtype=torch.complex128), norm="ortho")
    factors = [angles(n, 1, seed=order) for order in range(orders)]
    parameters = [t.requires_grad_() for order in factors for t in order.values()]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=300, history_size=50, line_search_fn="strong_wolfe", tolerance_change=1e-16
    )

    def distance():
        x = torch.eye(n, dtype=torch.complex128)[None]
        for order in factors:
            x = unitary(x, **order)
        return (x[0] - wanted).abs().square().sum()

    def closure():
        optimizer.zero_grad()
        loss = distance()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert distance() <= 1e-10


def test_filters_equal_their_definitions():
    n, x = 37, signal(37)
    factors, eigenvalues = angles(n), torch.rand(2, n, dtype=torch.float64) * 2 - 1
    w = torch.randn(5, dtype=torch.float64)
    damping = 1 - torch.arange(5, dtype=torch.float64) / 5
    polynomial = sum(damping[k] * w[k] * torch.cos(k * eigenvalues.acos()) for k in range(5))
    filters = {
        eigenvalues: synvolution(x, eigenvalues, **factors),
        polynomial: kernelution(x, eigenvalues, w, **factors, kernel="fejer"),
    }
    for b in range(2):
        matrix = phi(*(factors[name][b] for name in FACTORS))
        for exponent, out in filters.items():
            expected = matrix.mH @ (torch.exp(1j * exponent[b])[:, None] * (matrix @ x[b]))
            torch.testing.assert_close(out[b], expected, atol=1e-12, rtol=0)


def test_the_phase_has_no_influence_on_a_filter():
    x, factors, eigenvalues = signal(9), angles(9), torch.rand(2, 9, dtype=torch.float64)
    out = synvolution(x, eigenvalues, **factors)
    phase = factors["phase"].add(1).requires_grad_()
    torch.testing.assert_close(synvolution(x, eigenvalues, **factors | {"phase": phase}), out)
    synvolution(x, eigenvalues, **factors | {"phase": phase}).real.sum().backward()
    assert not phase.grad.any()


@pytest.mark.parametrize("call", [unitary, lambda x, **f: synvolution(x, f["phase"], **f)], ids=["unitary", "filter"])
def test_heads_share_the_rotations(call):
    x, factors = signal(40, heads=3), angles(40)
    out = call(x, **factors)
    torch.testing.assert_close(out, torch.stack([call(head, **factors) for head in x.unbind(1)], 1))


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float32, torch.complex64),
        (torch.complex64, torch.complex64),
        (torch.bfloat16, torch.complex64),
        (torch.float16, torch.complex64),
        (torch.float64, torch.complex128),
    ],
)
def test_precision(dtype, result):
    n = 1024
    x = signal(n, dtype=dtype)
    factors = {name: t.to(dtype.to_real()) for name, t in angles(n).items()}
    exact = synvolution(x.to(torch.complex128), factors["phase"], **{k: t.double() for k, t in factors.items()})
    out = synvolution(x, factors["phase"], **factors)
    assert out.dtype == result
    assert (out - exact).norm() <= 16 * torch.finfo(result).eps * exact.norm()


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 1, 3), (2, 5, 0), (0, 2, 5, 3), (2, 0, 3)])
def test_hardly_anything(shape):
    n = shape[-2]
    x = torch.randn(shape)
    lower, upper, phase = (
        torch.rand(shape[0], 3, max(n - 1, 0)),
        torch.rand(shape[0], 3, max(n - 1, 0)),
        torch.rand(shape[0], n),
    )
    for out in (unitary(x, lower, upper, phase), synvolution(x, phase, lower, upper, phase)):
        assert (out.shape, out.dtype) == (x.shape, torch.complex64)
    if n == 1:
        torch.testing.assert_close(unitary(x, lower, upper, phase), torch.exp(1j * phase)[..., None] * x)


def damping_of_table_6(kernel, k, K):
    """By hand from the table, with the default parameters."""
    t = k / (K + 1)
    if kernel == "dirichlet":
        return 1.0
    if kernel == "fejer":
        return 1 - k / (K + 1)
    if kernel == "jackson":
        rise, cot = math.sin(k * math.pi / (K + 2)), math.cos(math.pi / (K + 2)) / math.sin(math.pi / (K + 2))
        return ((K + 2 - k) * math.cos(k * math.pi / (K + 2)) + rise * cot) / (K + 2)
    if kernel == "lanczos":
        return 1.0 if k == 0 else (math.sin(math.pi * t) / (math.pi * t)) ** 3
    if kernel == "lorentz":
        return math.sinh(4 * (1 - t)) / math.sinh(4)
    if kernel == "vekic":
        return 1.0 if k == 0 else 0.5 - 0.5 * math.tanh((t - 0.5) / (t * (1 - t)))
    return math.exp(-((t / 2) ** 2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("K", [0, 1, 2, 5])
def test_damping_is_table_6(kernel, K):
    g = gibbs_damping(kernel, K)
    expected = torch.tensor([damping_of_table_6(kernel, k, K) for k in range(K + 1)], dtype=torch.float64)
    torch.testing.assert_close(g, expected, atol=1e-14, rtol=0)
    assert g[0] == 1
    assert (g > 0).all()


def test_damping_by_hand():
    """K = 1: k / (K+1) = 1/2, and pi / (K+2) = 60 degrees."""
    values = {
        gibbs_damping("jackson", 1): (2 * 0.5 + 0.75**0.5 / 3**0.5) / 3,
        gibbs_damping("lanczos", 1, M=2): (2 / math.pi) ** 2,
        gibbs_damping("lorentz", 1, xi=-2): 1 / (2 * math.cosh(1)),
        gibbs_damping("vekic", 1): 0.5,
        gibbs_damping("wang", 1, a=2.0, b=3.0): math.exp(-1),
    }
    assert [g[1].item() for g in values] == pytest.approx([*values.values()])
    for xi in (2000.0, 1.7e308):
        assert gibbs_damping("lorentz", 3, xi=xi).isfinite().all()
    assert gibbs_damping("wang", 3, a=10**300).isfinite().all()


def test_kernel_polynomial_loss():
    w = torch.tensor([7.0, 1.0, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    assert kernel_polynomial_loss(w).item() == pytest.approx(math.pi * (1 + 4 * 0.25 + 9 * 4))
    assert gradcheck(kernel_polynomial_loss, [w])
    assert kernel_polynomial_loss(w.half()).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lower": torch.zeros(2, 3, 5)}, r"lower and upper are \(2, 3, 4\), phase \(2, 5\)"),
        ({"upper": torch.zeros(1, 3, 4)}, r"lower and upper are \(2, 3, 4\)"),
        ({"phase": torch.zeros(5)}, r"phase \(2, 5\)"),
        ({"phase": torch.zeros(2, 5, dtype=torch.complex64)}, "phase must be real floating-point numbers"),
        ({"lower": torch.zeros(2, 3, 4, dtype=torch.int64)}, "lower must be real floating-point numbers"),
        ({"value": torch.zeros(5, 3)}, r"the signal is \(batch, tokens, features\) or"),
        ({"value": torch.zeros(2, 5, 3, dtype=torch.int64)}, "real or complex floating-point numbers"),
        ({"eigenvalues": torch.zeros(2, 4)}, r"eigenvalues is \(batch, tokens\), here \(2, 5\)"),
        ({"eigenvalues": torch.zeros(2, 5, dtype=torch.complex64)}, "eigenvalues must be real"),
        ({"coefficients": torch.zeros(2, 3)}, r"coefficients is \(K\+1,\)"),
        ({"coefficients": torch.zeros(0)}, r"coefficients is \(K\+1,\)"),
        ({"coefficients": torch.zeros(3, dtype=torch.complex64)}, "coefficients must be real"),
        ({"kernel": "gauss"}, "kernel='gauss': use one of 'dirichlet', 'fejer'"),
        ({"kernel": "lanczos", "M": 0}, "M must be an integer >= 1"),
    ],
)
def test_wrong_input_is_one_clear_error(changes, message):
    inputs = angles(5, dtype=torch.float32) | {"value": torch.zeros(2, 5, 3), "eigenvalues": torch.zeros(2, 5)}
    with pytest.raises(GraphFilterError, match=message):
        kernelution(**inputs | {"coefficients": torch.ones(3)} | changes)


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("fejer", {"K": -1}, "K must be an integer >= 0, got -1"),
        ("fejer", {"K": 1.5}, "K must be an integer >= 0"),
        ("lanczos", {"M": 2.5}, "M must be an integer >= 1"),
        ("lorentz", {"xi": 0.0}, "xi must be a finite number that is not 0"),
        ("lorentz", {"xi": math.nan}, "xi must be a finite number that is not 0"),
        ("wang", {"a": -1.0}, "a must be finite and >= 0"),
        ("wang", {"b": 0.0}, "b finite and > 0"),
        ("wang", {"a": "1"}, "a must be finite and >= 0"),
        ("lorentz", {"xi": None}, "xi must be a finite number that is not 0"),
        ("lanczos", {"M": 10**30}, "M must be at most 1000000"),
        ("fejer", {"K": 10**400}, "K must be at most 1000000"),
    ],
)
def test_damping_out_of_range(kernel, options, message):
    with pytest.raises(GraphFilterError, match=message):
        gibbs_damping(kernel, **{"K": 2} | options)


@pytest.mark.parametrize("coefficients", [torch.zeros(2, 3), torch.zeros(3, dtype=torch.complex64)])
def test_a_loss_of_other_coefficients(coefficients):
    with pytest.raises(GraphFilterError, match="kernel_polynomial_loss: coefficients"):
        kernel_polynomial_loss(coefficients)
