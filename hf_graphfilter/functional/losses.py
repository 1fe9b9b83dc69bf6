"""Losses that training may add to the loss of the task."""

from __future__ import annotations

import typing
from typing import Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError
from ..ops import spectral

Norm = Literal["mean_abs", "frobenius", "off_diagonal"]


def orthogonality_loss(
    u: Tensor, v: Tensor, mask: Tensor | None = None, *, norm: Norm = "mean_abs", rho: spectral.Rho = "softmax"
) -> Tensor:
    """Return how far the singular vectors are from orthonormal: ``|U^T U - I| + |V^T V - I|``.

    Args:
        u, v: (batch, heads, tokens, features), the projections before their softmax over features and tokens.
        mask: bool (batch, tokens), False for padding.
        norm: ``"mean_abs"``: the mean absolute entry over batch, heads and features (the code of AGF's authors).
            ``"frobenius"``: the Frobenius norm divided by n^2, where n is the number of tokens without padding, as a
            mean over batch and heads (AGF, Eq. 11 as printed). ``"off_diagonal"``: the mean square of the entries,
            where those on the diagonal count as 0 (Singularformer, Eq. 15).
        rho: the activation of ``u`` and ``v``, see ``AGFConfig``.

    Returns:
        A scalar, float32 or wider.

    Example:
        >>> import torch
        >>> bool(orthogonality_loss(*torch.randn(2, 1, 2, 5, 4)) > 0)
        True

    Source: Wi et al., AGF (IJCAI 2025), Eq. 11; Wu et al., Singularformer (IJCAI 2023), Eq. 15.
    """
    if norm not in typing.get_args(Norm):
        raise GraphFilterError(f"norm={norm!r}: use 'mean_abs', 'frobenius' or 'off_diagonal'")
    if rho not in typing.get_args(spectral.Rho):
        raise GraphFilterError(f"rho={rho!r}: use 'softmax', 'sigmoid', 'tanh' or 'none'")
    if u.shape != v.shape or u.dim() != 4:
        raise GraphFilterError(
            f"orthogonality_loss: u and v are (batch, heads, tokens, features), got {tuple(u.shape)}, {tuple(v.shape)}"
        )
    real("orthogonality_loss", u=u, v=v)
    keys = present(mask, u)
    with torch.autocast(u.device.type, enabled=False):
        left, right = (spectral.gram_deviation(spectral.basis(x, dim, keys, rho)) for x, dim in ((u, -1), (v, -2)))
        if norm == "mean_abs":
            return left.abs().mean() + right.abs().mean()
        if norm == "off_diagonal":
            return off_diagonal(left).mean() + off_diagonal(right).mean()
        tokens = u.shape[2] if keys is None else keys.sum(-1).clamp(min=1)[:, None]
        left, right = (torch.linalg.matrix_norm(deviation) / tokens**2 for deviation in (left, right))
        return left.mean() + right.mean()


def diagonal_loss(core: Tensor) -> Tensor:
    """Return how far ``softmax(core)`` is from diagonal: the mean square of its off-diagonal entries.

    The entries on the diagonal count as 0.

    Args:
        core: (batch, heads, r, r), the scores of ``singularformer`` before their softmax.

    Returns:
        A scalar, float32 or wider.

    Raises:
        GraphFilterError: the core is not square, or does not hold real floating-point numbers.

    Example:
        >>> import torch
        >>> bool(diagonal_loss(100 * torch.eye(4).expand(1, 2, 4, 4)) < 1e-6)
        True

    Source: Wu et al., Singularformer (IJCAI 2023), Eq. 16.
    """
    if core.dim() != 4 or core.shape[-1] != core.shape[-2]:
        raise GraphFilterError(f"diagonal_loss: core is (batch, heads, r, r), got {tuple(core.shape)}")
    real("diagonal_loss", core=core)
    with torch.autocast(core.device.type, enabled=False):
        return off_diagonal(spectral.to_float32(core).softmax(-1)).mean()


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return the squares of the entries (..., r, r), with 0 on the diagonal."""
    return matrix.square() * (1 - torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device))


def real(name: str, **tensors: Tensor | None) -> None:
    """Raise unless the arguments of the function ``name`` are real floating-point numbers."""
    for argument, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise GraphFilterError(f"{name}: {argument} must be real floating-point numbers, got {x.dtype}")


def present(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask of tokens as bool, checked against (batch, heads, tokens, features)."""
    if mask is not None and mask.shape != (like.shape[0], like.shape[2]):
        raise GraphFilterError(
            f"mask is (batch, tokens), here ({like.shape[0]}, {like.shape[2]}), got {tuple(mask.shape)}"
        )
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        raise GraphFilterError(f"mask (batch, tokens) is bool, True for tokens that are there, got {mask.dtype}")
    return None if mask is None else mask.bool()
