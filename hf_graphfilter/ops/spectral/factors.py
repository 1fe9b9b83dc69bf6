"""The factors ``U Sigma`` and ``V``, and how far ``U`` and ``V`` are from orthogonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..polynomials import Recurrence, expand, expand_with_derivatives
from .bidirectional import NEVER, blocks, wide

PIECE = 1 << 15  # numbers that elementwise work on the CPU takes at once


def left_vectors(u: Tensor, sigma: Tensor | None, theta: Tensor, steps: Recurrence) -> Tensor:
    """``softmax(u) * sum_k theta_k T_k(sigmoid(sigma))``: the rows of ``U Sigma`` (Eq. 8 and 9).

    Args:
        u, sigma: (batch, heads, tokens, features); ``sigma`` None where ``theta`` has order 0.
        theta: (K+1,) or (heads, K+1), float32 or wider.
        steps: from ``recurrence``.

    Returns:
        (batch, heads, tokens, features), dtype of ``u``.
    """
    if sigma is None:
        return (wide(u).softmax(-1) * theta.reshape(-1, 1, 1)).to(u.dtype)
    return _LeftVectors.apply(u, sigma, theta, steps)


class _LeftVectors(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, sigma: Tensor, theta: Tensor, steps: Recurrence) -> Tensor:
        out = torch.empty_like(u, memory_format=torch.contiguous_format)
        for part in blocks(u, PIECE):
            U, x = wide(u[:, :, part]).softmax(-1), wide(sigma[:, :, part]).sigmoid()
            out[:, :, part] = U.mul_(expand(x, theta, steps))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.steps = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, sigma, theta = ctx.saved_tensors
        grad_u, grad_sigma, grad_theta = torch.empty_like(u), torch.empty_like(sigma), torch.zeros_like(theta)
        for part in blocks(u, PIECE):
            U, x, g = (wide(t[:, :, part]) for t in (u, sigma, grad))
            U, x = U.softmax(-1), x.sigmoid()
            p, slope, basis = expand_with_derivatives(x, theta, ctx.steps)
            toward_p = g * U
            for k, t in enumerate(basis):
                by_head = torch.linalg.vecdot(toward_p, t).sum((0, 2))
                grad_theta[..., k] += by_head if theta.dim() == 2 else by_head.sum()
            grad_sigma[:, :, part] = toward_p.mul_(slope).mul_(x).mul_(1 - x)
            toward_u = p.mul_(g)
            grad_u[:, :, part] = U * (toward_u - torch.linalg.vecdot(U, toward_u).unsqueeze(-1))
        return grad_u, grad_sigma, grad_theta, None


def basis(x: Tensor, dim: int, keys: Tensor | None) -> Tensor:
    """``U``, ``V``: the softmax of ``x`` (batch, heads, tokens, features) over the features (``dim`` -1) or
    the tokens (-2); zero at tokens where ``keys`` is False."""
    if keys is None:
        return wide(x).softmax(dim)
    there = keys[:, None, :, None]
    return wide(x).masked_fill(~there, NEVER).softmax(dim) * there


def gram_deviation(x: Tensor) -> Tensor:
    """``x^T x - I``, (..., features, features); its backward pass is one product, as the result is symmetric."""
    return _Gram.apply(x) - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


class _Gram(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mT @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x @ (grad + grad.mT)
