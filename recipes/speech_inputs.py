"""The inputs of a speech model: features, which are kept in a cache, and batches of them."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Value
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoFeatureExtractor,
    Speech2TextFeatureExtractor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)
from transformers.audio_utils import mel_filter_bank, window_function

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import require
from recipes.errors import note
from recipes.models import loading_errors
from recipes.recordings import group, join, mark_sources, read_audio, to_integers, to_wave
from recipes.transcripts import normalize

FORMAT = 2  # of what is cached; raise it where `prepare` gives other numbers
COLUMNS = {"audio": Value("binary"), "length": Value("int64"), "seconds": Value("float32"), "problem": Value("string")}


# ---------------------------------------------------------------------------------------------------------- features


def load_extractor(args: Any, config: Any) -> Any:
    """Return the feature extractor of the model, or one that fits a model from scratch."""
    if not args.from_scratch or Path(args.model).is_dir():
        with loading_errors(args.model):
            return AutoFeatureExtractor.from_pretrained(args.model)
    encoder = getattr(config, "encoder_config", config)
    if config.model_type == "whisper":
        seconds = config.max_source_positions * 2 // 100
        return WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=seconds)
    if config.model_type in ("speech_to_text", "parakeet_ctc"):
        mels = getattr(encoder, "num_mel_bins", None) or config.input_feat_per_channel
        return Speech2TextFeatureExtractor(feature_size=mels, num_mel_bins=mels)
    if hasattr(config, "conv_stride"):
        return Wav2Vec2FeatureExtractor(return_attention_mask=getattr(config, "feat_extract_norm", "") != "group")
    raise GraphFilterError(
        f"--model {args.model} from scratch: features are known for speech_to_text, parakeet_ctc, whisper and models "
        "of waveforms such as wav2vec2; name a folder with a preprocessor_config.json instead"
    )


def keeps_frames(extractor: Any) -> bool:
    """Return whether features are made once; of the others the waveform is kept and they are made by the batch."""
    return isinstance(extractor, Speech2TextFeatureExtractor)


def count_frames(extractor: Any, lengths: Tensor) -> Tensor:
    """Return how many frames or samples the model gets of recordings with these ``length`` entries."""
    if keeps_frames(extractor) or extractor.model_input_names[0] == "input_values":
        return lengths
    if isinstance(extractor, WhisperFeatureExtractor):
        return torch.full_like(lengths, extractor.nb_max_frames)
    rate = extractor.sampling_rate
    noise = np.random.default_rng(0).normal(0, 0.1, 3 * rate).astype(np.float32)
    options = {"sampling_rate": rate, "return_attention_mask": True, "return_tensors": "np"}
    short, long = (int(extractor(noise[:n], **options)["attention_mask"].sum()) for n in (rate, 3 * rate))
    return lengths * (long - short) // (2 * rate)


def make_frames(extractor: Speech2TextFeatureExtractor, samples: np.ndarray) -> np.ndarray:
    """Return what the extractor does, all windows at once: log-mel filterbanks of mean 0 and variance 1."""
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64) * 2**15, 400)[::160]
    frames = frames - frames.mean(1, keepdims=True)
    frames[:, 1:] -= 0.97 * frames[:, :-1].copy()
    frames[:, 0] *= 1 - 0.97
    window, filters = _filterbank(extractor.num_mel_bins, extractor.sampling_rate)
    power = np.abs(np.fft.rfft(frames * window, 512)) ** 2
    mel = np.log(np.maximum(1.192092955078125e-07, power @ filters)).astype(np.float32)
    if extractor.do_ceptral_normalize and extractor.normalize_means:
        mel = mel - mel.mean(0)
    if extractor.do_ceptral_normalize and extractor.normalize_vars:
        mel = mel / np.maximum(mel.std(0), 1e-5)  # a frequency that never changes has none
    return mel


@lru_cache(maxsize=1)
def _filterbank(mels: int, rate: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the window and the triangles of Kaldi."""
    options = {"norm": None, "mel_scale": "kaldi", "triangularize_in_mel_space": True, "sampling_rate": rate}
    filters = mel_filter_bank(257, mels, min_frequency=20, max_frequency=rate // 2, **options)
    return window_function(400, "povey", periodic=False), filters


def prepare(
    rows: list[dict[str, Any]], extractor: Any, args: Any, part: str, most: int | None = None
) -> tuple[Dataset, int]:
    """Return (recordings with their texts, how many were left out), until ``most`` can be used; features are cached."""
    require("soundfile", "speech", "reading audio")
    if not rows:
        raise GraphFilterError(f"the part {part!r} of {args.task} is empty")
    if most and part == "train":  # the first ones may be of one speaker
        rows = random.Random(0).sample(rows, len(rows))
    rows = [{**row, "text": normalize(row["text"], args.normalize)} for row in rows]
    speeds = tuple(args.speeds) if part == "train" else (1.0,)
    whisper = isinstance(extractor, WhisperFeatureExtractor)  # which cuts what is longer, and says nothing
    seconds = min(args.max_seconds, extractor.chunk_length) if whisper else args.max_seconds
    settings = (FORMAT, extractor.to_json_string(), seconds, args.too_long, speeds, args.data, args.task)
    marks = [(row["name"], not row["text"], *mark_sources(row["audio"])) for row in rows]
    key = hashlib.sha256(json.dumps([settings, marks, *([most] if most else [])]).encode()).hexdigest()[:32]
    make = partial(_make, rows, extractor, seconds, args.too_long, speeds, most)
    data = Dataset.from_generator(make, features=Features(COLUMNS), fingerprint=key)
    texts = [row["text"] for row in rows for _ in speeds][: len(data)]
    problems = {i: text for i, text in enumerate(data["problem"]) if text}
    if problems:
        first = next(iter(problems))
        reason = f"{rows[first // len(speeds)]['name']}: {problems[first]}"
        if args.bad_audio == "error":
            raise GraphFilterError(f"{args.task}, {part} part: {reason}; --bad_audio skip leaves such recordings out")
        if len(problems) == len(data):
            raise GraphFilterError(
                f"{args.task}, {part} part: all {len(data)} recordings are left out; the first, {reason}"
            )
        note(f"{args.task}, {part} part: {len(problems)} of {len(data)} recordings are left out; the first, {reason}")
    usable = [i for i in range(len(data)) if i not in problems]
    data = data.remove_columns("problem").add_column("text", texts).select(usable)
    if part == "train" and args.join_seconds:
        kinds, names = [i % len(speeds) for i in usable], [rows[i // len(speeds)]["name"] for i in usable]
        data = join_neighbours(data, kinds, names, min(args.join_seconds, seconds), extractor, key)
    return data.add_column("training", [part == "train"] * len(data)), len(problems)


def join_neighbours(
    data: Dataset, kinds: list[int], names: list[str], most: float, extractor: Any, fingerprint: str
) -> Dataset:
    """Return neighbouring recordings joined with their texts, up to ``most`` seconds; they are kept in the cache too.

    ``kinds`` are the speeds of the recordings, which are not mixed.
    """
    groups = group(list(data["seconds"]), kinds, most)
    key = hashlib.sha256(json.dumps([fingerprint, groups, names]).encode()).hexdigest()[:32]
    make = partial(_join, data, groups, names, extractor)
    columns = {name: kind for name, kind in COLUMNS.items() if name != "problem"}
    joined = Dataset.from_generator(make, features=Features(columns), fingerprint=key)
    texts = list(data["text"])
    return joined.add_column("text", [" ".join(texts[i] for i in members) for members in groups])


def _join(data: Dataset, groups: list[list[int]], names: list[str], extractor: Any) -> Iterator[dict[str, Any]]:
    rate = extractor.sampling_rate
    for members in groups:
        rows = [data[i] for i in members]
        if keeps_frames(extractor):
            values = np.concatenate([np.frombuffer(r["audio"], np.float16).reshape(r["length"], -1) for r in rows])
            seconds = sum(row["seconds"] for row in rows)
        else:
            values = join([to_wave(row["audio"]) for row in rows], [Path(names[i]).name for i in members], rate)
            values, seconds = to_integers(values), len(values) / rate
        yield {"audio": values.tobytes(), "length": len(values), "seconds": seconds}


def _make(
    rows: list[dict[str, Any]], extractor: Any, seconds: float, too_long: str, speeds: Sequence[float], most: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the recordings as bytes, or what is wrong with them, until ``most`` of them can be used."""
    rate, usable = extractor.sampling_rate, 0
    for row in rows:
        for speed in speeds:
            if most and usable >= most:
                return
            item: dict[str, Any] = {"audio": b"", "length": 0, "seconds": 0.0, "problem": ""}
            try:
                if not row["text"]:
                    raise ValueError("its transcript is empty")
                samples = read_audio(row["audio"], rate, speed)
                if len(samples) > seconds * rate:
                    if too_long != "cut":
                        raise ValueError(
                            f"it is {len(samples) / rate:.1f} seconds long, and {seconds:g} are the most that "
                            "--max_seconds and the model take"
                        )
                    samples = samples[: round(seconds * rate)]
                if keeps_frames(extractor):
                    values = make_frames(extractor, samples).astype(np.float16)
                else:
                    values = to_integers(samples)
                item |= {"audio": values.tobytes(), "length": len(values), "seconds": len(samples) / rate}
                usable += 1
            except ValueError as error:
                item["problem"] = str(error)
            yield item


# ----------------------------------------------------------------------------------------------------------- batches


@dataclass
class SpeechBatches:
    """Rows to a batch, padded to the longest; features of the training part with SpecAugment.

    Args:
        extractor: makes the features that are not kept.
        time_masks, time_width: how many stretches of frames are hidden, each at most so long and a fifth of the whole.
        frequency_masks, frequency_width: the same of frequencies.
    """

    extractor: Any
    time_masks: int = 2
    time_width: int = 40
    frequency_masks: int = 2
    frequency_width: int = 27

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = [torch.tensor(row["labels"], dtype=torch.long) for row in rows]
        batch = {"labels": pad_sequence(labels, batch_first=True, padding_value=-100)}
        training = rows[0]["training"]
        if keeps_frames(self.extractor):
            size = self.extractor.num_mel_bins
            frames = [np.frombuffer(row["audio"], np.float16).reshape(-1, size).astype(np.float32) for row in rows]
            tensors = [torch.from_numpy(tensor) for tensor in frames]
            if training:
                tensors = [self.hide(tensor, tensor.new_zeros(())) for tensor in tensors]
            mask = pad_sequence([torch.ones(len(tensor), dtype=torch.long) for tensor in tensors], batch_first=True)
            return batch | {"input_features": pad_sequence(tensors, batch_first=True), "attention_mask": mask}
        waves = [to_wave(row["audio"]) for row in rows]
        whisper = isinstance(self.extractor, WhisperFeatureExtractor)  # pads all to one length, without a mask
        options = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        options |= {} if whisper else {"padding": True, "return_attention_mask": True}
        features = dict(self.extractor(waves, **options))
        if training and "input_features" in features:
            mask = features.get("attention_mask")
            counts = [len(wave) // self.extractor.hop_length for wave in waves] if whisper else mask.sum(1).tolist()
            are_last = whisper or features["input_features"].shape[1] != mask.shape[1]
            for spectrogram, count in zip(features["input_features"], counts, strict=True):
                frames = (spectrogram.T if are_last else spectrogram)[:count]
                single = frames.reshape(-1, getattr(self.extractor, "num_mel_bins", frames.shape[1]))  # not stacked
                frames.copy_(self.hide(single, frames.mean()).reshape(frames.shape))
        return batch | features

    def hide(self, frames: Tensor, value: Tensor) -> Tensor:
        """Return frames (time, frequency) with some stretches of both at ``value``."""
        frames = frames.clone()
        time, frequency = frames.shape
        for count, width, size, axis in (
            (self.time_masks, min(self.time_width, time // 5), time, 0),
            (self.frequency_masks, min(self.frequency_width, frequency // 2), frequency, 1),
        ):
            for _ in range(count):
                length = int(torch.randint(width + 1, ()))
                begin = int(torch.randint(size - length + 1, ()))
                frames.narrow(axis, begin, length).fill_(value)
        return frames
