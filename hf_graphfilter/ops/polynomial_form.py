"""The choice of the fastest form of a polynomial of attention: a GPU kernel, one A on the CPU, or several calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import triton
from .attention_pieces import split_rows
from .attention_polynomial import apply_polynomial
from .combine import Coefficients, combine
from .compiled_polynomial import can_write_out, write_out
from .eager_cpu import on_plain_cpu
from .heads import repeat_heads

# The range in which one A is faster than K = 2 calls of scaled_dot_product_attention, most of all with a backward pass.
# MOST_TOKENS is the largest number of tokens, by whether A is causal. FEWEST_ENTRIES is the smallest number of entries
# of A per block, which repays the calls that a block takes. Measured with 2 to 384 matrices, 10 to 64 features, 2 to
# 4,096 tokens, with the code for AVX-512, for AVX2 and for neither. Beyond 1,024 tokens without a causal mask, one A is
# 5 to 20 % faster on a quiet machine, but up to 40 % slower beside a busy process.
MOST_TOKENS = {False: 1024, True: 4096}
FEWEST_ENTRIES = 1 << 15


def polynomial_form(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    coefficients: Coefficients,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    exact: bool,
) -> tuple[Tensor, list[Tensor]] | None:
    """Return ``apply_polynomial`` from a GPU kernel, the CPU or a compiler, or None if the caller must apply A K times.

    Keys and values may have fewer heads than queries. The result is None if PyTorch is restricted to
    ``SDPBackend.MATH``, whose calls are the only form with second derivatives.
    """
    if _is_restricted_to_math():
        return None
    heads = query.shape[1]
    options: dict[str, Any] = {"scale": scale, "causal": causal, "dropout": dropout}
    if len(coefficients) == 3 and (powers := triton.apply_twice(query, key, value, mask, **options)):
        constant, *others = coefficients
        terms = [] if constant is None else [(constant, repeat_heads(value, heads))]
        return combine([*terms, *((c, x) for c, x in zip(others, powers, strict=True) if c is not None)]), [powers[0]]
    if can_apply(query, key, value, mask, coefficients, causal, dropout, exact):
        form = apply_polynomial
    elif can_write_out(query) and _are_alike(query, key, value, coefficients, dropout, exact):
        form = write_out
    else:
        return None
    return form(query, repeat_heads(key, heads), repeat_heads(value, heads), coefficients, mask, **options)


def _is_restricted_to_math() -> bool:
    cuda = torch.backends.cuda  # whose settings count on every device
    fused = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled
    return not torch.compiler.is_compiling() and not any(enabled() for enabled in fused)


def can_have_form(query: Tensor) -> bool:
    """Return False if ``polynomial_form`` would return None for this query whatever its other arguments are."""
    on_cpu = query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)
    return on_cpu or triton.chosen("gfsa", query)


def can_apply(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    coefficients: Coefficients,
    causal: bool,
    dropout: float,
    exact: bool,
) -> bool:
    """Return whether ``apply_polynomial`` is the faster form, which it can be on the CPU only.

    It equals calls of attention up to rounding, but draws other dropout masks. So if results must be ``exact``, it is
    used only for several applications with dropout, since no call of the original model draws their masks.

    The answer is the same with and without gradients: checkpointing runs the forward pass in both ways, and must find
    the same numbers and draw the same masks.
    """
    return (
        all(map(on_plain_cpu, (query, key, value)))
        and _are_alike(query, key, value, coefficients, dropout, exact)
        and (dropout > 0 or _is_faster(query, mask, causal))
    )


def _are_alike(
    query: Tensor, key: Tensor, value: Tensor, coefficients: Coefficients, dropout: float, exact: bool
) -> bool:
    """Return whether one A can serve all applications: inputs of one kind and size, and as exact as required."""
    dtype, tokens = query.dtype, query.shape[2]
    return (
        all(type(t) is Tensor and t.dtype == dtype for t in (query, key, value))
        and dtype in (torch.float32, torch.float64)
        and all(c is None or torch.promote_types(c.dtype, dtype) == dtype for c in coefficients)
        and not torch.is_autocast_enabled("cpu")
        and query.shape[0] == key.shape[0] == value.shape[0]
        and tokens == key.shape[2] == value.shape[2]
        and query.numel() > 0
        and not (exact and (dropout == 0 or len(coefficients) == 2))
        and 0 <= dropout < 1
    )


def _is_faster(query: Tensor, mask: Tensor | None, causal: bool) -> bool:
    batch, heads, tokens, _ = query.shape
    has_learned_mask = mask is not None and mask.requires_grad  # for which SDPA has no kernel
    is_small = batch * heads * tokens**2 < FEWEST_ENTRIES * len(split_rows(tokens, causal))
    return (has_learned_mask or not is_small) and tokens <= MOST_TOKENS[causal]
