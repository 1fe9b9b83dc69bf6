"""Filters of linear cost against softmax attention: ``python benchmarks/linear.py`` (on the GPU where there is one).

Sections:

attention: SDPA, AGF (K = 3), Singularformer (r = 64) and Synvolution (the real part of its complex result) alone, with
    given projections of the input; every token sees all tokens, n = 256 ... 65536, one sequence.
batch: the same in typical shapes of fine-tuning, about 4,096 tokens per batch.
short: batches of 64, as in Singularformer's Table 3, around the lengths from which its paper finds it faster (144) and
    smaller (192).
memory, short-memory: the peak memory of the calls of "attention" and "short", each in a separate process.

All forms are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
every section writes benchmarks/results/linear-DEVICE-SECTION.csv with percentiles and hardware.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from measure import FEATURES, PASSES, SDPA_UP_TO, Benchmark, Call, main, make_pass, random_heads

from hf_graphfilter import functional

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHORT = (128, 512, 2048)
THRESHOLDS = (64, 96, 128, 144, 192, 256)
BATCH = 64
FORMS = ("plain", "agf", "singularformer", "synvolution")


def attention(device: str, form: str, n: int, backward: bool, batch: int = 1) -> Call:
    """Return a call of a form on random inputs."""
    query, key, value, sigma = random_heads(4, batch, n, device, backward, torch.float32)
    generator = torch.Generator(device).manual_seed(1)
    scores = torch.randn(batch, n, FEATURES, device=device, generator=generator).requires_grad_(backward)
    shapes = (batch, n), (batch, 3, n - 1), (batch, 3, n - 1)
    spectrum = [torch.randn(s, device=device, generator=generator).requires_grad_(backward) for s in shapes]
    phase = torch.zeros(batch, n, device=device)
    theta = torch.tensor([1.0, 0.1, -0.1, 0.05], device=device, requires_grad=backward)
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: F.scaled_dot_product_attention(query, key, value),
        "agf": lambda: functional.agf(query, sigma, key, value, theta),
        "singularformer": lambda: functional.singularformer(query, key, value, scores)[0],
        "synvolution": lambda: functional.synvolution(value, *spectrum, phase).real,
    }
    return make_pass(forms[form], (query, key, value, sigma, scores, theta, *spectrum), backward)


def forms_at(n: int, device: str) -> list[str]:
    return [form for form in FORMS if form != "plain" or n <= SDPA_UP_TO[device]]


def time_shapes(benchmark: Benchmark, shapes: list[tuple[int, int]], case: str) -> Iterator[list[dict]]:
    for backward, (batch, n) in itertools.product((False, True), shapes):
        forms = forms_at(n, benchmark.device)
        calls = {form: attention(benchmark.device, form, n, backward, batch) for form in forms}
        yield benchmark.time(calls, case, n, False, PASSES[backward])


def measure_memory(benchmark: Benchmark) -> Iterator[list[dict]]:
    lengths = [n for n in benchmark.lengths if n in (512, 4096, 16384, 65536)]
    for backward, n in itertools.product((False, True), lengths):
        yield from benchmark.peaks(forms_at(n, benchmark.device), "attention", n, False, PASSES[backward], backward)


def measure_short_memory(benchmark: Benchmark) -> Iterator[list[dict]]:
    for backward, n in itertools.product((False, True), THRESHOLDS):
        yield from benchmark.peaks(("plain", "singularformer"), "short", n, False, PASSES[backward], backward, BATCH)


SECTIONS = {
    "attention": lambda benchmark: time_shapes(benchmark, [(1, n) for n in benchmark.lengths], "one sequence"),
    "batch": lambda benchmark: time_shapes(benchmark, [(4096 // n, n) for n in SHORT], "4,096 tokens"),
    "short": lambda benchmark: time_shapes(benchmark, [(BATCH, n) for n in THRESHOLDS], "batches of 64"),
    "memory": measure_memory,
    "short-memory": measure_short_memory,
}

if __name__ == "__main__":
    main("linear", __doc__, SECTIONS, LENGTHS, inside=attention)
