"""Attention as it is after the filter: maps, rollout, and how alike those of two models are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from .observing import Call, Layer, Reader, observe
from .statistics import Band, Running


class MapReader(Reader):
    """Keeps the matrices of all layers of a batch."""

    matrices = True

    def __init__(self, filtered: bool = True) -> None:
        self.filtered = filtered
        self.maps: list[dict[Layer, Tensor]] = []  # of each sequence, (heads, tokens, tokens)
        self.first: Layer | None = None
        self.batch = 0

    def attention(self, call: Call) -> None:
        self.first = self.first or call.layer
        if call.layer == self.first:
            self.batch = len(self.maps)
            self.maps += [{} for _ in range(len(call.is_token))]
        matrices = list(call.each(call.filtered if self.filtered else call.attention))
        if len(matrices) != len(self.maps) - self.batch:
            raise GraphFilterError(
                f"layer {call.layer} attends within windows: its maps are not those of a whole input"
            )
        for sequence, matrix in zip(self.maps[self.batch :], matrices, strict=True):
            sequence[call.layer] = matrix.cpu()


def attention_maps(model: nn.Module, batch: Any, *, filtered: bool = True) -> list[dict[Layer, Tensor]]:
    """Of every sequence of one batch: by layer what self-attention applies to its values, (heads, tokens, tokens),
    without padding; ``filtered=False`` for A where a filter is. They are on the CPU, all held at once.

    Raises:
        GraphFilterError: as ``smoothing``; attention within windows.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> maps = attention_maps(BertModel(BertConfig(num_hidden_layers=2)), {"input_ids": torch.arange(8)[None]})
        >>> [matrix.shape for matrix in maps[0].values()]
        [torch.Size([12, 8, 8]), torch.Size([12, 8, 8])]
    """
    reader = MapReader(filtered)
    observe(model, [batch], [reader])
    return reader.maps


def rollout(maps: dict[Layer, Tensor], stack: str | None = None) -> Tensor:
    """Of the maps of one sequence: how much each output token has of each input token, (tokens, tokens), the product
    over the layers of ``(I + mean over heads) / 2`` (Abnar and Zuidema, 2020). A filter may make entries negative."""
    layers = [layer for layer in maps if stack in (None, layer.stack)]
    if len({layer.stack for layer in layers}) != 1:
        stacks = ", ".join(repr(name) for name in dict.fromkeys(layer.stack for layer in maps))
        raise GraphFilterError(f"rollout follows one stack of layers: name it with stack=, of {stacks}")
    product = None
    for layer in sorted(layers, key=lambda layer: layer.index):
        mean = maps[layer].mean(0)
        step = (mean + torch.eye(len(mean), dtype=mean.dtype)) / 2
        product = step if product is None else step @ product
    assert product is not None
    return product


@dataclass(frozen=True)
class Correlation:
    """What ``attention_correlation`` gives: the band over sequences, and the value of each of the first thousand."""

    band: Band
    values: list[float]


def attention_correlation(model: nn.Module, other: nn.Module, batches: Iterable[Any]) -> Correlation:
    """How alike the attention of two models is on the same inputs (Singularformer, Eq. 19-20): of each, the maximum
    over heads and the mean over layers of what self-attention applies; then Pearson's correlation row by row, and the
    mean over the rows. Encoder-decoders: of the encoder.

    Raises:
        GraphFilterError: as ``attention_maps``; the models see an input as another number of tokens.
    """
    running = Running()
    values: list[float] = []
    for batch in batches:
        for one, two in zip(attention_maps(model, batch), attention_maps(other, batch), strict=True):
            a, b = summarise(one), summarise(two)
            if a.shape != b.shape:
                raise GraphFilterError(
                    f"the models see one input as {len(a)} and {len(b)} tokens: their attention cannot be compared"
                )
            correlation = rows_correlation(a, b)
            running.add(correlation)
            values += [float(correlation)] if len(values) < 1000 else []
    if not values:
        raise GraphFilterError("there are no batches: nothing was compared")
    return Correlation(running.band(), values)


def summarise(maps: dict[Layer, Tensor]) -> Tensor:
    stacks = list(dict.fromkeys(layer.stack for layer in maps))
    if len(stacks) > 1 and "encoder" not in stacks:
        raise GraphFilterError(f"a model of {' and '.join(stacks)} has no one attention: hand in one of its parts")
    stack = "encoder" if "encoder" in stacks else stacks[0]
    return torch.stack([matrix.amax(0) for layer, matrix in maps.items() if layer.stack == stack]).mean(0)


def rows_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Mean over the rows of Pearson's correlation of two matrices; a constant row correlates with nothing: 0."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return (torch.nn.functional.normalize(a, dim=-1) * torch.nn.functional.normalize(b, dim=-1)).sum(-1).mean()
