"""Time and memory of GFSA: ``python benchmarks/gfsa.py`` (CPU, and the GPU where there is one).

Sections:

start: the import, and patch_model on a model of BERT-base's shape.
steps: whole training steps of models of the shapes of BERT-base, DeiT-S and GPT-2, the baseline against GFSA, without
    attention dropout and with the default of the model's config. On a GPU also two smaller models, with all kernels and
    without any; steps run under autocast there.
compiled: the same without dropout, all compiled by torch.compile.
attention: attention alone, n = 128 ... 4096, causal and not: (a) SDPA, (b) GFSA, (c) a dense reference that forms A^2,
    and on a GPU, in bfloat16, also (d) GFSA with all kernels and (e) without kernels.
memory: the peak memory of the calls of "attention", each in a separate process.

All forms are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported.
Every section writes benchmarks/results/gfsa-DEVICE-SECTION.csv with percentiles and hardware.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from measure import FEATURES, HEADS, PASSES, Benchmark, Call, half, main, make_pass, random_heads
from shapes import bert, deit_s, gpt2, minilm, narrow, patch_filter, training_step
from transformers import BertConfig, BertForSequenceClassification

from hf_graphfilter import (
    AttentionCall,
    AttentionShift,
    AttentionSite,
    DenseShift,
    GFSAConfig,
    patch_model,
    unpatch_model,
)
from hf_graphfilter.ops.combine import Coefficients
from hf_graphfilter.ops.polynomial_form import polynomial_form
from hf_graphfilter.ops.triton.enabled import SWITCH

LENGTHS = (128, 197, 512, 1024, 2048, 4096)
TOKENS_A_BATCH = {"cpu": 4096, "cuda": 65536}
DENSE_UP_TO = {"cpu": 4096, "cuda": 1024}  # what memory the matrices of a batch take


# ----------------------------------------------------------------------------------------------- attention alone


def attention(device: str, form: str, n: int, causal: bool, backward: bool) -> Call:
    """Return a call of a form on random inputs, with about as many tokens at every length, and one sequence of few."""
    batch = max(1, TOKENS_A_BATCH[device] // n) if n > 32 else 1
    query, key, value = random_heads(3, batch, n, device, backward, half(device))
    site = AttentionSite("bench", torch.nn.Identity(), HEADS, causal, "encoder", "", 0)
    graph_filter = GFSAConfig(K=3).build(site).to(device)
    torch.nn.init.constant_(graph_filter.w_K, 0.1)

    def attend(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.scaled_dot_product_attention(query, k, v, is_causal=causal).transpose(1, 2), None

    def polynomial(v: torch.Tensor, coefficients: Coefficients, exact: bool) -> tuple | None:
        os.environ[SWITCH] = SWITCHES[form]
        return polynomial_form(query, key, v, None, coefficients, causal=causal, exact=exact)

    def matrix() -> torch.Tensor:
        scores = query @ key.mT * FEATURES**-0.5
        if causal:
            hidden = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1)

    def forward() -> torch.Tensor:
        if form == "plain":
            return attend(key, value)[0].transpose(1, 2)
        if form in SWITCHES:
            os.environ[SWITCH] = SWITCHES[form]
            return graph_filter(AttentionShift(AttentionCall(attend, query, key, polynomial=polynomial)), value)
        A = matrix()  # Eq. 5 as it is printed, and as the authors' code computes it
        w_0, w_1, w_K = (w.view(-1, 1, 1) for w in (graph_filter.w_0, graph_filter.w_1, graph_filter.w_K))
        H = w_0 * torch.eye(n, device=device) + w_1 * A + w_K * (A + 2 * (A @ A - A))
        return DenseShift(H.to(A.dtype))(value)

    return make_pass(forward, (query, key, value), backward)


FORMS = {"cpu": ("plain", "gfsa", "dense"), "cuda": ("plain", "gfsa", "dense", "kernel", "no kernel")}
SWITCHES = {"gfsa": "", "kernel": "1", "no kernel": "0"}  # by default, kernels wherever they apply, or none


def forms_at(n: int, device: str) -> list[str]:
    return [form for form in FORMS[device] if form != "dense" or n <= DENSE_UP_TO[device]]


def cases(benchmark: Benchmark) -> Iterator[tuple[int, bool, bool]]:
    """Yield n, causal, backward."""
    return itertools.product(benchmark.lengths, (False, True), (False, True))


def time_attention(benchmark: Benchmark) -> Iterator[list[dict]]:
    for n, causal, backward in cases(benchmark):
        calls = {form: attention(benchmark.device, form, n, causal, backward) for form in forms_at(n, benchmark.device)}
        yield benchmark.time(calls, "attention", n, causal, PASSES[backward])


def measure_memory(benchmark: Benchmark) -> Iterator[list[dict]]:
    for n, causal, backward in cases(benchmark):
        forms = forms_at(n, benchmark.device)
        yield from benchmark.peaks(forms, "attention", n, causal, PASSES[backward], causal, backward)


# ------------------------------------------------------------------------------------------ whole training steps


STEPS = {
    "BERT-base": (bert, (False, True)),
    "DeiT-S": (deit_s, (False,)),  # its config has no attention dropout
    "GPT-2": (gpt2, (False, True)),
}
SMALL = {  # which keep a CPU longer than a GPU: timed with as much as fits a GPU
    "MiniLM": (minilm, (False,)),
    "GPT-2 12 x 256": (partial(narrow, width=256, heads=4, tokens=256, batch=16), (False,)),
}


def build_patched(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return patch_filter(build(), "gfsa")


def make_step(
    build: Callable[[], torch.nn.Module], batch: dict, device: str, switch: str = "", compiled: bool = False
) -> Call:
    """Return a training step."""
    with torch.device(device):
        model = build()
    if compiled:
        model.compile()
    step = training_step(model.to(device).train(), batch)

    def run() -> None:
        os.environ[SWITCH] = switch
        step()

    return run


def time_steps(benchmark: Benchmark) -> Iterator[list[dict]]:
    device, size = benchmark.device, {"num_hidden_layers": 1} if benchmark.smoke else {}
    for name, (make, dropouts) in (STEPS if device == "cpu" else STEPS | SMALL).items():
        for dropout in dropouts:
            build, batch, n, causal = make(dropout, device, **size)
            calls = {"plain": make_step(build, batch, device)}
            for form in FORMS[device]:
                if form in SWITCHES:
                    calls[form] = make_step(partial(build_patched, build), batch, device, SWITCHES[form])
            case = f"{name} step, attention dropout {0.1 if dropout else 0.0:g}"
            yield benchmark.time(calls, case, n, causal, seconds=5)


def time_compiled(benchmark: Benchmark) -> Iterator[list[dict]]:
    device, size = benchmark.device, {"num_hidden_layers": 1} if benchmark.smoke else {}
    for name, (make, _) in STEPS.items():
        build, batch, n, causal = make(False, device, **size)
        calls = {
            "plain": make_step(build, batch, device, compiled=True),
            "gfsa": make_step(partial(build_patched, build), batch, device, compiled=True),
            "not compiled": make_step(build, batch, device),
        }
        yield benchmark.time(calls, f"{name} step, compiled", n, causal, seconds=5)


# ------------------------------------------------------------------------------------------------------------ the start


def time_start(benchmark: Benchmark) -> Iterator[list[dict]]:
    """plain: ``import transformers``, gfsa: with ours, in fresh processes; then patching, which has no plain form."""

    def importing(names: str) -> Call:
        return lambda: subprocess.run([sys.executable, "-c", f"import {names}"], check=True)

    calls = {"plain": importing("transformers"), "gfsa": importing("transformers, hf_graphfilter")}
    yield benchmark.time(calls, "import transformers", "", False, "")
    model = BertForSequenceClassification(BertConfig()).to(benchmark.device)
    calls = {"plain": lambda: unpatch_model(patch_model(model, "gfsa", K=3))}
    yield benchmark.time(calls, "patch_model and unpatch_model, BERT-base", "", False, "")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sections = {
        "start": time_start,
        "steps": time_steps,
        "compiled": time_compiled,
        "attention": time_attention,
        "memory": measure_memory,
    }
    main("gfsa", __doc__, sections, LENGTHS, inside=attention)
