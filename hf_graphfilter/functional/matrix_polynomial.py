"""Polynomials of the attention matrix."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..errors import GraphFilterError
from ..ops.combine import Coefficients
from ..ops.eager_cpu import on_plain_cpu
from ..ops.heads import repeat_heads
from ..ops.polynomial_form import polynomial_form
from ..shift.attention import AttentionCall, AttentionShift
from ..shift.operator import ShiftOperator
from .losses import present


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
    """Apply ``H = w_0 I + w_1 A + w_K (A + (K-1)(A^2 - A))`` to ``value``, without an n x n matrix.

    Args:
        query: (batch, heads, tokens, features).
        key, value: (batch, heads or key heads, tokens, features).
        w_0, w_1, w_K: numbers, or tensors (heads,).
        K: order, >= 1.
        mask: bool (batch, tokens), False for padding. Or four dimensions as in ``scaled_dot_product_attention``: bool
            (True for visible) or additive, broadcast to (batch, heads, queries, keys).
        causal: whether a token sees no later tokens; not together with a mask of queries by keys.
        scale: factor of the scores; features ** -0.5 by default.
        dropout: dropout probability; each application of A draws a new pattern.
        approximation: ``"taylor"`` as above, or ``"none"`` for ``w_K A^K``.

    Returns:
        (batch, heads, tokens, features), with the dtype of ``value``.

    Raises:
        GraphFilterError: K < 1, the approximation is unknown, the numbers of queries and keys differ, or the mask or
            the coefficients have another shape.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> gfsa(q, k, v, w_0=0.0, w_1=1.0, w_K=0.1, K=3).shape
        torch.Size([1, 2, 5, 4])

    Source: Choi et al., GFSA (NeurIPS 2024), Eq. 4-6.
    """
    if not isinstance(K, int) or isinstance(K, bool) or K < 1:
        raise GraphFilterError(f"gfsa: K must be an integer >= 1, got {K!r}")
    if approximation not in ("taylor", "none"):
        raise GraphFilterError(f"gfsa: approximation is 'taylor' or 'none', got {approximation!r}")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4 or key.shape[:3] != value.shape[:3]:
        raise GraphFilterError(f"gfsa: query, key and value are (batch, heads, tokens, features), got {shapes}")
    if query.shape[2] != key.shape[2]:
        raise GraphFilterError(f"gfsa: A must be square, as many queries as keys; got {shapes}")
    if query.shape[1] % key.shape[1]:
        raise GraphFilterError(f"gfsa: the heads of the query must be a multiple of those of the key; got {shapes}")
    heads = query.shape[1]
    keys = _visible(mask, query)
    if causal and keys is not None:
        tokens = query.shape[2]
        causal_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        keys = keys & causal_mask if keys.dtype == torch.bool else keys.masked_fill(~causal_mask, -torch.inf)

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        is_causal = causal and keys is None
        out = scaled_dot_product_attention(query, k, v, keys, dropout, is_causal, scale=scale)
        return out.transpose(1, 2), None

    def polynomial(v: Tensor, coefficients: Coefficients, exact: bool) -> tuple[Tensor, list[Tensor]] | None:
        is_causal = causal and keys is None
        options: dict[str, Any] = {"scale": scale, "causal": is_causal, "dropout": dropout, "exact": exact}
        return polynomial_form(query, key, v, keys, coefficients, **options)

    shift = AttentionShift(AttentionCall(attend, query, key, polynomial=polynomial))
    c_0, c_1, c_K = (_coefficient(c, query, heads, n) for c, n in ((w_0, "w_0"), (w_1, "w_1"), (w_K, "w_K")))
    return apply_gfsa(shift, value, c_0, c_1, c_K, K, approximation)


def apply_gfsa(
    shift: ShiftOperator,
    value: Tensor,
    w_0: Tensor | None,
    w_1: Tensor,
    w_K: Tensor,
    K: int,
    approximation: Literal["taylor", "none"],
) -> Tensor:
    """Return ``w_0 value + w_1 S(value) + w_K P(value)``, see ``gfsa``; without the first term if w_0 is None.

    While w_K is zero (its start value), ``S`` is the model's own attention call, so that the outputs stay the same bit
    for bit. This is checked only on the CPU, where there are faster forms.
    """
    if K > 1:
        shift.exact = known_zero(w_K)
    if K == 1:
        return shift.polynomial(value, [w_0, w_1 + w_K])
    if approximation == "none":
        return shift.polynomial(value, [w_0, w_1, *[None] * (K - 2), w_K])
    return shift.polynomial(value, [w_0, torch.add(w_1, w_K, alpha=2 - K), (K - 1) * w_K])


def known_zero(coefficient: Tensor) -> bool:
    """Return whether all values are zero, or False if the answer would cost a synchronisation or a graph break."""
    return on_plain_cpu(coefficient) and not any(coefficient.flatten().tolist())  # in Python: these are few numbers


def _visible(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the mask as ``scaled_dot_product_attention`` takes it."""
    if mask is None:
        return None
    batch, heads, tokens, _ = query.shape
    if mask.shape == (batch, tokens) and (is_token := present(mask, query)) is not None:
        return is_token[:, None, None, :]
    sizes = zip(mask.shape, (batch, heads, tokens, tokens), strict=False)
    if mask.dim() != 4 or any(size not in (1, full_size) for size, full_size in sizes):
        raise GraphFilterError(
            f"gfsa: mask is (batch, tokens), here ({batch}, {tokens}), or of queries by keys with four dimensions, as "
            f"mask[None, None] has; got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise GraphFilterError(f"gfsa: a mask of queries by keys is bool or floating-point numbers, got {mask.dtype}")
    return mask


def _coefficient(c: Any, like: Tensor, heads: int, name: str) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    c = torch.as_tensor(c, device=like.device, dtype=None if isinstance(c, Tensor) else dtype)
    c = c if c.is_floating_point() else c.to(dtype)
    if c.dim() > 1 or (c.dim() == 1 and c.shape[0] not in (1, heads)):
        raise GraphFilterError(f"gfsa: {name} is a number or a tensor ({heads},), got shape {tuple(c.shape)}")
    return c.expand(heads)
