"""Personalised PageRank and heat diffusion over the graph of attention.

Source: Gasteiger et al., "Predict then Propagate: Graph Neural Networks meet Personalized PageRank" (ICLR 2019) and
"Diffusion Improves Graph Learning" (NeurIPS 2019), Eq. 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import GraphFilterError, shown
from .core.base import LARGEST_ORDER, FilterConfig
from .core.build import register_filter
from .core.fields import check_counts, check_limits
from .core.power_series import PowerSeries

CITATION = """@inproceedings{gasteiger2019diffusion,
  title     = {Diffusion Improves Graph Learning},
  author    = {Johannes Gasteiger and Stefan Wei{\\ss}enberger and Stephan G{\\"u}nnemann},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2019}
}"""


class Diffusion(PowerSeries):
    """The filter ``H = (1 - g) A + g sum_{k<=K} c_k A^k``, with a gate g per head that starts at 0.

    ``c_k = alpha (1 - alpha)^k`` is PageRank, ``alpha (I - (1 - alpha) A)^-1``. The error of the cut-off at K is at
    most ``(1 - alpha)^(K+1)`` in the infinity norm. ``c_k = e^-t t^k / k!`` is heat diffusion. alpha or t is learned
    per head too: ``rate``, which starts at 0, is added to the logit or logarithm of the option's value. There are K
    applications of ``S``.
    """

    per_head = ("g", "rate")
    sources: ClassVar[dict[str, str]] = {"alpha": "rate", "t": "rate"}
    g: Tensor
    rate: Tensor
    config: PPRConfig

    @property
    def pace(self) -> Tensor:
        """The learned alpha in (0, 1), or t > 0, (heads,)."""
        if self.config.kernel == "heat":
            return (self.rate + math.log(self.config.t)).exp()
        return (self.rate + math.log(self.config.alpha / (1 - self.config.alpha))).sigmoid()

    def coefficients(self) -> dict[str, Tensor]:
        """Return ``g``, and ``alpha`` or ``t``, each (heads,)."""
        return {"g": self.g.detach(), {"ppr": "alpha", "heat": "t"}[self.config.kernel]: self.pace.detach()}

    def series(self, dtype: torch.dtype) -> Tensor:
        k, pace = torch.arange(self.config.K + 1, device=self.g.device), self.pace[:, None].to(dtype)
        if self.config.kernel == "heat":
            # of t, which float32 may not hold
            logarithm = (self.rate + math.log(self.config.t))[:, None].to(dtype)
            c = (k * logarithm - pace - torch.lgamma(k.to(dtype) + 1)).exp()
        else:
            c = pace * (1 - pace) ** k
        return self.g[:, None].to(dtype) * (c - (k == 1).to(c.dtype))


@register_filter("ppr")
@dataclass(frozen=True)
class PPRConfig(FilterConfig):
    """Personalised PageRank or heat diffusion over the attention graph, mixed with attention by a gate.

    Both are sums over all powers of A with decreasing weights (Gasteiger et al., ICLR 2019 and NeurIPS 2019). They
    collect what a token reaches in several steps, and PageRank returns to the token itself with a probability alpha at
    each step.

    Departures from the papers: the sum ends after K powers; the probability or the time is learned per head; a gate g
    per head mixes the filter with attention. The gate starts at 0, so the patched model equals the original.

    Args:
        K (int, default 4): Number of applications of A, 1 to 1000.
        kernel (str, default "ppr"): The weights of the powers. ``"ppr"``: alpha (1 - alpha)^k, PageRank. ``"heat"``:
            e^-t t^k / k!, heat diffusion.
        alpha (float, default 0.15): Start value of the probability of returning to the token itself, in (0, 1). It is
            read by ``kernel="ppr"``.
        t (float, default 1.0): Start value of the time of diffusion, > 0. It is read by ``kernel="heat"``.

    Example:
        >>> PPRConfig(alpha=0.2).starts_as_original
        True
    """

    module = Diffusion
    citation = CITATION
    formula = "(1-g) A V + g sum_k alpha (1-alpha)^k A^k V"
    cost = "K applications of A"

    K: int = 4
    kernel: Literal["ppr", "heat"] = "ppr"
    alpha: float = 0.15
    t: float = 1.0

    def validate(self) -> None:
        check_counts(self, K=LARGEST_ORDER)
        if not 0 < self.alpha < 1:
            raise GraphFilterError(f"PPRConfig: alpha must lie between 0 and 1, got {shown(self.alpha)}")
        check_limits(self, "t", above=0)
