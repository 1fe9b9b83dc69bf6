"""The softmax of attention scores with a mask, in the memory of the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask_readings import read_once

_VECTOR = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32  # bytes
_EMPTY = "_graph_filter_empty_rows"  # of a mask, which all layers of a model share


def has_empty_rows(mask: Tensor) -> bool:
    """Return whether a mask, bool or additive, has rows that attend to nothing; it is read once per mask."""
    return bool(read_once(mask, _EMPTY, lambda: _read_empty_rows(mask)))


def _read_empty_rows(mask: Tensor) -> bool:
    visible = mask if mask.dtype == torch.bool else mask.detach() > -torch.inf
    return not visible.any(-1).all()


def biased_softmax(scores: Tensor, bias: Tensor | None, empties: bool = True) -> Tensor:
    """Return the softmax of ``scores + bias``, written into the memory of ``scores``.

    Rows of -inf, which attend to nothing, become zero, as in PyTorch. They are looked for where there may be
    ``empties``.
    """
    if bias is None:
        return softmax_(scores)
    scores += bias
    matrix = softmax_(scores)
    if not empties:
        return matrix
    empty = bias.amax(-1, keepdim=True) == -torch.inf
    return matrix.masked_fill_(empty, 0.0) if empty.any() else matrix


def softmax_(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension, written into the memory of ``scores``."""
    if not _has_short_rows(scores):
        return torch.softmax(scores, -1, out=scores)
    scores -= scores.amax(-1, keepdim=True)
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores


def softmax_backward_(grad: Tensor, matrix: Tensor) -> Tensor:
    """Return the gradient of the scores, written into ``grad``, which is the gradient of their softmax ``matrix``."""
    if not _has_short_rows(matrix):
        return torch._softmax_backward_data(grad, matrix, -1, matrix.dtype, grad_input=grad)
    grad *= matrix
    return grad.addcmul_(matrix, grad.sum(-1, keepdim=True), value=-1)


def _has_short_rows(x: Tensor) -> bool:
    """Return whether rows are shorter than a vector register, where PyTorch's softmax takes 2 to 8 times as long."""
    return x.shape[-1] * x.itemsize < _VECTOR and x.device.type == "cpu"


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask that is bool (True: may attend) to one that is added to scores; others stay as they are."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
