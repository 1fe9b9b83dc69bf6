"""Train or fine-tune a model that transcribes speech, with a graph filter in its self-attention.

    python recipes/speech.py --config speech/small.yaml --task digits --data DATA/fsdd
    python recipes/speech.py --config speech/transformer.yaml --task librispeech-100 --data LibriSpeech
    python recipes/speech.py --config speech/whisper.yaml --task folder --data RECORDINGS --language czech

Tasks: folder (metadata.csv with the columns file, text and split), digits (connected ones from the free spoken digit
data set), mboshi, fillets-cs, librispeech-100, librispeech-960, common-voice, and any audio data set of the Hub with
transcripts, as NAME/SET or NAME/SET:CONFIG. Models: encoder-decoders (speech_to_text from scratch, with a CTC head
beside its decoder; Whisper) and encoders with CTC (parakeet_ctc from scratch, Wav2Vec2 and its relatives). The scores
are word and character error rates. Recordings of any sampling rate are resampled, several channels averaged; features
are made once and cached.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes", "speech")

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict
from safetensors.torch import save_file
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import (
    LogitsProcessorList,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)

from hf_graphfilter import GraphFilterError
from recipes import metrics, runs
from recipes.arguments import SpeechArguments
from recipes.data import cut
from recipes.errors import is_main_process
from recipes.joint_search import JointSearch
from recipes.models import model_config
from recipes.settings import Recipe
from recipes.speech_data import TASKS, read
from recipes.speech_inputs import SpeechBatches, count_frames, keeps_frames, load_extractor, prepare
from recipes.speech_models import (
    HEAD,
    HEAD_FILE,
    build,
    check_model,
    check_targets,
    ctc_loss,
    ctc_weight,
    input_lengths,
    is_ctc,
    output_lengths,
    read_ctc,
)
from recipes.training import fit
from recipes.transcripts import NORMALIZE, decode, drop_long_targets, drop_long_texts, encode, make_tokenizer
from recipes.transcripts import normalize as normal_form

MEASURES = ("wer", "cer")
MASKS = ("time_masks", "time_width", "frequency_masks", "frequency_width")  # of SpecAugment


def run(args, training):
    """Do one training run."""
    config = model_config(args)
    ctc = is_ctc(args, config)
    check_model(args, config, ctc)
    extractor = load_extractor(args, config)
    rows, split = read(args)
    most = {part: args.max_train_samples if part == "train" else args.max_eval_samples for part in rows}
    # Only a smoke test stops there: other limits choose among all recordings that can be used.
    most = most if args.smoke else dict.fromkeys(rows)
    prepared = {part: prepare(items, extractor, args, part, most[part]) for part, items in rows.items()}
    left_out = {part: count for part, (_, count) in prepared.items() if count}
    data = DatasetDict({part: recordings for part, (recordings, _) in prepared.items()})
    # What is held out to tune by was cut by `read`, before copies were made at other speeds.
    data = cut(data, replace(args, held_out=0.0))
    data = DatasetDict({k: v if k == "train" else v.select(np.argsort(v["length"])) for k, v in data.items()})
    tokenizer = make_tokenizer(args, lambda: iter(data["train"]["text"]), ctc)
    if args.language:
        tokenizer = WhisperTokenizer.from_pretrained(args.tokenizer or args.model)
        tokenizer.set_prefix_tokens(language=args.language, task="transcribe")
    new_vocabulary = bool(args.from_scratch or args.train_tokenizer or args.tokenizer == "characters")
    model = build(args, training, config, tokenizer, new_vocabulary)
    if args.language:
        model.generation_config.language, model.generation_config.task = args.language, "transcribe"
        model.generation_config.forced_decoder_ids = None
    special = {t for t in (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None}
    special |= set() if ctc else {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    data = encode(data, tokenizer, ctc, None if ctc else model.config.decoder_start_token_id)
    check_targets(args, model, data)
    if ctc or hasattr(model, HEAD):
        room = output_lengths(model, count_frames(extractor, torch.tensor(data["train"]["length"])))
        data["train"], count = drop_long_targets(data["train"], room, special)
        if not len(data["train"]):
            raise GraphFilterError(
                f"{args.task}: all {count} training transcripts have more tokens than the encoder gives CTC frames: "
                "use a larger vocabulary (--train_tokenizer), or check that the texts belong to the recordings"
            )
        left_out |= {"train_targets": count} if count else {}
    if not ctc:
        limit = getattr(model.config, "max_target_positions", sys.maxsize)
        data["train"], count = drop_long_texts(data, limit)
        left_out |= {"train_texts": count} if count else {}
        longest = max(map(len, data["train"]["labels"])) * 3 // 2 + 8
        training.generation_max_length = training.generation_max_length or min(longest, limit)
    training.remove_unused_columns, training.label_names = False, ["labels"]
    masks = {name: getattr(args, name) for name in MASKS}
    options = {"data_collator": SpeechBatches(extractor, **masks)}
    options["trainer_class"] = partial(SpeechTrainer, speech=args, ctc=ctc, special=special)
    outcome = fit(args, training, model, tokenizer, DatasetDict(data), **options)
    if training.save_strategy != "no" and is_main_process():
        save(model, extractor, Path(training.output_dir))
    hours = {part: round(sum(recordings["seconds"]) / 3600, 3) for part, recordings in data.items()}
    counts = {part: len(recordings) for part, recordings in data.items()}
    extras = {"left_out": left_out, "hours": hours, "task_type": "automatic-speech-recognition"}
    return {**outcome, "split": split, "rows": counts, **extras}


def save(model, extractor, folder):
    """Write what a pipeline needs besides the Trainer's files; the head for CTC, which no class has, goes apart."""
    extractor.save_pretrained(folder)
    if hasattr(model, HEAD):
        save_file(getattr(model, HEAD).state_dict(), folder / HEAD_FILE)
        delattr(model, HEAD)
        model.save_pretrained(folder)


class SpeechTrainer(Seq2SeqTrainer):
    """A Trainer with the losses of speech, which evaluates what the model writes.

    The loss of an encoder is CTC; that of an encoder-decoder is the cross-entropy of the decoder, and CTC beside it
    with its weight where the model has a head for it.
    """

    loss_is_scaled_for_ga = False

    def __init__(self, *args, speech, ctc, special, **options):
        super().__init__(*args, compute_metrics=self.score, **options)
        self.speech, self.ctc, self.special = speech, ctc, special
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss, and the outputs with the logits of CTC if there are any."""
        unwrapped = self.accelerator.unwrap_model(model)
        labels = inputs["labels"]
        hidden = {"labels"} if self.ctc else set()
        outputs = model(**{k: v for k, v in inputs.items() if k not in hidden | self.unread})
        logits, weight = outputs.get("ctc_logits"), ctc_weight(self.speech)
        if self.ctc:
            logits, weight = outputs.logits, 1.0
        loss = torch.zeros((), device=labels.device)
        if logits is not None:
            lengths = output_lengths(unwrapped, input_lengths(inputs))
            blank = unwrapped.config.pad_token_id
            loss = weight * ctc_loss(logits, lengths, labels, self.special, blank)
            if return_outputs:
                outputs["ctc"] = read_ctc(logits.detach(), lengths, blank)
                outputs["search"] = (logits.detach(), lengths, blank)
        if not self.ctc:
            flat, smoothing = outputs.logits.flatten(0, 1), self.args.label_smoothing_factor
            decoder_loss = functional.cross_entropy(flat.float(), labels.flatten(), label_smoothing=smoothing)
            loss = loss + (1 - (weight if logits is not None else 0.0)) * decoder_loss
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **options):
        """Return (loss, tokens that the decoder and CTC write, labels)."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        predictions = () if self.ctc else (self.write(inputs, outputs.get("search")),)
        if outputs.get("ctc") is not None:
            predictions += (outputs["ctc"],)
        return loss.detach(), predictions, inputs["labels"]

    @property
    def unread(self):
        """What the model was pretrained without: transformers passes a mask only if the extractor returns one."""
        extractor = self.data_collator.extractor
        waves = not isinstance(extractor, WhisperFeatureExtractor) and not keeps_frames(extractor)
        return {"attention_mask"} if waves and not extractor.return_attention_mask else set()

    def write(self, inputs, search):
        """Return the tokens that the decoder writes, with CTC where it has a weight in the search."""
        unwrapped, beams, weight = self.accelerator.unwrap_model(self.model), self.args.generation_num_beams, 0.0
        options = {"max_length": self.args.generation_max_length, **({"num_beams": beams} if beams else {})}
        if search is not None and (weight := self.speech.ctc_decode_weight):
            joint = JointSearch(*search, end=unwrapped.config.eos_token_id, weight=weight)
            options["logits_processor"] = LogitsProcessorList([joint])
        return unwrapped.generate(**{k: v for k, v in inputs.items() if k not in {"labels"} | self.unread}, **options)

    def evaluate(self, eval_dataset=None, **options):
        """Return the metrics of a part, whose transcripts are those that were read."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        self.references = [normal_form(text, self.speech.normalize) for text in rows["text"]]
        return super().evaluate(rows, **options)

    def score(self, prediction):
        """Return the error rates of what the decoder writes, and those of CTC."""
        predictions = prediction.predictions
        scores = {}
        names = [""] if self.ctc else ["", "ctc_"]
        for prefix, ids in zip(names, predictions if isinstance(predictions, tuple) else (predictions,), strict=False):
            ids = np.where(ids < 0, self.processing_class.pad_token_id, ids)
            texts = decode(self.processing_class, ids)
            # several processes repeat rows at the end, which Seq2SeqTrainer leaves in
            texts = [normal_form(text, self.speech.normalize) for text in texts[: len(self.references)]]
            values = metrics.score(MEASURES, texts, self.references)
            scores |= {f"{prefix}{name}": value for name, value in values.items()}
        return scores

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)


def check(args, training):
    """Raise for what can be known to be wrong before any data is read."""
    for name, choices in (("normalize", NORMALIZE), ("too_long", ("skip", "cut")), ("bad_audio", ("skip", "error"))):
        if getattr(args, name) not in choices:
            raise GraphFilterError(f"--{name} {getattr(args, name)}: it is one of {', '.join(choices)}")
    for name in ("ctc_weight", "ctc_decode_weight"):
        if not 0 <= (weight := getattr(args, name) or 0) <= 1:
            raise GraphFilterError(f"--{name} {weight:g}: it is from 0 to 1")
    if not args.max_seconds > 0 or not all(speed > 0 for speed in args.speeds):
        raise GraphFilterError("--max_seconds and --speeds are above 0")
    for name in (*MASKS, "join_seconds"):
        if not (size := getattr(args, name)) >= 0:
            raise GraphFilterError(f"--{name} {size:g}: it is 0 or more")


RECIPE = Recipe(
    name="speech",
    metrics={**{name: task.metric for name, task in TASKS.items()}, "*": "test/wer"},
    run=run,
    defaults={
        "num_train_epochs": 30,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 32,
        "learning_rate": 1e-3,
        "train_sampling_strategy": "group_by_length",
    },
    description=__doc__,
    known=lambda task: "/" in task,
    arguments=(SpeechArguments, Seq2SeqTrainingArguments),
    check=check,
)

if __name__ == "__main__":
    runs.main(RECIPE)
