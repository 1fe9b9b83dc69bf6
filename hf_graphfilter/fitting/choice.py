"""Choose the layers that keep their attention: those where restoring it lowers the loss most."""

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
Losses = Sequence[float]  # one loss (of text or retrieval), or both

GREEDY = 3  # layers that are chosen one by one
_AUTO = re.compile(r"auto:(\d+(?:\.\d+)?)%")


def parse_share(layers: Any) -> float | None:
    """Return the share of layers that ``"auto:75%"`` linearizes; None for the forms that ``patch_model`` reads.

    Raises:
        GraphFilterError: the text is neither a share nor a form that ``patch_model`` reads.
    """
    if not isinstance(layers, str):
        return None
    if not layers.startswith("auto"):
        parse_layers(layers)  # so that a mistake is found before anything is read
        return None
    match = _AUTO.fullmatch(layers)
    if match is None or not 0 < (share := float(match[1]) / 100) <= 1:
        raise GraphFilterError(f"layers={shown(layers)}: the share of layers is given as 'auto:75%', above 0 to 100")
    return share


def check_choose(choose: Any, share: float | None) -> None:
    """Raise an error if ``choose`` is unknown, or is given although no layers are to be chosen."""
    if choose is not None and choose not in get_args(Choose):
        raise GraphFilterError(f"choose={shown(choose)}: use {', '.join(map(repr, get_args(Choose)))} or None")
    if choose is not None and share is None:
        raise GraphFilterError(f"choose={choose!r} says how layers='auto:75%' chooses: give such a share, or omit it")


def count_kept(share: float, modules: int) -> int:
    """Return how many modules keep their attention if a share of them (at least one) is linearized."""
    return modules - max(1, round(share * modules))


def leave_sliding_windows(model: nn.Module, stack: str | None) -> Layers:
    """Return the choice of all layers without a sliding window, since a sliding window is linear in time already.

    A warning names the layers that are left out. If all or no layers have such a window, return None (all layers); in
    the first case ``patch_model`` then raises an error.
    """
    all_sites, _ = host_of(model).find(model)
    sites = select_sites(all_sites, None, stack) if all_sites else []
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
    """Choose the modules that get their attention back: those that lower the loss of the whole model most.

    The first three are chosen one by one; each is measured with the attention of the earlier ones restored. One more
    measurement ranks the remaining modules, and the best of them follow.

    Args:
        names: the names of all modules, which have filters.
        count: number of modules to choose.
        measure: a function that returns the losses of the model for each list of modules whose attention is restored.
            If there are two losses, the gains in each are divided by their standard deviation and added.

    Returns:
        The chosen modules, the best first, and the gain of each module. The gain of a chosen module is that at the time
        of the choice; the gain of another is from the last measurement. It is minus infinity if a loss is NaN.
    """
    restored: list[str] = []
    gains: dict[str, float] = {}
    if count < 1:
        return restored, gains
    (before,) = measure([[]])
    while len(restored) < count:
        candidates = [name for name in names if name not in restored]
        losses = measure([[*restored, name] for name in candidates])
        gains |= zip(candidates, _gains(before, losses), strict=True)
        ranking = sorted(candidates, key=lambda name: -gains[name])
        before = losses[candidates.index(ranking[0])]
        restored += ranking[: 1 if len(restored) < GREEDY else count - len(restored)]
    return restored, {name: gains[name] for name in names}


def _gains(before: Losses, losses: list[Losses]) -> list[float]:
    """Return how far each of ``losses`` lies below ``before``; two kinds are scaled to equal spread and added."""
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
