"""A classification head over pooled token vectors, on any encoder of transformers."""

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_graphfilter.models.converter.layers import pooled

POOLINGS = ("mean_max", "mean", "first")


class PooledClassifier(PreTrainedModel):
    """The encoder of a config, its token vectors pooled without padding, and two dense layers with a ReLU between.

    ``pooling``, kept in the config, names what the head takes: mean and maximum over the tokens side by side
    (``mean_max``, the head of Singularformer's paper), their ``mean``, or the ``first`` token. The encoder has the name
    that its own checkpoints give it, so that its weights are found in theirs, and in this one's by ``AutoModel``.
    """

    config_class = AutoConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config, pooling=None):
        super().__init__(config)
        config.pooling = pooling or getattr(config, "pooling", POOLINGS[0])
        self.loss_type = "ForSequenceClassification"
        encoder = AutoModel.from_config(config)
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # of the first token: without use and gradient here
        self.base_model_prefix = encoder.base_model_prefix
        setattr(self, self.base_model_prefix, encoder)
        width = config.hidden_size
        self.dense = nn.Linear(width * 2 if config.pooling == "mean_max" else width, width)
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1))
        self.output = nn.Linear(width, config.num_labels)
        self.post_init()

    @classmethod
    def from_config(cls, config):
        """A model with new weights, as of the auto classes."""
        return cls._from_config(config)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None) -> SequenceClassifierOutput:
        """``attention_mask`` is (batch, tokens), not 0 where a token is there; without one all are."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        hidden = self.base_model(**inputs).last_hidden_state
        there = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        features = pool(hidden, there.bool(), self.config.pooling)
        logits = self.output(self.dropout(self.dense(self.dropout(features)).relu()))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def pool(hidden: Tensor, there: Tensor, pooling: str) -> Tensor:
    """``hidden`` (batch, tokens, features) to (batch, features), twice as many for ``mean_max``, by the tokens that are
    ``there``, bool (batch, tokens)."""
    return pooled(hidden, there, "cls" if pooling == "first" else pooling)
