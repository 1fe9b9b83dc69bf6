"""Whisper's encoder in linear time: ``python benchmarks/whisper_linear.py WEIGHTS DIGITS --window 64 --budget 240000``.

WEIGHTS is a folder with an English Whisper and its tokenizer; DIGITS is the free spoken digit data set. The speech is
sequences of 20 to 32 digits by one speaker. 100 of them are used to fit, and 40 of other recordings (nine minutes) are
transcribed before and after. A row with the word error rates (greedy decoding) and the CPU seconds of one encoder pass
is written to benchmarks/results/speech-cpu-linear.csv; it replaces an earlier row with the same options.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from datasets import disable_progress_bars
from measure import stamp
from pages.sources import RESULTS
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

from hf_graphfilter import linearize

sys.path.append(str(Path(__file__).parents[1]))
from recipes import metrics
from recipes.speech_data import DIGITS
from recipes.speech_inputs import SpeechBatches, prepare
from recipes.transcripts import encode, normalize

LONGEST = 45  # tokens; at the end of a recording Whisper may repeat a word for ever, which this cuts short
FILE = RESULTS / "speech-cpu-linear.csv"
OPTIONS = ("window", "budget", "layers", "train")
PARTS = {"train": (100, range(10, 50)), "test": (40, range(10))}
SETTINGS = {"normalize": "words", "speeds": [1.0], "max_seconds": 30.0, "too_long": "skip", "bad_audio": "skip"}


def sequences(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each part, the same ones always."""
    draw, files = random.Random(1), sorted(folder.rglob("*.wav"))
    speakers = sorted({file.stem.split("_")[1] for file in files})
    parts = {}
    for part, (count, numbers) in PARTS.items():
        parts[part] = []
        for number in range(count):
            speaker = draw.choice(speakers)
            clips = [f for f in files if f.stem.split("_")[1] == speaker and int(f.stem.split("_")[2]) in numbers]
            recordings = draw.choices(clips, k=draw.randint(20, 32))
            text = " ".join(DIGITS[int(file.stem[0])] for file in recordings)
            parts[part].append({"audio": [*map(str, recordings)], "name": str(number), "text": text})
    return parts


def in_words(text: str) -> str:
    """Return a transcript with its digits as words, without punctuation."""
    return normalize(re.sub(r"\d", lambda match: f" {DIGITS[int(match[0])]} ", text), "words")


@torch.no_grad()
def transcribe(model: Any, tokenizer: Any, collate: SpeechBatches, rows: Any) -> list[str]:
    """Return what the model writes."""
    texts: list[str] = []
    for begin in range(0, len(rows), 4):
        batch = collate([rows[i] for i in range(begin, min(begin + 4, len(rows)))])
        ids = model.generate(input_features=batch["input_features"], max_length=LONGEST)
        texts += map(in_words, tokenizer.batch_decode(ids, skip_special_tokens=True))
    return texts


@torch.no_grad()
def encoder_seconds(model: Any) -> float:
    """Return the median CPU time of a pass over 30 seconds."""
    features, seconds = torch.randn(1, model.config.num_mel_bins, 3000), []
    for _ in range(6):
        start = time.process_time()
        model.model.encoder(features)
        seconds.append(time.process_time() - start)
    return median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("digits", type=Path)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--budget", type=int, default=240_000)
    parser.add_argument("--layers", default="all", help="which are linearized: all, 0,2 or auto:50%%")
    parser.add_argument("--train", default="filters", choices=("filters", "lora", "all"))
    options = parser.parse_args()
    disable_progress_bars()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    extractor = AutoFeatureExtractor.from_pretrained(options.weights)
    tokenizer = AutoTokenizer.from_pretrained(options.weights)
    model = WhisperForConditionalGeneration.from_pretrained(options.weights, dtype=torch.float32).eval()
    settings = SimpleNamespace(**SETTINGS, data=str(options.digits), task="long digits")
    prepared = {part: prepare(rows, extractor, settings, part)[0] for part, rows in sequences(options.digits).items()}
    data = encode(prepared, tokenizer, False, model.config.decoder_start_token_id)
    collate = SpeechBatches(extractor, time_masks=0, frequency_masks=0)
    test = data["test"]
    before, seconds = transcribe(model, tokenizer, collate, test), encoder_seconds(model)
    batches = [collate([row]) for row in data["train"].shuffle(seed=0)]
    report = linearize(
        model,
        batches,
        window=options.window,
        budget=options.budget,
        train=options.train,
        layers=None if options.layers == "all" else options.layers,
        stack="encoder",
        holdout=4,
        stages={"attention": 0.5, "logits": 0.5},
        progress=False,
    )
    print(report)
    after, linear = transcribe(model, tokenizer, collate, test), encoder_seconds(model)
    word_errors = {
        "original": metrics.errors("wer", test["text"], before),
        "linear": metrics.errors("wer", test["text"], after),
    }
    row = {**stamp("cpu", "torch", "transformers"), "model": options.weights.name}
    row |= {name: getattr(options, name) for name in OPTIONS}
    row |= {
        "fit_seconds": round(report.seconds),
        "minutes": round(sum(test["seconds"]) / 60, 1),
    }
    row |= {f"wer_{name}": round(value, 4) for name, value in word_errors.items()}
    row |= {"encoder_original": round(seconds, 3), "encoder_linear": round(linear, 3)}
    keep_row(row)


def keep_row(row: dict[str, Any]) -> None:
    """Write the row beside those of other options."""
    case = ("model", *OPTIONS)
    rows = list(csv.DictReader(FILE.open())) if FILE.is_file() else []
    rows = [old for old in rows if [old[k] for k in case] != [str(row[k]) for k in case]]
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*row], lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])
    print(row)


if __name__ == "__main__":
    main()
