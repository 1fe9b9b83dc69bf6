"""One call of PyTorch's attention on given queries and keys: the operator ``S`` of a filter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.combine import Coefficients
from ...ops.heads import repeat_heads
from ...ops.polynomial_form import polynomial_form
from ...ops.scores import additive
from ...ops.visibility import visibility
from ...shift.attention import AttentionCall


class SDPACall:
    """``scaled_dot_product_attention`` with all arguments but keys and values, or the same as explicit matrices.

    Args:
        query: (batch, heads, tokens, features).
        key: (batch, key heads, tokens, features).
        hidden: (batch, tokens, hidden size), the input of the attention; None where it is not known.
        mask: bool (True: may attend) or additive, broadcastable to (batch, heads, tokens, tokens); None for no mask.
        keys: bool (batch, tokens), True for tokens that are not padding; ``mask`` then need not hide padding.
        causal: whether a token sees only itself and earlier tokens, besides ``keys``; ``mask`` is then causal or None.
        declared_causal: whether a compiled graph expects a causal mask, since it cannot look into the mask.
        dropout: probability with which an entry of ``A`` is dropped.
        scale: factor of the scores; None for 1 / sqrt(features).
        need_weights: whether to form ``A`` and keep it as weights.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        hidden: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        keys: Tensor | None = None,
        causal: bool = False,
        declared_causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        need_weights: bool = False,
    ):
        self.query, self.key, self.hidden, self.keys = query, key, hidden, keys
        self.causal, self.dropout, self.need_weights = causal, dropout, need_weights
        self.declared_causal = declared_causal
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.structured = mask is None or causal  # what hides tokens is known without a look into the mask
        self.mask = self._merge(mask)
        self.is_causal = causal and self.mask is None

    def to_call(self) -> AttentionCall:
        """Return the call as the shift operator takes it."""
        return AttentionCall(
            *(self.attend, self.query, self.key),
            hidden=self.hidden,
            scaling=self.scale,
            mask=self.mask,
            visible=self.read_mask,
            polynomial=None if self.need_weights else self.apply_polynomial,
            weights_again=self.need_weights and not self.dropout,
        )

    def attend(self, key: Tensor, signal: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the attention with ``signal`` as the value, (batch, tokens, heads, features), and the weights."""
        grouped = key.shape[1] != self.query.shape[1]
        if not self.need_weights:
            options: dict[str, Any] = {"dropout_p": self.dropout, "is_causal": self.is_causal, "scale": self.scale}
            out = F.scaled_dot_product_attention(self.query, key, signal, self.mask, enable_gqa=grouped, **options)
            return out.transpose(1, 2), None
        heads = self.query.shape[1]
        key, signal = repeat_heads(key, heads), repeat_heads(signal, heads)
        scores = (self.query * self.scale) @ key.mT
        mask = additive(self.mask, scores.dtype)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, self.dropout) if self.dropout else weights
        return (weights @ signal).transpose(1, 2), weights

    def read_mask(self) -> tuple[bool, Tensor | None]:
        """Return (causal, keys): which tokens the mask leaves, see ``ops.visibility``."""
        mask = self.keys if self.structured else self.mask
        return visibility(mask, self.causal, self.query.shape[2], declared_causal=self.declared_causal)

    def apply_polynomial(
        self, value: Tensor, coefficients: Coefficients, exact: bool
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the result of a joint form of several applications, or None if there is no faster one."""
        options: dict[str, Any] = {"scale": self.scale, "causal": self.is_causal, "dropout": self.dropout}
        return polynomial_form(self.query, self.key, value, self.mask, coefficients, exact=exact, **options)

    def _merge(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask that hides padding too."""
        if self.keys is None and not self.need_weights:
            return None if self.causal else mask
        if mask is None and self.causal:
            n = self.query.shape[2]
            mask = torch.ones(n, n, dtype=torch.bool, device=self.query.device).tril()
        if self.keys is None:
            return mask
        keys = self.keys[:, None, None, :]
        if mask is None:
            return keys
        return mask & keys if mask.dtype == torch.bool else mask.masked_fill(~keys, -torch.inf)
