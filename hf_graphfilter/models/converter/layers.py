"""The parts of Converter: embeddings, the complex convolution over tokens, the feed-forward network, and pooling.

All take a mask (batch, tokens), bool, or None. Masked tokens, wherever they are, change nothing in the others.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, leaky_relu, softplus
from transformers import initialization as init

from ...errors import GraphFilterError
from ...filters.core.unitary_spectrum import Spectrum, damped_polynomial
from ...filters.core.window import in_dtype_of
from ...ops.polynomials import recurrence
from ...ops.spectral import to_float32
from ...ops.unitary import filter_tokens
from .configuration import ConverterConfig


class ScaleNorm(nn.Module):
    """Norm ``weight * x / (|x| + eps)`` of real or complex x (batch, tokens, features), in float32 or wider."""

    def __init__(self, features: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(features)), eps

    def reset_parameters(self) -> None:
        init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = to_float32(x)
        return x * (to_float32(self.weight) / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + self.eps))


class ConverterEmbeddings(nn.Module):
    """Embeddings of tokens and positions, projected to the hidden size."""

    def __init__(self, config: ConverterConfig):
        super().__init__()
        features, self.kind = config.embedding_size or config.hidden_size, config.position_embedding
        self.dropout, self.max_positions = config.embedding_dropout, config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, features)
        self.position: nn.Module | None
        self.register_module("position", None)  # compilers look where another model of this class has its own
        if self.kind == "gru":
            self.position = nn.GRU(features, features, 2, batch_first=True, dropout=config.position_dropout)
        elif self.kind == "absolute":
            self.position = nn.Embedding(config.max_position_embeddings, features)
        self.projection = nn.Linear(features, config.hidden_size) if features != config.hidden_size else nn.Identity()
        self.norm = ScaleNorm(config.hidden_size, config.norm_eps)

    def forward(self, embeds: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``embeds`` (batch, tokens, embedding size) to (batch, tokens, hidden size)."""
        x = self.norm(self.projection(embeds + self._positions(embeds, mask).to(embeds.dtype)))
        return dropout(x.to(embeds.dtype), self.dropout, self.training)

    def _positions(self, embeds: Tensor, mask: Tensor | None) -> Tensor:
        tokens, features = embeds.shape[1:]
        if self.kind == "gru":  # not by the module's class, which adapters and quantizers replace
            assert self.position is not None
            return recurrent(self.position, embeds, mask)
        if self.kind == "none":
            return torch.zeros_like(embeds)
        if mask is None:
            positions = torch.arange(tokens, device=embeds.device).unsqueeze(0)
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
        if self.kind == "sinusoidal":
            return sinusoidal(positions, features)
        assert self.position is not None
        if tokens > (most := getattr(self.position, "num_embeddings", self.max_positions)):
            raise GraphFilterError(
                f"{tokens} tokens, and max_position_embeddings is {most}: truncate the input, "
                "or make the model with another position_embedding"
            )
        return self.position(positions)


def recurrent(gru: nn.Module, embeds: Tensor, mask: Tensor | None) -> Tensor:
    """Return the outputs of a GRU in float32 or wider.

    Tokens are moved in front of the padding first. Since the GRU runs forwards, they never see padding.
    """
    x = to_float32(embeds)
    if mask is not None:
        order = (~mask).byte().argsort(dim=1, stable=True)
        x = _reorder(x, order)
    with torch.autocast(x.device.type, enabled=False):
        weights = dict(gru.named_parameters())  # none of a quantized one
        offloaded = [weight.dtype for weight in weights.values() if weight.is_meta]
        if offloaded:  # the module itself fetches them, and is left in its dtype
            x = gru(x.to(offloaded[0]))[0].to(x.dtype)
        elif all(weight.dtype == x.dtype for weight in weights.values()):
            x = gru(x)[0]
        else:
            x = functional_call(gru, {name: weight.to(x.dtype) for name, weight in weights.items()}, x)[0]
    return x if mask is None else _reorder(x, order.argsort(1))


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order.unsqueeze(-1).expand_as(x))


def sinusoidal(positions: Tensor, features: int) -> Tensor:
    """Map positions (batch, tokens) to sines and cosines in turn, (batch, tokens, features), as Vaswani et al. do."""
    log_frequencies = torch.arange(0, features, 2, device=positions.device) * (-math.log(10000.0) / features)
    angles = positions.unsqueeze(-1) * log_frequencies.exp()
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :features]


class ConverterConvolution(nn.Module):
    """Kernelution (Eq. 12) or Synvolution (Eq. 8) of complex values, with one filter for all features."""

    coefficients: Tensor | None

    def __init__(self, config: ConverterConfig):
        super().__init__()
        features, self.dropout = config.hidden_size, config.value_dropout
        self.spectrum = Spectrum(
            features,
            features,
            phase=False,
            eigenvalue_dropout=config.eigenvalue_dropout,
            eigenvector_dropout=config.eigenvector_dropout,
        )
        self.value_real = nn.Linear(features, features, bias=False)
        self.value_imag = nn.Linear(features, features, bias=False)
        is_learned = config.convolution == "kernelution"
        self.register_parameter("coefficients", nn.Parameter(torch.empty(config.K + 1)) if is_learned else None)
        self.steps, self.factors = recurrence("chebyshev", config.K), config.damping()

    def reset_parameters(self) -> None:
        """Set the authors' start: values of variance 1/2, ``w = 2 / (K + 1)``, and half of that for ``w_0``."""
        for layer in (self.value_real, self.value_imag):
            init.normal_(layer.weight, std=math.sqrt(0.5))
        if self.coefficients is not None:
            start = torch.full_like(self.coefficients, 2 / len(self.coefficients))
            start[0] /= 2
            init.copy_(self.coefficients, start)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Filter (batch, tokens, features) in complex64 or wider."""
        parts = [to_float32(layer(in_dtype_of(layer, x))) for layer in (self.value_real, self.value_imag)]
        value = torch.complex(*(dropout(part, self.dropout, self.training) for part in parts))
        eigenvalues, angles = self.spectrum(x)
        if self.coefficients is not None:
            eigenvalues = damped_polynomial(eigenvalues, self.coefficients, self.factors, self.steps)
        return filter_tokens(value.unsqueeze(1), eigenvalues, angles, is_present=mask).squeeze(1)


class GatedFeedForward(nn.Module):
    """The feed-forward network of Eq. 13, from complex (batch, tokens, features) to real.

    It computes ``[softplus(Re(z) W) * tanh(Im(z) W')] W_O``.
    """

    def __init__(self, config: ConverterConfig):
        super().__init__()
        self.real = nn.Linear(config.hidden_size, config.intermediate_size)
        self.imag = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = config.feed_forward_dropout

    def reset_parameters(self) -> None:
        for layer in (self.real, self.imag, self.output):
            init.xavier_uniform_(layer.weight)
            init.zeros_(layer.bias)

    def forward(self, z: Tensor) -> Tensor:
        size, sign = self.real(in_dtype_of(self.real, z.real)), self.imag(in_dtype_of(self.imag, z.imag))
        return self.output(dropout(softplus(size) * sign.tanh(), self.dropout, self.training))


def check(embeds: Tensor) -> None:
    """Raise unless embeddings are what the model takes."""
    if embeds.dim() != 3 or not embeds.shape[1] or not embeds.is_floating_point():
        raise GraphFilterError(
            "Converter takes input_ids (batch, tokens), of a token at least, or real inputs_embeds (batch, tokens, "
            f"features); the embeddings are {tuple(embeds.shape)}, {embeds.dtype}"
        )


def visible(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return a user's mask as bool, for ``tokens`` (batch, tokens, features)."""
    if attention_mask is None:
        return None
    if attention_mask.shape != tokens.shape[:2]:
        raise GraphFilterError(
            f"attention_mask must be (batch, tokens), here {tuple(tokens.shape[:2])}, got {tuple(attention_mask.shape)}"
        )
    return attention_mask.bool()


def pooled(x: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Pool (batch, tokens, features) to (batch, features), or to twice as many features for "mean_max"."""
    if pooling == "cls":
        if mask is None:
            return x[:, 0]
        index = mask.byte().argmax(1)[:, None, None].expand(-1, 1, x.shape[2])
        return x.gather(1, index).squeeze(1) * mask.any(1, keepdim=True)
    if pooling == "mean_max":
        return torch.cat([pooled(x, mask, "mean"), pooled(x, mask, "max")], -1)
    if mask is None:
        return x.mean(1) if pooling == "mean" else x.amax(1)
    is_token = mask.unsqueeze(-1)
    if pooling == "max":
        return x.masked_fill(~is_token, torch.finfo(x.dtype).min).amax(1) * is_token.any(1)
    return (to_float32(x) * is_token).sum(1).div(is_token.sum(1).clamp(min=1)).to(x.dtype)


def say_what_labels_would_add(logits: Tensor, penalty: Tensor | None, labels: Tensor | None, eta: float) -> None:
    """Warn if the loss to minimise is not the model's own, since it may lack the penalty of the layers."""

    def say(gradient: Tensor) -> None:
        warnings.warn(
            f"eta={eta} asks for the kernel polynomial loss, and this model in training got no labels (the Trainer "
            "keeps them for label_smoothing_factor and compute_loss_func): if it is not there already, add eta * "
            "outputs.kernel_polynomial_loss to the loss that is minimised, or set eta=0",
            stacklevel=2,
        )

    if penalty is not None and labels is None and logits.requires_grad and not torch.compiler.is_compiling():
        logits.register_hook(say)


class ClassificationHead(nn.Module):
    """A classifier of two layers on pooled features."""

    def __init__(self, config: ConverterConfig):
        super().__init__()
        assert config.num_labels is not None
        features = config.hidden_size * (2 if config.pooling == "mean_max" else 1)
        if config.num_sequences == 2:
            features *= 4 if config.interaction == "nli" else 2
        self.interaction, self.dropout = config.interaction, config.classifier_dropout
        self.dense = nn.Linear(features, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.num_labels)

    def reset_parameters(self) -> None:
        init.kaiming_normal_(self.dense.weight, nonlinearity="leaky_relu")
        init.xavier_normal_(self.output.weight)
        init.zeros_(self.dense.bias)
        init.zeros_(self.output.bias)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        """Map one or two of (batch, features) to (batch, labels)."""
        if len(sequences) == 2 and self.interaction == "nli":
            u, v = sequences
            sequences = [u, v, u * v, u - v]
        x = leaky_relu(self.dense(torch.cat(sequences, -1)))
        return self.output(dropout(x, self.dropout, self.training))


class MaskedLMHead(nn.Module):
    """A head that predicts tokens with the weights of the embeddings."""

    def __init__(self, config: ConverterConfig):
        super().__init__()
        features = config.embedding_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size, features)
        self.norm = nn.LayerNorm(features)
        self.decoder = nn.Linear(features, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(nn.functional.gelu(self.dense(x))))
