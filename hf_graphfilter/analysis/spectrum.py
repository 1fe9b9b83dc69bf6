"""Singular values of tokens and attention matrices, and the ranks that follow from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from .observing import Call, Layer, observe
from .results import BandReader, Measured

POINTS = 33  # of a curve of singular values, from the largest to the smallest


@dataclass(frozen=True)
class Spectrum(Measured):
    """The result of ``spectrum``: ranks and singular values by layer."""

    quantities: ClassVar[dict[str, str]] = {
        "effective_rank": "effective rank of the tokens",
        "stable_rank": "stable rank of the tokens",
        "singular_values": "singular value of the tokens\n(of the largest)",
        "attention_effective_rank": "effective rank of attention",
        "attention_singular_values": "singular value of attention\n(of the largest)",
    }
    title: ClassVar[str] = "Dimensions that tokens and attention use: mean over texts"

    @classmethod
    def grid(cls, quantity: str, points: int) -> tuple[str, list[float]]:
        return "rank of the singular value (0 largest, 1 smallest)", torch.linspace(0, 1, points).tolist()


class SpectrumReader(BandReader[Spectrum]):
    """A reader that collects singular values and ranks."""

    result_class = Spectrum
    lacking = "no text has a token, so that there is nothing to decompose: check the inputs and their mask"

    def __init__(self, attention: int = 64) -> None:
        if type(attention) is not int or attention < 0:
            raise GraphFilterError(f"attention must be a number of texts, 0 for none, got {shown(attention)}")
        self.matrices, self.left = attention > 0, attention
        self.seen: dict[Layer, int] = defaultdict(int)
        super().__init__()

    def tokens(self, layer: Layer, tokens: Tensor, is_token: Tensor) -> None:
        for x, mask in zip(tokens, is_token, strict=True):
            if mask.any():
                self.add(layer, "", torch.linalg.svdvals(x[mask]))

    def attention(self, call: Call) -> None:
        remaining = self.left - self.seen[call.layer]
        if remaining <= 0 or not call.is_matrix:
            return
        for matrix in islice(call.each(call.filtered), remaining):
            self.seen[call.layer] += 1
            if matrix.shape[-1]:
                self.add(call.layer, "attention_", torch.linalg.svdvals(matrix))

    def add(self, layer: Layer, prefix: str, values: Tensor) -> None:
        """Add a sample of singular values, (values,) or (heads, values), as the mean over the heads."""
        self.samples[layer, f"{prefix}effective_rank"].add(effective_rank(values).mean())
        self.samples[layer, f"{prefix}stable_rank"].add(stable_rank(values).mean())
        relative = (values / values[..., :1].clamp(min=1e-30)).reshape(1, -1, values.shape[-1])
        curve = torch.nn.functional.interpolate(relative, POINTS, mode="linear", align_corners=True)
        self.samples[layer, f"{prefix}singular_values"].add(curve.mean((0, 1)))


def spectrum(model: nn.Module, batches: Iterable[Any], *, attention: int = 64, **options: Any) -> Spectrum:
    """Measure singular values and ranks for each layer; padding does not count.

    Two matrices are decomposed. One is the output ``X`` (tokens, features) of a layer. The other is what its
    self-attention applies to the values: the matrix of the filter, or A (mean over the heads).

    - ``effective_rank``: exp of the entropy of ``sigma / sum sigma`` (Roy and Vetterli, 2007).
    - ``stable_rank``: ``sum sigma^2 / max sigma^2``.
    - ``singular_values``: ``sigma / max sigma`` at 33 places from the largest to the smallest.

    For the second matrix, the names of the quantities begin with ``attention_``.

    Args:
        model: model of transformers or timm, with or without filters; it is left as it was.
        batches: dicts of the model's arguments, or tensors; any number.
        attention: number of texts (the first ones) whose attention is decomposed; 0 for none. This decomposition costs
            most of the time. Default: 64.
        options: ``progress``, a function that wraps the batches, as a progress bar does.

    Raises:
        GraphFilterError: one of the errors of ``smoothing``, or ``attention`` is below 0.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> measured = spectrum(model, [{"input_ids": torch.arange(16).view(2, 8)}])
        >>> 1 <= measured[-1, "attention_effective_rank"].mean <= 8
        tensor(True)
    """
    reader = SpectrumReader(attention)
    observe(model, batches, [reader], **options)
    return reader.result(model)


def effective_rank(values: Tensor) -> Tensor:
    """Return the effective rank for singular values (..., values)."""
    share = values / values.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.special.entr(share).sum(-1).exp()


def stable_rank(values: Tensor) -> Tensor:
    """Return the stable rank for singular values (..., values)."""
    return values.square().sum(-1) / values.square().amax(-1).clamp(min=1e-30)
