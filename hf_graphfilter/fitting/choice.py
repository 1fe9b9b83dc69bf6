"""Choose the layers that keep their attention: those where a filter costs most."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import GraphFilterError, shown

_AUTO = re.compile(r"auto:(\d+(?:\.\d+)?)%")


def parse_share(layers: Any) -> float | None:
    """Return the share of layers that ``"auto:75%"`` linearizes; None for what ``patch_model`` reads itself."""
    if not isinstance(layers, str) or not layers.startswith("auto"):
        return None
    found = _AUTO.fullmatch(layers)
    if found is None or not 0 < (share := float(found[1]) / 100) <= 1:
        raise GraphFilterError(f"layers={shown(layers)}: the share of layers is given as 'auto:75%', above 0 to 100")
    return share


def least_sensitive(sensitivity: Mapping[str, float], share: float) -> list[str]:
    """Return the modules that cost least, at least one, in the order given; one that gives NaN costs most."""
    count = max(1, round(share * len(sensitivity)))
    cost = {name: math.inf if math.isnan(value) else value for name, value in sensitivity.items()}
    chosen = sorted(cost, key=lambda name: cost[name])[:count]
    return [name for name in sensitivity if name in chosen]
