"""Over-smoothing: how alike the tokens of a text become with depth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .observing import Call, Layer, observe
from .results import BandReader, Measured


@dataclass(frozen=True)
class Smoothing(Measured):
    """The result of ``smoothing``; layer -1 stands for the input embeddings."""

    quantities: ClassVar[dict[str, str]] = {
        "cosine": "mean cosine of two tokens",
        "high_frequency": "share of energy off the mean token",
        "dirichlet": "Dirichlet energy on the attention graph\n(of the tokens' energy)",
    }
    title: ClassVar[str] = "How alike tokens become: mean over texts, band of one standard deviation"


class SmoothingReader(BandReader[Smoothing]):
    """A reader that collects how alike tokens are."""

    result_class = Smoothing
    lacking = "no text has two tokens, so that tokens cannot be compared: pass longer texts"

    def __init__(self, dirichlet: bool = True) -> None:
        self.matrices = dirichlet
        super().__init__()
        self.given: dict[str, Tensor] = {}

    def tokens(self, layer: Layer, tokens: Tensor, is_token: Tensor) -> None:
        self.given[layer.stack] = tokens
        for x, mask in zip(tokens, is_token, strict=True):
            if (text := x[mask]).shape[0] > 1:
                self.samples[layer, "cosine"].add(mean_cosine(text))
                self.samples[layer, "high_frequency"].add(high_frequency(text))

    def attention(self, call: Call) -> None:
        if not self.matrices or (tokens := self.given.pop(call.layer.stack, None)) is None:
            return  # never what an earlier layer read
        if tokens.shape[:2] != call.is_token.shape:
            return  # attention within windows has its tokens in another order
        for matrix, x, is_token in zip(call.each(call.attention), tokens, call.is_token, strict=True):
            if matrix.shape[-1] > 1:
                self.samples[call.layer, "dirichlet"].add(dirichlet_energy(matrix, x[is_token]))

    def outputs(self, outputs: Any, batch: Any) -> None:
        self.given.clear()


def smoothing(model: nn.Module, batches: Iterable[Any], *, dirichlet: bool = True, **options: Any) -> Smoothing:
    """Measure for each layer how alike the tokens of a text are; padding does not count.

    - ``cosine``: the mean cosine similarity of two different tokens. It is 1 if all point in one direction.
    - ``high_frequency``: ``|X - mean|^2 / |X|^2`` (Frobenius), the share of the energy off the mean token. The mean
      token is the part of frequency 0 (Wang et al., ICLR 2022). The share is 0 if all tokens are equal.
    - ``dirichlet``: ``sum_ij A_ij |x_i - x_j|^2 / (2 |X|^2)`` for the input X of a layer on the graph of its attention,
      mean over the heads.

    Args:
        model: model of transformers or timm, with or without filters; it is left as it was.
        batches: dicts of the model's arguments, or tensors; any number.
        dirichlet: ``False`` leaves out ``dirichlet``, which needs the attention matrices; this is faster. Default:
            ``True``.
        options: ``progress``, a function that wraps the batches, as a progress bar does.

    Raises:
        GraphFilterError: the model has no self-attention that can be read, no text has two tokens, or a layer gives
            numbers that are not finite.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> measured = smoothing(model, [{"input_ids": torch.arange(16).view(2, 8)}])
        >>> 0 < measured[-1, "cosine"].mean < 1
        tensor(True)
    """
    reader = SmoothingReader(dirichlet)
    observe(model, batches, [reader], **options)
    return reader.result(model)


def mean_cosine(x: Tensor) -> Tensor:
    """Return the mean cosine over the pairs of different rows of (tokens, features)."""
    unit = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    all_pairs, self_pairs = unit.sum(0).square().sum(), unit.square().sum()
    return (all_pairs - self_pairs) / (len(x) * (len(x) - 1))


def high_frequency(x: Tensor) -> Tensor:
    """Return the share of the energy of (tokens, features) off the mean token."""
    return (x - x.mean(0)).square().sum() / x.square().sum().clamp(min=1e-30)


def dirichlet_energy(matrix: Tensor, x: Tensor) -> Tensor:
    """Return the Dirichlet energy of (tokens, features) on graphs (heads, tokens, tokens), mean over the heads."""
    squares = x.square().sum(-1)
    node_terms = matrix.sum(-1) @ squares + matrix.sum(-2) @ squares
    edge_terms = (matrix * (x @ x.mT)).sum((-1, -2))
    return ((node_terms / 2 - edge_terms) / squares.sum().clamp(min=1e-30)).mean()
