"""Converter: a unitary matrix over the tokens, built from angles, and filters that have its eigenvectors."""

from __future__ import annotations

import math
import sys
import typing
from typing import Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError, shown
from ..ops import hessenberg, spectral
from ..ops.givens import unit
from ..ops.polynomials import expand, recurrence
from ..ops.unitary import precision
from .losses import real

Kernel = Literal["dirichlet", "fejer", "jackson", "lanczos", "lorentz", "vekic", "wang"]

LARGEST = 1_000_000  # largest K and M of a damping


def unitary(x: Tensor, lower: Tensor, upper: Tensor, phase: Tensor, *, inverse: bool = False) -> Tensor:
    """Apply the unitary matrix ``Phi = D H_l H_u`` to ``x`` in O(n d) time and memory, without an n x n matrix.

    ``H_l = G_{N-1} ... G_1`` and ``H_u = G_1 ... G_{N-1}`` are products of Givens rotations G_i of the tokens i and
    i+1. The angles of ``H_l`` are ``lower``, those of ``H_u`` are ``upper``; ``D = diag(exp(i phase))``.

    Args:
        x: (batch, tokens, features) or (batch, heads, tokens, features), real or complex.
        lower, upper: (batch, 3, tokens - 1), the angles alpha, beta and gamma of Eq. 6 in radians, equal for all heads.
        phase: (batch, tokens), in radians.
        inverse: whether to apply ``Phi^-1`` instead, which is the conjugate transpose.

    Returns:
        A tensor of the shape of ``x``: complex128 if any input has double precision, else complex64 (also for half
        precision).

    Raises:
        GraphFilterError: shapes do not fit, or angles are not real floating-point numbers.

    Example:
        >>> import torch
        >>> x, angles, phase = torch.randn(1, 5, 4), torch.randn(2, 1, 3, 4), torch.randn(1, 5)
        >>> y = unitary(x, *angles, phase)
        >>> y.shape, torch.allclose(unitary(y, *angles, phase, inverse=True).real, x, atol=1e-5)
        (torch.Size([1, 5, 4]), True)

    Source: Zhang et al., Converter (preprint, 2025), Eq. 6 and 7 with one order (1-DHHP) and no permutation.
    """
    signal, lower, upper, phase = _prepare("unitary", x, lower, upper, phase)
    scale = unit(-phase if inverse else phase)
    return _reshape(hessenberg.transform(signal, lower, upper, scale, forward=not inverse, back=inverse), x)


def synvolution(value: Tensor, eigenvalues: Tensor, lower: Tensor, upper: Tensor, phase: Tensor) -> Tensor:
    """Apply ``Phi^-1 [exp(i eigenvalues) * (Phi value)]``, a unitary filter, in O(n d) time and memory.

    Args:
        value: (batch, tokens, features) or (batch, heads, tokens, features), real or complex.
        eigenvalues: (batch, tokens), in radians.
        lower, upper, phase: the angles of Phi, see ``unitary``. D and its inverse cancel out in this filter, so
            ``phase`` has no influence on the result, and its gradient is exactly zero.

    Returns:
        A tensor of the shape of ``value``, with the dtype as in ``unitary``.

    Raises:
        GraphFilterError: one of the errors of ``unitary``.

    Example:
        >>> import torch
        >>> angles = torch.randn(2, 1, 3, 4)
        >>> synvolution(torch.randn(1, 5, 4), torch.randn(1, 5), *angles, torch.randn(1, 5)).dtype
        torch.complex64

    Source: Zhang et al., Converter (preprint, 2025), Eq. 8.
    """
    signal, eigenvalues, lower, upper, phase = _prepare_filter("synvolution", value, eigenvalues, lower, upper, phase)
    return _reshape(_filter(signal, eigenvalues, lower, upper, phase), value)


def kernelution(
    value: Tensor,
    eigenvalues: Tensor,
    coefficients: Tensor,
    lower: Tensor,
    upper: Tensor,
    phase: Tensor,
    *,
    kernel: Kernel = "dirichlet",
    M: int = 3,
    xi: float = 4.0,
    a: float = 0.5,
    b: float = 2.0,
) -> Tensor:
    """Apply ``Phi^-1 [exp(i p(eigenvalues)) * (Phi value)]`` with the Chebyshev series ``p(x) = sum_k g_k w_k T_k(x)``.

    Args:
        value, eigenvalues, lower, upper, phase: as in ``synvolution``; the eigenvalues should lie in [-1, 1].
        coefficients: w_k, (K+1,). There is no factor 1/2 at k = 0.
        kernel, M, xi, a, b: the kind and the parameters of the damping g_k, see ``gibbs_damping``.

    Returns:
        A tensor of the shape of ``value``, with the dtype as in ``unitary``, whatever the dtype of the coefficients is.

    Raises:
        GraphFilterError: one of the errors of ``unitary`` or ``gibbs_damping``, or coefficients have another shape.

    Example:
        >>> import torch
        >>> value, eigenvalues = torch.randn(1, 5, 4), torch.rand(1, 5)
        >>> angles, phase = torch.randn(2, 1, 3, 4), torch.randn(1, 5)
        >>> kernelution(value, eigenvalues, torch.tensor([0.0, 1.0, 0.1]), *angles, phase, kernel="jackson").shape
        torch.Size([1, 5, 4])

    Source: Zhang et al., Converter (preprint, 2025), Eq. 12.
    """
    real("kernelution", coefficients=coefficients)
    if coefficients.dim() != 1 or not len(coefficients):
        raise GraphFilterError(f"kernelution: coefficients is (K+1,), got {tuple(coefficients.shape)}")
    K = len(coefficients) - 1
    damping = gibbs_damping(kernel, K, M=M, xi=xi, a=a, b=b)
    signal, eigenvalues, lower, upper, phase = _prepare_filter("kernelution", value, eigenvalues, lower, upper, phase)
    weights = coefficients.to(eigenvalues) * damping.to(eigenvalues)
    polynomial = expand(eigenvalues[:, None, :, None], weights, recurrence("chebyshev", K))[:, 0, :, 0]
    return _reshape(_filter(signal, polynomial, lower, upper, phase), value)


def gibbs_damping(kernel: Kernel, K: int, *, M: int = 3, xi: float = 4.0, a: float = 0.5, b: float = 2.0) -> Tensor:
    """Return the factors ``g_0 ... g_K`` that damp the Gibbs oscillations of a Chebyshev expansion; ``g_0`` is 1.

    Args:
        kernel: ``"dirichlet"``, ``"fejer"``, ``"jackson"``, ``"lanczos"`` (with M), ``"lorentz"`` (xi), ``"vekic"`` or
            ``"wang"`` (a and b).
        K: highest order, from 0 to a million.
        M: power, an integer from 1 to a million.
        xi: resolution, a finite number that is not 0 (for xi to 0 the kernel becomes ``"fejer"``).
        a, b: parameters of ``exp(-(a k / (K+1))^b)``, finite numbers with a >= 0 and b > 0.

    Returns:
        The factors, (K+1,), float64.

    Raises:
        GraphFilterError: the kernel is unknown, or K or a parameter of this kernel is out of range.

    Example:
        >>> gibbs_damping("fejer", 3)
        tensor([1.0000, 0.7500, 0.5000, 0.2500], dtype=torch.float64)

    Source: Zhang et al., Converter (preprint, 2025), Table 6.
    """
    if kernel not in typing.get_args(Kernel):
        raise GraphFilterError(f"kernel={kernel!r}: use one of {', '.join(map(repr, typing.get_args(Kernel)))}")
    if not _integer(K) or K < 0:
        raise GraphFilterError(f"K must be an integer >= 0, got {shown(K)}")
    if K > LARGEST:
        raise GraphFilterError(f"K must be at most {LARGEST}, got {shown(K)}")
    if kernel == "lanczos" and (not _integer(M) or M < 1):
        raise GraphFilterError(f"gibbs_damping: M must be an integer >= 1, got {shown(M)}")
    if kernel == "lanczos" and M > LARGEST:
        raise GraphFilterError(f"gibbs_damping: M must be at most {LARGEST}, got {shown(M)}")
    if kernel == "lorentz" and (not _is_finite(xi) or xi == 0):
        raise GraphFilterError(f"gibbs_damping: xi must be a finite number that is not 0, got {shown(xi)}")
    if kernel == "wang" and not (_is_finite(a) and _is_finite(b) and a >= 0 and b > 0):
        raise GraphFilterError(
            f"gibbs_damping: a must be finite and >= 0, b finite and > 0, got a={shown(a)}, b={shown(b)}"
        )
    k = torch.arange(K + 1, dtype=torch.float64)
    t = k / (K + 1)
    if kernel == "dirichlet":
        return torch.ones_like(t)
    if kernel == "fejer":
        return 1 - t
    if kernel == "jackson":
        angle = math.pi / (K + 2)
        return ((K + 2 - k) * (k * angle).cos() + (k * angle).sin() / math.tan(angle)) / (K + 2)
    if kernel == "lanczos":
        return torch.sinc(t) ** M  # sin(pi t) / (pi t)
    if kernel == "lorentz":
        steep = min(2 * abs(float(xi)), sys.float_info.max)  # sinh(xi (1 - t)) / sinh(xi) within float64
        return (-steep / 2 * t).exp() * torch.expm1(-steep * (1 - t)) / math.expm1(-steep)
    if kernel == "vekic":
        return (1 - ((t - 0.5) / (t * (1 - t))).tanh()) / 2
    return (-((float(a) * t) ** float(b))).exp()


def kernel_polynomial_loss(coefficients: Tensor) -> Tensor:
    """Return the loss ``sum_k pi k^2 |w_k|^2``, which penalises high orders more.

    Args:
        coefficients: w_k, (K+1,), before any damping.

    Returns:
        A scalar, float32 or wider.

    Raises:
        GraphFilterError: the coefficients have another shape, or are not real floating-point numbers.

    Example:
        >>> import torch
        >>> kernel_polynomial_loss(torch.tensor([5.0, 1.0, 0.5]))
        tensor(6.2832)

    Source: Zhang et al., Converter (preprint, 2025), Eq. 11.
    """
    real("kernel_polynomial_loss", coefficients=coefficients)
    if coefficients.dim() != 1 or not len(coefficients):
        raise GraphFilterError(f"kernel_polynomial_loss: coefficients is (K+1,), got {tuple(coefficients.shape)}")
    orders = torch.arange(len(coefficients), device=coefficients.device)
    return math.pi * (orders * spectral.to_float32(coefficients)).square().sum()


def _filter(signal: Tensor, angle: Tensor, lower: Tensor, upper: Tensor, phase: Tensor) -> Tensor:
    response = unit(angle + 0 * phase)  # D^-1 exp(i angle) D
    return hessenberg.transform(signal, lower, upper, response, forward=True, back=True)


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and abs(x) <= sys.float_info.max


def _integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _prepare(name: str, x: Tensor, lower: Tensor, upper: Tensor, phase: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Return the signal (batch, tokens, all features), the rotations and the rest, in the precision of the result."""
    real(name, lower=lower, upper=upper, phase=phase)
    if x.dim() not in (3, 4) or not (x.is_floating_point() or x.is_complex()):
        raise GraphFilterError(
            f"{name}: the signal is (batch, tokens, features) or (batch, heads, tokens, features), real or complex "
            f"floating-point numbers; got {tuple(x.shape)}, {x.dtype}"
        )
    batch, tokens = x.shape[0], x.shape[-2]
    shape = (batch, 3, max(tokens - 1, 0))
    if not lower.shape == upper.shape == shape or phase.shape != (batch, tokens):
        raise GraphFilterError(
            f"{name}: of {batch} sequences of {tokens} tokens lower and upper are {shape}, phase {(batch, tokens)}; "
            f"got {tuple(lower.shape)}, {tuple(upper.shape)}, {tuple(phase.shape)}"
        )
    dtype = precision(x, lower, upper, phase, *more)
    signal = x.transpose(1, 2).flatten(2) if x.dim() == 4 else x
    return signal, *(t.to(dtype) for t in (lower, upper, phase, *more))


def _prepare_filter(
    name: str, x: Tensor, eigenvalues: Tensor, lower: Tensor, upper: Tensor, phase: Tensor
) -> tuple[Tensor, ...]:
    real(name, eigenvalues=eigenvalues)
    signal, lower, upper, phase, real_eigenvalues = _prepare(name, x, lower, upper, phase, eigenvalues)
    if eigenvalues.shape != phase.shape:
        raise GraphFilterError(
            f"{name}: eigenvalues is (batch, tokens), here {tuple(phase.shape)}, got {tuple(eigenvalues.shape)}"
        )
    return signal, real_eigenvalues, lower, upper, phase


def _reshape(signal: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 3:
        return signal
    return signal.unflatten(2, (like.shape[1], like.shape[3])).transpose(1, 2)
