"""GFSA: graph-filter-based self-attention, a polynomial of the attention matrix.

Source: Choi et al., "Graph Convolutions Enrich the Self-Attention in Transformers!" (NeurIPS 2024), Eq. 4-6.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from ..functional.matrix_polynomial import apply_gfsa, known_zero
from ..ops.filled import filled
from ..shift.operator import ShiftOperator
from .core.base import LARGEST_ORDER, FilterConfig, GraphFilter
from .core.build import register_filter
from .core.fields import check_limits
from .core.site import AttentionSite

CITATION = """@inproceedings{choi2024gfsa,
  title     = {Graph Convolutions Enrich the Self-Attention in Transformers!},
  author    = {Jeongwhan Choi and Hyowon Wi and Jayoung Kim and Yehjin Shin and Kookjin Lee and Nathaniel Trask and
               Noseong Park},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024}
}"""
COEFFICIENTS = ("w_0", "w_1", "w_K")


class GFSA(GraphFilter):
    """The filter ``H V = w_0 V + w_1 S(V) + w_K P(V)``, with P the K-th power of S or its first-order approximation.

    With ``approximation="taylor"`` (Eq. 4), ``P = S + (K-1)(S^2 - S)``, so ``H = w_0 I + (w_1 + (2-K) w_K) S + (K-1)
    w_K S^2``: two applications of ``S`` whatever K. With ``"none"``, ``P = S^K``: K applications. Each head has one
    coefficient of each kind, in float32. Only ``w_K`` is learned by default, as the parameter counts of the paper
    imply (144 for 12 layers of 12 heads). It starts at 0, as in the authors' code, so the patched model equals the
    original.

    Dropout: each application draws its own mask, and E[A_1 A_2] = A^2 holds for independent masks only. The authors'
    BERT and GPT-2 code squares one dropped-out matrix instead.
    """

    per_head = COEFFICIENTS

    config: GFSAConfig
    w_0: Tensor
    w_1: Tensor
    w_K: Tensor

    def __init__(self, config: GFSAConfig, site: AttentionSite):
        super().__init__(config, site)
        for name in COEFFICIENTS:
            start = torch.empty(site.heads)
            if name in config.learn:
                self.register_parameter(name, nn.Parameter(start))
            else:
                self.register_buffer(name, start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in COEFFICIENTS:
            nn.init.constant_(getattr(self, name), getattr(self.config, name))

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        w_0 = None if _fixed_at_zero(self.w_0) else self.w_0
        K = 1 if _fixed_at_zero(self.w_K) else self.config.K
        return apply_gfsa(shift, value, w_0, self.w_1, self.w_K, K, self.config.approximation)

    def branches(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Return one term per coefficient."""
        coefficients = self.coefficient_tensors()
        return {
            name: partial(filled, tensor, 0.0) for name, tensor in coefficients.items() if not _fixed_at_zero(tensor)
        }


def _fixed_at_zero(coefficient: Tensor) -> bool:
    """Return whether a term can be left out."""
    return not coefficient.requires_grad and known_zero(coefficient)


@register_filter("gfsa")
@dataclass(frozen=True)
class GFSAConfig(FilterConfig):
    """GFSA, a polynomial of the attention matrix: w_0 I + w_1 A + w_K A^K.

    Attention passes the slow parts of a signal over the tokens and weakens the fast ones. GFSA (Choi et al., NeurIPS
    2024) adds a power of the attention matrix A, with one learned number per head, so each head learns its own
    frequency response. By default the K-th power is replaced by a first-order approximation, which costs two
    applications of A whatever K is.

    With the default start values the patched model equals the original.

    Departure from the authors' code: each application of A draws its own dropout mask, since E[A_1 A_2] = A^2 holds for
    independent masks only. Their BERT and GPT-2 code squares one dropped-out matrix.

    Args:
        K (int, default 3): Order of the high-order term, 1 to 1000. The papers use 2 to 10.
        w_0 (float, default 0.0): Start value of the coefficient of I, the same for all heads.
        w_1 (float, default 1.0): Start value of the coefficient of A, the same for all heads.
        w_K (float, default 0.0): Start value of the coefficient of A^K, the same for all heads.
        learn (tuple of str, default ("w_K",)): The coefficients to train: any of ``"w_0"``, ``"w_1"`` and ``"w_K"``.
            The others are fixed buffers. The paper learns ``w_K`` only.
        approximation (str, default "taylor"): How the K-th power is computed. ``"taylor"``: A + (K-1)(A^2 - A), Eq. 4
            of the paper, whose error is at most 2K in the infinity norm (Theorem 3.1). ``"none"``: the exact power,
            with K applications of A.

    Example:
        >>> GFSAConfig(K=4, w_0=-0.01).to_dict()["K"]
        4
    """

    module = GFSA
    citation = CITATION
    formula = "w_0 V + w_1 A V + w_K (A + (K-1)(A² - A)) V"
    cost = "2 applications of A; K if exact"

    K: int = 3
    w_0: float = 0.0
    w_1: float = 1.0
    w_K: float = 0.0
    learn: tuple[str, ...] = ("w_K",)
    approximation: Literal["taylor", "none"] = "taylor"

    @property
    def starts_as_original(self) -> bool:
        """Whether the start values are those of the attention matrix itself."""
        return (self.w_0, self.w_1, self.w_K) == (0, 1, 0)

    def validate(self) -> None:
        if self.K < 1:
            raise GraphFilterError(f"GFSAConfig: K must be an integer >= 1, got {self.K}")
        check_limits(self, "K", most=LARGEST_ORDER)
        for name in self.learn:
            if name not in COEFFICIENTS:
                raise GraphFilterError(
                    f"GFSAConfig: learn names {shown(name)}, but the coefficients are w_0, w_1 and w_K"
                )
        if len(set(self.learn)) != len(self.learn):
            raise GraphFilterError(f"GFSAConfig: learn names a coefficient twice: {shown(self.learn)}")
