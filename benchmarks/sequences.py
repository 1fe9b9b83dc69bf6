"""Training steps of whole classifiers by length: ``python benchmarks/sequences.py`` (on the GPU where there is one).

The classifiers have BERT's shape, 2 layers of 128 features and 2 heads, with mean pooling (``recipes/classifier.py``):
the baseline, GFSA (K = 3, w_K = 0.1), AGF (K = 3), Singularformer and Kernelution; also Converter, one layer of 64
features, with GRU and with sinusoidal positions. Tokens are random. Dropout is that of the models, but none is applied
to attention, since SDPA on a CPU would then keep the whole matrix. Filters add their losses to that of the task, as
with the Trainer.

steps: forward, backward and AdamW, one sequence per step, n = 1024 ... 32768; on a CPU the baseline and GFSA only to
    16384.
batch: 16,384 tokens per step.
memory: the peak of two steps beyond the model and its inputs, with gradients and AdamW's state, each in a separate
    process.

All systems are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
every section writes benchmarks/results/sequences-DEVICE-SECTION.csv with percentiles and hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import SDPA_UP_TO, STEP, Benchmark, Call, main
from shapes import patch_filter, training_step
from transformers import BertConfig

from hf_graphfilter import ConverterConfig, ConverterForSequenceClassification
from hf_graphfilter.training.loss_gradients import GradientAdder
from hf_graphfilter.training.penalties import penalised_filters  # as the Trainer's callback does

sys.path.append(str(Path(__file__).parents[1]))
from recipes.classifier import PooledClassifier

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384  # a step of the section "batch"
BATCHES = (1024, 4096)
VOCABULARY, LABELS = 256, 10
FILTERS = {"gfsa": {"K": 3, "w_K": 0.1}, "agf": {"K": 3}, "singularformer": {}, "kernelution": {}}
POSITIONS = {"converter, gru": "gru", "converter, sinusoidal": "sinusoidal"}
FORMS = ("plain", *FILTERS, *POSITIONS)
QUADRATIC = ("plain", "gfsa")


def classifier(form: str, n: int, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    if form in POSITIONS:
        config = ConverterConfig(vocab_size=VOCABULARY, num_labels=LABELS, position_embedding=POSITIONS[form])
        return ConverterForSequenceClassification(config)
    sizes = {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 512}
    tokens = {"vocab_size": VOCABULARY, "max_position_embeddings": n, "num_labels": LABELS}
    model = PooledClassifier(BertConfig(**sizes, **tokens, attention_probs_dropout_prob=0.0), pooling="mean")
    if form in FILTERS:
        patch_filter(model, form, **FILTERS[form])
    if form in FILTERS and form not in QUADRATIC:
        added = GradientAdder({}, {})
        for graph_filter in penalised_filters(model, {}, {}):
            graph_filter.recorder = added
    return model


def step(device: str, form: str, n: int, batch: int = 1, layers: int = 2) -> Call:
    """Return a training step of a system on random tokens."""
    model = classifier(form, n, layers).to(device).train()
    ids = torch.randint(1, VOCABULARY, (batch, n), device=device)  # 0 is padding
    labels = torch.randint(LABELS, (batch,), device=device)
    return training_step(model, {"input_ids": ids, "labels": labels})


def two_steps(device: str, form: str, n: int) -> Call:
    """Return a call with the state of AdamW, which is there from the first step on."""
    run = step(device, form, n)
    return lambda: (run(), run())


def forms_at(n: int, device: str) -> list[str]:
    """Return the systems that fit; the quadratic ones up to where a step takes seconds, not minutes."""
    return [form for form in FORMS if form not in QUADRATIC or n <= SDPA_UP_TO[device]]


def time_steps(benchmark: Benchmark, shapes: list[tuple[int, int]], case: str) -> Iterator[list[dict]]:
    layers = 1 if benchmark.smoke else 2
    for batch, n in shapes:
        forms = forms_at(n, benchmark.device)
        calls = {form: step(benchmark.device, form, n, batch, layers) for form in forms}
        yield benchmark.time(calls, case, n, False)


def time_batches(benchmark: Benchmark) -> Iterator[list[dict]]:
    shapes = [(TOKENS // n, n) for n in BATCHES if n in benchmark.lengths]
    return time_steps(benchmark, shapes, f"{TOKENS:,} tokens")


def measure_memory(benchmark: Benchmark) -> Iterator[list[dict]]:
    for n in benchmark.lengths:
        yield from benchmark.peaks(forms_at(n, benchmark.device), "one sequence", n, False, STEP)


SECTIONS = {
    "steps": lambda benchmark: time_steps(benchmark, [(1, n) for n in benchmark.lengths], "one sequence"),
    "batch": time_batches,
    "memory": measure_memory,
}

if __name__ == "__main__":
    main("sequences", __doc__, SECTIONS, LENGTHS, inside=two_steps)
