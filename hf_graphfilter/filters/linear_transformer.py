"""Linear Transformer: linear attention with the fixed feature map ``elu(x) + 1``.

Source: Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (ICML
2020), Eq. 4 to 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..ops.spectral import to_float32
from .core.build import register_filter
from .core.feature_map import FeatureMapFilter
from .core.replacing import ReplacingConfig

CITATION = """@inproceedings{katharopoulos2020transformers,
  title     = {Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention},
  author    = {Angelos Katharopoulos and Apoorv Vyas and Nikolaos Pappas and Fran{\\c{c}}ois Fleuret},
  booktitle = {International Conference on Machine Learning},
  year      = {2020}
}"""


class LinearTransformer(FeatureMapFilter):
    """Linear attention with ``phi(x) = elu(x) + 1``, and no parameters of its own."""

    scaled = False

    def query_features(self, query: Tensor) -> Tensor:
        return _log_map(query)

    def key_features(self, key: Tensor) -> Tensor:
        return _log_map(key)


def _log_map(x: Tensor) -> Tensor:
    """Return ``log(elu(x) + 1)``, which is ``log(x + 1)`` for a positive x and x itself for a negative one."""
    x = to_float32(x)
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


@register_filter("linear_transformer")
@dataclass(frozen=True)
class LinearTransformerConfig(ReplacingConfig):
    """Linear Transformer, linear attention with a fixed feature map that replaces attention at linear cost.

    The Linear Transformer (Katharopoulos et al., ICML 2020) replaces the exponential of a score by a product of feature
    maps of query and key, ``elu(x) + 1``. It has no parameters: the model's own projections learn to fit it. Decoding
    keeps a state of constant size.

    Right after patching, a model is far from the original, except with ``init="blend"``. It is a baseline for models
    that are trained from scratch. For a pretrained model choose a filter that ``linearize`` can fit, such as
    ``"hedgehog"``.

    Args:
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> LinearTransformerConfig(window=64).sinks
        0
    """

    module = LinearTransformer
    citation = CITATION
    formula = "phi(Q) phi(K)^T / rows, phi(x) = elu(x) + 1"
    cost = "linear in the tokens"

    @classmethod
    def for_conversion(cls, **options: Any) -> Self:
        return super().for_conversion(**{"sinks": 0, **options})
