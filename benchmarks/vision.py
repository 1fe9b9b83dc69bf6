"""Measure the throughput of timm's image models, unpatched and patched: ``python benchmarks/vision.py``.

It reports images per second in inference and in training (forward, backward, AdamW), GFLOPs per image, and parameters,
as in Tables 9 and 20 of the GFSA paper. Each pair is timed side by side in one process. The results are written to
benchmarks/results/vision-DEVICE-throughput.csv.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Iterator
from functools import partial

import timm
import torch
from measure import Benchmark, half, main, rounds, stamp
from shapes import patch_filter
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_graphfilter import filter_parameters, parameter_groups

MODELS = {
    "DeiT-S, 12 layers": ("deit_small_patch16_224", {}, 3),
    "DeiT-S, 24 layers": ("deit_small_patch16_224", {"depth": 24}, 3),
    "CaiT-S24": ("cait_s24_224", {}, 4),
    "Swin-S": ("swin_small_patch4_window7_224", {}, 3),
}
FIELDS = [
    *("date", "device", "model", "K", "pass", "form", "batch", "median_ms", "images_per_s", "ratio_to_plain"),
    *("gflops", "parameters", "rounds", "torch", "timm"),
]


def gflops(model: nn.Module) -> float:
    """Of one image, counting a multiplication and an addition as one operation, as the papers do."""
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    for coefficient in filter_parameters(frozen):
        coefficient.fill_(0.1)  # one that is fixed at 0 costs nothing
    with FlopCounterMode(display=False) as counter:
        frozen(torch.zeros(1, 3, 224, 224, device=next(model.parameters()).device))
    return counter.get_total_flops() / 2e9


def steps(model: nn.Module, images: torch.Tensor, train: bool):
    """Return a function that runs one step."""
    model.train(train)
    device = images.device.type

    def forward():
        with torch.autocast(device, half(device), enabled=device == "cuda"):
            return model(images)

    if not train:
        return torch.no_grad()(forward)
    patched = any("graph_filter" in name for name, _ in model.named_modules())
    groups = parameter_groups(model, 1e-4) if patched else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        forward().float().square().mean().backward()
        optimizer.step()

    return step


def time_model(benchmark: Benchmark, title: str) -> Iterator[list[dict]]:
    name, settings, K = MODELS[title]
    settings = settings | {"depth": 1} if benchmark.smoke else settings
    models = {form: timm.create_model(name, **settings).to(benchmark.device) for form in ("plain", "gfsa")}
    patch_filter(models["gfsa"], "gfsa", K=K)
    common = stamp(benchmark.device, "torch", "timm")
    flops = {form: gflops(model) for form, model in models.items()}
    for batch, pass_name in itertools.product(benchmark.lengths, ("inference", "training")):
        images = torch.randn(batch, 3, 224, 224, device=benchmark.device)
        calls = {form: steps(model, images, pass_name == "training") for form, model in models.items()}
        times = rounds(calls, benchmark.device, benchmark.seconds)
        for form, values in times.items():
            median = statistics.median(values)
            ratios = [baseline / value for baseline, value in zip(times["plain"], values, strict=True)]
            row = {
                **{"model": title, "K": K if form == "gfsa" else "", "pass": pass_name, "form": form, "batch": batch},
                "median_ms": round(median, 1),
                "images_per_s": round(batch / median * 1e3, 2),
                "ratio_to_plain": round(statistics.median(ratios), 3),
                "gflops": round(flops[form], 3),
                "parameters": sum(p.numel() for p in models[form].parameters()),
                "rounds": len(values),
            }
            print(row, flush=True)
            yield [common | row]


if __name__ == "__main__":
    sections = {title: partial(time_model, title=title) for title in MODELS}
    main("vision", __doc__, sections, (8,), file="vision-{device}-throughput", fields=FIELDS)
