"""Heads that share keys and values, and parts of the heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat grouped heads: (batch, groups, tokens, features) to (batch, heads, tokens, features)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


@dataclass(frozen=True)
class HeadPart:
    """Some key heads, and the query heads that share them.

    Attributes:
        groups: number of all key heads.
        chosen: the numbers of the key heads, in order.
        runs: (begin, end) of each run of neighbours among them.
    """

    groups: int
    chosen: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        runs: list[tuple[int, int]] = []
        for head in self.chosen:
            begin = runs.pop()[0] if runs and runs[-1][1] == head else head
            runs.append((begin, head + 1))
        object.__setattr__(self, "runs", tuple(runs))

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the part of ``x`` for these heads along ``dim``, which counts key heads or query heads."""
        if len(self.chosen) == self.groups:
            return x
        group_size = x.shape[dim] // self.groups
        parts = [x.narrow(dim, begin * group_size, (end - begin) * group_size) for begin, end in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def merge_heads(parts: Iterable[tuple[HeadPart, Tensor]]) -> Tensor:
    """Return all heads in order, given tensors (batch, heads, ...) of parts that together are all of them."""
    pieces: dict[int, Tensor] = {}
    for part, x in parts:
        group_size = x.shape[1] // len(part.chosen)
        sizes = [(end - begin) * group_size for begin, end in part.runs]
        pieces |= {begin: piece for (begin, _), piece in zip(part.runs, x.split(sizes, 1), strict=True)}
    return torch.cat([pieces[begin] for begin in sorted(pieces)], 1)
