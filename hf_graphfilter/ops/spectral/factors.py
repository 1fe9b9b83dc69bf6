"""The factors ``U Sigma`` and ``V``, and the deviation of ``U`` and ``V`` from orthogonality."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..polynomials import Recurrence, expand, expand_with_derivatives
from .blocks import NEVER, Block, to_float32

Rho = Literal["softmax", "sigmoid", "tanh", "none"]
ALL: Block = (slice(None), slice(None), slice(None))


class Left(NamedTuple):
    """The left factor ``U Sigma = softmax(u) * sum_k theta_k T_k(sigmoid(sigma))`` (Eq. 8 and 9 of the AGF paper).

    Its rows are computed where they are needed.

    Attributes:
        u, sigma: (batch, heads, tokens, features); ``sigma`` None where ``theta`` has order 0.
        theta: (K+1,) or (heads, K+1), float32 or wider.
        steps: from ``recurrence``.
    """

    u: Tensor
    sigma: Tensor | None
    theta: Tensor
    steps: Recurrence

    def rows(self, at: Block = ALL) -> Tensor:
        """Return the rows, (batch, heads, tokens, features), float32 or wider."""
        U, x, theta = self._read_block(at)
        return U * (theta[..., :1, None] if x is None else expand(x, theta, self.steps))

    def singular_values(self) -> Tensor:
        """Return the diagonal of ``Sigma`` for each token, or one number for all where ``theta`` has order 0."""
        theta = self.theta
        return (
            theta[..., :1, None] if self.sigma is None else expand(to_float32(self.sigma).sigmoid(), theta, self.steps)
        )

    def room(self) -> Left:
        """Return empty tensors for the gradients."""
        sigma = None if self.sigma is None else torch.empty_like(self.sigma)
        return Left(torch.empty_like(self.u), sigma, torch.zeros_like(self.theta), self.steps)

    def backward(self, at: Block, grad: Tensor, grads: Left) -> Tensor:
        """Return the rows again, and write their gradients, given ``grad`` of the rows, into ``grads``."""
        U, x, theta = self._read_block(at)
        toward_p = grad * U
        if x is None:
            p, basis = theta[..., :1, None], [torch.ones_like(U)]
        else:
            p, slope, basis = expand_with_derivatives(x, theta, self.steps)
        by_theta = torch.stack([torch.linalg.vecdot(toward_p, t).sum((0, 2)) for t in basis], -1)
        if theta.dim() == 2:
            grads.theta[at[1]] += by_theta
        else:
            grads.theta.add_(by_theta.sum(0))
        toward_u = toward_p * p
        grads.u[at] = torch.addcmul(toward_u, U, toward_u.sum(-1, keepdim=True), value=-1)
        if x is not None and grads.sigma is not None:
            grads.sigma[at] = toward_p.mul_(slope).mul_(x).mul_(1 - x)
        return U.mul_(p)

    def _read_block(self, at: Block) -> tuple[Tensor, Tensor | None, Tensor]:
        U = to_float32(self.u[at]).transpose(1, 2).softmax(-1).transpose(1, 2)  # as projections store it
        x = None if self.sigma is None else to_float32(self.sigma[at]).sigmoid()
        return U, x, self.theta[at[1]] if self.theta.dim() == 2 else self.theta


def basis(x: Tensor, dim: int, keys: Tensor | None, rho: Rho = "softmax") -> Tensor:
    """Return ``U`` or ``V``: the softmax of ``x`` over the features (``dim`` -1) or over the tokens (``dim`` -2).

    ``x`` is (batch, heads, tokens, features). The result is zero at tokens where ``keys`` is False. Activations ``rho``
    other than the softmax act on each entry.
    """
    if rho != "softmax":
        x = to_float32(x)
        out = x.sigmoid() if rho == "sigmoid" else x.tanh() if rho == "tanh" else x
        return out if keys is None else out * keys[:, None, :, None]
    if keys is None:
        return to_float32(x).softmax(dim)
    visible = keys[:, None, :, None]
    return to_float32(x).masked_fill(~visible, NEVER).softmax(dim) * visible


def gram_deviation(x: Tensor) -> Tensor:
    """Return ``x^T x - I``, (..., features, features).

    Its backward pass is one product, as the result is symmetric.
    """
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
