"""What the Converter models return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput


@dataclass
class ConverterOutput(BaseModelOutput):
    """The output of ``ConverterModel``.

    ``kernel_polynomial_loss`` is a scalar, the mean over the layers, in training with Kernelution and eta > 0.
    """

    kernel_polynomial_loss: Tensor | None = None


@dataclass
class ConverterClassifierOutput(SequenceClassifierOutput):
    """A ``SequenceClassifierOutput`` with ``kernel_polynomial_loss`` (see ``ConverterOutput``).

    For pairs it has the hidden states of the second sequence too.
    """

    hidden_states_2: tuple[Tensor, ...] | None = None
    kernel_polynomial_loss: Tensor | None = None


@dataclass
class ConverterMaskedLMOutput(MaskedLMOutput):
    """A ``MaskedLMOutput`` with ``kernel_polynomial_loss`` (see ``ConverterOutput``)."""

    kernel_polynomial_loss: Tensor | None = None
