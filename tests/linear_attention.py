"""A filter in the place of attention, all of it: ``phi(Q) phi(K)^T V``, rows scaled to sum 1, phi(x) = 1 + elu(c x)."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import elu

from hf_graphfilter import ReplacingConfig, ReplacingFilter, register_filter
from hf_graphfilter.ops.heads import repeat_heads


class LinearAttention(ReplacingFilter):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.sharpness = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.constant_(self.sharpness, self.config.sharpness)

    def filtered(self, shift, value):
        tokens, state = shift.query.shape[2], shift.state
        key, value = (repeat_heads(x[:, :, -tokens:], self.heads) for x in (shift.key, value))
        causal, visible = shift.visible()
        c = self.sharpness.view(-1, 1, 1)
        q, k = (1 + elu(c * x) for x in (shift.query, key))
        if visible is not None:
            k = k * visible[:, None, -tokens:, None]
        sums, norms = k.unsqueeze(-1) * value.unsqueeze(-2), k  # (batch, heads, tokens, features[, value features])
        if causal or state is not None:
            sums, norms = sums.cumsum(2), norms.cumsum(2)
            if state is not None:
                sums, norms = (x + state.get(name, 0) for name, x in (("sums", sums), ("norms", norms)))
                state.update(sums=sums[:, :, -1:], norms=norms[:, :, -1:])
        else:
            sums, norms = sums.sum(2, keepdim=True), norms.sum(2, keepdim=True)
        out = (q.unsqueeze(-2) @ sums).squeeze(-2) / (q * norms).sum(-1, keepdim=True).clamp(min=1e-6)
        return self.penalised(out.to(value.dtype), sharpness=lambda: self.sharpness.square().mean())


@register_filter("linear-attention")
@dataclass(frozen=True)
class LinearAttentionConfig(ReplacingConfig):
    """Linear attention with a learned sharpness a head."""

    module = LinearAttention

    sharpness: float = 1.0
    decay: float = 1e-2

    @property
    def penalties(self):
        return {"sharpness": self.decay}
