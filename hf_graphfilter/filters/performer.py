"""Performer: linear attention whose random features estimate the softmax without bias (FAVOR+).

Source: Choromanski et al., "Rethinking Attention with Performers" (ICLR 2021), Lemma 1 and section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.spectral import to_float32
from .core.build import register_filter
from .core.feature_map import FeatureMapFilter
from .core.fields import check_limits
from .core.replacing import ReplacingConfig
from .core.site import AttentionSite

CITATION = """@inproceedings{choromanski2021rethinking,
  title     = {Rethinking Attention with Performers},
  author    = {Krzysztof Choromanski and Valerii Likhosherstov and David Dohan and Xingyou Song and Andreea Gane and
               Tam{\\'a}s Sarl{\\'o}s and Peter Hawkins and Jared Davis and Afroz Mohiuddin and Lukasz Kaiser and
               David Belanger and Lucy Colwell and Adrian Weller},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}"""
MOST_FEATURES = 4096
_LAYERS = 10_000  # seeds of one model are this far from those of the next


class Performer(FeatureMapFilter):
    """Linear attention with ``phi(x) = exp(x w_i - |x|^2 / 2)`` of fixed random directions ``w_i``.

    The directions are a buffer, drawn once per layer from ``seed`` and saved with the model.
    """

    directions: Tensor

    def __init__(self, config: PerformerConfig, site: AttentionSite):
        super().__init__(config, site)
        self.seed = config.seed * _LAYERS + site.index
        self.register_buffer("directions", torch.empty(config.features, site.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            count, features = self.directions.shape
            self.directions.copy_(orthogonal_directions(count, features, self.seed))

    def query_features(self, query: Tensor) -> Tensor:
        return self._project(query)  # without |x|^2 / 2, which all features share

    def key_features(self, key: Tensor) -> Tensor:
        return self._project(key) - to_float32(key).square().sum(-1, keepdim=True) / 2

    def _project(self, x: Tensor) -> Tensor:
        x = to_float32(x)
        with torch.autocast(x.device.type, enabled=False):
            return x @ self.directions.to(x.dtype).mT


def orthogonal_directions(count: int, features: int, seed: int) -> Tensor:
    """Draw ``count`` standard normal vectors (count, features), orthogonal within blocks of ``features`` vectors."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-count // features)
    normal = torch.randn(blocks, features, features, generator=generator, dtype=torch.float64, device="cpu")
    lengths = torch.randn(count, features, generator=generator, dtype=torch.float64, device="cpu").norm(dim=-1)
    q, r = torch.linalg.qr(normal)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform over all rotations
    return q.mT.flatten(0, 1)[:count] * lengths[:, None]


@register_filter("performer")
@dataclass(frozen=True)
class PerformerConfig(ReplacingConfig):
    """Performer, linear attention that estimates the softmax by random features and replaces it at linear cost.

    The Performer (Choromanski et al., ICLR 2021) replaces the exponential of a score by positive random features of
    query and key (FAVOR+). Their product has the exponential as its mean, so the filter comes near the original
    attention as ``features`` grows, as long as the scores are small. It has no parameters. The random directions are
    orthogonal, drawn once, and saved with the model; the paper's code can draw them again during training. Decoding
    keeps a state of constant size.

    Right after patching, a model is far from the original, except with ``init="blend"``. It is a baseline for models
    that are trained from scratch. For a pretrained model choose a filter that ``linearize`` can fit, such as
    ``"hedgehog"``.

    Args:
        features (int, default 256): Number of random features per head, at most 4096.
        seed (int, default 0): Seed of the directions. Each layer that ``patch_model`` patches draws its own. In a model
            that builds ``GraphFilterAttention`` itself, give each layer another seed.
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> PerformerConfig(features=64).seed
        0
    """

    module = Performer
    citation = CITATION
    formula = "phi(Q) phi(K)^T / rows, phi(x) = exp(x·w_i - x·x/2), w_i random"
    cost = "linear in the tokens"

    features: int = 256
    seed: int = 0

    def validate(self) -> None:
        super().validate()
        check_limits(self, "features", least=1, most=MOST_FEATURES)
        check_limits(self, "seed", least=0, most=2**31 - 1)
