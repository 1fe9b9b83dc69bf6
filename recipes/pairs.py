"""Two functions, each encoded alone, and whether they do the same: the model of clones in CodeT5's code."""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from recipes.classifier import SequenceModel


class PairClassifier(SequenceModel):
    """The model's vectors of two texts side by side, a dense layer with a tanh, and scores of the labels.

    The vector of a text is that of its first token in an encoder. An encoder-decoder reads the text in both parts, and
    the vector is the decoder's at the last end-of-text token.
    """

    reads_both = True

    def __init__(self, config, **fields):
        super().__init__(config, **fields)
        self.dense = nn.Linear(2 * self.width, self.width)
        self.output = nn.Linear(self.width, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, labels=None, input_ids_2=None, attention_mask_2=None
    ) -> SequenceClassifierOutput:
        """``attention_mask`` is (batch, tokens), with padding at the end, and so is that of the second text."""
        texts = ((input_ids, attention_mask), (input_ids_2, attention_mask_2))
        logits = self.output(self.dense(torch.cat([self.vector(*text) for text in texts], -1)).tanh())
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def vector(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return a vector (batch, features) of each text."""
        if not self.config.is_encoder_decoder:
            return self.encode(ids, mask, None)[:, 0]
        start = getattr(self.config, "decoder_start_token_id", None)  # PLBART has none: it begins with the last token
        start = self.config.eos_token_id if start is None else start
        shifted = torch.cat([ids.new_full((len(ids), 1), start), ids[:, :-1]], 1)
        hidden = self.base_model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=shifted, decoder_attention_mask=mask
        ).last_hidden_state
        places = torch.arange(ids.shape[1], device=ids.device)
        ends = (ids == self.config.eos_token_id) & mask.bool()
        last = torch.where(ends.any(1), (ends * places).argmax(1), mask.sum(1) - 1)
        return hidden[torch.arange(len(ids), device=ids.device), last]
