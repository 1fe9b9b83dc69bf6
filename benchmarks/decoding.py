"""Time decoding with a cache per token, the baseline against GFSA: ``python benchmarks/decoding.py``.

The model has GPT-2's shape (12 layers, d 768) and random weights. One sequence is decoded after contexts of several
lengths, with a dynamic and with a static cache, on a GPU also as a replayed graph. The caches are filled without
running the context. Both forms are timed in turn within a round; ratios are taken within a round. The results, in
milliseconds per token, are written to benchmarks/results/decoding-DEVICE.csv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from measure import Benchmark, half, main
from transformers import DynamicCache, GPT2Config, GPT2Model, PreTrainedModel, StaticCache

from hf_graphfilter import filter_parameters, patch_model
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
FILLED = 64  # tokens that are really run
MOST = 96  # decoded tokens that a static cache has room for


def build(form: str, device: str) -> GPT2Model:
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_positions=CONTEXTS[-1] + 256, vocab_size=1000)).to(device, half(device)).eval()
    if form == "gfsa":
        patch_model(model, "gfsa", K=3)
        for parameter in filter_parameters(model):
            parameter.data.fill_(0.1)
    return model


def fill_cache(
    model: PreTrainedModel, length: int, kind: str, device: str, batch: int = 1, filled: int = FILLED
) -> DynamicCache | StaticCache:
    """Return what contexts of this length leave behind, of which ``filled`` tokens are really run."""
    config = model.config
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=config, max_cache_len=length + MOST)
    model(torch.randint(0, min(1000, config.vocab_size), (batch, filled), device=device), **{CACHE: cache})
    times = -(-length // filled)
    for layer in cache.layers:
        kept = getattr(layer, "kept", {})
        if hasattr(layer, "length"):  # the state of an AGF, which is no more than after the tokens that were run
            layer.length = length
            # of heads that keep their attention
            names = [name for name in ("kept_key", "kept_value") if name in kept]
            kept.update({name: repeat_tokens(kept[name], times, length) for name in names})
        elif kind == "dynamic":
            layer.keys, layer.values = (repeat_tokens(x, times, length) for x in (layer.keys, layer.values))
            kept.update({name: repeat_tokens(x, times, length) for name, x in kept.items()})
            layer.ends = dict.fromkeys(kept, length)
            layer.known = layer.keys, layer.values  # else the filter sees that another has replaced them
        else:
            for x in (layer.keys, layer.values, *kept.values()):
                x[:, :, :length] = repeat_tokens(x[:, :, :filled], times, length)
            layer.cumulative_length.fill_(length)
    return cache


def repeat_tokens(x: torch.Tensor, times: int, length: int) -> torch.Tensor:
    return x.repeat(1, 1, times, 1)[:, :, :length].contiguous()


def one_token(
    model: PreTrainedModel, cache: DynamicCache | StaticCache, device: str, batch: int = 1
) -> Callable[[], object]:
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    return lambda: model(token, **{CACHE: cache})


def capture_graph(step: Callable[[], object]) -> Callable[[], object]:
    """Return a step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


CASES = {"dynamic": "one token, dynamic cache", "static": "one token, static cache"}
CASES["graph"] = "one token, static cache, graph"  # last: it may not be possible


@torch.no_grad()
def time_tokens(benchmark: Benchmark, kind: str) -> Iterator[list[dict]]:
    device = benchmark.device
    if kind == "graph" and device != "cuda":
        return
    models = {form: build(form, device) for form in ("plain", "gfsa")}
    for length in benchmark.lengths:
        caches = {form: fill_cache(model, length, kind, device) for form, model in models.items()}
        calls = {form: one_token(model, caches[form], device) for form, model in models.items()}
        if kind == "graph":
            calls = {form: capture_graph(call) for form, call in calls.items()}
        yield benchmark.time(calls, CASES[kind], length, True, "decoding")


if __name__ == "__main__":
    sections = {kind: partial(time_tokens, kind=kind) for kind in CASES}
    main("decoding", __doc__, sections, CONTEXTS, file="decoding-{device}")
