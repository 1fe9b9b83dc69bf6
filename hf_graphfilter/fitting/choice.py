"""Choose the layers that keep their attention: those whose restored attention gains most."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from statistics import pstdev
from typing import Any, Literal, get_args

from torch import nn

from ..errors import GraphFilterError, shown
from ..filters import FilterConfig, GraphFilter
from ..filters.core.attached import filters_of
from ..hosts import host_of
from ..logs import logger
from ..patching.layers import Layers, parse_layers, select_sites
from ..patching.patch import patch_model, unpatch_model

Choose = Literal["text", "retrieval", "both"]
Losses = Sequence[float]  # of text, of retrieval, or of both

GREEDY = 3  # layers that are chosen one by one
_AUTO = re.compile(r"auto:(\d+(?:\.\d+)?)%")


def parse_share(layers: Any) -> float | None:
    """Return the share of layers that ``"auto:75%"`` linearizes; None for what ``patch_model`` reads itself.

    Raises:
        GraphFilterError: a text that is neither a share nor one of ``patch_model``'s.
    """
    if not isinstance(layers, str):
        return None
    if not layers.startswith("auto"):
        parse_layers(layers)  # so that a mistake is found before anything is read
        return None
    found = _AUTO.fullmatch(layers)
    if found is None or not 0 < (share := float(found[1]) / 100) <= 1:
        raise GraphFilterError(f"layers={shown(layers)}: the share of layers is given as 'auto:75%', above 0 to 100")
    return share


def check_choose(choose: Any, share: float | None) -> None:
    """Raise if ``choose`` is no way to choose layers, or if no layers are to be chosen."""
    if choose is not None and choose not in get_args(Choose):
        raise GraphFilterError(f"choose={shown(choose)}: use {', '.join(map(repr, get_args(Choose)))} or None")
    if choose is not None and share is None:
        raise GraphFilterError(f"choose={choose!r} says how layers='auto:75%' chooses: give such a share, or omit it")


def count_kept(share: float, modules: int) -> int:
    """Return how many modules keep their attention where a share of them, and at least one, is linearized."""
    return modules - max(1, round(share * modules))


def leave_sliding_windows(model: nn.Module, stack: str | None) -> Layers:
    """Return all layers but those that see a sliding window: these are linear in time already.

    A warning says which are left. A model that has no others gets them all, and ``patch_model`` says why it cannot.
    """
    found, _ = host_of(model).find(model)
    sites = select_sites(found, None, stack) if found else []
    windows = {site.name: site.sliding_window for site in sites if site.sliding_window is not None}
    if not 0 < len(windows) < len(sites):
        return None
    logger.warning(
        "%d of the %d attention layers of %s see a sliding window of %s tokens and stay as they are: %s",
        *(len(windows), len(sites), type(model).__name__),
        *(" or ".join(map(str, sorted(set(windows.values())))), ", ".join(windows)),
    )
    return lambda index, name: name not in windows


def restore(
    names: Sequence[str], count: int, measure: Callable[[list[list[str]]], list[Losses]]
) -> tuple[list[str], dict[str, float]]:
    """Choose the modules that get their attention back, by what the loss of the whole model gains.

    The first three are chosen one by one, each with the attention of those before it restored. The others follow by the
    rank of one more measurement.

    Args:
        names: of all modules, which are filters.
        count: how many to choose.
        measure: returns, for each list of modules, the losses of the model with the attention of these restored. Where
            it gives two losses, the gains in each are divided by their standard deviation, and added.

    Returns:
        The chosen modules, the best first, and the gain of each module: of a chosen one when it was chosen, of the
        others in the last measurement. A module whose restored attention gives NaN gains minus infinity.
    """
    chosen: list[str] = []
    gains: dict[str, float] = {}
    if count < 1:
        return chosen, gains
    (before,) = measure([[]])
    while len(chosen) < count:
        rest = [name for name in names if name not in chosen]
        losses = measure([[*chosen, name] for name in rest])
        gains |= zip(rest, _gains(before, losses), strict=True)
        best = sorted(rest, key=lambda name: -gains[name])
        before = losses[rest.index(best[0])]
        chosen += best[: 1 if len(chosen) < GREEDY else count - len(chosen)]
    return chosen, {name: gains[name] for name in names}


def _gains(before: Losses, losses: list[Losses]) -> list[float]:
    """Return what each of ``losses`` is below ``before``; of several kinds, the sum at equal spread."""
    gains = [0.0] * len(losses)
    for start, column in zip(before, zip(*losses, strict=True), strict=True):
        finite = [loss for loss in column if math.isfinite(loss)]
        spread = (pstdev(finite) if finite and len(before) > 1 else 0) or 1
        start = start if math.isfinite(start) else max(finite, default=0.0)
        for i, loss in enumerate(column):
            gains[i] += (start - loss) / spread if math.isfinite(loss) else -math.inf
    return gains


def keep_attention(
    model: nn.Module, config: FilterConfig, modules: dict[str, GraphFilter], restored: list[str]
) -> dict[str, GraphFilter]:
    """Give the restored modules their attention back, and return the filters of the others."""
    states = {name: graph_filter.state_dict() for name, graph_filter in modules.items() if name not in restored}
    patch_model(unpatch_model(model), config, layers=lambda index, name: name in states)
    remaining = dict(filters_of(model))
    for name, graph_filter in remaining.items():
        graph_filter.load_state_dict(states[name])
    return remaining
