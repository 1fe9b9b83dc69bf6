"""The softmax of attention scores with a mask, in the memory of the scores."""

from __future__ import annotations

import torch
from torch import Tensor


def biased_softmax(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Return the softmax of ``scores + bias``, written into the memory of ``scores``.

    Rows of -inf, which attend to nothing, become zero, as in PyTorch.
    """
    if bias is None:
        return torch.softmax(scores, -1, out=scores)
    scores += bias
    matrix = torch.softmax(scores, -1, out=scores)
    empty = bias.amax(-1, keepdim=True) == -torch.inf
    return matrix.masked_fill_(empty, 0.0) if empty.any() else matrix


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask that is bool (True: may attend) to one that is added to scores; others stay as they are."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
