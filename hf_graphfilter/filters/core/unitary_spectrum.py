"""The parts of Converter's filters and model: eigenvalues and angles, their polynomial, the real form."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...ops.polynomials import Recurrence, expand
from ...ops.spectral import to_float32
from .window import in_dtype_of


class Spectrum(nn.Module):
    """The eigenvalues and rotation angles of a unitary filter, made from the tokens by two SIREN networks.

    Each network has two layers, ``sin(W_2 sin(W_1 x + b_1) + b_2)``. Its outputs are averaged over groups of equal size
    to one eigenvalue and to the angles of a token (Eq. 4). So the eigenvalues are in [-1, 1], the angles in [-2 pi, 2
    pi].

    Weights start as in Sitzmann et al. (2020), with two changes: omega_0 = 1, and the first layer has the bound of an
    inner layer too, ``sqrt(6 / features)``. The reason is the input: omega_0 = 30 is meant for one to three coordinates
    in [-1, 1]. Here it is hundreds of normalised features, whose sum already turns the sine once around. The linear
    layers compute in the dtype of their weights. Sines, averages and results are float32 or wider.

    Args:
        features: number of features of a token.
        hidden: number of outputs of each layer; the last has at least one per eigenvalue or angle.
        sets: number of sets of eigenvalues and angles per token, such as one per head.
        orders: number of rotations per set, L of Eq. 7.
        phase: whether to make the seventh angle of a token, that of D. It has no influence on a filter, in which D
            cancels with its inverse.
        eigenvalue_dropout: dropout of the hidden features of the first network, so its results keep their range.
        eigenvector_dropout: the same for the second network.

    Example:
        >>> import torch
        >>> eigenvalues, angles = Spectrum(16, 16, sets=2)(torch.randn(3, 5, 16))
        >>> eigenvalues.shape, angles.shape
        (torch.Size([3, 2, 5]), torch.Size([3, 2, 1, 7, 5]))
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        sets: int = 1,
        orders: int = 1,
        phase: bool = True,
        eigenvalue_dropout: float = 0.0,
        eigenvector_dropout: float = 0.0,
    ):
        super().__init__()
        self.shape = sets, orders, 6 + phase
        self.eigenvalue_dropout, self.eigenvector_dropout = eigenvalue_dropout, eigenvector_dropout
        self.eigenvalues = _siren(features, hidden, sets)
        self.angles = _siren(features, hidden, math.prod(self.shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (*self.eigenvalues, *self.angles):
            assert isinstance(layer, nn.Linear)
            nn.init.uniform_(layer.weight, -math.sqrt(6 / layer.in_features), math.sqrt(6 / layer.in_features))
            nn.init.uniform_(layer.bias, -1 / math.sqrt(layer.in_features), 1 / math.sqrt(layer.in_features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues (batch, sets, tokens) and angles (batch, sets, orders, 7 or 6, tokens) in radians.

        ``x`` is (batch, tokens, features). The angles are three of the lower rotations, three of the upper, and the
        phase.
        """
        sets, angles = self.shape[0], math.prod(self.shape)
        eigenvalues = self._numbers(x, self.eigenvalues, sets, self.eigenvalue_dropout)
        numbers = 2 * math.pi * self._numbers(x, self.angles, angles, self.eigenvector_dropout)
        return eigenvalues, numbers.unflatten(1, self.shape)

    def _numbers(self, x: Tensor, siren: nn.Sequential, count: int, dropout: float) -> Tensor:
        """Return numbers in [-1, 1], (batch, count, tokens)."""
        for layer in siren:
            if layer is not siren[0]:
                x = nn.functional.dropout(x, dropout, self.training)
            x = layer(in_dtype_of(layer, x))
            x = to_float32(x).sin()
        return x.unflatten(-1, (count, -1)).mean(-1).mT


def _siren(features: int, hidden: int, numbers: int) -> nn.Sequential:
    """Return two layers whose outputs form ``numbers`` groups of equal size."""
    return nn.Sequential(nn.Linear(features, hidden), nn.Linear(hidden, max(hidden // numbers, 1) * numbers))


def damped_polynomial(eigenvalues: Tensor, w: Tensor, factors: tuple[float, ...], steps: Recurrence) -> Tensor:
    """Return ``sum_k g_k w_k T_k`` at the eigenvalues.

    Args:
        eigenvalues: (batch, sets, tokens).
        w: the w_k, (K+1,) or (sets, K+1).
        factors: the g_k.
        steps: the recurrence of the T_k.
    """
    coefficients = torch.stack([g * w_k for g, w_k in zip(factors, w.unbind(-1), strict=True)], -1)
    return expand(eigenvalues.unsqueeze(-1), coefficients, steps).squeeze(-1)


def reflect(zeta: Tensor) -> Tensor:
    """Return ``zeta`` reflected into [0, 1] by a triangle wave, whose slope is 1 or -1, also at the start value 1."""
    return ((zeta + 1).remainder(2) - 1).abs()


def real_form(z: Tensor, zeta: Tensor) -> Tensor:
    """Return ``zeta Re z + (1 - zeta) Im z`` with zeta reflected."""
    return torch.lerp(z.imag, z.real, reflect(zeta).to(z.real.dtype))
