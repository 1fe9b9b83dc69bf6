"""A table of the registered filters, made from what they say of themselves."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from .base import FilterConfig
from .registry import available_filters, get_filter
from .site import AttentionSite

HEADER = ["filter", "formula", "cost", "parameters per head", "causal", "decoding keeps", "start", "source"]


def overview(heads: int = 12, features: int = 64) -> list[list[str]]:
    """Return one row per registered filter, under ``HEADER``, with its default options.

    Args:
        heads: number of heads of the module for which parameters are counted.
        features: number of features per head of that module.
    """
    return [row(name, get_filter(name), heads, features) for name in available_filters()]


def row(name: str, config_class: type[FilterConfig], heads: int, features: int) -> list[str]:
    """Return the row of one filter."""
    config = config_class()
    module = nn.Module()
    width: dict[str, Any] = {"hidden_size": heads * features, "head_dim": features, "stack_module": module}
    with torch.device("meta"):
        graph_filter = config.build(AttentionSite("site", module, heads, False, "encoder", "", 0, **width))
    parameters = sum(p.numel() for p in graph_filter.parameters()) / heads
    causal = getattr(type(graph_filter), "causal_form", True)
    return [
        f"`{name}`",
        f"`{config.formula}`",
        config.cost,
        f"{parameters:,.0f}" if parameters >= 1 or not parameters else f"1/{1 / parameters:.0f}",
        "yes" if causal else "no",
        graph_filter.decoding if causal else "",
        "as attention" if config.starts_as_original else "different",
        _source(config.citation),
    ]


def _source(citation: str) -> str:
    """Return title and year of a BibTeX entry."""
    matches = [re.search(rf"^ *{field} *= *{{(.*?)}},?$", citation, re.M | re.S) for field in ("title", "year")]
    title, year = (" ".join(re.sub(r"[{}]|\\(?=[&%$#_])", "", match[1]).split()) if match else "" for match in matches)
    return f"{title}, {year}" if title else ""


def summary(config_class: type[FilterConfig]) -> str:
    """Return the first line of the config's docstring, or of its filter's."""
    lines = [(owner.__doc__ or "").strip().partition("\n")[0] for owner in (config_class, config_class.module)]
    signature = f"{config_class.__name__}("  # by dataclass, where the author wrote none
    return next((line for line in lines if line and not line.startswith(signature)), "")
