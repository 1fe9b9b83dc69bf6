"""The Converter models; importing this file registers them with the Auto classes.

Source: Zhang et al., "Converting Transformers into DGNNs Form" (preprint, 2025), Eq. 4-14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ...errors import GraphFilterError
from ...filters.core.unitary_spectrum import Spectrum, real_form
from ...functional import kernel_polynomial_loss
from .configuration import ConverterConfig
from .layers import (
    ClassificationHead,
    ConverterConvolution,
    ConverterEmbeddings,
    GatedFeedForward,
    MaskedLMHead,
    ScaleNorm,
    check,
    pooled,
    say_what_labels_would_add,
    to_float32,
    visible,
)
from .outputs import ConverterClassifierOutput, ConverterMaskedLMOutput, ConverterOutput


class ConverterLayer(GradientCheckpointingLayer):
    """Convolution and feed-forward network, each added to its input and normed (PostNorm).

    Between them the signal is complex; the second sum takes ``zeta Re + (1 - zeta) Im`` of it.
    """

    def __init__(self, config: ConverterConfig):
        super().__init__()
        self.convolution = ConverterConvolution(config)
        self.convolution_norm = ScaleNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = GatedFeedForward(config)
        self.feed_forward_norm = ScaleNorm(config.hidden_size, config.norm_eps)
        self.zeta = nn.Parameter(torch.empty(1))
        self.penalised = config.eta > 0

    def reset_parameters(self) -> None:
        init.ones_(self.zeta)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (batch, tokens, features), real as ``x``, and the kernel polynomial loss where training needs it."""
        z = self.convolution_norm(self.convolution(x, mask) + to_float32(x))
        out = self.feed_forward_norm(to_float32(self.feed_forward(z)) + real_form(z, self.zeta)).to(x.dtype)
        coefficients = self.convolution.coefficients if self.training and self.penalised else None
        return out, None if coefficients is None else kernel_polynomial_loss(coefficients)


_OWN_START = ClassificationHead, ConverterConvolution, ConverterLayer, GatedFeedForward, ScaleNorm, Spectrum, nn.GRU


class ConverterPreTrainedModel(PreTrainedModel):
    """The base of the Converter models: their start values, their loss, and what transformers may do with them."""

    config: ConverterConfig
    config_class = ConverterConfig
    base_model_prefix = "converter"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ConverterEmbeddings", "ConverterLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": ConverterLayer}  # noqa: RUF012  # as transformers declares it

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that transformers lets ``_init_weights`` initialise all our modules.

        For custom code, it initialises only modules with parameters of their own. Some of our modules initialise the
        modules inside them. They use functions that leave loaded parameters alone.
        """
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, _OWN_START):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def _objective(self, task: Tensor, penalty: Tensor | None, labels: Tensor, count: Any = None) -> Tensor:
        """Return the objective of Eq. 14 from the loss of the task.

        If a batch holds only some of the ``count`` labels of a step, their share weights the penalty and a mean loss.
        """
        if count is not None:
            share = (labels != -100).sum() / count
            is_mean = self.config.problem_type in ("regression", "multi_label_classification")  # else it is a sum
            task = task * share.to(task.device) if is_mean else task
            penalty = None if penalty is None else penalty * share.to(penalty.device)
        if penalty is None:
            return task
        return (1 - self.config.eta) * task + self.config.eta * penalty.to(task.device)


class ConverterModel(ConverterPreTrainedModel):
    """Converter: an encoder whose layers mix tokens by learned unitary filters, in linear time, without attention.

    ``forward(input_ids, attention_mask, inputs_embeds)`` gives ``last_hidden_state`` (batch, tokens, hidden size).
    ``attention_mask`` is (batch, tokens), 0 for padding, which may be anywhere. ``inputs_embeds`` is (batch, tokens,
    embedding size). The model has no attention matrices.

    Raises:
        GraphFilterError: both or neither of ``input_ids`` and ``inputs_embeds``; no token, or more tokens than absolute
            positions; a mask of another shape; ``output_attentions``, a cache, cross-attention or ``position_ids``.

    Example:
        >>> import torch
        >>> model = ConverterModel(ConverterConfig(num_hidden_layers=2))
        >>> model(torch.randint(0, 384, (1, 20))).last_hidden_state.shape
        torch.Size([1, 20, 64])
    """

    def __init__(self, config: ConverterConfig):
        super().__init__(config)
        self.embeddings = ConverterEmbeddings(config)
        self.layers = nn.ModuleList(ConverterLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # type: ignore[assignment]

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> ConverterOutput:
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise GraphFilterError("Converter has no attention matrices to give: leave out output_attentions")
        if (input_ids is None) == (inputs_embeds is None):
            raise GraphFilterError("Converter takes either input_ids or inputs_embeds")
        for name in ("encoder_hidden_states", "cache", "past_key_values", "position_ids"):
            if kwargs.get(name) is not None:
                raise GraphFilterError(f"Converter is an encoder whose tokens are in order: leave out {name}")
        embeds = self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        check(embeds)
        mask = visible(attention_mask, embeds)
        x, penalties = self.embeddings(embeds, mask), []
        for layer in self.layers:
            x, penalty = layer(x, mask)
            penalties += [] if penalty is None else [penalty.to(x.device)]
        return ConverterOutput(
            last_hidden_state=x, kernel_polynomial_loss=torch.stack(penalties).mean() if penalties else None
        )


class ConverterForSequenceClassification(ConverterPreTrainedModel):
    """Converter with a head of two layers on the pooled tokens, for one sequence or a pair.

    With ``num_sequences=2`` in the config, both sequences are encoded with the same weights and their features
    combined.

    ``forward`` takes the inputs of ``ConverterModel``. For a pair it also takes ``input_ids_2``, ``attention_mask_2``
    and ``inputs_embeds_2``, which may have another length. ``labels`` are (batch,) or (batch, labels), as in all models
    of transformers (``problem_type``). In training the loss is that of Eq. 14 (see ``eta`` of ``ConverterConfig``). In
    evaluation it is the loss of the task alone.

    Raises:
        GraphFilterError: as for ``ConverterModel``; or a second sequence that is missing or not expected.

    Example:
        >>> import torch
        >>> model = ConverterForSequenceClassification(ConverterConfig(num_sequences=2, num_labels=3))
        >>> model(torch.randint(0, 384, (2, 20)), input_ids_2=torch.randint(0, 384, (2, 30))).logits.shape
        torch.Size([2, 3])
    """

    def __init__(self, config: ConverterConfig):
        super().__init__(config)
        self.converter = ConverterModel(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_ids_2: Tensor | None = None,
        attention_mask_2: Tensor | None = None,
        inputs_embeds_2: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ConverterClassifierOutput:
        inputs = [(input_ids, attention_mask, inputs_embeds), (input_ids_2, attention_mask_2, inputs_embeds_2)]
        expected = self.config.num_sequences
        second = inputs[1] if expected == 1 else (input_ids_2, inputs_embeds_2)
        count = 1 + any(x is not None for x in second)
        if count != expected:
            raise GraphFilterError(
                f"this model classifies {('single sequences', 'pairs')[expected - 1]} (num_sequences={expected}), and "
                f"input_ids_2 or inputs_embeds_2 is {('missing', 'not expected')[count - 1]}"
            )
        encoded, features = [], []
        for ids, mask, embeds in inputs[:expected]:
            out = self.converter(ids, mask, embeds, **{**kwargs, "return_dict": True})
            encoded.append(out)
            features.append(pooled(out.last_hidden_state, visible(mask, out.last_hidden_state), self.config.pooling))
        batches = [x.shape[0] for x in features]  # len() would bind a graph to their number
        if batches[0] != batches[-1]:
            raise GraphFilterError(f"the sequences of a pair: {batches[0]} first ones, {batches[1]} second")
        logits, penalty, loss = self.classifier(features), encoded[0].kernel_polynomial_loss, None
        say_what_labels_would_add(logits, penalty, labels, self.config.eta)
        if labels is not None:
            task = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
            loss = self._objective(task, penalty, labels, kwargs.get("num_items_in_batch"))
        return ConverterClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=encoded[0].hidden_states,
            hidden_states_2=encoded[-1].hidden_states if expected == 2 else None,
            kernel_polynomial_loss=penalty,
        )


class ConverterForMaskedLM(ConverterPreTrainedModel):
    """Converter with a head that predicts tokens with the weights of the embeddings.

    ``forward`` takes the inputs of ``ConverterModel``, and ``labels`` (batch, tokens), -100 for tokens without a label.
    The loss in training is that of Eq. 14.

    Raises:
        GraphFilterError: as for ``ConverterModel``.

    Example:
        >>> import torch
        >>> model = ConverterForMaskedLM(ConverterConfig())
        >>> model(torch.randint(0, 384, (1, 20))).logits.shape
        torch.Size([1, 20, 384])
    """

    _tied_weights_keys = {  # noqa: RUF012
        "head.decoder.weight": "converter.embeddings.word_embeddings.weight"
    }

    def __init__(self, config: ConverterConfig):
        super().__init__(config)
        self.converter = ConverterModel(config)
        self.head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head.decoder = new_embeddings  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ConverterMaskedLMOutput:
        out = self.converter(input_ids, attention_mask, inputs_embeds, **{**kwargs, "return_dict": True})
        logits, penalty, loss = self.head(out.last_hidden_state), out.kernel_polynomial_loss, None
        say_what_labels_would_add(logits, penalty, labels, self.config.eta)
        if labels is not None:
            task = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = self._objective(task, penalty, labels, kwargs.get("num_items_in_batch"))
        return ConverterMaskedLMOutput(loss, logits, out.hidden_states, kernel_polynomial_loss=penalty)


AutoModel.register(ConverterConfig, ConverterModel, exist_ok=True)
AutoModelForSequenceClassification.register(ConverterConfig, ConverterForSequenceClassification, exist_ok=True)
AutoModelForMaskedLM.register(ConverterConfig, ConverterForMaskedLM, exist_ok=True)
