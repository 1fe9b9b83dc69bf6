"""Classifiers of tokens or series, and their self-pretraining: positions, any encoder of transformers, and a head."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, pad
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput

from hf_graphfilter import GraphFilterError
from hf_graphfilter.analysis.model_inputs import position_table
from hf_graphfilter.models.converter.layers import pooled, recurrent, sinusoidal

POOLINGS = ("mean_max", "mean", "first", "flatten")
POSITIONS = ("gru", "sinusoidal", "none")
# fields of a config, besides its encoder's own
FIELDS = {"pooling", "positions", "channels", "flattened", "num_sequences", "embedding_dropout"}
CONSTANT = 1e-6  # a channel of a smaller deviation is only centred


class SequenceModel(PreTrainedModel):
    """The encoder of a config and its inputs; the base class of the models below.

    Fields of the config, all kept in a checkpoint, and taken as keywords too:

    ``positions``: ``"gru"`` (two layers over the embeddings, as in Converter), ``"sinusoidal"`` or ``"none"``. They
    replace the learned positions of the encoder, whose table is then zero and frozen. None keeps the learned positions.

    ``channels``: number of channels of a series. Series are (batch, steps, channels), passed as ``inputs_embeds``, and
    a linear layer projects them. Each channel is normalised by its mean and deviation, which are buffers
    (``normalise_by``).

    ``embedding_dropout``: dropout of the embeddings, if the encoder has only one number for them and its layers.

    The encoder has the name that it has in its own checkpoints. So its weights can be loaded from these, and
    ``AutoModel`` can load them from checkpoints of this class.
    """

    config_class = AutoConfig
    reads_both = False  # whether it takes encoder-decoders too
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config, **fields):
        if unknown := fields.keys() - FIELDS:
            raise TypeError(f"{type(self).__name__} takes no {min(unknown)}")
        config.update(fields)
        super().__init__(config)
        self.positions, self.channels = (getattr(config, name, None) for name in ("positions", "channels"))
        if self.positions not in (None, *POSITIONS):
            raise GraphFilterError(f"positions={self.positions!r}: use one of {', '.join(POSITIONS)}")
        if not MODEL_MAPPING[type(config)]._supports_sdpa:
            config._attn_implementation = "eager"  # chosen for this class, which does
        encoder = AutoModel.from_config(config)
        if (config.is_encoder_decoder and not self.reads_both) or not reads_tokens(encoder):
            raise GraphFilterError(f"{type(encoder).__name__} is no encoder of tokens, which --pooling needs")
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # of the first token: without use and gradient here
        if (dropout := getattr(config, "embedding_dropout", None)) is not None:
            embeddings = getattr(encoder, "embeddings", None)
            if not isinstance(getattr(embeddings, "dropout", None), nn.Dropout):
                raise GraphFilterError(f"{type(encoder).__name__} has no dropout of its embeddings to set")
            embeddings.dropout.p = dropout
        self.base_model_prefix = encoder.base_model_prefix
        setattr(self, self.base_model_prefix, encoder)
        self.width = config.hidden_size * (2 if config.model_type == "reformer" else 1)  # two streams, side by side
        width = encoder.get_input_embeddings().embedding_dim
        if self.channels:
            self.projection = nn.Linear(self.channels, width)
            self.register_buffer("mean", torch.zeros(self.channels))
            self.register_buffer("deviation", torch.ones(self.channels))
        if self.positions == "gru":
            self.gru = nn.GRU(width, width, 2, batch_first=True, dropout=getattr(config, "hidden_dropout_prob", 0.1))

    def post_init(self):
        super().post_init()
        self._freeze_unused_embeddings()

    @classmethod
    def from_config(cls, config):
        """Return a model with new weights, as of the auto classes."""
        return cls._from_config(config)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model._freeze_unused_embeddings()  # what the checkpoint of an encoder without a head has there
        if "gru.weight_ih_l0" in info["missing_keys"]:
            model.gru.reset_parameters()  # transformers leaves them undefined
        if "mean" in info["missing_keys"]:
            model.normalise_by(torch.zeros(model.channels), torch.ones(model.channels))
        return (model, info) if output_loading_info else model

    def _freeze_unused_embeddings(self):
        """No learned positions where others take their place, and no tokens where there are series."""
        if self.positions is not None:
            table = learned_positions(self.base_model).requires_grad_(False)
            nn.init.zeros_(table.weight)
        if self.channels:
            self.get_input_embeddings().requires_grad_(False)

    def normalise_by(self, mean: Tensor, deviation: Tensor) -> None:
        """Set what series are normalised by, a number per channel: those of the training part."""
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > CONSTANT, deviation, 1.0))

    def normalise(self, series: Tensor) -> Tensor:
        return (series - self.mean) / self.deviation

    def encode(self, input_ids: Tensor | None, mask: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Token vectors (batch, tokens, features); ``mask``, (batch, tokens), is not 0 where a token is; None: all."""
        if self.channels and inputs_embeds is not None:
            inputs_embeds = self.projection(self.normalise(inputs_embeds).to(self.projection.weight.dtype))
        if self.positions in ("gru", "sinusoidal"):
            if inputs_embeds is None:
                inputs_embeds, input_ids = self.get_input_embeddings()(input_ids), None
            inputs_embeds = inputs_embeds + self._embed_positions(inputs_embeds, mask).to(inputs_embeds.dtype)
        tokens = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        if (multiple := getattr(self.config, "padded_to", 1)) > 1:
            input_ids, mask, inputs_embeds = pad_inputs(-tokens % multiple, input_ids, mask, inputs_embeds)
            if self.config.model_type == "nystromformer":  # whose own mask has a row per token, not per landmark
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -1e4)[:, None, None]
        out = self.base_model(input_ids=input_ids, attention_mask=mask, inputs_embeds=inputs_embeds)
        return out.last_hidden_state[:, :tokens]

    def _embed_positions(self, embeds: Tensor, mask: Tensor | None) -> Tensor:
        if self.positions == "gru":
            return recurrent(self.gru, embeds, None if mask is None else mask.bool())
        return sinusoidal(torch.arange(embeds.shape[1], device=embeds.device).unsqueeze(0), embeds.shape[2])


def pad_inputs(missing: int, input_ids: Tensor | None, mask: Tensor | None, inputs_embeds: Tensor | None):
    """Return the inputs with so many more tokens that the mask hides, for an encoder that takes some lengths only."""
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device) if mask is None else mask
    if inputs_embeds is not None:
        return input_ids, pad(mask, (0, missing)), pad(inputs_embeds, (0, 0, 0, missing))
    return pad(input_ids, (0, missing)), pad(mask, (0, missing)), None


def reads_tokens(encoder: PreTrainedModel) -> bool:
    try:
        return isinstance(encoder.get_input_embeddings(), nn.Embedding)
    except NotImplementedError:
        return False


def learned_positions(encoder: nn.Module) -> nn.Embedding:
    if (table := position_table(encoder)) is not None:
        return table
    raise GraphFilterError(
        f"positions are for encoders with learned ones, which they replace, and {type(encoder).__name__} has none: "
        "leave them out, or use bert or roberta-prelayernorm"
    )


class PooledClassifier(SequenceModel):
    """An encoder, a pooling of its token vectors without padding, and a head.

    ``pooling``, kept in the config, names the input of the head:

    - ``mean_max``: mean and maximum over the tokens, concatenated (the head of the Singularformer paper);
    - ``mean``: the mean over the tokens;
    - ``first``: the first token;
    - ``flatten``: all tokens, concatenated (the head of Zerveas et al., 2021, for series), at most
      ``config.flattened``.

    The head has one dense layer for ``flatten``, else two with a ReLU between. If ``config.num_sequences`` is 2, the
    second sequence is ``input_ids_2``, and the head takes (u, v, u v, u - v) of the two, which have the same encoder.
    """

    def __init__(self, config, **fields):
        config.pooling = fields.pop("pooling", None) or getattr(config, "pooling", POOLINGS[0])
        super().__init__(config, **fields)
        self.loss_type = "ForSequenceClassification"
        width = self.width
        features = {"mean_max": 2 * width, "flatten": width * getattr(config, "flattened", 0)}.get(
            config.pooling, width
        )
        features *= 4 if getattr(config, "num_sequences", 1) == 2 else 1
        self.dense = nn.Linear(features, width) if config.pooling != "flatten" else None
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1))
        self.output = nn.Linear(width if self.dense else features, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        labels=None,
        input_ids_2=None,
        attention_mask_2=None,
    ) -> SequenceClassifierOutput:
        """``attention_mask`` is (batch, tokens), not 0 where a token is there; without one all are."""
        inputs = [(input_ids, attention_mask, inputs_embeds)]
        if getattr(self.config, "num_sequences", 1) == 2:
            inputs.append((input_ids_2, attention_mask_2, None))
        features = [self.features(*arguments) for arguments in inputs]
        if len(features) == 2:
            u, v = features
            features = [u, v, u * v, u - v]
        x = self.dropout(torch.cat(features, -1))
        logits = self.output(self.dropout(self.dense(x).relu()) if self.dense else x)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def features(self, input_ids, attention_mask, inputs_embeds) -> Tensor:
        hidden = self.encode(input_ids, attention_mask, inputs_embeds)
        mask = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        return pool(hidden, mask.bool(), self.config.pooling, getattr(self.config, "flattened", None))


def pool(hidden: Tensor, mask: Tensor, pooling: str, flattened: int | None = None) -> Tensor:
    """Pool ``hidden`` (batch, tokens, features) to (batch, features), by the tokens of ``mask``, bool (batch, tokens).

    There are twice as many features for ``mean_max``, and ``flattened`` times as many for ``flatten``.
    """
    if pooling != "flatten":
        return pooled(hidden, mask, "cls" if pooling == "first" else pooling)
    if hidden.shape[1] > flattened:
        raise GraphFilterError(f"a sequence of {hidden.shape[1]} tokens, and the head takes {flattened}")
    vectors = gelu(hidden) * mask.unsqueeze(-1)
    return pad(vectors, (0, 0, 0, flattened - hidden.shape[1])).flatten(1)


class Denoiser(SequenceModel):
    """The encoder with a head that restores what was hidden of its input.

    This is self-pretraining on a task's own inputs (Amos et al., ICLR 2024, arXiv 2310.02980). Of tokens ``labels``
    (batch, tokens) are the hidden ones, -100 elsewhere. Of series ``hidden_steps`` (batch, steps), bool, are hidden
    here, by the mean of each channel; the loss is the mean squared error of them, normalised.
    """

    def __init__(self, config, **fields):
        super().__init__(config, **fields)
        self.loss_type = "ForMaskedLM"
        self.restore = nn.Linear(self.width, self.channels or config.vocab_size)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, hidden_steps=None
    ) -> MaskedLMOutput:
        embeds = inputs_embeds
        if self.channels:
            embeds = torch.where(hidden_steps.unsqueeze(-1), self.mean, inputs_embeds)
        logits = self.restore(self.encode(input_ids, attention_mask, embeds))
        if self.channels:
            loss = mse_loss(logits.float()[hidden_steps], self.normalise(inputs_embeds)[hidden_steps])
        else:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits)
