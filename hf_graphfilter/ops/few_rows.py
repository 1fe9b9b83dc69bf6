"""The attention matrix at the few query tokens of a decoding step, formed once for all applications of it.

A row is one number per key and head, far less than the keys themselves. So keys are read once, and every application
reads its signal. Grouped heads are rows of one product: no key is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eager_cpu import on_plain_cpu
from .scores import additive, biased_softmax

FEW = 16  # query tokens, those of assisted decoding too; with more, two calls are as fast


def can_form_rows(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether ``form_rows`` is the faster form: a decoding step on the CPU, without gradients."""
    return (
        on_plain_cpu(query)  # first: a graph would be bound to the number of tokens
        and query.shape[2] <= FEW
        and (query.shape[2] == 1 or mask is not None)  # several without a mask are causal, which SDPA has rules for
        and query.dtype == key.dtype
        and query.dtype in (torch.float32, torch.float64)
        and query.shape[0] == key.shape[0]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def form_rows(query: Tensor, key: Tensor, mask: Tensor | None = None, *, scale: float | None = None) -> Tensor:
    """Return ``softmax(scale Q K^T + mask)``, (batch, heads, query tokens, key tokens).

    Args:
        query: (batch, heads, query tokens, features).
        key: (batch, key heads, key tokens, features).
        mask: bool (True: may attend) or additive, broadcastable to the result.
        scale: of the scores, 1 / sqrt(features) by default.
    """
    heads, tokens, features = query.shape[1:]
    scale = features**-0.5 if scale is None else scale
    queries = query.reshape(key.shape[0] * key.shape[1], -1, features)
    # the keys on the left: a quarter faster than on the right for one query
    scores = torch.baddbmm(query.new_empty(()), key.flatten(0, 1), queries.mT, beta=0, alpha=scale).mT
    return biased_softmax(scores.reshape(-1, heads, tokens, key.shape[2]), additive(mask, query.dtype))
