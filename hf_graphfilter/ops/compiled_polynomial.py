"""A polynomial of softmax attention with A as a tensor, in operations that ``torch.compile`` fuses."""

from __future__ import annotations

import torch
from torch import Tensor

from .combine import Coefficients, combine
from .exporting import is_exporting
from .scores import additive

# Up to so many entries of A, the code that Inductor compiles from this form is faster than calls of
# scaled_dot_product_attention, each of which forms A again. Measured on one processor with 2 threads: training steps
# with 40 to 256 tokens, and forward passes with 40 and 64. At 3.7 million entries both take equally long.
MOST_ENTRIES = 1 << 21


def can_write_out(query: Tensor) -> bool:
    """Return whether the graph being compiled should hold A as a tensor: a small A on the CPU, and no export."""
    if not torch.compiler.is_compiling() or is_exporting():
        return False
    return query.device.type == "cpu" and query.shape[:3].numel() * query.shape[2] <= MOST_ENTRIES


def write_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: Coefficients,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Return what ``apply_polynomial`` returns, in operations that a compiler fuses."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    bias = additive(mask, scores.dtype)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if bias is None:
        matrix = scores.softmax(-1)
    else:  # rows that attend to nothing become zero, as in PyTorch
        empty = bias.amax(-1, keepdim=True) == -torch.inf
        matrix = (scores + bias).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    powers = [value]
    for _ in coefficients[1:]:
        applied = torch.dropout(matrix, dropout, train=True) if dropout > 0 else matrix
        powers.append(applied @ powers[-1])
    terms = [(c, x) for c, x in zip(coefficients, powers, strict=True) if c is not None]
    return combine(terms), powers[1:-1]
