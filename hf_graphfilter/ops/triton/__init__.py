"""Triton kernels for GPUs: other forms of what ``ops`` computes anyway. None is required.

A kernel is used on a CUDA device if it can be launched and is the faster form. ``enabled.FASTER`` says when it is, and
``make bench-gpu`` measures the numbers for it. The environment variable ``HF_GRAPHFILTER_KERNELS`` overrides the
choice: ``1`` uses kernels wherever they apply, ``0`` nowhere. With ``TRITON_INTERPRET=1``, ``1`` also applies to
tensors on the CPU, where Triton's interpreter runs the kernels, slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .enabled import chosen


def apply_twice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor] | None:
    """Return ``(S(V), S(S(V)))`` with a joint backward pass, or None where no kernel is used.

    The first is bit for bit what ``scaled_dot_product_attention`` returns, so only training has something to gain.

    Args:
        query: (batch, heads, tokens, features).
        key, value: the same, or with fewer heads, a divisor.
        mask, scale, causal, dropout: as in ``ops.attention_polynomial``; dropout is left to that form.
    """
    if dropout or not chosen("gfsa", query) or not torch.is_grad_enabled():
        return None
    from . import twice_kernel as attention

    if not attention.can_apply(query, key, value, mask):
        return None
    return attention.apply_twice(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale, causal)


def combine(coefficients: Sequence[Tensor], signals: Sequence[Tensor]) -> Tensor | None:
    """Return ``sum_k c_k x_k``, or None where no kernel is used; see ``ops.combine``."""
    if not chosen("combine", signals[0]):
        return None
    from . import combine_kernel as kernel

    return kernel.combine(coefficients, signals) if kernel.can_combine(coefficients, signals) else None


def differentiate_combination(
    grad: Tensor, coefficients: Sequence[Tensor], signals: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Return the gradients of the coefficients and of the signals, or None where no kernel is used.

    Args:
        grad: gradient of the result of ``combine``.
        coefficients, signals: the arguments of ``combine``.
        needs: which of the coefficients, then of the signals, need a gradient.
    """
    if torch.is_grad_enabled() or not chosen("combine", grad):  # these gradients have none themselves
        return None
    from . import combine_kernel as kernel

    return (
        kernel.differentiate(grad, coefficients, signals, needs) if kernel.can_combine(coefficients, signals) else None
    )


def filter_causal(
    rows: Callable[[], Tensor], v: Tensor, value: Tensor, mass: Tensor, mean: Tensor, tiny: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the result and the state after the last token, or None where no kernel is used.

    Args:
        rows: function that computes the rows of ``U Sigma``.
        v, value: as in ``ops.spectral.filter_causal``.
        mass, mean: the state before the first token.
        tiny: the smallest running mass, relative to its chunk's, that is divided by.
    """
    if not chosen("agf", v):
        return None
    from . import causal_kernel as causal

    w = rows()
    if not causal.can_filter(w, v, value):
        return None
    return causal.filter_causal(w, v, value, mass, mean, tiny)
