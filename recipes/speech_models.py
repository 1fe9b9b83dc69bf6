"""Speech models: made or loaded, with a CTC head where that is asked for, their losses and what they write."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCTC, AutoModelForSpeechSeq2Seq, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CTC_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import nearest
from hf_graphfilter.files import find_optional
from recipes.errors import note
from recipes.models import build_model

ENGLISH = 51864  # entries of the vocabulary of Whisper's models that know English alone; others have more
INPUTS = ("input_features", "input_values")
HEAD = "joint_ctc_head"
HEAD_FILE = f"{HEAD}.safetensors"  # beside the model, whose class does not have this head


def is_ctc(args: Any, config: Any) -> bool:
    """Return whether the model is an encoder with a CTC head, and not one that writes."""
    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return False
    if config.model_type in MODEL_FOR_CTC_MAPPING_NAMES:
        if args.ctc_weight not in (None, 1.0):
            raise GraphFilterError(
                f"--ctc_weight {args.ctc_weight:g}: {config.model_type} has no decoder to weigh with"
            )
        return True
    raise GraphFilterError(f"--model {args.model}: {config.model_type} has neither a CTC head nor a decoder of text")


def check_model(args: Any, config: Any, ctc: bool) -> None:
    """Raise for what this model cannot do, before features are made."""
    if args.ctc_decode_weight and (ctc or not ctc_weight(args)):
        raise GraphFilterError(
            f"--ctc_decode_weight {args.ctc_decode_weight:g} needs a decoder with a CTC head beside it: leave it out, "
            "or give the decoder that head by --ctc_weight"
        )
    pretrained = config.model_type == "whisper" and not args.from_scratch
    if not args.language:
        if pretrained and config.vocab_size > ENGLISH:
            raise GraphFilterError(
                f"{args.model} knows many languages: name that of the recordings, for example --language czech"
            )
        return
    if not pretrained:
        raise GraphFilterError(f"--language {args.language}: {args.model} does not take a language")
    if args.language.lower() not in {*TO_LANGUAGE_CODE, *TO_LANGUAGE_CODE.values()}:
        hint = nearest(args.language, TO_LANGUAGE_CODE)
        raise GraphFilterError(f"--language {args.language}: Whisper knows no such language{hint}")
    if config.vocab_size == ENGLISH:
        raise GraphFilterError(f"--language {args.language}: {args.model} knows English alone, leave it out")


def build(args: Any, training: Any, config: Any, tokenizer: Any, trained: bool) -> PreTrainedModel:
    """Return the model, patched; an encoder-decoder with a weight for CTC has a head for it."""
    ctc = is_ctc(args, config)
    fields: dict[str, Any] = {}
    if args.from_scratch and not ctc:
        fields = {"decoder_start_token_id": tokenizer.bos_token_id}
    elif trained and ctc and not args.from_scratch:
        fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "ignore_mismatched_sizes": True}
    elif trained and not args.from_scratch:
        raise GraphFilterError(f"--model {args.model} writes with its own vocabulary: leave out --train_tokenizer")
    model = build_model(args, training, AutoModelForCTC if ctc else AutoModelForSpeechSeq2Seq, tokenizer, **fields)
    if not args.from_scratch and hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()  # the convolutions of Wav2Vec2, as its authors do
    if not ctc and ctc_weight(args) > 0:
        head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
        if not args.from_scratch:
            _load_head(head, args.model)
        setattr(model, HEAD, head)
        model.register_forward_hook(_add_ctc_logits, with_kwargs=True)
    return model


def _load_head(head: nn.Linear, source: str) -> None:
    """Load the CTC head that an earlier run wrote beside the model; say if there is none that fits."""
    file = find_optional(source, HEAD_FILE)
    weights = load_file(file) if file else {}
    if {name: x.shape for name, x in weights.items()} == {name: x.shape for name, x in head.state_dict().items()}:
        head.load_state_dict(weights)
    else:
        note(f"{source} has no {HEAD_FILE} that fits: the CTC head is new")


def check_targets(args: Any, model: Any, data: dict[str, Any]) -> None:
    """Raise if the model has no output for a token of the transcripts: CTC would read what is beyond its logits."""
    largest = max(max(row, default=0) for rows in data.values() for row in rows["labels"])
    outputs = model.config.get_text_config(decoder=True).vocab_size
    if largest >= outputs:
        raise GraphFilterError(
            f"the tokenizer gives token {largest}, and {args.model} has outputs for {outputs}: "
            "choose a --tokenizer that belongs to the model"
        )


@dataclass
class JointOutput(Seq2SeqLMOutput):
    """The outputs of an encoder-decoder with a CTC head, whose logits are (batch, positions, vocabulary)."""

    ctc_logits: Tensor | None = None


def _add_ctc_logits(model: nn.Module, args: Any, inputs: dict[str, Any], outputs: Any) -> JointOutput | None:
    """Put what the CTC head says among the outputs, where DDP sees that its parameters are in use."""
    if "labels" not in inputs or not hasattr(model, HEAD):
        return None
    return JointOutput(**outputs, ctc_logits=getattr(model, HEAD)(outputs.encoder_last_hidden_state))


def ctc_weight(args: Any) -> float:
    """Return the weight of the CTC loss of an encoder-decoder: that of the paper from scratch, else 0."""
    return float(args.ctc_weight if args.ctc_weight is not None else 0.3 if args.from_scratch else 0.0)


def output_lengths(model: Any, lengths: Tensor) -> Tensor:
    """Return how many positions the encoder gives for inputs of these lengths."""
    for name in ("_get_feat_extract_output_lengths", "_get_subsampling_output_length"):
        if method := getattr(model, name, None):
            return method(lengths).long()
    raise GraphFilterError(f"{type(model).__name__} does not say how long its output is: CTC needs that")


def ctc_loss(logits: Tensor, lengths: Tensor, labels: Tensor, special: set[int], blank: int) -> Tensor:
    """Return the mean over the rows of the CTC loss per target; targets that do not fit count as 0."""
    is_target = ~torch.isin(labels, torch.tensor([*special, -100], device=labels.device))
    targets, counts = labels[is_target], is_target.sum(1)
    logits = logits.float().log_softmax(-1).transpose(0, 1)
    with torch.backends.cudnn.flags(enabled=False):
        return nn.functional.ctc_loss(logits, targets, lengths, counts, blank=blank, zero_infinity=True)


def read_ctc(logits: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Return the most likely token of each position, the blank beyond the end; and repetitions as blanks."""
    ids = logits.argmax(-1)
    is_padding = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
    is_repeat = torch.zeros_like(is_padding)
    is_repeat[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(is_padding | is_repeat, blank)


def input_lengths(inputs: dict[str, Tensor]) -> Tensor:
    """Return how many frames or samples each row has."""
    name = next(name for name in INPUTS if name in inputs)
    if (mask := inputs.get("attention_mask")) is not None:
        return mask.sum(1)
    x = inputs[name]
    return torch.full((len(x),), x.shape[-1], device=x.device)
