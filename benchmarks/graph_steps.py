"""Training steps of Graphormer-slim on ZINC, and what its graphs cost: ``python benchmarks/graph_steps.py``.

steps: forward, backward and AdamW, baseline (SDPA, and eager attention) and filters, with the dropout of the paper and
       64 and 256 graphs per step, and with 32 graphs and no dropout, as recipes/configs/graphs/small.yaml trains on
       ZINC, with one thread too.
data: the time to find the paths of 1,000 graphs and to make a batch of 256 of them, beside the baseline's step of 256.

ZINC is read from ../shared/data, beside the checkout. All forms are timed in turn within a round, ratios are taken
within a round, and medians over the rounds are reported; every section writes
benchmarks/results/graphs-DEVICE-SECTION.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import Benchmark, Call, main
from shapes import patch_filter, training_step

from hf_graphfilter import GraphormerConfig, GraphormerForGraphPrediction
from hf_graphfilter.graphs import GraphCollator, GraphDataset, prepare_graph

sys.path.append(str(Path(__file__).parents[1]))
from recipes.graph_data import ZINC_SIZES, read_zinc

ZINC = Path(__file__).parents[2] / "shared" / "data" / "zinc12k" / "zinc12k_graphs.npz"
EAGER = "baseline, eager"
FILTERS: dict[str, dict[str, Any]] = {"gfsa": {"K": 3}, "polynomial": {"K": 3}, "contranorm": {}}
BATCHES = (64, 256)
PREPARED = 1000


@cache
def zinc() -> tuple[list[dict[str, Any]], GraphDataset]:
    """Return the first graphs of the training part, as they are and prepared."""
    rows = read_zinc(ZINC)["train"]()
    raw = [row for row, _ in zip(rows, range(PREPARED), strict=False)]
    return raw, GraphDataset(raw, GraphormerConfig(**ZINC_SIZES))


def graphormer(dropout: bool, device: str, *, graphs: int = 32, layers: int = 12) -> tuple:
    """Return Graphormer-slim and the first graphs of ZINC, in the form of shapes.py."""
    rates = {} if dropout else {"attention_dropout": 0.0, "activation_dropout": 0.0}
    config = GraphormerConfig(**ZINC_SIZES, num_hidden_layers=layers, **rates)
    batch = GraphCollator(config)([zinc()[1][place] for place in range(graphs)]).to(device)
    return lambda: GraphormerForGraphPrediction(config), dict(batch), batch["attention_mask"].shape[1], False


def step(device: str, form: str, graphs: int, layers: int, dropout: bool = True) -> Call:
    """Return a training step of Graphormer-slim."""
    torch.manual_seed(0)
    build, batch, *_ = graphormer(dropout, device, graphs=graphs, layers=layers)
    model = build()
    if form == EAGER:
        model.set_attn_implementation("eager")
    if form in FILTERS:
        patch_filter(model, form, **FILTERS[form])
    return training_step(model.to(device).train(), batch)


def time_steps(benchmark: Benchmark) -> Iterator[list[dict]]:
    layers = 1 if benchmark.smoke else 12
    threads = torch.get_num_threads()
    cases = [("32 graphs, no dropout, 1 thread", 32, False, 1), ("32 graphs, no dropout", 32, False, threads)]
    cases += [(f"{graphs} graphs", graphs, True, threads) for graphs in benchmark.lengths]
    for shape, graphs, dropout, count in cases:
        torch.set_num_threads(count)
        calls = {form: step(benchmark.device, form, graphs, layers, dropout) for form in ("plain", EAGER, *FILTERS)}
        yield benchmark.time(calls, shape, graphs, False, seconds=4)


def time_data(benchmark: Benchmark) -> Iterator[list[dict]]:
    raw, ready = zinc()
    config, graphs = GraphormerConfig(**ZINC_SIZES), max(benchmark.lengths)
    collate = GraphCollator(config)
    calls = {
        "plain": step(benchmark.device, "plain", graphs, 1 if benchmark.smoke else 12),
        "collator": lambda: collate([ready[place] for place in range(graphs)]),
        f"paths of {PREPARED:,} graphs": lambda: [prepare_graph(graph, config) for graph in raw],
    }
    yield benchmark.time(calls, "data", graphs, False, seconds=2)


if __name__ == "__main__":
    main("graphs", __doc__, {"steps": time_steps, "data": time_data}, BATCHES)
