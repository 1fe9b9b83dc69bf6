"""The filter ``U Sigma V^T`` with factors that no softmax normalises: AGF's ablation of the activation rho."""

from __future__ import annotations

import torch
from torch import Tensor

from .causal import CHUNK


def multiply_all(rows: Tensor, v: Tensor, value: Tensor) -> Tensor:
    """Return ``rows (v^T value)``, where every token sees every token, in O(n d^2) time.

    Args:
        rows: (batch, heads, tokens, features), ``U Sigma``.
        v: of the same shape; zero at tokens that are absent.
        value: (batch, heads, tokens, value features); zero at tokens that are absent.
    """
    return rows @ (v.mT @ value)


def multiply_causal(rows: Tensor, v: Tensor, value: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``multiply_all`` over the tokens so far, and the state of decoding, ``v^T value`` over all tokens.

    Args:
        rows, v, value: as in ``multiply_all``.
        past: ``v^T value`` (batch, heads, features, value features) over the tokens before these.
    """
    tokens = v.shape[2]
    if tokens <= CHUNK:
        sums = v.mT @ value
        out = (rows @ v.mT).tril() @ value
        return (out, sums) if past is None else (out + rows @ past, sums + past)
    rows, v, value = (_split(x) for x in (rows, v, value))
    sums = v.mT @ value
    ends = sums.cumsum(2)
    if past is not None:
        ends = ends + past[:, :, None]
    out = (rows @ v.mT).tril() @ value + rows @ (ends - sums)
    return out.flatten(2, 3)[:, :, :tokens], ends[:, :, -1]


def _split(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
