"""A learned linear map of queries or keys, one per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...ops.heads import HeadPart, repeat_heads
from ...ops.spectral import to_float32
from .window import in_dtype_of


class HeadMap(nn.Module):
    """The product ``x W`` of each head, where W (heads, features, features) starts as the identity."""

    def __init__(self, heads: int, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, features, features))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1]).expand_as(self.weight))

    def forward(self, x: Tensor, part: HeadPart | None = None) -> Tensor:
        """Map ``x`` (batch, heads, tokens, features), in float32 or wider.

        A model may have repeated its grouped heads since the map was made. ``part`` says which heads ``x`` has, if not
        all.
        """
        weight = self.weight if part is None else part.take(self.weight, 0)
        weight = repeat_heads(weight[None], x.shape[1])[0] if x.shape[1] != len(weight) else weight
        x = in_dtype_of(self, x)
        if x.shape[2] > 1:
            return to_float32(x @ weight)
        # a step of decoding: the batch takes the place of the tokens, so that no weight is repeated for it
        return to_float32(torch.bmm(x[:, :, 0].transpose(0, 1), weight)).transpose(0, 1).unsqueeze(2)
