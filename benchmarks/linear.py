"""Filters of linear cost against softmax attention: ``python benchmarks/linear.py`` (on the GPU where there is one).

attention: SDPA, AGF (K = 3), Singularformer (r = 64) and Synvolution (complex inside, its real part) alone, what they
project from the input given; every token sees all, n = 256 ... 65536, one sequence. batch: the same in the shapes that
fine-tuning has, about 4,096 tokens a batch. memory: the peak of the calls of attention, each in a process of its own.

All forms are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
every section writes benchmarks/results/linear-DEVICE-SECTION.csv with percentiles and hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from agf import FEATURES, HEADS, SDPA_UP_TO, growth
from measure import arguments, measure, peak_mb, report, rounds, rows, write

from hf_graphfilter import functional

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHORT = (128, 512, 2048)
FORMS = ("plain", "agf", "singularformer", "synvolution")


def call(form: str, batch: int, n: int, device: str, backward: bool) -> Callable[[], object]:
    """One call of a form on random inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def random() -> torch.Tensor:
        x = torch.randn(batch, n, HEADS, FEATURES, device=device, generator=generator)
        return x.transpose(1, 2).requires_grad_(backward)

    query, key, value, sigma = (random() for _ in range(4))
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
    forward = forms[form]

    def run() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        for x in (query, key, value, sigma, scores, theta, *spectrum):
            x.grad = None
        return forward().sum().backward()

    return run


def timed(common: dict, device: str, seconds: float, shapes: list[tuple[int, int]], case: str) -> list[dict]:
    table = []
    for backward in (False, True):
        for batch, n in shapes:
            forms = [form for form in FORMS if form != "plain" or n <= SDPA_UP_TO[device]]
            calls = {form: call(form, batch, n, device, backward) for form in forms}
            fields = {"case": case, "n": n, "causal": False, "pass": "fwd+bwd" if backward else "fwd"}
            table += report(rows({**common, **fields}, rounds(calls, device, seconds)))
    return table


def memory(common: dict, device: str, lengths: tuple[int, ...]) -> list[dict]:
    table = []
    for backward in (False, True):
        for n in lengths:
            for form in FORMS:
                if form != "plain" or n <= SDPA_UP_TO[device]:
                    peak = peak_mb(__file__, device, form, n, backward)
                    fields = {"case": "attention", "n": n, "causal": False, "pass": "fwd+bwd" if backward else "fwd"}
                    table += report([{**common, **fields, "form": form, "peak_mb": peak}])
    return table


def main() -> None:
    options, common = arguments(__doc__, ("attention", "batch", "memory"), LENGTHS)
    device, lengths = options.device, tuple(options.lengths)
    sections = {
        "attention": lambda: timed(common, device, options.seconds, [(1, n) for n in lengths], "one sequence"),
        "batch": lambda: timed(common, device, options.seconds, [(4096 // n, n) for n in SHORT], "4,096 tokens"),
        "memory": lambda: memory(common, device, tuple(n for n in lengths if n in (512, 4096, 16384, 65536))),
    }
    for section, run in sections.items():
        if options.only in (None, section):
            table = run()
            write(table, options.output / f"linear-{device}-{section}.csv")
            for form in FORMS[1:] if section == "attention" and max(lengths) > 4096 else ():
                for which in ("fwd", "fwd+bwd"):
                    print(f"{form} {which}: time grows as n^{growth(table, False, which, form):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:  # from peak_mb
        device, form, n, backward = sys.argv[2:]
        measure(
            device, call(form, 1, 32, device, backward == "True"), call(form, 1, int(n), device, backward == "True")
        )
    else:
        main()
