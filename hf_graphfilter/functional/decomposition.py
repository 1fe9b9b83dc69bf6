"""Replacement filters: products of tall matrices, linear in the number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import GraphFilterError
from ..ops import spectral
from ..ops.heads import repeat_heads
from ..ops.polynomials import Basis, recurrence
from .losses import present, real


def agf(
    u: Tensor,
    sigma: Tensor,
    v: Tensor,
    value: Tensor,
    theta: Tensor,
    *,
    basis: Basis = "jacobi",
    a: float = 1.0,
    b: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Apply ``U Sigma V^T``, a filter in the singular value domain, in O(n d^2) time and O(n d + d^2) memory.

    ``U = softmax_features(u)``, ``V = softmax_tokens(v)``, ``Sigma = sum_k theta_k T_k(sigmoid(sigma))`` for every
    token and feature.

    Args:
        u, sigma, v: (batch, heads, tokens, features), the projections before softmax and sigmoid.
        value: (batch, heads, tokens, value features).
        theta: the coefficients of the formula, (K+1,) or (heads, K+1).
        basis, a, b: the kind and the parameters of the polynomials T_k, see ``AGFConfig``.
        mask: bool (batch, tokens), False for padding, which has no influence. For a row of only padding the output is
            zero.
        causal: whether the softmax of ``V`` runs only over the tokens so far (not in the paper).

    Returns:
        (batch, heads, tokens, value features), with the dtype of ``value``. The softmaxes are float32 or wider.

    Raises:
        GraphFilterError: shapes do not fit, tensors are not real floating-point numbers, the basis is unknown, or a
            denominator of the polynomials vanishes for these a, b and k.

    Example:
        >>> import torch
        >>> u, sigma, v, value = torch.randn(4, 1, 2, 5, 4)
        >>> agf(u, sigma, v, value, theta=torch.tensor([1.0, 0.1, -0.1])).shape
        torch.Size([1, 2, 5, 4])

    Source: Wi et al., AGF (IJCAI 2025), Eq. 7-10.
    """
    if not (u.dim() == 4 and u.shape == sigma.shape == v.shape and value.shape[:3] == u.shape[:3]):
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("u", u), ("sigma", sigma), ("v", v), ("value", value)))
        raise GraphFilterError(
            f"agf: u, sigma and v are (batch, heads, tokens, features), value likewise; got {shapes}"
        )
    if theta.dim() not in (1, 2) or theta.shape[-1] < 1 or (theta.dim() == 2 and theta.shape[0] != u.shape[1]):
        raise GraphFilterError(
            f"agf: theta is (K+1,) or (heads, K+1) with {u.shape[1]} heads, got {tuple(theta.shape)}"
        )
    real("agf", u=u, sigma=sigma, v=v, value=value, theta=theta)
    if len({x.dtype == torch.float64 for x in (u, sigma, v, value)}) > 1:
        raise GraphFilterError(
            f"agf: u, sigma, v and value are all float64 or none of them is, got {u.dtype}, {sigma.dtype}, {v.dtype} "
            f"and {value.dtype}"
        )
    keys = present(mask, u)
    left = spectral.Left(u, sigma, spectral.to_float32(theta), recurrence(basis, theta.shape[-1] - 1, a, b))
    if causal:
        return spectral.filter_causal(left, v, value, keys, needs_state=False)[0]
    return spectral.filter_all(left, v, value, keys)


def singularformer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    previous: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply ``alpha softmax(core) alpha^`` with ``core = scale (alpha^ query)(alpha^ key)^T``, in linear time.

    It takes O(n r d) time and O(n (r + d)) memory.

    Here ``alpha = softmax_r(scores)`` and ``alpha^ = softmax_tokens(scores)``, the same for all heads.

    Args:
        query: (batch, heads, tokens, features).
        key, value: (batch, heads or key heads, tokens, features); ``value`` may have other features.
        scores: (batch, tokens, r), ``X W_a + b_a``.
        mask: bool (batch or 1, tokens), False for padding, which has no influence. For a row of only padding the output
            is zero.
        previous: (batch, heads, r, r), the core of the previous layer, to be added to this core (residual attention).
        scale: factor of the core; features ** -0.5 by default.

    Returns:
        The output (batch, heads, tokens, value features), with the dtype of ``value``; and ``core``, (batch, heads, r,
        r), the scores with ``previous`` added, before their softmax. The core and all softmaxes are float32 or wider.

    Raises:
        GraphFilterError: shapes do not fit, or tensors are not real floating-point numbers.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> out, core = singularformer(q, k, v, torch.randn(1, 5, 3))
        >>> out.shape, core.shape
        (torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 3, 3]))

    Source: Wu et al., Singularformer (IJCAI 2023), Eq. 8-14 and the text after them.
    """
    batch, heads, features = _check(query, key, value, scores)
    r = scores.shape[-1]
    real("singularformer", query=query, key=key, value=value, scores=scores, previous=previous)
    if previous is not None and previous.shape != (batch, heads, r, r):
        raise GraphFilterError(
            f"singularformer: previous is the core of the layer before, here {(batch, heads, r, r)}, got "
            f"{tuple(previous.shape)}"
        )
    if mask is not None and mask.shape == (1, query.shape[2]):
        mask = mask.expand(batch, -1)
    keys = present(mask, query)
    spread = spectral.to_float32(scores).softmax(-1).to(value.dtype)
    gather = spectral.basis(scores.unsqueeze(1), -2, keys).squeeze(1).mT  # (batch, r, tokens)

    def pool(x: Tensor) -> Tensor:
        """Pool (batch, heads, tokens, features) to (batch, heads, r, features), with one product for all heads."""
        pooled_heads = gather.to(x.dtype) @ x.transpose(1, 2).flatten(2)  # rotary positions may make the query wider
        return repeat_heads(pooled_heads.unflatten(-1, (x.shape[1], -1)).transpose(1, 2), heads)

    with torch.autocast(query.device.type, enabled=False):  # half precision may not hold the scores
        scaled_query = spectral.to_float32(pool(query)) * (features**-0.5 if scale is None else scale)
        core = scaled_query @ spectral.to_float32(pool(key)).mT
    if previous is not None:
        core = core + previous
    inner = core.softmax(-1).to(value.dtype) @ pool(value)
    out = spread @ inner.transpose(1, 2).flatten(2)
    return out.unflatten(-1, (heads, -1)).transpose(1, 2), core


def _check(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[int, int, int]:
    def shapes() -> str:  # a function, since a compiler cannot format symbolic sizes
        named = {"query": query, "key": key, "value": value, "scores": scores}
        return ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())

    if not query.dim() == key.dim() == value.dim() == 4 or scores.dim() != 3 or key.shape[:3] != value.shape[:3]:
        raise GraphFilterError(
            "singularformer: query, key and value are (batch, heads, tokens, features), scores (batch, tokens, r); got "
            f"{shapes()}"
        )
    batch, heads, tokens, features = query.shape
    differ = any(x.shape[0] != batch or x.shape[-2] != tokens for x in (key, value, scores))
    if differ or key.shape[-1] != features:
        raise GraphFilterError(f"singularformer: batch, tokens or features differ: {shapes()}")
    if not key.shape[1] or heads % key.shape[1] or not features or not scores.shape[-1]:
        raise GraphFilterError(
            "singularformer: the heads of the query are a multiple of those of the key, with a feature at least, and "
            f"r >= 1; got {shapes()}"
        )
    return batch, heads, features
