"""Linear attention: a positive feature map of query and key in place of the exponential of their product."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...ops import spectral
from ...ops.heads import repeat_heads
from ...ops.polynomials import recurrence
from ...shift.attention import AttentionShift
from .replacing import ReplacingFilter

_NO_STEPS = recurrence("monomial", 0, 0.0, 0.0)


class FeatureMapFilter(ReplacingFilter):
    """Linear attention ``phi(Q) (phi(K)^T value) / (phi(Q) phi(K)^T 1)``, in O(n d^2) time without an n x n matrix.

    It is the filter ``U V^T`` of the singular value domain with another normalisation. ``V`` is the softmax over tokens
    of ``log phi(K)``. ``U`` is the softmax over features of ``log phi(Q)`` plus the logarithm of the mass of each
    feature of the keys so far. Hence the same kernels compute it, and decoding keeps the same state.

    A subclass defines ``query_features`` and ``key_features``.

    Class attributes:
        scaled: whether query and key are first multiplied by the root of the scale of the scores.
    """

    scaled: ClassVar[bool] = True

    def query_features(self, query: Tensor) -> Tensor:
        """Return ``log phi(query)`` (batch, heads, tokens, mapped features), in float32 or wider.

        It may leave out a summand that all features of a token share, since rows are scaled to sum 1.
        """
        raise NotImplementedError

    def key_features(self, key: Tensor) -> Tensor:
        """Return ``log phi(key)``, as ``query_features`` but without leaving anything out."""
        raise NotImplementedError

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        tokens, state = shift.query.shape[2], shift.state
        key, value = (repeat_heads(x[:, :, -tokens:], self.heads) for x in (shift.key, value))
        query = shift.query
        if self.scaled:
            root = shift.scaling**0.5
            query, key = query * root, key * root
        u, v = self.query_features(query), self.key_features(key)
        causal, keys = shift.visible()
        keys = None if keys is None else keys[:, -tokens:]
        logits, _ = spectral.hide(v, value, keys)
        if not causal and state is None:
            mass = logits.logsumexp(2, keepdim=True)
            return spectral.filter_all(_make_left(u + mass), v, value, keys)
        past_state = spectral.CausalState(state["mass"], state["mean"]) if state else None
        if past_state is not None:
            logits = torch.cat([past_state.mass[:, :, None].to(logits.dtype), logits], 2)
        mass = spectral.running_mass(logits)[:, :, -tokens:]
        out, next_state = spectral.filter_causal(
            _make_left(u + mass), v, value, keys, past_state, needs_state=state is not None
        )
        if state is not None and next_state is not None:
            state.update(next_state._asdict())
        return out


def _make_left(u: Tensor) -> spectral.Left:
    return spectral.Left(u, None, u.new_ones(1), _NO_STEPS)
