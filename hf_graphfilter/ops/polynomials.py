"""Polynomial bases by three-term recurrences, the expansion of a spectral filter in them, and its gradient.

``T_0 = 1``, ``T_1 = c_0 + c_1 x``, ``T_k = (alpha_k x + beta_k) T_{k-1} - gamma_k T_{k-2}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError

Basis = Literal["jacobi", "chebyshev", "legendre", "monomial"]
Recurrence = tuple[tuple[float, float, float], ...]
_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST = 1e30  # of what the recurrence computes: it is done in float32, whose largest number is 3e38


@lru_cache
def recurrence(basis: str, K: int, a: float = 1.0, b: float = 1.0) -> Recurrence:
    """Return the steps ``(alpha_k, beta_k, gamma_k)`` for k = 1 ... K; the first is ``(c_1, c_0, 0)``.

    Args:
        basis: ``"jacobi"`` (with a and b), ``"chebyshev"`` (first kind), ``"legendre"``, ``"monomial"``, or
            ``"bernstein"``, which gives the recurrence of the basis in which ``bernstein_in_chebyshev`` expands it.
        K: highest order, >= 0.
        a, b: parameters of the Jacobi polynomials. They are orthogonal on [-1, 1] for a, b > -1; the recurrence also
            runs outside, where no denominator vanishes.

    Returns:
        K triples. Jacobi after Eq. 22-26 of the AGF paper with ``2k+a+b-1`` in place of its misprint ``2k+a+b+1``.

    Raises:
        GraphFilterError: an unknown basis, K < 0, or a, b and k for which a denominator is zero or the polynomials
            leave the range of float32 on [0, 1].

    Example:
        >>> recurrence("chebyshev", 2)
        ((1.0, 0.0, 0.0), (2.0, 0.0, 1.0))
    """
    if K < 0:
        raise GraphFilterError(f"K must be an integer >= 0, got {K}")
    if basis == "monomial":
        return ((1.0, 0.0, 0.0),) * K
    if basis == "chebyshev":
        return tuple((1.0, 0.0, 0.0) if k == 1 else (2.0, 0.0, 1.0) for k in range(1, K + 1))
    if basis == "bernstein":  # those of Chebyshev on [0, 1], in which ``bernstein_in_chebyshev`` expands them
        return tuple((2.0, -1.0, 0.0) if k == 1 else (4.0, -2.0, 1.0) for k in range(1, K + 1))
    if basis == "legendre":
        return tuple(((2 * k - 1) / k, 0.0, (k - 1) / k) for k in range(1, K + 1))
    if basis != "jacobi":
        raise GraphFilterError(f"unknown basis {basis!r}; use 'jacobi', 'chebyshev', 'legendre' or 'monomial'")
    steps = [((a + b + 2) / 2, (a - b) / 2, 0.0)] if K else []
    for k in range(2, K + 1):
        s = 2 * k + a + b
        if k + a + b == 0 or s == 2:
            vanishing = "k + a + b" if k + a + b == 0 else "2k + a + b - 2"
            raise GraphFilterError(
                f"the Jacobi recurrence has no step k={k} for a={a:g}, b={b:g}: its denominator {vanishing} is zero; "
                "choose other a, b or a smaller K"
            )
        scale = 2 * k * (k + a + b)
        alpha = (s - 1) * s / scale
        beta = (s - 1) * (a * a - b * b) / (scale * (s - 2))
        gamma = 2 * (k + a - 1) * (k + b - 1) * s / (scale * (s - 2))
        steps.append((alpha, beta, gamma))
    if not all(_stays_finite(x / 8, steps) for x in range(9)):
        raise GraphFilterError(
            f"the Jacobi polynomials up to K={K} for a={a:g}, b={b:g} leave the range of float32 on [0, 1]; choose a "
            "smaller K, or a and b nearer to 0"
        )
    return tuple(steps)


def _stays_finite(x: float, steps: list[tuple[float, float, float]]) -> bool:
    earlier = current = 1.0
    for alpha, beta, gamma in steps:
        product, subtracted = (x * alpha + beta) * current, gamma * earlier
        if not (abs(product) <= _LARGEST and abs(subtracted) <= _LARGEST):  # NaN is not either
            return False
        earlier, current = current, product - subtracted
    return True


@lru_cache
def monomials(basis: str, K: int, a: float = 1.0, b: float = 1.0) -> list[list[float]]:
    """Return the coefficients of x^0 ... x^K in T_0 ... T_K, (K+1) x (K+1).

    Arguments and errors are those of ``recurrence``. The basis may also be ``"bernstein"``: ``T_k = binomial(K, k) x^k
    (1 - x)^(K-k)``.

    Example:
        >>> monomials("chebyshev", 2)[2]
        [-1.0, 0.0, 2.0]
    """
    if basis == "bernstein":
        return [
            [0] * k + [math.comb(K, k) * math.comb(K - k, j) * (-1) ** j for j in range(K - k + 1)]
            for k in range(K + 1)
        ]
    before, current = [0.0] * (K + 1), [1.0] + [0.0] * K
    rows = [current]
    for alpha, beta, gamma in recurrence(basis, K, a, b):
        raised = [0.0, *current[:-1]]
        following = [alpha * r + beta * c - gamma * e for r, c, e in zip(raised, current, before, strict=True)]
        before, current = current, following
        rows.append(current)
    return rows


@lru_cache
def bernstein_in_chebyshev(K: int) -> list[list[float]]:
    """Return the coefficients of ``T_0(2x - 1) ... T_K(2x - 1)``, Chebyshev on [0, 1], in the Bernstein polynomials.

    They are at most 1, while those of the powers of x grow as 3^K, so sums in this basis lose little to rounding.

    Example:
        >>> [[round(c, 3) for c in row] for row in bernstein_in_chebyshev(1)]
        [[0.5, -0.5], [0.5, 0.5]]
    """
    angles = [math.pi * (i + 0.5) / (K + 1) for i in range(K + 1)]  # of the nodes, where sums are integrals
    rows = []
    for k in range(K + 1):
        values = [math.comb(K, k) * math.cos(a / 2) ** (2 * k) * math.sin(a / 2) ** (2 * (K - k)) for a in angles]
        sums = [sum(v * math.cos(j * a) for v, a in zip(values, angles, strict=True)) for j in range(K + 1)]
        rows.append([(1 if j == 0 else 2) * s / (K + 1) for j, s in enumerate(sums)])
    return rows


def identity_coefficients(basis: str, K: int, a: float = 1.0, b: float = 1.0) -> list[float]:
    """Return the coefficients of ``T_0 ... T_K`` whose sum is x itself, K >= 1.

    Arguments and errors are those of ``monomials``.

    Example:
        >>> identity_coefficients("bernstein", 2)
        [0.0, 0.5, 1.0]
    """
    if basis == "bernstein":
        return [k / K for k in range(K + 1)]
    scale, constant, _ = recurrence(basis, K, a, b)[0]
    if not scale:
        raise GraphFilterError(
            f"with a={a:g} and b={b:g} the first Jacobi polynomial is constant, and the filter starts as A: choose "
            "other values, whose sum is not -2"
        )
    return [-constant / scale, 1 / scale] + [0.0] * (K - 1)


def highest_order(basis: str, K: int, a: float = 1.0, b: float = 1.0) -> int:
    """Return the highest order up to K for which float32 still resolves the sums of the ``T_k`` on [0, 1].

    Float32 resolves 2^-24, and bfloat16 2^-7 of the sum. Arguments and errors are those of ``monomials``.

    Example:
        >>> highest_order("chebyshev", 100)
        14
    """
    if basis == "monomial":
        return K
    terms = (max(sum(map(abs, row)) for row in monomials(basis, k, a, b)) for k in range(1, K + 1))
    return next((k for k, largest in enumerate(terms) if not largest <= 2**17), K)


def polynomials(x: Tensor, steps: Recurrence) -> Iterator[Tensor]:
    """Yield ``T_0(x), T_1(x), ... T_K(x)``, each of the shape and dtype of ``x``.

    Example:
        >>> import torch
        >>> [t.item() for t in polynomials(torch.tensor([0.5]), recurrence("chebyshev", 2))]
        [1.0, 0.5, -0.5]
    """
    earlier = current = x.new_ones(()).expand_as(x)
    yield current
    for k, (alpha, beta, gamma) in enumerate(steps):
        factor = x * alpha + beta if beta else x * alpha
        following = factor * current if k else factor
        if gamma:
            following = torch.sub(following, earlier, alpha=gamma)
        earlier, current = current, following
        yield current


def applied(operator: Callable[[Tensor], Tensor], once: Tensor, signal: Tensor, steps: Recurrence) -> Iterator[Tensor]:
    """Yield ``T_0(S) V, T_1(S) V, ... T_K(S) V``, given ``S(V)`` and ``V``, by K - 1 more applications of ``S``.

    Numbers beyond float16 become its largest number, since infinity times a coefficient of 0 would be NaN.

    Example:
        >>> import torch
        >>> V = torch.ones(1)
        >>> [t.item() for t in applied(lambda x: x / 2, V / 2, V, recurrence("chebyshev", 2))]
        [1.0, 0.5, -0.5]
    """
    half = signal.dtype == torch.float16

    def add(*parts: tuple[float, Tensor]) -> Tensor:
        (factor, first), *rest = [(factor, x.float() if half else x) for factor, x in parts]
        total = factor * first
        for factor, x in rest:
            total = torch.add(total, x, alpha=factor) if factor else total
        return total.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() if half else total

    (scale, constant, _), *others = steps
    earlier, current = signal, once if scale == 1 and not constant else add((scale, once), (constant, signal))
    yield from (earlier, current)
    for alpha, beta, gamma in others:
        earlier, current = current, add((alpha, operator(current)), (-gamma, earlier), (beta, current))
        yield current


def expand(x: Tensor, theta: Tensor, steps: Recurrence) -> Tensor:
    """Return ``sum_k theta_k T_k(x)``.

    Args:
        x: (batch, heads, tokens, features).
        theta: (K+1,), or (heads, K+1).
        steps: from ``recurrence``.
    """
    return _backward_sums(x, _per_head(theta, x), steps)[0].expand_as(x)


def expand_with_derivatives(x: Tensor, theta: Tensor, steps: Recurrence) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return ``p = sum_k theta_k T_k(x)``, ``dp/dx`` and ``[T_0, ..., T_K]``; shapes as in ``expand``."""
    sums, basis = _backward_sums(x, _per_head(theta, x), steps), [*polynomials(x, steps)]
    slope = torch.zeros_like(x)
    for (alpha, _, _), t, partial in zip(steps, basis, sums[1:], strict=False):
        slope.addcmul_(t, partial, value=alpha)
    return sums[0].expand_as(x), slope, basis


def _backward_sums(x: Tensor, theta: Tensor, steps: Recurrence) -> list[Tensor]:
    """Return Clenshaw's ``b_k = theta_k + (alpha_{k+1} x + beta_{k+1}) b_{k+1} - gamma_{k+2} b_{k+2}``, k = 0 ... K.

    The sum is ``b_0``, its derivative ``sum_k alpha_k T_{k-1} b_k``: half the passes over memory of a sum term by term.
    """
    sums = [theta[-1]]
    for k in range(len(steps) - 1, -1, -1):
        alpha, beta, _ = steps[k]
        constant = theta[k]
        if beta:
            constant = torch.add(constant, sums[0], alpha=beta)
        if k + 1 < len(steps) and steps[k + 1][2]:
            constant = torch.sub(constant, sums[1], alpha=steps[k + 1][2])
        sums.insert(0, torch.addcmul(constant, x, sums[0], value=alpha))
    return sums


def _per_head(theta: Tensor, x: Tensor) -> Tensor:
    """Shape coefficients (K+1,) or (heads, K+1) as (K+1, 1 or heads, 1, 1)."""
    return theta.to(x.dtype).reshape(-1, theta.shape[-1]).t().reshape(theta.shape[-1], -1, 1, 1)
