"""Measure the cost of filters in speech models: ``python benchmarks/speech_steps.py``.

steps: forward, backward and AdamW of Speech2Text as recipes/configs/speech/small.yaml trains it, with the joint loss of
decoder and CTC head: 32 recordings, the longest of three or nine seconds, the shortest of four fifths of that.
encoder: a forward pass of the encoder of Whisper tiny and base with random weights, 30 seconds, one recording.

All forms are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
every section writes benchmarks/results/speech-DEVICE-SECTION.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from measure import Benchmark, Call, main
from shapes import patch_filter, training_step
from torch import Tensor, nn
from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

sys.path.append(str(Path(__file__).parents[1]))
from recipes.speech_models import ctc_loss, output_lengths

SMALL = Path(__file__).parents[1] / "recipes" / "configs" / "speech" / "small.yaml"
FILTERS: dict[str, dict[str, Any]] = {"gfsa": {"K": 2, "w_K": 0.1}, "far_field": {}}  # as after training, not at 0
SECONDS = (3, 9)
ROWS, CHARACTERS_PER_SECOND, VOCABULARY = 32, 9, 40
WHISPER = {"Whisper tiny": (384, 4, 6), "Whisper base": (512, 6, 8)}  # width, layers, heads


class JointLoss(nn.Module):
    """A model with a CTC head on its encoder; its loss weighs both as the recipe does."""

    def __init__(self, model: nn.Module, weight: float):
        super().__init__()
        self.model, self.config, self.weight = model, model.config, weight
        self.head = nn.Linear(model.config.d_model, VOCABULARY)

    def forward(self, **batch: Tensor) -> Any:
        outputs = self.model(**batch)
        logits = self.head(outputs.encoder_last_hidden_state)
        lengths = output_lengths(self.model, batch["attention_mask"].sum(1))
        ctc = ctc_loss(logits, lengths, batch["labels"], set(), self.config.pad_token_id)
        outputs.loss = (1 - self.weight) * outputs.loss + self.weight * ctc
        return outputs


def step(device: str, form: str, seconds: int, layers: int | None) -> Call:
    """Return a training step of the small configuration."""
    torch.manual_seed(0)
    settings = yaml.safe_load(SMALL.read_text())
    sizes = settings["from_scratch"] | ({"encoder_layers": layers} if layers else {})
    model = Speech2TextForConditionalGeneration(Speech2TextConfig(vocab_size=VOCABULARY, **sizes))
    if form in FILTERS:
        patch_filter(model, form, **FILTERS[form])
    frames = seconds * 100
    lengths = torch.linspace(0.8 * frames, frames, ROWS).long()
    batch = {
        "input_features": torch.randn(ROWS, frames, 80),
        "attention_mask": (torch.arange(frames) < lengths[:, None]).long(),
        "labels": torch.randint(5, VOCABULARY, (ROWS, seconds * CHARACTERS_PER_SECOND)),
    }
    joint = JointLoss(model, settings["ctc_weight"]).to(device).train()
    return training_step(joint, {name: x.to(device) for name, x in batch.items()})


def encode(device: str, form: str, sizes: tuple[int, int, int]) -> Call:
    """Return a forward pass of an encoder of Whisper."""
    torch.manual_seed(0)
    width, layers, heads = sizes
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, encoder_attention_heads=heads, encoder_ffn_dim=4 * width
    )
    config._attn_implementation = "sdpa"
    model = WhisperEncoder(config).to(device).eval()
    if form in FILTERS:
        patch_filter(model, form, **FILTERS[form])
    features = torch.randn(1, 80, 3000, device=device)
    return lambda: model(features)


def time_steps(benchmark: Benchmark) -> Iterator[list[dict]]:
    for seconds in benchmark.lengths:
        layers = 1 if benchmark.smoke else None
        calls = {form: step(benchmark.device, form, seconds, layers) for form in ("plain", "gfsa")}
        yield benchmark.time(calls, "Speech2Text", seconds, False, seconds=4)


def time_encoder(benchmark: Benchmark) -> Iterator[list[dict]]:
    for name, sizes in WHISPER.items():
        shape = (32, 1, 2) if benchmark.smoke else sizes
        calls = {form: encode(benchmark.device, form, shape) for form in ("plain", *FILTERS)}
        with torch.no_grad():
            yield benchmark.time(calls, name, 1500, False, "forward", seconds=6)


if __name__ == "__main__":
    main("speech", __doc__, {"steps": time_steps, "encoder": time_encoder}, SECONDS)
