"""The README's headlines, and the demo."""

import json

from hf_graphfilter.demo import result_rows
from hf_graphfilter.tables import markdown_table
from pages.sources import CARD, over_plain, read, where


def headlines() -> str:
    """One row each for what is learned, what GFSA costs and what AGF saves."""
    steps = sorted((row for row in read("gfsa-cpu-steps") if row["form"] == "gfsa"), key=over_plain)
    least, most = (f"**{over_plain(row)}** ({row['case']})" for row in (steps[0], steps[-1]))
    tokens = [row for row in read("decoding-cpu") if row["form"] == "gfsa"]
    context = max(int(row["n"]) for row in tokens)
    caches = [f"**{over_plain(row)}** ({row['case'].split(', ')[1]})" for row in tokens if int(row["n"]) == context]
    compared = [row for row in read("agf-cpu-attention") if row["form"] == "agf" and row["ratio_to_plain"]]
    lengths = []
    for causal in ("False", "True"):
        rows = {
            int(row["n"]): over_plain(row) for row in compared if (row["pass"], row["causal"]) == ("fwd+bwd", causal)
        }
        faster = min(n for n, value in rows.items() if value < 1)
        lengths.append(f"**{rows[max(rows)]:.3f}** at {max(rows):,} tokens, below 1 from {faster:,} on")
    body = [
        ["MiniLM-L6 fine-tuned on film reviews, GFSA - baseline", demo_results()["verdict"], "benchmarks.md#the-demo"],
        [
            "time with GFSA / time of the baseline",
            f"training step: {least} to {most}; one token after {context:,}: {', '.join(caches)}",
            "benchmarks.md#speed-and-memory",
        ],
        [
            "time of AGF / time of SDPA, forward and backward",
            f"encoders: {lengths[0]}; causal: {lengths[1]}",
            "agf.md#measured-speed-and-memory",
        ],
    ]
    body = [[what, result, f"[more](docs/{page})"] for what, result, page in body]
    return f"{markdown_table(['measured', 'result', ''], body)}\n\nTimes: {where(steps)}"


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
