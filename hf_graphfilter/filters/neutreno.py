"""NeuTRENO: attention that keeps tokens near the values of the first layer.

Source: Nguyen et al., "Mitigating Over-smoothing in Transformers via Regularized Nonlocal Functionals" (NeurIPS 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..ops.combine import combine
from ..shift.attention import AttentionShift
from .core.build import register_filter
from .core.power_series import FromFirstLayer, FromFirstLayerConfig
from .core.site import AttentionSite

CITATION = """@inproceedings{nguyen2023neutreno,
  title     = {Mitigating Over-smoothing in Transformers via Regularized Nonlocal Functionals},
  author    = {Tam Nguyen and Tan M. Nguyen and Richard G. Baraniuk},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023}
}"""


class NeuTRENO(FromFirstLayer):
    """The filter ``A V + alpha (V_0 - V)``, with V_0 the values of the first layer.

    There is one number alpha per head, 0 at the start (the paper's is 0.6).
    """

    per_head = ("alpha",)
    alpha: Tensor

    def forward(self, shift: AttentionShift, value: Tensor) -> Tensor:  # type: ignore[override]
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        own_values = shift.identity(value)
        first_values = self.first(shift, own_values)
        return combine([(torch.ones_like(self.alpha), shift(value)), (self.alpha, first_values - own_values)])


@register_filter("neutreno")
@dataclass(frozen=True)
class NeuTRENOConfig(FromFirstLayerConfig):
    """NeuTRENO: attention that keeps tokens near the values of the first layer.

    With depth, tokens become alike. NeuTRENO (Nguyen et al., NeurIPS 2023) adds alpha times the difference between the
    first layer's values and those of the layer, so every layer is reminded of the start.

    Departure from the paper: alpha is one learned number per head that starts at 0, so the patched model equals the
    original. The paper uses 0.6.

    The first layer must be among the chosen layers; nothing changes in it. Two cases raise a ``GraphFilterError``:
    models whose layers exchange nothing but hidden states (timm), and attention within windows of an image. There are
    no options.

    Example:
        >>> NeuTRENOConfig().formula
        'A V + alpha (V_0 - V)'
    """

    module = NeuTRENO
    citation = CITATION
    formula = "A V + alpha (V_0 - V)"
    cost = "1 application of A"

    def check_sites(self, sites: Sequence[AttentionSite]) -> None:
        super().check_sites(sites)
        group_sizes = Counter(site.group for site in sites)
        for site in sites:
            if group_sizes[site.group] > 1 or site.stack_module is None or _runs_again(site):
                continue
            raise GraphFilterError(
                f"{site.name} is the first layer, whose values 'neutreno' passes on to later ones, so nothing would "
                "change: choose later layers too, or another filter if there are none"
            )


def _runs_again(site: AttentionSite) -> bool:
    """Return whether the stack uses this module again as a later layer, with the same weights."""
    stack, config = site.stack_module, getattr(site.module, "config", None)
    if stack is None or sum(module is site.module for _, module in stack.named_modules(remove_duplicate=False)) > 1:
        return stack is not None
    depth = getattr(config, f"{site.stack}_layers", 0) or getattr(config, "num_hidden_layers", 0)
    return depth > max((len(layers) for layers in stack.children() if isinstance(layers, nn.ModuleList)), default=depth)
