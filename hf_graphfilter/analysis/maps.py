"""Attention maps with the filter applied, their rollout over the layers, and their correlation between models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from .model_inputs import check_batches
from .observing import Call, Layer, Reader, observe
from .statistics import Band, Running


class MapReader(Reader):
    """A reader that keeps the matrices of all layers."""

    matrices = True

    def __init__(self, filtered: bool = True) -> None:
        self.filtered = filtered
        self.maps: list[dict[Layer, Tensor]] = []  # per sequence: layer to matrix (heads, tokens, tokens)
        self.start = 0  # of the running batch in maps

    def attention(self, call: Call) -> None:
        if len(self.maps) == self.start:
            self.maps += [{} for _ in range(len(call.is_token))]
        matrices = list(call.each(call.filtered if self.filtered else call.attention))
        sequences = self.maps[self.start :]
        if len(matrices) != len(sequences) or call.layer in sequences[0]:
            raise GraphFilterError(
                f"layer {call.layer} has no map of a whole input: it attends within windows or image by image, or the "
                "batch has other numbers of texts and images"
            )
        for sequence, matrix in zip(sequences, matrices, strict=True):
            sequence[call.layer] = matrix.cpu()

    def outputs(self, outputs: Any, batch: Any) -> None:
        self.start = len(self.maps)


def attention_maps(model: nn.Module, batch: Any, *, filtered: bool = True) -> list[dict[Layer, Tensor]]:
    """Return the matrices that self-attention applies to its values, per sequence of a batch and per layer.

    A matrix is that of the filter if the module has a filter, and A otherwise. All matrices are kept on the CPU at the
    same time.

    Args:
        model: model of transformers or timm, with or without filters; it is left as it was.
        batch: dict of the model's arguments, or a tensor.
        filtered: ``False`` gives A also for modules with a filter. Default: ``True``.

    Returns:
        For each sequence a dict from layer to matrix, (heads, tokens, tokens), without padding.

    Raises:
        GraphFilterError: one of the errors of ``smoothing``, the output of a filter is not a matrix times the values,
            attention works within windows or on several images of one input, or texts and images do not come in pairs.

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
    """Return how much each output token has of each input token (attention rollout; Abnar and Zuidema, 2020).

    This is the product over the layers of ``(I + mean over heads) / 2``. A filter may make entries negative.

    Args:
        maps: the maps of one sequence: an element of the list that ``attention_maps`` returns.
        stack: the stack to follow, such as ``"encoder"``. It is needed only if there are several.

    Returns:
        A matrix, (tokens, tokens).

    Raises:
        GraphFilterError: the maps are those of several sequences, or have several stacks and ``stack`` names none.
    """
    if not isinstance(maps, Mapping):
        raise GraphFilterError(
            "rollout follows the maps of one sequence: pass one element of what attention_maps returns"
        )
    layers = [layer for layer in maps if stack in (None, layer.stack)]
    if len({layer.stack for layer in layers}) != 1:
        stacks = ", ".join(repr(name) for name in dict.fromkeys(layer.stack for layer in maps))
        raise GraphFilterError(f"rollout follows one stack of layers, and the maps have {stacks}: pass one as stack=")
    product = None
    for layer in sorted(layers, key=lambda layer: layer.index):
        mean = maps[layer].mean(0)
        step = (mean + torch.eye(len(mean), dtype=mean.dtype)) / 2
        product = step if product is None else step @ product
    assert product is not None
    return product


@dataclass(frozen=True)
class Correlation:
    """The correlation of the attention of two models.

    Attributes:
        band: mean and standard deviation over the sequences.
        values: the correlation for each of the first thousand sequences.
    """

    band: Band
    values: list[float]


def attention_correlation(model: nn.Module, other: nn.Module, batches: Iterable[Any]) -> Correlation:
    """Measure how alike the attention of two models is on the same inputs (Singularformer, Eq. 19-20).

    The matrix of a model is the maximum over the heads and the mean over the layers of what self-attention applies. Two
    matrices are compared by Pearson's correlation row by row, and then the mean over the rows. An encoder-decoder is
    compared by its encoder.

    Args:
        model: the first model.
        other: the second model, which splits an input into the same number of tokens.
        batches: dicts of the models' arguments, or tensors.

    Raises:
        GraphFilterError: one of the errors of ``attention_maps``, or the models split an input into different numbers
            of tokens.
    """
    statistics = Running()
    values: list[float] = []
    for batch in check_batches(batches):
        for maps, other_maps in zip(attention_maps(model, batch), attention_maps(other, batch), strict=True):
            a, b = summarise(maps), summarise(other_maps)
            if a.shape != b.shape:
                raise GraphFilterError(
                    f"the models see one input as {len(a)} and {len(b)} tokens: their attention cannot be compared"
                )
            if not len(a):
                continue  # a sequence of padding alone
            correlation = rows_correlation(a, b)
            statistics.add(correlation)
            values += [float(correlation)] if len(values) < 1000 else []
    if not values:
        raise GraphFilterError("there are no batches, so that nothing was compared: pass at least one")
    return Correlation(statistics.band(), values)


def summarise(maps: dict[Layer, Tensor]) -> Tensor:
    """Return the maximum over the heads and the mean over the layers, (tokens, tokens)."""
    stacks = list(dict.fromkeys(layer.stack for layer in maps))
    if len(stacks) > 1 and "encoder" not in stacks:
        raise GraphFilterError(
            f"a model of {' and '.join(stacks)} has several stacks and no encoder: pass one of its parts as the model"
        )
    stack = "encoder" if "encoder" in stacks else stacks[0]
    return torch.stack([matrix.amax(0) for layer, matrix in maps.items() if layer.stack == stack]).mean(0)


def rows_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean over the rows of Pearson's correlation of two matrices; a constant row counts as 0."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return (torch.nn.functional.normalize(a, dim=-1) * torch.nn.functional.normalize(b, dim=-1)).sum(-1).mean()
