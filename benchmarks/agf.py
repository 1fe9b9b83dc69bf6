"""Time and memory of AGF: ``python benchmarks/agf.py`` (CPU, and the GPU where there is one).

Sections:

attention: AGF against SDPA, n = 64 ... 65536, encoder and causal, one sequence; also the fitted exponent of AGF's time
    in n between 4k and 64k, and the length from which AGF is faster.
batch: batches of about 8,192 tokens against the same formula in PyTorch operations, and of about 4,096 against SDPA.
memory: the peak memory of the calls of "attention", each in a separate process.
layers: a whole attention module in training, with and without the orthogonality loss.
decoding: milliseconds per token of causal AGF and of the original attention, by the length of the context.

All forms are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported.
Every section writes benchmarks/results/agf-DEVICE-SECTION.csv with percentiles and hardware.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
import transformers
from decoding import fill_cache, one_token
from measure import PASSES, SDPA_UP_TO, Benchmark, Call, half, main, make_pass, random_heads
from transformers import BertConfig, GPT2Config, GPT2Model
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from hf_graphfilter import functional, patch_model
from hf_graphfilter.ops.polynomials import polynomials, recurrence
from hf_graphfilter.ops.triton.enabled import SWITCH
from hf_graphfilter.training.loss_gradients import GradientAdder  # its cost, without a Trainer around it

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BATCHES = ((32, 256), (16, 512), (4, 2048), (1, 8192))  # against plain operations
SHORT = ((16, 256), (10, 384), (8, 512))  # against SDPA
CONTEXTS = (100, 1000, 10_000, 100_000)


# ----------------------------------------------------------------------------------------------- attention alone


def operations(query: torch.Tensor, sigma: torch.Tensor, key: torch.Tensor, value: torch.Tensor, theta: torch.Tensor):
    """AGF's formula as one writes it down, where every token sees every token."""
    terms = polynomials(sigma.sigmoid(), recurrence("jacobi", len(theta) - 1))
    w = query.softmax(-1) * sum(t * p for t, p in zip(theta, terms, strict=True))
    return w @ (key.softmax(-2).mT @ value)


def attention(device: str, form: str, n: int, causal: bool, backward: bool, batch: int = 1) -> Call:
    """Return a call of a form on random inputs."""
    query, key, value, sigma = random_heads(4, batch, n, device, backward, half(device))
    theta = torch.tensor([1.0, 0.1, -0.1, 0.05], device=device, requires_grad=backward)

    def forward() -> torch.Tensor:
        if form == "operations":
            return operations(query, sigma, key, value, theta)
        if form == "plain":
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        os.environ[SWITCH] = str(int(form == "kernel"))
        return functional.agf(query, sigma, key, value, theta, causal=causal)

    return make_pass(forward, (query, key, value, sigma), backward)


def cases(benchmark: Benchmark) -> Iterator[tuple[int, bool, bool, list[str]]]:
    """Yield n, causal, backward, forms."""
    for causal, backward, n in itertools.product((False, True), (False, True), benchmark.lengths):
        forms = ["plain", "agf"] if n <= SDPA_UP_TO[benchmark.device] else ["agf"]
        yield n, causal, backward, forms + ["kernel"] * (causal and benchmark.device == "cuda")


def time_attention(benchmark: Benchmark) -> Iterator[list[dict]]:
    for n, causal, backward, forms in cases(benchmark):
        calls = {form: attention(benchmark.device, form, n, causal, backward) for form in forms}
        yield benchmark.time(calls, "attention", n, causal, PASSES[backward])


def time_batches(benchmark: Benchmark) -> Iterator[list[dict]]:
    """In the case "over operations" these are the form "plain", so that ratios are to them."""
    shapes = [("operations", False, shape) for shape in BATCHES]
    shapes += [("plain", causal, shape) for causal in (False, True) for shape in SHORT]
    for (baseline, causal, (batch, n)), backward in itertools.product(shapes, (False, True)):
        case = f"batch of {batch}, over {'SDPA' if baseline == 'plain' else baseline}"
        forms = {"plain": baseline, "agf": "agf"}
        calls = {name: attention(benchmark.device, form, n, causal, backward, batch) for name, form in forms.items()}
        yield benchmark.time(calls, case, n, causal, PASSES[backward])


def measure_memory(benchmark: Benchmark) -> Iterator[list[dict]]:
    for n, causal, backward, forms in cases(benchmark):
        yield from benchmark.peaks(forms, "attention", n, causal, PASSES[backward], causal, backward)


# ------------------------------------------------------------------------------------------------ whole modules


def time_layers(benchmark: Benchmark) -> Iterator[list[dict]]:
    """Time an attention module of BERT-base and of GPT-2 in training: plain, AGF, AGF with the orthogonality loss."""
    for (name, causal), n in itertools.product({"BERT-base": False, "GPT-2": True}.items(), (512, 2048)):
        hidden = torch.randn(4096 // n, n, 768, device=benchmark.device, requires_grad=True)
        calls = {form: module_step(form, causal, hidden, benchmark.device) for form in ("plain", "agf", "agf+ortho")}
        yield benchmark.time(calls, f"attention module of {name}", n, causal, PASSES[True], seconds=2)


def module_step(form: str, causal: bool, hidden: torch.Tensor, device: str) -> Call:
    torch.manual_seed(0)
    if causal:
        model = GPT2Model(GPT2Config(n_layer=1, vocab_size=8, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    else:
        config = BertConfig(num_hidden_layers=1, vocab_size=8, attention_probs_dropout_prob=0.0)
        model = transformers.BertModel(config)
    if form != "plain":
        patch_model(model, "agf")
    model.to(device).train()
    module = next(m for m in model.modules() if isinstance(m, (BertSelfAttention, GPT2Attention)))
    if form == "agf+ortho":
        module.graph_filter.recorder = GradientAdder({"orthogonality": 1e-2}, {})

    def step() -> None:
        module(hidden)[0].sum().backward()

    return step


# ----------------------------------------------------------------------------------------------------- decoding


@torch.no_grad()
def time_decoding(benchmark: Benchmark) -> Iterator[list[dict]]:
    """One more token after a context: a GPT-2-shaped model, 4 layers, d 256; the cache is filled without running it."""
    for length, form in itertools.product(CONTEXTS, ("plain", "agf")):
        # one after the other: the plain form's cache would empty the processor's
        torch.manual_seed(0)
        config = GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=CONTEXTS[-1] + 4096, vocab_size=1000)
        model = GPT2Model(config).to(benchmark.device).eval()
        if form == "agf":
            patch_model(model, "agf")
        call = one_token(model, fill_cache(model, length, "dynamic", benchmark.device), benchmark.device)
        yield benchmark.time({form: call}, "one token, GPT-2, 4 layers", length, True, "decoding")


SECTIONS = {
    "attention": time_attention,
    "batch": time_batches,
    "memory": measure_memory,
    "layers": time_layers,
    "decoding": time_decoding,
}

if __name__ == "__main__":
    main("agf", __doc__, SECTIONS, LENGTHS, inside=attention)
