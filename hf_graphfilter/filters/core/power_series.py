"""Base classes of filters that have coefficients per head only, and of power series of the attention matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import GraphFilterError
from ...functional.matrix_polynomial import known_zero
from ...shift.attention import AttentionShift
from ...shift.operator import ShiftOperator
from .base import FilterConfig, GraphFilter
from .site import AttentionSite


class PerHead(GraphFilter):
    """A filter whose only parameters are coefficients (heads, ...); they start at 0, where attention is unchanged.

    Class attributes:
        per_head: names of the coefficients.
        sources: the parameter of each coefficient that is shown under another name; r_1, r_2 ... belong to r.
    """

    sources: ClassVar[dict[str, str]] = {}

    def __init__(self, config: FilterConfig, site: AttentionSite):
        super().__init__(config, site)
        for name in self.per_head:
            self.register_parameter(name, nn.Parameter(torch.empty(site.heads, *self.shape(name, site))))
        self.reset_parameters()

    def shape(self, name: str, site: AttentionSite) -> tuple[int, ...]:
        """Return the shape of a coefficient of one head."""
        return ()

    def learned_coefficients(self) -> dict[str, Tensor]:
        return self.coefficients()

    def reset_parameters(self) -> None:
        for name in self.per_head:
            nn.init.zeros_(getattr(self, name))


class PowerSeries(PerHead):
    """The filter ``H V = S(V) + sum_k c_k S^k(V)``, with K applications of ``S``; a subclass gives the ``c_k``."""

    config: Any

    def series(self, dtype: torch.dtype) -> Tensor:
        """Return ``c_0 ... c_K``, which are added to A: (heads, K+1) with K >= 1, all 0 at the start."""
        raise NotImplementedError

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        c = self.series(torch.promote_types(torch.float32, value.dtype))
        shift.exact = known_zero(c)
        constant, linear, *higher = c.t().contiguous().unbind()  # columns would not do for a kernel
        return shift.polynomial(value, [constant, linear + 1, *higher])


class FromFirstLayer(PerHead):
    """A filter that reads the values of the first layer of its stack."""

    linear = spectral = False
    reads_earlier = True

    def __init__(self, config: FilterConfig, site: AttentionSite):
        super().__init__(config, site)
        if site.in_windows:
            raise GraphFilterError(
                f"{site.name} ({type(site.module).__name__}) attends within windows, whose tokens have another order "
                f"in other layers, but {config.filter!r} reads the values of the first layer; choose another filter"
            )
        if site.stack_module is None:
            raise GraphFilterError(
                f"{site.name} ({type(site.module).__name__}): {config.filter!r} reads the values of the first layer, "
                "but the layers of this model pass nothing on to each other besides the hidden states; choose another "
                "filter"
            )
        self.is_first = site.index == 0

    def first(self, shift: AttentionShift, values: Tensor) -> Tensor:
        """Return the values of the first layer; the first layer itself stores its ``values`` for the others."""
        earlier_values = shift.earlier.left_before(self.site_name, self.config.filter)
        if not earlier_values and not self.is_first:
            raise GraphFilterError(
                f"{self.site_name}: {self.config.filter!r} reads the values of the first layer, which did not run "
                "before it; train without dropping layers (layerdrop=0), or choose another filter"
            )
        first = earlier_values[0].to(values.device) if earlier_values else values  # of a model over several GPUs
        if self.is_first:  # at each use, so that checkpointing sees all uses of a layer with shared weights
            shift.earlier.leave(self.site_name, first, self.config.filter)
        if first.shape[2] != values.shape[2]:
            raise GraphFilterError(
                f"{self.site_name}: {self.config.filter!r} reads the values of the first layer, which have "
                f"{first.shape[2]} tokens, but its own have {values.shape[2]}: if only some layers have a sliding "
                "window, use use_cache=False; if layers see different pieces of an image, choose another filter"
            )
        return first


@dataclass(frozen=True)
class FromFirstLayerConfig(FilterConfig):
    """Config of a filter that reads the values of the first layer of its stack."""

    def check_sites(self, sites: Sequence[AttentionSite]) -> None:
        for group in dict.fromkeys(site.group for site in sites):
            first, *others = sorted((s for s in sites if s.group == group), key=lambda site: site.index)
            if first.index:
                raise GraphFilterError(
                    f"{self.filter!r} reads the values of the first layer, but the first chosen layer is {first.name}: "
                    "choose layers that include the first"
                )
            for site in others:
                if (site.heads, site.value_dim) != (first.heads, first.value_dim):
                    raise GraphFilterError(
                        f"{self.filter!r} reads the values of the first layer, {first.heads} heads of "
                        f"{first.value_dim} features, but {site.name} has {site.heads} of {site.value_dim}: choose "
                        "layers of the same shape"
                    )
