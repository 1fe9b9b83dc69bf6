"""The paired comparison: the encoder fine-tuned with the same seeds, with and without a graph filter.

Task: predict the rating of a snippet. Metrics on held-out snippets: Pearson's r, and the accuracy of the sign.
"""

from __future__ import annotations

import json
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from ..analysis.comparison import mean_and_sd, paired_comparison
from ..analysis.plots import plot_coefficients
from ..console import Console, table
from ..errors import GraphFilterError, require
from ..packages import version_of
from ..patching.status import filter_parameters, filter_status
from ..training.optimizer import filter_optimizer
from .fine_tuning import LR, StepCallback, build_model, count_batches, fine_tune, quiet_arguments, save_checkpoint
from .progress import show_bar
from .snippets import Snippets, load_snippets, pretrained_path

TEST_ROWS = 2000
VARIANTS = {"plain": "baseline", "gfsa": "gfsa"}  # name in files: name in tables


def run_demo(
    output: str | Path = "runs/demo",
    *,
    seeds: int = 3,
    rows: int = 2000,
    K: int = 3,
    filter_lr: float = 1e-2,
    minutes: float = 6.0,
) -> dict[str, Any]:
    """Run the demo and write checkpoint, card, plot and ``results.json`` to ``output``.

    Args:
        output: directory.
        seeds: number of pairs of runs (baseline and GFSA with the same seed); fewer if ``minutes`` run out.
        rows: number of training snippets, at most all that the package has.
        K: order of the filter.
        filter_lr: learning rate of the filter coefficients.
        minutes: time limit; no further pair of runs starts that would end later.

    Returns:
        The content of ``results.json``.
    """
    if seeds < 1 or rows < 32 or not minutes >= 0:  # NaN is not
        raise GraphFilterError(
            f"the demo needs seeds >= 1, rows >= 32 and minutes >= 0, got seeds={seeds}, rows={rows}, minutes={minutes}"
        )
    for module in ("scipy", "matplotlib"):
        require(module, "demo", "the demo")
    filter_optimizer(quiet_arguments(Path(output), 1), filter_lr)  # raises before the baseline is trained
    output, started, console = Path(output), time.perf_counter(), Console()
    source = pretrained_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    snippets = load_snippets()
    order = torch.randperm(len(snippets), generator=torch.Generator().manual_seed(0)).tolist()
    test = Snippets([snippets[i] for i in order[:TEST_ROWS]], tokenizer)
    train = Snippets([snippets[i] for i in order[TEST_ROWS : TEST_ROWS + rows]], tokenizer)
    note = "" if len(train) == rows else f" (all there are, {rows:,} were asked for)"
    console.print(f"all-MiniLM-L6-v2 on {len(train):,} movie-review snippets{note}, tested on {len(test):,} others")

    runs: list[dict[str, Any]] = []
    for seed in range(1, seeds + 1):
        pair_start = time.perf_counter()
        for variant in VARIANTS:
            model, args = build_model(source, variant, seed, K), quiet_arguments(output / "trainer", seed)
            optimizer = filter_optimizer(args, filter_lr) if variant == "gfsa" else None
            with show_bar(console, f"seed {seed}, {VARIANTS[variant]:8}", count_batches(args, train, test)) as advance:
                scores = fine_tune(model, args, train, test, tokenizer, optimizer, StepCallback(advance))
            runs.append({"variant": variant, "seed": seed, **scores})
        pair_seconds = time.perf_counter() - pair_start
        if seed < seeds and time.perf_counter() - started + pair_seconds > minutes * 60:
            console.print(f"stopping after {seed} of {seeds} seeds: the next pair would go over {minutes:g} minutes")
            break

    results = _summary(runs, model, len(train), K, filter_lr)
    console.print(table(*result_rows(results), title="fine-tuned twice, same seeds (mean ± standard deviation)"))
    console.print(results["verdict"])
    console.print(table(*filter_status(model).table(), title="what the filter learned (last seed)"))
    plot_coefficients(model, output / "coefficients.png")
    description = (
        f"One epoch on {len(train)} snippets, seed {runs[-1]['seed']}; the numbers below are this checkpoint's. "
        f"Against the unpatched model: {results['verdict']}"
    )
    checkpoint = save_checkpoint(model, tokenizer, output / "checkpoint", runs[-1], test, description)
    console.print(f"\nsaved and loaded again from {checkpoint}: outputs are equal")
    console.print(f"plot: {output / 'coefficients.png'}   card: {checkpoint / 'README.md'}")
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"whole demo: {time.perf_counter() - started:.0f} s")
    return results


def _summary(runs: list[dict[str, Any]], model: nn.Module, rows: int, K: int, filter_lr: float) -> dict[str, Any]:
    gain = paired_comparison(*([r["pearson"] for r in runs if r["variant"] == v] for v in VARIANTS))
    interval = {"low": gain.low, "high": gain.high} if gain.pairs > 1 else {"low": None, "high": None}
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {name: version_of(name) for name in ("torch", "transformers", "hf_graphfilter")},
        "settings": {"train_rows": rows, "test_rows": TEST_ROWS, "K": K, "filter_lr": filter_lr, "lr": LR, "epochs": 1},
        "runs": runs,
        "added_parameters": {"plain": 0, "gfsa": sum(p.numel() for p in filter_parameters(model))},
        "difference": {"pearson": gain.mean, **interval, "seeds": gain.pairs},
        "verdict": f"Paired difference in r: {gain}.",
    }


def result_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of the comparison as text, from a result of ``run_demo``."""
    header = ["model", "seeds", "Pearson r", "sign accuracy", "training s", "added parameters"]
    rows = []
    for variant in VARIANTS:
        runs = [r for r in results["runs"] if r["variant"] == variant]
        forms = (("pearson", ".4f"), ("accuracy", ".4f"), ("seconds", ".1f"))
        cells = [mean_and_sd([r[key] for r in runs], form) for key, form in forms]
        rows.append([VARIANTS[variant], str(len(runs)), *cells, str(results["added_parameters"][variant])])
    return header, rows
