"""The other way to the same numbers: attention with explicit matrices, registered as an attention implementation.

It shares no code with the package: scores, softmax, and each filter's formula as the paper prints it.
"""

import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from models import use
from scipy import special
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "dense_oracle"


def gfsa_matrix(A, c, config, seen):
    """Eq. 5 of the GFSA paper, or its exact form."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    w_0, w_1, w_K = (c[name].to(A.dtype).view(-1, 1, 1) for name in ("w_0", "w_1", "w_K"))
    power = torch.matrix_power(A, config.K) if config.approximation == "none" else A + (config.K - 1) * (A @ A - A)
    return w_0 * eye + w_1 * A + w_K * power


def expansion(x, theta, config):
    """sum_k theta_k T_k(x) through scipy; theta (K+1,) or (heads, K+1), x (batch, heads, tokens, features)."""
    functions = {
        "jacobi": lambda k, x: special.eval_jacobi(k, config.a, config.b, x),
        "chebyshev": special.eval_chebyt,
        "legendre": special.eval_legendre,
        "monomial": lambda k, x: x**k,
    }
    theta = theta.expand(x.shape[1], -1)[:, :, None, None].to(x.dtype)
    terms = [theta[:, k] * _Smooth.apply(x, k, functions[config.basis]) for k in range(config.K + 1)]
    return sum(terms)


class _Smooth(torch.autograd.Function):
    """A scipy function with a derivative by central differences."""

    @staticmethod
    def forward(ctx, x, k, function):
        ctx.save_for_backward(x)
        ctx.call = lambda y: torch.as_tensor(function(k, y.detach().cpu().numpy()), dtype=x.dtype, device=x.device)
        return ctx.call(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        h = 1e-4
        return (
            grad * (ctx.call(x - 2 * h) - 8 * ctx.call(x - h) + 8 * ctx.call(x + h) - ctx.call(x + 2 * h)) / (12 * h),
            None,
            None,
        )


def spectral_matrix(u, sigma, v, theta, config, allowed):
    """Eq. 7-10 of the AGF paper as an n x n matrix; row t takes the softmax over the tokens that it may see."""
    U, Sigma = u.softmax(-1), expansion(sigma.sigmoid(), theta, config)
    V = v[:, :, None].masked_fill(~allowed[..., None], -1e30).softmax(3) * allowed[..., None]  # (b, h, t, s, feature)
    return torch.einsum("bhtj,bhtsj->bhts", U * Sigma, V)


def agf_matrix(A, c, config, seen):
    """AGF with all that the package adds to it: corrected projections, the window, the blend."""
    w, heads = seen.weights, A.shape[1]

    def projected(name):
        out = torch.nn.functional.linear(seen.hidden, w[f"{name}.weight"], w.get(f"{name}.bias"))
        return out.unflatten(-1, (heads, -1)).transpose(1, 2)

    u, v = seen.query, seen.key
    if config.correction:
        u, v = u + projected("correct_u"), v + projected("correct_v")
    if (config.rho, config.singular_values) != ("softmax", "polynomial"):
        return in_the_place_of(A, ablated_matrix(u, v, c, projected, config, seen), c, config, seen)
    theta = torch.stack([c[f"theta_{k}"] for k in range(config.K + 1)], -1)
    return in_the_place_of(A, spectral_matrix(u, projected("sigma"), v, theta, config, seen.allowed), c, config, seen)


def ablated_matrix(u, v, c, projected, config, seen):
    """AGF's Tables 6 and 18: other activations of U and V, other singular values."""
    rho = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": lambda x: x}.get(config.rho)
    U = rho(u) if rho else u.softmax(-1)
    v, allowed = v[:, :, None], seen.allowed[..., None]
    V = (rho(v) if rho else v.masked_fill(~allowed, -1e30).softmax(3)) * allowed
    if config.singular_values == "learned":
        Sigma = 2 * seen.weights["singular"].sigmoid()
    elif config.singular_values == "one":
        Sigma = torch.ones_like(U)
    else:
        Sigma = expansion(
            projected("sigma").sigmoid(), torch.stack([c[f"theta_{k}"] for k in range(config.K + 1)], -1), config
        )
    return torch.einsum("bhtj,bhtsj->bhts", U * Sigma, V)


def in_the_place_of(A, H, c, config, seen, close=None):
    """``H`` with the window and sinks that a filter in the place of attention may mix in, blended with ``A``."""
    if config.window:
        t = torch.arange(A.shape[-1])
        close = (t[:, None] - t).abs() <= config.window if close is None else close
        near = seen.allowed & (close | first_tokens(config, seen))
        scores = seen.scores.masked_fill(~near, -1e30)
        tokens = seen.allowed & ~near if config.far == "beyond" else seen.allowed
        count = tokens.sum(-1, keepdim=True).clamp(min=int(config.far == "all"))
        w = seen.weights
        outside = torch.nn.functional.linear(seen.hidden, w["outside.weight"], w["outside.bias"]).mT.unsqueeze(-1)
        share = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - outside - count.to(A.dtype).log())
        H = share * scores.softmax(-1) * near + (1 - share) * H
    gate = c["gate"].to(A.dtype).view(-1, 1, 1) if "gate" in c else 1.0
    return (1 - gate) * A + gate * H


def first_tokens(config, seen):
    there = seen.allowed.any(-2, keepdim=True)
    return there & (there.cumsum(-1) <= config.sinks)


def far_field_matrix(A, c, config, seen):
    """Near tokens by their scores; a softmax over the far tokens per feature, read by a softmax over features."""
    block = torch.arange(A.shape[-1]) // config.window
    close = (block[:, None] - block).abs() <= 1
    far = seen.allowed & ~close & ~first_tokens(config, seen)

    def features(x, name):
        weight = seen.weights[f"{name}.weight"].to(x.dtype)
        return x @ weight.repeat_interleave(x.shape[1] // len(weight), 0)

    key = features(seen.key, "map_key")
    if config.memory:
        close = close | exact_tokens(far, key, seen.value, config)
        far = far & ~close
    V = key[:, :, None].masked_fill(~far[..., None], -1e30).softmax(3) * far[..., None]
    H = torch.einsum("bhtj,bhtsj->bhts", features(seen.query, "map_query").softmax(-1), V)
    H = in_the_place_of(A, H, c, config, seen, close)
    if not config.keep:
        return H
    kept = torch.isin(torch.arange(seen.groups), torch.tensor(config.keep.get(seen.layer, ())))
    return torch.where(kept.repeat_interleave(A.shape[1] // seen.groups).view(-1, 1, 1), A, H)


def exact_tokens(far, key, value, config):
    """Which tokens each token sees exactly though they are far: block by block, the worst by the means of the rest."""
    exact = torch.zeros_like(far)
    for b, h in torch.cartesian_prod(*map(torch.arange, far.shape[:2])).tolist():
        held, rest = [], []
        for begin in range(2 * config.window, far.shape[-1], config.window):
            rows = slice(begin, begin + config.window)
            candidates = [s for s in far[b, h, rows].any(0).nonzero()[:, 0].tolist() if s not in rest]
            mean = (key[b, h, rest].softmax(0).mT @ value[b, h, rest]).mean(0) if rest else torch.zeros(1).double()
            candidates.sort(key=lambda s: -(value[b, h, s] - mean).norm().item())
            held, left = candidates[: config.memory], candidates[config.memory :]
            rest += left
            exact[b, h, rows, held] = True
    return exact & far


def singular_matrix(A, c, config, seen):
    """Eq. 18 of the Singularformer paper as an n x n matrix; tokens that are not there have no weight in alpha^."""
    there = seen.allowed.any(-2, keepdim=True)  # (batch, heads, 1, tokens)
    w = seen.weights
    scores = torch.nn.functional.linear(seen.hidden, w["alpha.weight"], w["alpha.bias"])[:, None] / config.temperature
    gather = scores.mT.masked_fill(~there, -1e30).softmax(-1) * there
    core = (gather @ seen.query) @ (gather @ seen.key).mT * seen.scaling
    return in_the_place_of(A, scores.softmax(-1) @ core.softmax(-1) @ gather, c, config, seen)


def siren(x, w, name, numbers):
    """sin(W_2 sin(W_1 x + b_1) + b_2), its features averaged in groups: (batch, numbers, tokens)."""
    for i in range(2):
        x = torch.nn.functional.linear(x, w[f"{name}.{i}.weight"], w[f"{name}.{i}.bias"]).sin()
    return torch.stack([group.mean(-1) for group in x.chunk(numbers, -1)], 1)


def givens_product(angles, upwards):
    """Eq. 6 and 7 of the Converter paper: G_1 ... G_{m-1}, or G_{m-1} ... G_1, from (batch, sets, 3, tokens)."""
    a, b, half = (x[..., :-1] for x in (angles * torch.tensor([[1.0], [1.0], [0.5]])).unbind(2))
    row = [torch.exp(-0.5j * (a + b)) * half.cos(), -torch.exp(0.5j * (a - b)) * half.sin()]
    below = [torch.exp(-0.5j * (a - b)) * half.sin(), torch.exp(0.5j * (a + b)) * half.cos()]
    rotations = torch.stack([torch.stack(row, -1), torch.stack(below, -1)], -2).unbind(2)
    n = angles.shape[-1]
    product = torch.eye(n, dtype=torch.complex128).expand(*angles.shape[:2], n, n)
    for i, rotation in enumerate(rotations):
        if upwards:
            product = torch.cat([product[..., :i], product[..., i : i + 2] @ rotation, product[..., i + 2 :]], -1)
        else:
            rows = rotation @ product[..., i : i + 2, :]
            product = torch.cat([product[..., :i, :], rows, product[..., i + 2 :, :]], -2)
    return product


def digraph_matrix(A, c, config, seen):
    """Eq. 4-12 of the Converter paper with explicit matrices, of the tokens that are there."""
    heads, tokens = A.shape[1], A.shape[-1]
    sets = heads if config.per_head else 1
    numbers = siren(seen.hidden, seen.weights, "spectrum.angles", sets * config.orders * 6)
    angles = 2 * torch.pi * numbers.unflatten(1, (sets, config.orders, 6))
    exponent = siren(seen.hidden, seen.weights, "spectrum.eigenvalues", sets)
    if "w_0" in c:
        theta = torch.stack([c[f"w_{k}"] for k in range(config.K + 1)], -1) * torch.tensor(
            config.damping(), dtype=torch.float64
        )
        exponent = expansion(exponent[..., None], theta, SimpleNamespace(basis="chebyshev", K=config.K))[..., 0]
    turn = torch.exp(1j * exponent)[..., None]
    H = (turn * torch.eye(tokens)).repeat(1, heads // sets, 1, 1)  # of padding, which is in no rotation
    there = seen.allowed[:, 0].any(-2)
    for mask in there.unique(dim=0):
        rows, places = (there == mask).all(-1).nonzero()[:, 0], mask.nonzero()[:, 0]
        order = [*range(0, len(places), 2), *range(1, len(places), 2)]
        eye = torch.eye(len(places), dtype=turn.dtype)
        permutation = eye[order] if config.permutation == "stride" else eye
        phi = eye
        for own in angles[rows][..., places].unbind(2):
            phi = phi @ givens_product(own[:, :, :3], False) @ givens_product(own[:, :, 3:], True) @ permutation
        filtered = phi.mH @ (turn[rows][:, :, places] * phi)
        H[rows[:, None, None, None], torch.arange(heads)[:, None, None], places[:, None], places] = filtered
    zeta = c["zeta"].view(-1, 1, 1)
    return in_the_place_of(A, (zeta * H.real + (1 - zeta) * H.imag).to(A.dtype), c, config, seen)


def linear_attention_matrix(A, c, config, seen):
    """``phi(Q) phi(K)^T`` over the visible tokens, rows scaled to sum 1; blended with A."""
    q, k = (1 + torch.nn.functional.elu(c["sharpness"].to(A.dtype).view(-1, 1, 1) * x) for x in (seen.query, seen.key))
    scores = q @ k.mT * seen.allowed
    return in_the_place_of(A, scores / scores.sum(-1, keepdim=True).clamp(min=1e-6), c, config, seen)


def hedgehog_matrix(A, c, config, seen):
    """``phi(Q) phi(K)^T`` over the visible tokens, rows scaled to sum 1, phi(x) = softmax([x W, -x W])."""

    def features(x, name):
        mapped = x * seen.scaling**0.5 @ seen.weights[f"{name}.weight"].to(x.dtype)
        return torch.cat([mapped, -mapped], -1).softmax(-1)

    scores = features(seen.query, "map_query") @ features(seen.key, "map_key").mT * seen.allowed
    return in_the_place_of(A, row_shares(scores), c, config, seen)


def linear_transformer_matrix(A, c, config, seen):
    """``phi(Q) phi(K)^T`` over the visible tokens, rows scaled to sum 1, phi(x) = elu(x) + 1."""
    q, k = (torch.nn.functional.elu(x) + 1 for x in (seen.query, seen.key))
    return in_the_place_of(A, row_shares(q @ k.mT * seen.allowed), c, config, seen)


def performer_matrix(A, c, config, seen):
    """The same with phi(x) = exp(x w_i - |x|^2 / 2), in logarithms, since products can vanish."""
    query, key = (x * seen.scaling**0.5 for x in (seen.query, seen.key))
    q, k = (x @ seen.weights["directions"].to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2 for x in (query, key))
    scores = (q.unsqueeze(3) + k.unsqueeze(2)).logsumexp(-1).masked_fill(~seen.allowed, -1e30)
    return in_the_place_of(A, scores.softmax(-1) * seen.allowed, c, config, seen)


def row_shares(scores):
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-30)


def series_matrix(A, coefficients):
    """sum_k c_k A^k with c (heads, K+1)."""
    power, out = torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A), 0
    for c in coefficients.to(A.dtype).unbind(1):
        out, power = out + c.view(-1, 1, 1) * power, power @ A
    return out


def polynomial_matrix(A, c, config, seen):
    theta, K = seen.weights["theta"].double(), config.K
    theta = theta.tanh() if config.theta == "tanh" else theta
    a, b = (1 if x is None else x for x in (config.a, config.b))
    start = {"bernstein": [k / K for k in range(K + 1)], "jacobi": [(b - a) / (a + b + 2), 2 / (a + b + 2)]}
    own = start.get(config.basis, [0.0, 1.0])  # of A itself
    theta = theta + torch.tensor(own + [0.0] * (K + 1 - len(own)), dtype=torch.float64)
    if config.basis == "bernstein":
        eye, out = torch.eye(A.shape[-1], dtype=A.dtype), 0
        for k in range(K + 1):
            basis = torch.matrix_power(A, k) @ torch.matrix_power(eye - A, K - k) * math.comb(K, k)
            out = out + theta[:, k].to(A.dtype).view(-1, 1, 1) * basis
        return out
    functions = {
        "monomial": lambda k: np.poly1d([1.0] + [0.0] * k),
        "chebyshev": special.chebyt,
        "legendre": special.legendre,
        "jacobi": lambda k: special.jacobi(k, a, b),
    }
    powers = torch.zeros(K + 1, K + 1, dtype=torch.float64)
    for k in range(K + 1):
        powers[k, : k + 1] = torch.as_tensor(functions[config.basis](k).coef[::-1].copy())
    return series_matrix(A, theta @ powers)


def diffusion_matrix(A, c, config, seen):
    if config.kernel == "heat":
        weights = [torch.exp(-c["t"]) * c["t"] ** k / math.factorial(k) for k in range(config.K + 1)]
    else:
        weights = [c["alpha"] * (1 - c["alpha"]) ** k for k in range(config.K + 1)]
    g = c["g"].to(A.dtype).view(-1, 1, 1)
    return (1 - g) * A + g * series_matrix(A, torch.stack(weights, 1))


def arma_matrix(A, c, config, seen):
    """By the fixed-point steps themselves."""
    eye, out = torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A), A
    for p in range(1, config.order + 1):
        r, b = (c[f"{name}_{p}"].to(A.dtype).view(-1, 1, 1) for name in "rb")
        x = eye
        for _ in range(config.steps):
            x = b * A @ x + eye
        out = out + r * x
    return out


def uniform(A, seen):
    return seen.allowed.to(A.dtype) / seen.allowed.sum(-1, keepdim=True).clamp(min=1)


def attnscale_matrix(A, c, config, seen):
    scale = c["lambda"].to(A.dtype).view(-1, 1, 1)
    return (1 + scale) * A - scale * uniform(A, seen)


def centered_matrix(A, c, config, seen):
    return A - c["g"].to(A.dtype).view(-1, 1, 1) * uniform(A, seen) @ A


def featscale(A, c, config, seen):
    low, high = (c[name].to(A.dtype)[:, None] for name in ("low", "high"))
    mean = uniform(A, seen)
    return lambda v: A @ v + low * (mean @ A @ v) + high * (A @ v - mean @ A @ v)


def xsa(A, c, config, seen):
    def apply(v):
        y, unit = A @ v, torch.nn.functional.normalize(v, dim=-1)
        return y - c["alpha"].to(A.dtype).view(-1, 1, 1) * (y * unit).sum(-1, keepdim=True) * unit

    return apply


def dex(A, c, config, seen):
    w = seen.weights["weight"]
    return lambda v: A @ v - c["strength"].to(A.dtype).view(-1, 1, 1) * (A @ v @ w)


def gated(A, c, config, seen):
    w = seen.weights["weight"]
    gate = 2 * torch.nn.functional.linear(seen.hidden, w.flatten(0, 1)).sigmoid()
    return lambda v: A @ v * gate.unflatten(-1, w.shape[:2]).transpose(1, 2)


def contranorm(A, c, config, seen):
    def apply(v):
        y = A @ v
        alike = (y @ y.mT / config.temperature).masked_fill(~seen.allowed, -1e30).softmax(-1)
        return y + c["s"].to(A.dtype).view(-1, 1, 1) * (y - alike @ y)

    return apply


def neutreno(A, c, config, seen):
    return lambda v: A @ v + c["alpha"].to(A.dtype).view(-1, 1, 1) * (seen.first(v) - v)


def value_residual(A, c, config, seen):
    own, other = (c[n].to(A.dtype).view(seen.groups, -1).mean(1) for n in ("l_1", "l_2"))
    own, other = (x.repeat_interleave(A.shape[1] // seen.groups).view(-1, 1, 1) for x in (own, other))
    return lambda v: A @ (v + own * v + other * seen.first(v))


def dense_attention(module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs):
    heads, groups = query.shape[1], key.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    unbiased = scores = query @ key.mT * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    matrix = scores.softmax(-1)
    if hasattr(module, "oracle"):
        allowed = (
            torch.ones(1, dtype=torch.bool) if attention_mask is None else attention_mask > -50
        )  # as shifted windows write it
        allowed = allowed.expand(matrix.shape)
        matrix = module.oracle(
            matrix,
            seen=SimpleNamespace(
                query=query,
                key=key,
                scores=unbiased,
                allowed=allowed,
                hidden=module.seen_hidden,
                scaling=scaling,
                weights=module.seen_weights,
                groups=groups,
                first=module.seen_first,
                value=value,
                layer=getattr(module, "layer_idx", None),
            ),
        )
    out = matrix(value) if callable(matrix) else matrix @ value
    return out.transpose(1, 2).contiguous(), None if callable(matrix) else matrix


AttentionInterface.register(NAME, dense_attention)
AttentionMaskInterface.register(NAME, eager_mask)


def _keep_hidden(module, args, kwargs):
    module.seen_hidden = args[0] if args else kwargs["hidden_states"]


def live_coefficients(graph_filter):
    """What ``coefficients`` returns, but through which gradients reach the parameters."""
    with mock.patch.object(torch.Tensor, "detach", lambda tensor: tensor):
        return graph_filter.coefficients()


def live_weights(graph_filter):
    return {**dict(graph_filter.named_parameters()), **dict(graph_filter.named_buffers())}


def compare_own_gradients(patched, twin_filters, **tolerance):
    """The gradients of the filters of ``patched``, and of the copy of it that an explicit twin was made of."""
    reference = dict(twin_filters.named_parameters())
    for name, parameter in patched.named_parameters():
        if "graph_filter." in name and parameter.grad is not None:
            expected = reference[name].grad
            expected = torch.zeros_like(parameter) if expected is None else expected
            torch.testing.assert_close(parameter.grad, expected, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def dense_twin(plain, patched, formula):
    """``plain`` computing what ``patched`` should, with explicit matrices; gradients reach the filters of this."""
    use(plain, NAME)
    left: dict = {}
    plain.register_forward_pre_hook(lambda *_: left.clear())
    for name, module in patched.named_modules():
        if "graph_filter" in module._modules:
            f = module.graph_filter
            twin = plain.get_submodule(name)
            twin.oracle = partial(formula, c=live_coefficients(f), config=f.config)
            twin.seen_first = partial(first_of, left, f)
            twin.seen_weights = live_weights(f)
            twin.register_forward_pre_hook(_keep_hidden, with_kwargs=True)
    return plain


def first_of(left, graph_filter, v):
    """What the first layer of the stack had for ``v``."""
    return left.setdefault(graph_filter.site_name.partition(".")[0], v)


def timm_twin(plain, patched, formula):
    """``plain``, unfused, in which dropout is handed A and gives back H: what follows multiplies it with the values."""
    for module in plain.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    for name, module in patched.named_modules():
        if "graph_filter" in module._modules:
            f = module.graph_filter
            twin = plain.get_submodule(name)
            seen = {}
            twin.register_forward_pre_hook(lambda m, args, seen=seen: seen.update(hidden=args[0]))
            twin.attn_drop.register_forward_hook(
                lambda m, i, A, f=f, twin=twin, seen=seen: as_matrix(
                    formula(A, live_coefficients(f), f.config, scores_of(twin, seen["hidden"], f)),
                    scores_of(twin, seen["hidden"], f).value,
                )
            )
    return plain


def as_matrix(found, value):
    """A matrix that makes of ``value`` what a formula of values does."""
    if callable(found) and (torch.linalg.matrix_rank(value) < value.shape[-1]).any():
        pytest.skip("fewer different tokens than features: no matrix does what this filter does")
    return found(value) @ torch.linalg.pinv(value) if callable(found) else found


def scores_of(module, hidden, graph_filter):
    """What a filter without scores reads: the module's query and key, and its own weights."""
    query, key, value = module.qkv(hidden).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    scores = query @ key.mT * module.scale
    weights = live_weights(graph_filter)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    return SimpleNamespace(
        query=query,
        key=key,
        scores=scores,
        allowed=allowed,
        hidden=hidden,
        scaling=module.scale,
        weights=weights,
        value=value,
    )
