"""Products of Givens rotations as real matrices between phases.

A rotation of two tokens (Eq. 6 of the Converter paper, its angles halved) is a real one between phases, ``G = diag(e^-i
beta, e^i beta) R(gamma) diag(e^-i alpha, e^i alpha)``. A phase that both tokens share commutes with R. So in a product
of rotations of neighbouring tokens, all phases move to the two ends: ``H = diag(e^i after) R_H diag(e^i before)``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .exporting import is_exporting

BLOCK = 16  # rotations, or blocks of them, that are taken together


def unit(angle: Tensor) -> Tensor:
    """Return ``exp(i angle)``."""
    return torch.complex(angle.cos(), angle.sin())


def lower_factor(angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``H_l = G_n ... G_1`` as real blocks between two phases.

    Args:
        angles: (batch, 3, n), real: alpha, beta and gamma in radians.

    Returns:
        The blocks of R_H, (batch, blocks, m+1, m+1), each ``R_m ... R_1`` of m rotations; and the phases before and
        after it, (batch, n+1), float64, as they are sums over all tokens; on the CPU where the device has no float64.
    """
    alpha, beta, gamma = (angles / 2).unbind(1)
    alpha, beta = _to_double(alpha), _to_double(beta)
    common = (beta - alpha).cumsum(1) - beta  # phase of both tokens of a rotation
    last = (beta - alpha).sum(1, keepdim=True)
    return _products(_rotations(gamma)), pad(alpha - common, (1, 0)), torch.cat([common - beta, last], 1)


def upper_factor(angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``H_u = G_1 ... G_n`` in the form of ``lower_factor``; a block is ``R_1 ... R_m``."""
    alpha, beta, gamma = (angles / 2).unbind(1)
    alpha, beta = _to_double(alpha), _to_double(beta)
    common = (alpha - beta).flip(1).cumsum(1).flip(1) + beta
    first = (alpha - beta).sum(1, keepdim=True)
    return _products(_rotations(gamma).mT).mT, pad(-alpha - common, (0, 1)), torch.cat([first, common + beta], 1)


def _to_double(phase: Tensor) -> Tensor:
    return (phase.cpu() if phase.device.type == "mps" else phase).double()


def _rotations(gamma: Tensor) -> Tensor:
    """Return the rotations (batch, blocks, BLOCK, 2, 2) by angles (batch, n), padded by rotations by zero.

    One rotation by zero comes first, and at least one last.
    """
    padding = BLOCK if is_exporting() else 0  # two blocks at least: the same graph for any length
    gamma = pad(gamma, (1, 1 + -(gamma.shape[1] + 2) % BLOCK + padding))  # cells of them would bind it to their number
    c, s = gamma.cos(), gamma.sin()
    return torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2)).unflatten(1, (-1, BLOCK))


def _products(products: Tensor) -> Tensor:
    """Multiply the rotations of each block, by doubling and without any division."""
    while products.shape[2] > 1:
        first, second = products[:, :, ::2], products[:, :, 1::2]
        above = pad(first[..., :-1, :], (0, first.shape[-1] - 1))
        below = torch.cat([second[..., :1] * first[..., -1:, :], second[..., 1:]], -1)
        products = torch.cat([above, below], -2)
    return products.squeeze(2)
