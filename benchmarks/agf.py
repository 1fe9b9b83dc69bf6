"""Time and memory of AGF: ``python benchmarks/agf.py`` (CPU, and the GPU where there is one).

attention: AGF against plain SDPA alone, n = 64 ... 65536, encoder and causal, one sequence; with it the fitted
exponent of AGF's time in n between 4k and 64k, and the length from which it is the faster one. batch: in batches of
about 8,192 tokens against the same formula in plain PyTorch operations, and of about 4,096 against SDPA. memory: the
peak of the calls of attention, each in a process of its own. layers: a whole attention module in training, with and
without the orthogonality loss. decoding: milliseconds a token of a causal AGF and of plain attention, by the length of
the context.

All forms are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
every section writes benchmarks/results/agf-DEVICE-SECTION.csv with percentiles and hardware.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import transformers
from decoding import filled, one_token
from measure import arguments, half, measure, peak_mb, report, rounds, rows, write
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
HEADS, FEATURES = 12, 64
SDPA_UP_TO = {"cpu": 16384, "cuda": 131072}  # beyond, one backward pass takes minutes


# ----------------------------------------------------------------------------------------------- attention alone


def operations(query: torch.Tensor, sigma: torch.Tensor, key: torch.Tensor, value: torch.Tensor, theta: torch.Tensor):
    """AGF's formula as one writes it down, where every token sees every token."""
    terms = polynomials(sigma.sigmoid(), recurrence("jacobi", len(theta) - 1))
    w = query.softmax(-1) * sum(t * p for t, p in zip(theta, terms, strict=True))
    return w @ (key.softmax(-2).mT @ value)


def attention(form: str, n: int, causal: bool, device: str, backward: bool, batch: int = 1) -> Callable[[], object]:
    """One call of a form on random inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def random() -> torch.Tensor:
        stored = torch.randn(batch, n, HEADS, FEATURES, device=device, generator=generator).to(half(device))
        return stored.transpose(1, 2).requires_grad_(backward)

    query, key, value, sigma = (random() for _ in range(4))
    theta = torch.tensor([1.0, 0.1, -0.1, 0.05], device=device, requires_grad=backward)

    def forward() -> torch.Tensor:
        if form == "operations":
            return operations(query, sigma, key, value, theta)
        if form == "plain":
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        os.environ[SWITCH] = str(int(form == "kernel"))
        return functional.agf(query, sigma, key, value, theta, causal=causal)

    def run() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        query.grad = key.grad = value.grad = sigma.grad = None
        return forward().sum().backward()

    return run


def cases(common: dict, lengths: tuple[int, ...], device: str) -> Iterator[tuple[int, bool, bool, list[str], dict]]:
    """(n, causal, backward, forms, the fields that they give a row)."""
    for causal in (False, True):
        for backward in (False, True):
            for n in lengths:
                forms = ["plain", "agf"] if n <= SDPA_UP_TO[device] else ["agf"]
                forms += ["kernel"] * (causal and device == "cuda")
                fields = {"case": "attention", "n": n, "causal": causal, "pass": "fwd+bwd" if backward else "fwd"}
                yield n, causal, backward, forms, {**common, **fields}


def attention_rows(common: dict, device: str, lengths: tuple[int, ...], seconds: float) -> list[dict]:
    made = []
    for n, causal, backward, forms, fields in cases(common, lengths, device):
        calls = {form: attention(form, n, causal, device, backward) for form in forms}
        made += report(rows(fields, rounds(calls, device, seconds)))
    return made


def batch_rows(common: dict, device: str, seconds: float) -> list[dict]:
    """In the case "over operations" these are the form "plain", so that ratios are to them."""
    table = []
    cases = [("operations", False, shape) for shape in BATCHES]
    cases += [("plain", causal, shape) for causal in (False, True) for shape in SHORT]
    for other, causal, (batch, n) in cases:
        case = f"batch of {batch}, over {'SDPA' if other == 'plain' else other}"
        for backward in (False, True):
            forms = {"plain": other, "agf": "agf"}
            calls = {name: attention(form, n, causal, device, backward, batch) for name, form in forms.items()}
            fields = {"case": case, "n": n, "causal": causal, "pass": "fwd+bwd" if backward else "fwd"}
            table += report(rows({**common, **fields}, rounds(calls, device, seconds)))
    return table


def memory_rows(common: dict, device: str, lengths: tuple[int, ...]) -> list[dict]:
    made = []
    for n, causal, backward, forms, fields in cases(common, lengths, device):
        for form in forms:
            peak = peak_mb(__file__, device, form, n, causal, backward)
            made += report([{**fields, "form": form, "peak_mb": peak}])
    return made


def growth(timed: list[dict], causal: bool, which: str, form: str = "agf") -> float:
    """Fitted exponent of a form's time in n, least squares on logarithms between 4k and 64k."""
    points = [
        (math.log(row["n"]), math.log(row["median_ms"]))
        for row in timed
        if row["form"] == form and row["causal"] == causal and row["pass"] == which and row["n"] >= 4096
    ]
    x, y = ([p[i] for p in points] for i in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in points) / sum((a - mean_x) ** 2 for a in x)


# ------------------------------------------------------------------------------------------------ whole modules


def layer_rows(common: dict, device: str, seconds: float) -> list[dict]:
    """An attention module of BERT-base and of GPT-2 in training: plain, AGF, AGF with the orthogonality loss."""
    made = []
    for name, causal in (("BERT-base", False), ("GPT-2", True)):
        for n in (512, 2048):
            hidden = torch.randn(4096 // n, n, 768, device=device, requires_grad=True)
            calls = {form: module_step(form, causal, hidden, device) for form in ("plain", "agf", "agf+ortho")}
            case = f"attention module of {name}"
            times = rounds(calls, device, seconds)
            made += report(rows({**common, "case": case, "n": n, "causal": causal, "pass": "fwd+bwd"}, times))
    return made


def module_step(form: str, causal: bool, hidden: torch.Tensor, device: str) -> Callable[[], object]:
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
def decoding_rows(common: dict, device: str, seconds: float) -> list[dict]:
    """One more token after a context: a GPT-2-shaped model, 4 layers, d 256; the cache is filled without running it."""
    made = []
    for length in CONTEXTS:
        times = {}
        for form in ("plain", "agf"):  # one after the other: the plain form's cache would empty the processor's
            torch.manual_seed(0)
            config = GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=CONTEXTS[-1] + 4096, vocab_size=1000)
            model = GPT2Model(config).to(device).eval()
            if form == "agf":
                patch_model(model, "agf")
            times |= rounds({form: one_token(model, filled(model, length, "dynamic", device), device)}, device, seconds)
        case = {**common, "case": "one token, GPT-2, 4 layers", "n": length, "causal": True, "pass": "decoding"}
        made += report([row for form, values in times.items() for row in rows(case, {form: values})])
    return made


def main() -> None:
    options, common = arguments(__doc__, ("attention", "batch", "memory", "layers", "decoding"), LENGTHS)
    lengths = tuple(options.lengths)
    sections = {
        "attention": lambda: attention_rows(common, options.device, lengths, options.seconds),
        "batch": lambda: batch_rows(common, options.device, options.seconds),
        "memory": lambda: memory_rows(common, options.device, lengths),
        "layers": lambda: layer_rows(common, options.device, options.seconds * 2),
        "decoding": lambda: decoding_rows(common, options.device, options.seconds),
    }
    for section, run in sections.items():
        if options.only in (None, section):
            made = run()
            write(made, options.output / f"agf-{options.device}-{section}.csv")
            if section == "attention" and max(lengths) > 4096:
                for causal in (False, True):
                    for which in ("fwd", "fwd+bwd"):
                        exponent = growth(made, causal, which)
                        print(f"{'causal' if causal else 'encoder'} {which}: time grows as n^{exponent:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:  # from peak_mb
        device, form, n, causal, backward = sys.argv[2:]
        case = causal == "True", device, backward == "True"
        measure(device, attention(form, 32, *case), attention(form, int(n), *case))
    else:
        main()
