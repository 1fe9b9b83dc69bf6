"""Measure what a patched module costs beyond its arithmetic: microseconds per call, and memory in training.

Time: two layers of a tiny BERT, unpatched and patched in turn; they are so small that little else matters. ``route`` is
a filter that only applies S, so its difference is that of the way through the attention interface; the others add their
own arithmetic. Memory: the memory that four layers of BERT-base's width with AGF still hold after a training step of
8 x 512 tokens without a callback, without the gradients.

``--torch`` times layers of ``nn.TransformerEncoder`` instead: their fast path, the same layers without it, and patched.

    python benchmarks/overhead.py [--rounds 300] [--before FOLDER]    # another checkout, timed in turn
    python benchmarks/overhead.py --torch
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import RESULTS, stamp, write
from shapes import patch_filter
from transformers import BertConfig, BertModel

from hf_graphfilter import FilterConfig, GraphFilter, patch_model, register_filter

LAYERS, CALLS = 2, 20
FIELDS = ["date", "device", "torch", "transformers", "package", "form", "microseconds", "overhead", "rounds", "held_mb"]


class Route(GraphFilter):
    """A filter that returns ``S(value)``, the same as the unpatched model."""

    def forward(self, shift, value):
        return shift(value)


@register_filter("route")
@dataclass(frozen=True)
class RouteConfig(FilterConfig):
    """A filter without coefficients."""

    module = Route


FORMS = {"plain": None, "route": "route", "gfsa": "gfsa", "agf": "agf"}


def time_layers(rounds: int) -> dict[str, float]:
    """Median microseconds of a layer, by form."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=32
    )
    ids = torch.randint(0, 99, (1, 4))
    models = {}
    for form, name in FORMS.items():
        models[form] = BertModel(config).eval()
        if name is not None:
            patch_filter(models[form], name)
    times: dict[str, list[float]] = {form: [] for form in models}
    with torch.inference_mode():
        for number in range(rounds + 5):
            for form, model in models.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    model(ids)
                if number >= 5:
                    times[form].append((time.perf_counter() - start) / CALLS / LAYERS * 1e6)
    return {form: statistics.median(values) for form, values in times.items()}


TORCH_FIELDS = ["date", "device", "torch", "case", "form", "microseconds", "overhead", "ratio", "rounds"]
TORCH_CASES = {
    "tiny": {"width": 32, "tokens": 4, "batch": 1, "calls": CALLS},
    "128 tokens": {"width": 256, "tokens": 128, "batch": 8, "calls": 1},
    "128 tokens, half of them padding": {"width": 256, "tokens": 128, "batch": 8, "calls": 1},
}


def time_torch(case: str, rounds: int) -> list[dict]:
    """Time a layer of PyTorch's encoder in evaluation; return a row for each form."""
    width, tokens, batch, calls = TORCH_CASES[case].values()
    inputs = {"src": torch.randn(batch, tokens, width)}
    if "padding" in case:
        inputs["src_key_padding_mask"] = (torch.arange(tokens) >= tokens // 2).expand(batch, -1)
    models = {}
    for form in ("fast path", "plain", "route", "gfsa"):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        models[form] = torch.nn.TransformerEncoder(layer, LAYERS).eval()
        if FORMS.get(form):
            patch_filter(models[form], form)
    times: dict[str, list[float]] = {form: [] for form in models}
    with torch.inference_mode():
        for number in range(rounds + 5):
            for form, model in models.items():
                torch.backends.mha.set_fastpath_enabled(form != "plain")
                start = time.perf_counter()
                for _ in range(calls):
                    model(**inputs)
                if number >= 5:
                    times[form].append((time.perf_counter() - start) / calls / LAYERS * 1e6)
    torch.backends.mha.set_fastpath_enabled(True)
    rows = []
    for form, values in times.items():
        pairs = [*zip(values, times["plain"], times["fast path"], strict=True)]
        overhead = statistics.median(value - plain for value, plain, _ in pairs)
        ratio = statistics.median(value / fast for value, _, fast in pairs)
        row = {"case": case, "form": form, "microseconds": round(statistics.median(values), 1), "rounds": rounds}
        rows.append(row | {"overhead": round(overhead, 1), "ratio": round(ratio, 2)})
        print(f"{case:32} {form:9} {row['microseconds']:8.1f} us a layer, {ratio:5.2f} of the fast path")
    return rows


def measure_held() -> float:
    """MB of tensors that are there after a training step and were not before it."""

    def storages() -> dict[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    config = BertConfig(vocab_size=99, num_hidden_layers=4, max_position_embeddings=512)
    model = patch_model(BertModel(config), "agf").train()
    ids = torch.randint(0, 99, (8, 512))
    initial = storages()
    model(ids).last_hidden_state.square().mean().backward()
    model.zero_grad()
    return sum(size for pointer, size in storages().items() if pointer not in initial) / 2**20


def commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--before", type=Path, help="another checkout, timed in turn with this one")
    parser.add_argument("--torch", action="store_true", help="time layers of PyTorch's encoder")
    parser.add_argument("--inside", action="store_true", help="print the medians of one process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inside:
        print(json.dumps({**time_layers(options.rounds), "held": measure_held()}))
        return
    if options.torch:
        stamped = stamp("cpu", "torch")
        timed = [stamped | row for case in TORCH_CASES for row in time_torch(case, options.rounds)]
        write(timed, RESULTS / "overhead-torch-cpu.csv", TORCH_FIELDS)
        return
    checkout = Path(__file__).parent.parent
    folders = [options.before, checkout] if options.before else [checkout]
    packages = {commit(folder): folder for folder in folders}
    medians: dict[str, list[dict[str, float]]] = {name: [] for name in packages}
    for _ in range(5):  # processes differ more than rounds
        for name, folder in packages.items():
            os.environ["PYTHONPATH"] = str(folder)
            command = [sys.executable, __file__, "--inside", "--rounds", str(options.rounds // 5)]
            completed = subprocess.run(command, capture_output=True, text=True, check=True)
            medians[name].append(json.loads(completed.stdout.splitlines()[-1]))
    common = stamp("cpu", "torch", "transformers")
    rows = []
    for name, processes in medians.items():
        for form in FORMS:
            median = round(statistics.median(p[form] for p in processes), 1)
            overhead = round(statistics.median(p[form] - p["plain"] for p in processes), 1)
            fields = {"package": name, "form": form, "microseconds": median, "overhead": overhead}
            rows.append(common | fields | {"rounds": options.rounds})
            print(f"{name:7} {form:6} {median:8.1f} us a layer, {overhead:7.1f} over plain")
        megabytes = round(statistics.median(p["held"] for p in processes), 1)
        rows.append(common | {"package": name, "form": "agf, after a training step", "held_mb": megabytes})
        print(f"{name:7} agf, held after a training step: {megabytes:8.1f} MB")
    write(rows, RESULTS / "overhead-cpu.csv", FIELDS)


if __name__ == "__main__":
    main()
