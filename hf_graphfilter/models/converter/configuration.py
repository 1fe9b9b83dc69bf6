"""The config of the Converter models; importing this file registers it with ``AutoConfig``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from transformers import AutoConfig

from ...errors import GraphFilterError, shown
from ..configuration import CheckedConfig

if TYPE_CHECKING:
    from ...functional import Kernel

CHOICES = {
    "position_embedding": ("gru", "absolute", "sinusoidal", "none"),
    "convolution": ("kernelution", "synvolution"),
    "pooling": ("mean", "max", "mean_max", "cls"),
    "interaction": ("nli", "concat"),
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "embedding_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
)
DROPOUTS = ("position", "embedding", "value", "feed_forward", "eigenvalue", "eigenvector", "classifier")


class ConverterConfig(CheckedConfig):
    """Config of ``ConverterModel`` and of the models with a head on it.

    The defaults are those of the paper's classification of bytes (Table 8, "Text").

    Attributes:
        vocab_size: size of the vocabulary; 384 is that of ``ByT5Tokenizer``, whose tokens are bytes.
        hidden_size: number of features per token, which the paper calls embedding size (ES).
        embedding_size: number of features per embedding, projected to ``hidden_size`` if they differ. None means the
            same as ``hidden_size``.
        intermediate_size: number of hidden features of the gated feed-forward network, which the paper calls hidden
            size (HS).
        num_hidden_layers: number of layers; 1 in all experiments of the paper.
        position_embedding: ``"gru"`` (two layers over the embeddings), ``"absolute"`` (learned), ``"sinusoidal"``, or
            ``"none"``.
        max_position_embeddings: the longest input with ``"absolute"``; the others have no limit.
        convolution: ``"kernelution"`` (Eq. 12), or ``"synvolution"`` (Eq. 8), which has no polynomial.
        K: order of the Chebyshev polynomial of the eigenvalues, whose coefficients are learned.
        kernel, M, xi, a, b: damping of the coefficients, see ``functional.gibbs_damping``; ``"dirichlet"`` means none.
        eta: weight of the kernel polynomial loss in training, in [0, 1): the loss is (1 - eta) task + eta times its
            mean over the layers (Eq. 14). Synvolution has no such loss.
        pooling: how classification pools the tokens: ``"mean"``, ``"max"``, ``"mean_max"`` (both, side by side), or
            ``"cls"`` (the first token).
        num_sequences: 1, or 2 for the classification of pairs.
        interaction: how the features u and v of a pair are combined: ``"nli"`` for (u, v, u * v, u - v), or
            ``"concat"`` for (u, v).
        position_dropout: dropout rate between the layers of the GRU.
        embedding_dropout: dropout rate of the sum of the embeddings.
        value_dropout: dropout rate of the real and imaginary parts of the values.
        feed_forward_dropout: dropout rate of the hidden features of the feed-forward network.
        eigenvalue_dropout, eigenvector_dropout: dropout rates of the hidden features of the networks that make the
            eigenvalues and the angles.
        classifier_dropout: dropout rate of the hidden features of the classification head.
        initializer_range: standard deviation of the initial embeddings and of the head of ``ConverterForMaskedLM``.
        norm_eps: number added to the norms by which features are divided.

    Raises:
        GraphFilterError: an unknown choice, a size below 1, K < 0, a parameter of the kernel out of range, an eta or a
            dropout outside [0, 1), a decoder.

    Example:
        >>> ConverterConfig(num_hidden_layers=2, kernel="jackson").K
        2
    """

    model_type = "converter"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["kernel_polynomial_loss"]

    vocab_size: int = 384
    hidden_size: int = 64
    embedding_size: int | None = None
    intermediate_size: int = 256
    num_hidden_layers: int = 1
    position_embedding: str = "gru"
    max_position_embeddings: int = 4096
    convolution: str = "kernelution"
    K: int = 2
    kernel: Kernel = "dirichlet"
    M: int = 3
    xi: float | int = 4.0
    a: float | int = 0.5
    b: float | int = 2.0
    eta: float | int = 0.001
    pooling: str = "mean"
    num_sequences: int = 1
    interaction: str = "nli"
    position_dropout: float | int = 0.1
    embedding_dropout: float | int = 0.1
    value_dropout: float | int = 0.1
    feed_forward_dropout: float | int = 0.1
    eigenvalue_dropout: float | int = 0.1
    eigenvector_dropout: float | int = 0.1
    classifier_dropout: float | int = 0.0
    initializer_range: float = 0.02
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise GraphFilterError(
                    f"ConverterConfig: {name}={shown(value)}: use one of {', '.join(map(repr, choices))}"
                )
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        for name in SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise GraphFilterError(f"ConverterConfig: {name} must be an integer >= 1, got {shown(value)}")
        if type(self.num_sequences) is not int or self.num_sequences not in (1, 2):
            raise GraphFilterError(f"ConverterConfig: num_sequences must be 1 or 2, got {shown(self.num_sequences)}")
        for name in ("eta", *(f"{part}_dropout" for part in DROPOUTS)):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not 0 <= value < 1:
                raise GraphFilterError(f"ConverterConfig: {name} must be in [0, 1), got {shown(value)}")
        for name in ("initializer_range", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not 0 <= value < math.inf:
                raise GraphFilterError(f"ConverterConfig: {name} must be a number >= 0, got {shown(value)}")
        for name in ("is_decoder", "add_cross_attention"):
            if kwargs.get(name):
                raise GraphFilterError(f"ConverterConfig: {name}: Converter is an encoder, without causal form")
        self.damping()
        super().__post_init__(**kwargs)

    def damping(self) -> tuple[float, ...]:
        """Return the damping factors ``g_0 ... g_K``."""
        import torch  # which a config needs only when there is one

        from ...functional import gibbs_damping

        with torch.device("cpu"):  # models are built on the meta device
            return tuple(gibbs_damping(self.kernel, self.K, M=self.M, xi=self.xi, a=self.a, b=self.b).tolist())


AutoConfig.register(ConverterConfig.model_type, ConverterConfig, exist_ok=True)
