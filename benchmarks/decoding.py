"""Milliseconds a token when decoding with a cache, plain against GFSA: ``python benchmarks/decoding.py``.

GPT-2's shape (12 layers, d 768), one sequence, random weights, after contexts of several lengths, with a dynamic and
with a static cache, on a GPU also as a replayed graph. The caches are filled without running the context. Both forms
are timed in turn within a round; ratios are taken within a round. Writes benchmarks/results/decoding-DEVICE.csv.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import arguments, report, rounds, rows, write
from transformers import DynamicCache, GPT2Config, GPT2Model, StaticCache

from hf_graphfilter import filter_parameters, patch_model
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
FILLED = 64  # tokens that are really run
MOST = 96  # decoded tokens that a static cache has room for


def build(form: str, device: str) -> GPT2Model:
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_positions=CONTEXTS[-1] + 256, vocab_size=1000)).to(device).eval()
    if form == "gfsa":
        patch_model(model, "gfsa", K=3)
        for parameter in filter_parameters(model):
            parameter.data.fill_(0.1)
    return model


def filled(model: GPT2Model, length: int, kind: str, device: str) -> DynamicCache | StaticCache:
    """What a context of this length leaves behind."""
    config = model.config
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=config, max_cache_len=length + MOST)
    model(torch.randint(0, 1000, (1, FILLED), device=device), **{CACHE: cache})
    times = -(-length // FILLED)
    for layer in cache.layers:
        kept = getattr(layer, "kept", {})
        if hasattr(layer, "length"):  # the state of an AGF, which is no more than after the tokens that were run
            layer.length = length
        elif kind == "dynamic":
            layer.keys, layer.values = (repeated(x, times, length) for x in (layer.keys, layer.values))
            kept.update({name: repeated(x, times, length) for name, x in kept.items()})
            layer.ends = dict.fromkeys(kept, length)
        else:
            for x in (layer.keys, layer.values, *kept.values()):
                x[:, :, :length] = repeated(x[:, :, :FILLED], times, length)
            layer.cumulative_length.fill_(length)
    return cache


def repeated(x: torch.Tensor, times: int, length: int) -> torch.Tensor:
    return x.repeat(1, 1, times, 1)[:, :, :length].contiguous()


def one_token(model: GPT2Model, cache: DynamicCache | StaticCache, device: str) -> Callable[[], object]:
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    return lambda: model(token, **{CACHE: cache})


def replayed(step: Callable[[], object]) -> Callable[[], object]:
    """A step as a CUDA graph."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def main() -> None:
    kinds = ("dynamic", "static", "graph")
    options, common = arguments(__doc__, kinds, CONTEXTS)
    models = {form: build(form, options.device) for form in ("plain", "gfsa")}
    made = []
    cases = {kind: f"one token, {kind} cache" for kind in kinds} | {"graph": "one token, static cache, graph"}
    for kind in kinds if options.device == "cuda" else kinds[:2]:
        for length in options.lengths if options.only in (None, kind) else ():
            steps = {
                form: one_token(model, filled(model, length, kind, options.device), options.device)
                for form, model in models.items()
            }
            if kind == "graph":
                steps = {form: replayed(step) for form, step in steps.items()}
            times = rounds(steps, options.device, options.seconds)
            case = {**common, "case": cases[kind], "n": length, "causal": True, "pass": "decoding"}
            made += report(rows(case, times))
        write(made, options.output / f"decoding-{options.device}.csv")  # a graph may not be possible


if __name__ == "__main__":
    main()
