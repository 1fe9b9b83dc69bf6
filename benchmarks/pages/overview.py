"""The README's headlines, and the demo."""

import json
from statistics import median

from hf_graphfilter.demo import result_rows
from hf_graphfilter.tables import markdown_table
from pages.leagues import ALL_LAYERS, read_league
from pages.sources import CARD, RECIPES, over_plain, read, where
from recipes.league.standings import cell, compare_filters, comparisons
from recipes.summary import as_comparison

THREE_LAYERS = "layers 0, 2 and 4"
LEARNED = "all coefficients learned"  # by ALL_LAYERS and THREE_LAYERS; GFSA learns w_K alone by default


def headlines() -> str:
    """Write rows for what GFSA gains and costs, and one for what AGF saves."""
    league, runs = read_league("depth")
    pairs = {(pair.task, pair.variant): pair for pair in comparisons(league, runs, league.stages[-1])}
    gain = pairs["ptb, 12 layers", ALL_LAYERS]
    quiet = [row for row in read("busy-cpu") if row["form"] == "gfsa" and row["pass"].endswith("0 busy")]
    steps = [row for row in quiet if "Graphormer" not in row["case"]]  # whose baseline is slow: eager is faster there
    slowest = max(steps, key=over_plain)
    gpu = sorted((row for row in read("gfsa-cuda-steps") if row["form"] == "gfsa"), key=over_plain)
    assert [row["case"].partition(" step")[0] for row in (gpu[0], gpu[-1])] == ["GPT-2", "GPT-2 12 x 256"]
    compared = [row for row in read("agf-cpu-attention") if row["form"] == "agf" and row["ratio_to_plain"]]
    lengths = []
    for causal, kind in (("False", "encoders"), ("True", "decoders")):
        rows = {
            int(row["n"]): over_plain(row) for row in compared if (row["pass"], row["causal"]) == ("fwd+bwd", causal)
        }
        faster = min(n for n, value in rows.items() if value < 1)
        lengths.append(f"{kind}: faster from {faster:,} tokens, **{rows[max(rows)]:.3f}** at {max(rows):,}")
    table = [
        [
            f"GFSA ({LEARNED}) - baseline, same steps: perplexity of GPT-2, 12 layers of 32 features, on PTB",
            f"{cell(gain)}, 95 % interval, {gain.paired.pairs} seeds",
            "league.md#gfsa-in-deep-language-models",
        ],
        [
            f"the same ({LEARNED}) in three layers, equal time, uncorrected",
            f"PTB {compare_in_time('few')}; WikiText-2 {compare_in_time('replicated')}",
            "league.md#few-layers",
        ],
        [
            f"the same ({LEARNED}), 64 features",
            f"PTB {compare_in_time('wide', '**')}; WikiText-2 {compare_in_time('wide_replicated')}",
            "league.md#in-a-wider-model",
        ],
        [
            "GFSA - baseline, uncorrected: error of Graphormer on ZINC",
            compare_on_zinc(),
            "graphs.md#measured-zinc-and-molecules",
        ],
        [
            "GFSA - baseline: Pearson's r with human ratings, MiniLM fine-tuned on film reviews",
            demo_results()["verdict"].partition(": ")[2],
            "benchmarks.md#the-demo",
        ],
        [
            "GFSA / baseline: training step, CPU, at most 1,024 tokens, not compiled",
            f"**{median(map(over_plain, steps)):.2f}**, median of {len(steps)} shapes; "
            f"**{over_plain(slowest):.2f}** the most of these ({slowest['case'].replace(' x ', 'x')})",
            "benchmarks.md#beside-other-processes",
        ],
        [
            f"the same, on a GPU ({gpu[0]['device'].removeprefix('NVIDIA ')})",
            f"**{over_plain(gpu[0]):.2f}** (GPT-2, 1,024 tokens) to **{over_plain(gpu[-1]):.2f}** (small GPT-2)",
            "benchmarks.md#on-a-gpu",
        ],
        [
            "AGF / SDPA, CPU: attention alone, forward and backward",
            "; ".join(lengths),
            "agf.md#measured-speed-and-memory",
        ],
    ]
    table = [[quantity, result, f"[details](docs/{page})"] for quantity, result, page in table]
    return f"{markdown_table(['measured', 'result', 'more'], table)}\n\nTimes on the CPU: {where([*steps, *compared])}"


def compare_in_time(name: str, mark: str = "") -> str:
    """Return perplexity of GFSA in three layers minus the baseline's in equal time, with its interval and seeds."""
    league, runs = read_league(name)
    _, body = compare_filters(league, runs, league.stages[-1])
    pair = next(row for row in body if row[0] == f"`{THREE_LAYERS}` - `baseline, 1.08 times the steps`")
    difference, _, seeds = pair[1].rpartition(", ")
    return f"{mark}{difference}{mark}, {seeds} seeds"


def compare_on_zinc() -> str:
    """Return GFSA's error on ZINC minus the baseline's, after the same steps and in equal time, with its interval."""
    summary = json.loads((RECIPES / "graphs-zinc.json").read_text())["summary"]
    steps = as_comparison(summary["gfsa"]["difference"])
    (time,) = map(as_comparison, summary["gfsa"]["equal time"].values())
    return (
        f"same steps {steps.format('+.3f')}, {steps.pairs} seeds; equal time {time.format('+.3f')}, {time.pairs} seeds"
    )


def demo_results() -> dict:
    return json.loads((CARD / "results.json").read_text())


def demo_table() -> str:
    results = demo_results()
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    settings = results["settings"]
    return "\n\n".join(
        [
            markdown_table(*result_rows(results)),
            f"{results['verdict']} Trained on {settings['train_rows']:,} snippets, tested on {settings['test_rows']:,} "
            f"others; K = {settings['K']}, filter learning rate {settings['filter_lr']:g}, model {settings['lr']:g}. "
            f"{results['date']}, {results['machine']}; {versions}.",
        ]
    )
