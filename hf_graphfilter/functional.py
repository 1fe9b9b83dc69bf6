"""The filters as pure functions of tensors, usable without any model.

Shapes are (batch, heads, tokens, features) throughout. The same kernels run inside patched models.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .errors import GraphFilterError
from .ops import spectral
from .ops.combine import combine
from .ops.polynomials import Basis, recurrence
from .shift import AttentionShift, ShiftOperator, repeat_heads

Norm = Literal["mean_abs", "frobenius"]

__all__ = ["agf", "gfsa", "orthogonality_loss"]


def gfsa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w_0: Tensor | float,
    w_1: Tensor | float,
    w_K: Tensor | float,
    K: int,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    approximation: Literal["taylor", "none"] = "taylor",
) -> Tensor:
    """``H value`` with ``H = w_0 I + w_1 A + w_K (A + (K-1)(A^2 - A))``, without an n x n matrix.

    Args:
        query: (batch, heads, tokens, features).
        key, value: (batch, heads or key heads, tokens, features).
        w_0, w_1, w_K: numbers, or tensors (heads,).
        K: order, >= 1.
        mask: as in ``scaled_dot_product_attention``: bool (True for visible) or additive, or (batch, tokens) bool.
        causal: whether a token sees only earlier ones; not together with a mask of queries by keys.
        scale: of the scores; features ** -0.5 by default.
        dropout: probability, drawn anew in each application of A.
        approximation: ``"taylor"`` as above, or ``"none"`` for ``w_K A^K``.

    Returns:
        (batch, heads, tokens, features), dtype of ``value``.

    Raises:
        GraphFilterError: K < 1, other numbers of queries and keys, coefficients of another shape.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> gfsa(q, k, v, w_0=0.0, w_1=1.0, w_K=0.1, K=3).shape
        torch.Size([1, 2, 5, 4])

    Source: Choi et al., GFSA (NeurIPS 2024), Eq. 4-6.
    """
    if K < 1:
        raise GraphFilterError(f"gfsa: K must be an integer >= 1, got {K}")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4 or key.shape[:3] != value.shape[:3]:
        raise GraphFilterError(f"gfsa: query, key and value are (batch, heads, tokens, features), got {shapes}")
    if query.shape[2] != key.shape[2]:
        raise GraphFilterError(f"gfsa: A must be square, as many queries as keys; got {shapes}")
    if query.shape[1] % key.shape[1]:
        raise GraphFilterError(f"gfsa: the heads of the query must be a multiple of those of the key; got {shapes}")
    heads = query.shape[1]
    keys = mask[:, None, None, :] if mask is not None and mask.dim() == 2 else mask
    if causal and keys is not None:
        tokens = query.shape[2]
        earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        keys = keys & earlier if keys.dtype == torch.bool else keys.masked_fill(~earlier, -torch.inf)

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        is_causal = causal and keys is None
        out = scaled_dot_product_attention(query, k, v, keys, dropout, is_causal, scale=scale)
        return out.transpose(1, 2), None

    shift = AttentionShift(attend, query, key)
    c_0, c_1, c_K = (_coefficient(c, query, heads, n) for c, n in ((w_0, "w_0"), (w_1, "w_1"), (w_K, "w_K")))
    terms = attention_terms(shift, value, c_1, c_K, K, approximation)
    return combine([(c_0, shift.identity(value)), *terms])


def attention_terms(
    shift: ShiftOperator, value: Tensor, w_1: Tensor, w_K: Tensor, K: int, approximation: Literal["taylor", "none"]
) -> list[tuple[Tensor, Tensor]]:
    """``w_1 S(value) + w_K P(value)`` as (coefficient, signal) pairs for ``combine``; see ``gfsa``."""
    if approximation == "none":
        powers = shift.powers(value, K)
        return [(w_1, powers[0]), (w_K, powers[-1])]
    if K == 1:
        return [(w_1 + w_K, shift(value))]
    first, second = shift.powers(value, 2)
    return [(w_1 + (2 - K) * w_K, first), ((K - 1) * w_K, second)]


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
    """``U Sigma V^T value``: a filter in the singular value domain, O(n d^2) time and O(n d + d^2) memory.

    ``U = softmax_features(u)``, ``V = softmax_tokens(v)``, ``Sigma = sum_k theta_k T_k(sigmoid(sigma))`` for every
    token and feature.

    Args:
        u, sigma, v: (batch, heads, tokens, features), the projections before softmax and sigmoid.
        value: (batch, heads, tokens, value features).
        theta: the coefficients as they enter the formula, (K+1,) or (heads, K+1).
        basis, a, b: the polynomials T_k, see ``AGFConfig``.
        mask: bool (batch, tokens), True for tokens that are there; the others have no influence. Where none is there
            the output is zero.
        causal: ``V`` is a softmax over the tokens so far (not in the paper).

    Returns:
        (batch, heads, tokens, value features), dtype of ``value``. The softmaxes are float32 or wider.

    Raises:
        GraphFilterError: shapes that do not fit, an unknown basis, a, b and k with a vanishing denominator.

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
    keys = _keys(mask, u)
    theta = theta if theta.element_size() >= 4 else theta.float()
    w = spectral.left_vectors(u, sigma, theta, recurrence(basis, theta.shape[-1] - 1, a, b))
    if causal:
        return spectral.filter_causal(w, v, value, keys)[0]
    return spectral.filter_all(w, v, value, keys)


def orthogonality_loss(u: Tensor, v: Tensor, mask: Tensor | None = None, *, norm: Norm = "mean_abs") -> Tensor:
    """How far the singular vectors are from orthonormal: ``|U^T U - I| + |V^T V - I|``.

    Args:
        u, v: (batch, heads, tokens, features), the projections before their softmax over features and tokens.
        mask: bool (batch, tokens), True for tokens that are there.
        norm: ``"mean_abs"``, the mean absolute entry over batch, heads and features (the authors' code); or
            ``"frobenius"``, the Frobenius norm over n^2, n the tokens that are there (Eq. 11 as printed), mean over
            batch and heads.

    Returns:
        A scalar, float32 or wider.

    Example:
        >>> import torch
        >>> bool(orthogonality_loss(*torch.randn(2, 1, 2, 5, 4)) > 0)
        True

    Source: Wi et al., AGF (IJCAI 2025), Eq. 11.
    """
    if norm not in ("mean_abs", "frobenius"):
        raise GraphFilterError(f"norm={norm!r}: use 'mean_abs' or 'frobenius'")
    if u.shape != v.shape or u.dim() != 4:
        raise GraphFilterError(
            f"orthogonality_loss: u and v are (batch, heads, tokens, features), got {tuple(u.shape)}, {tuple(v.shape)}"
        )
    keys = _keys(mask, u)
    with torch.autocast(u.device.type, enabled=False):
        left, right = (spectral.gram_deviation(spectral.basis(x, dim, keys)) for x, dim in ((u, -1), (v, -2)))
        if norm == "mean_abs":
            return left.abs().mean() + right.abs().mean()
        tokens = u.shape[2] if keys is None else keys.sum(-1).clamp(min=1)[:, None]
        left, right = (torch.linalg.matrix_norm(deviation) / tokens**2 for deviation in (left, right))
        return left.mean() + right.mean()


def _coefficient(c: Any, like: Tensor, heads: int, name: str) -> Tensor:
    c = torch.as_tensor(c, device=like.device)
    c = c if c.is_floating_point() else c.float()
    if c.dim() > 1 or (c.dim() == 1 and c.shape[0] not in (1, heads)):
        raise GraphFilterError(f"gfsa: {name} is a number or a tensor ({heads},), got shape {tuple(c.shape)}")
    return c.expand(heads)


def _keys(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is not None and mask.shape != (like.shape[0], like.shape[2]):
        raise GraphFilterError(
            f"mask is (batch, tokens), here ({like.shape[0]}, {like.shape[2]}), got {tuple(mask.shape)}"
        )
    return None if mask is None else mask.bool()
