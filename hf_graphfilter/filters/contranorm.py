"""ContraNorm: attention that pushes similar tokens apart.

Source: Guo et al., "ContraNorm: A Contrastive Learning Perspective on Oversmoothing and Beyond" (ICLR 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..functional.matrix_polynomial import known_zero
from ..ops.combine import combine
from ..ops.eager_cpu import on_plain_cpu
from ..ops.polynomial_form import polynomial_form
from ..shift.attention import AttentionShift
from .core.base import FilterConfig
from .core.build import register_filter
from .core.fields import SMALLEST_TEMPERATURE, check_limits
from .core.power_series import PerHead

CITATION = """@inproceedings{guo2023contranorm,
  title     = {ContraNorm: A Contrastive Learning Perspective on Oversmoothing and Beyond},
  author    = {Xiaojun Guo and Yifei Wang and Tianqi Du and Yisen Wang},
  booktitle = {International Conference on Learning Representations},
  year      = {2023}
}"""


class ContraNorm(PerHead):
    """The filter ``(1 + s) y - s softmax(y y^T / temperature) y`` with y = A V.

    The softmax is over the tokens that a query sees. There is one number s per head, 0 at the start. The paper applies
    the formula to the features of all heads after the layer; here it acts on each head.
    """

    linear = spectral = False
    reads_mask = True
    per_head = ("s",)
    s: Tensor
    config: ContraNormConfig

    def forward(self, shift: AttentionShift, value: Tensor) -> Tensor:  # type: ignore[override]
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        shift.exact = known_zero(self.s)
        out = shift(value)
        rows = shift.all_rows(out)
        mask, causal = shift.seen()
        options: dict[str, Any] = {"scale": 1 / self.config.temperature}
        query = self._limit(out)
        key = query if rows is out else self._limit(rows)
        coefficients = 1 + self.s, -self.s
        result = polynomial_form(query, key, rows, mask, coefficients, causal=causal, exact=shift.exact, **options)
        if result is not None:
            return result[0]
        similarity_mean = scaled_dot_product_attention(query, key, rows, mask, is_causal=causal, **options)
        return combine([*zip(coefficients, (out, similarity_mean), strict=True)])

    def _limit(self, signal: Tensor) -> Tensor:
        """Clamp a signal where its similarities would leave float32; the softmax of those would be NaN."""
        bound = self._largest(signal)
        if on_plain_cpu(signal) and signal.numel():
            lowest, highest = signal.detach().aminmax()
            if -bound <= lowest and highest <= bound:
                return signal
        return signal.clamp(-bound, bound)

    def _largest(self, signal: Tensor) -> float:
        """Return the largest number whose similarities float32 can hold."""
        similarity = torch.finfo(torch.float32).max * min(self.config.temperature, 1.0) / signal.shape[-1]
        return min(0.5 * math.sqrt(similarity), torch.finfo(signal.dtype).max)


@register_filter("contranorm")
@dataclass(frozen=True)
class ContraNormConfig(FilterConfig):
    """ContraNorm: attention that pushes similar tokens apart.

    ContraNorm (Guo et al., ICLR 2023) computes how similar the outputs of attention are, and subtracts from each token
    a mean of the tokens that resemble it. This works against over-smoothing. It costs a second matrix of tokens by
    tokens.

    The strength s is one learned number per head. It starts at 0, so the patched model equals the original. A query is
    compared only with tokens that it sees.

    Departure from the paper: the paper applies it to the features of all heads at the end of the layer; here it acts on
    each head.

    Args:
        temperature (float, default 1.0): Divisor of the similarities, at least 1e-38. Smaller values compare a token
            with fewer, more similar tokens.

    Example:
        >>> ContraNormConfig(temperature=0.5).starts_as_original
        True
    """

    module = ContraNorm
    citation = CITATION
    formula = "(1+s) y - s softmax(y y^T / temperature) y, y = A V"
    cost = "1 application of A, 1 similarity"

    temperature: float = 1.0

    def validate(self) -> None:
        check_limits(self, "temperature", above=0, least=SMALLEST_TEMPERATURE)
