"""Fit replacement filters to single layers and compare their errors: ``python benchmarks/single_layers.py``.

Query, key, value and output of some layers of SmolLM2-135M and of MiniLM are recorded on real texts. A filter is then
fitted to each of these layers alone, with the same texts, steps and rates. No layer receives the output of another
filter. The relative squared errors on other texts are compared over seeds, which determine the order of the texts and
the new weights. This takes minutes, while a conversion takes an hour.

--shared has the texts. Every run is written to benchmarks/results/single-layers-DEVICE.csv when it ends.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from conversion import Reviews, Task, Text
from measure import make_parser, stamp
from torch import Tensor, nn

from hf_graphfilter import AttentionSite, FilterConfig, GraphFilter, patch_model, register_filter
from hf_graphfilter.filters import get_filter
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.filters.core.build import build_filter
from hf_graphfilter.shift.attention import AttentionCall, AttentionShift

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "far_field": ("far_field", {}),
    "far_field, window 128": ("far_field", {"window": 128}),
    "agf": ("agf", {}),
    "agf, K=0": ("agf", {"K": 0}),
    "hedgehog, 4 sinks": ("hedgehog", {"sinks": 4}),
    "hedgehog": ("hedgehog", {}),
}
MODELS: dict[str, tuple[type[Task], list[int]]] = {
    "smollm2": (Text, [3, 12, 21, 27]),
    "minilm": (Reviews, [0, 1, 3, 5]),
}
TRAIN, TEST = 64, 8
LR, FILTER_LR = 2e-2, 2e-1
FIELDS = ["date", "device", "model", "variant", "seed", "layer", "error", "parameters", "steps", "torch"]


class Recorder(GraphFilter):
    """Attention as it is, with a record of its calls."""

    reads_hidden = True
    calls: list[tuple[Tensor, ...]]

    def forward(self, shift: Any, value: Tensor) -> Tensor:
        out = shift(value)
        causal, _ = shift.visible()
        self.calls.append((shift.query, shift.key, value, shift.hidden, out))
        self.scaling, self.causal = shift.scaling, causal
        return out


@register_filter("recorder")
@dataclass(frozen=True)
class RecorderConfig(FilterConfig):
    module = Recorder


@torch.no_grad()
def record(task: Task, layers: list[int], count: int) -> list[Recorder]:
    """Return the recorders of the layers, after ``count`` texts without padding."""
    model = patch_model(task.model().eval(), "recorder", layers=layers)
    recorders = [recorder for _, recorder in filters_of(model)]
    for recorder in recorders:
        recorder.calls = []
    batches = (b["input_ids"] for b in task.data() if b.get("attention_mask", torch.ones(1)).all())
    for ids, _ in zip(batches, range(count)):  # noqa: B905  # as many texts as are asked for
        model.base_model(ids[:1])
    return recorders


def fit(variant: str, recorder: Recorder, seed: int, test: int) -> tuple[float, int]:
    """Return the error of a filter on the first ``test`` calls after a pass over the others, and its parameters."""
    name, options = VARIANTS[variant]
    torch.manual_seed(seed)
    query, key, _, hidden, _ = recorder.calls[0]
    place, width = nn.Module(), hidden.shape[-1]
    site = AttentionSite(
        *("layer", place, query.shape[1], recorder.causal, "decoder" if recorder.causal else "encoder", "", 0, width),
        head_dim=query.shape[-1],
        key_heads=key.shape[1],
    )
    graph_filter = build_filter(get_filter(name).for_conversion(**options), site)

    def error(call: tuple[Tensor, ...]) -> Tensor:
        query, key, value, hidden, out = call
        facts = AttentionCall(
            _refuse, query, key, hidden=hidden, scaling=recorder.scaling, visible=lambda: (recorder.causal, None)
        )
        return (graph_filter(AttentionShift(facts), value) - out).square().sum() / out.square().sum()

    train = recorder.calls[test:]
    random.Random(seed).shuffle(train)
    coefficients = graph_filter.coefficient_names()
    groups = [
        {"params": [p for n, p in graph_filter.named_parameters() if (n in coefficients) is is_coefficient], "lr": rate}
        for is_coefficient, rate in ((True, FILTER_LR), (False, LR))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, len(train) // 10)
    rate = lambda i: min((i + 1) / warm, (1 + math.cos(math.pi * i / len(train))) / 2)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for call in train:
        optimizer.zero_grad()
        error(call).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        test_error = fmean(error(call).item() for call in recorder.calls[:test])
    return test_error, sum(p.numel() for p in graph_filter.parameters())


def _refuse(*_: Any) -> Any:
    raise RuntimeError("the text is no longer than the window")


def main() -> None:
    parser = make_parser(__doc__, MODELS)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=TRAIN, help="texts that a filter is fitted to, one per step")
    parser.add_argument("--test", type=int, default=TEST)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"single-layers-{options.device}.csv"
    rows: list[dict[str, str]] = []
    if file.is_file():
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    finished = {(r["model"], r["variant"], r["seed"]) for r in rows if r["steps"] == str(options.train)}
    for model, (task, layers) in MODELS.items():
        if options.only not in (None, model):
            continue
        wanted = [(v, s) for s in range(options.seeds) for v in VARIANTS if (model, v, str(s)) not in finished]
        recorders = record(task(model, options.shared), layers, options.train + options.test) if wanted else []
        for variant, seed in wanted:
            for layer, recorder in zip(layers, recorders, strict=True):
                error, parameters = fit(variant, recorder, seed, options.test)
                row = {"model": model, "variant": variant, "seed": seed, "layer": layer, "error": f"{error:.5f}"}
                row |= {"parameters": parameters, "steps": options.train, **stamp(options.device, "torch")}
                rows.append({key: str(value) for key, value in row.items()})
                print(model, variant, seed, layer, row["error"], flush=True)
            with file.open("w", newline="") as lines:
                writer = csv.DictWriter(lines, FIELDS)
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
