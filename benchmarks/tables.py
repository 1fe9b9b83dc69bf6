"""Write the measured tables into README.md: ``python benchmarks/tables.py``.

Reads ``benchmarks/results/gfsa-*.csv`` (from benchmarks/gfsa.py) and ``model_cards/minilm-movie-snippets/results.json``
(copied from a demo's output with ``--demo runs/demo``), and replaces what stands between the markers.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
from pathlib import Path

from hf_graphfilter.card import markdown_table
from hf_graphfilter.demo import result_rows

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CARD = ROOT / "model_cards" / "minilm-movie-snippets"


def keep_demo(output: Path) -> None:
    """Keep card, plot and results of a demo run that really happened."""
    CARD.mkdir(parents=True, exist_ok=True)
    shutil.copy(output / "checkpoint" / "README.md", CARD / "README.md")
    for name in ("results.json", "coefficients.png"):
        shutil.copy(output / name, CARD / name)


def demo_table() -> str:
    results = json.loads((CARD / "results.json").read_text())
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


def bench_tables() -> str:
    parts = []
    for file in sorted((ROOT / "benchmarks" / "results").glob("gfsa-*.csv"), reverse=True):
        section = file.stem.split("-")[2]
        if section == "memory":
            continue  # a column of the attention table
        rows = list(csv.DictReader(file.open()))
        if section == "attention":
            rows = with_memory(rows, file.with_name(file.name.replace("attention", "memory")))
        first = rows[0]
        where = f"{first['device']}, {first['date']}; torch {first['torch']}, transformers {first['transformers']}."
        caption, table = SECTIONS[section]
        parts += [f"{caption} {where}", table(rows)]
    return "\n\n".join(parts)


def with_memory(rows: list[dict], file: Path) -> list[dict]:
    def key(row: dict) -> tuple:
        return row["n"], row["causal"], row["pass"], row["form"]

    peaks = {key(row): row["peak_mb"] for row in csv.DictReader(file.open())}
    return [{**row, "peak_mb": peaks[key(row)]} for row in rows]


def start_table(rows: list[dict]) -> str:
    body = [[row["case"], {"plain": "without", "gfsa": "with"}[row["form"]], row["median_ms"]] for row in rows]
    body[-1][1] = ""
    return markdown_table(["", "hf_graphfilter", "ms"], body)


def step_table(rows: list[dict]) -> str:
    cases = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["form"]] = row
    body = [
        [
            case,
            forms["plain"]["n"],
            *(f"{float(forms[f]['median_ms']):,.0f}" for f in ("plain", "gfsa")),
            f"**{forms['gfsa']['ratio_to_plain']}**",
        ]
        for case, forms in cases.items()
    ]
    return markdown_table(["step", "n", "plain ms", "GFSA ms", "ratio"], body)


def attention_table(rows: list[dict]) -> str:
    cases = {}
    for row in rows:
        cases.setdefault((int(row["n"]), row["causal"] == "True", row["pass"]), {})[row["form"]] = row
    body = []
    for (n, causal, which), forms in sorted(cases.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])):
        plain, gfsa, dense = (forms[f] for f in ("plain", "gfsa", "dense"))
        faster = float(dense["median_ms"]) / float(gfsa["median_ms"])
        body.append(
            [
                "causal" if causal else "full",
                n,
                which,
                *(f"{float(f['median_ms']):,.1f}" for f in (plain, gfsa, dense)),
                f"**{gfsa['ratio_to_plain']}**",
                f"{faster:.1f}x",
                " / ".join(f["peak_mb"] for f in (plain, gfsa, dense)),
            ]
        )
    header = ["mask", "n", "pass", "SDPA", "GFSA", "dense A²", "GFSA / SDPA", "faster than dense", "peak MB (three)"]
    return markdown_table(header, body)


SECTIONS = {
    "steps": ("Whole training steps (forward, backward, AdamW), patched over plain.", step_table),
    "attention": (
        "Attention alone, 12 heads of 64 features, about 4,096 tokens a batch, K = 3. Times are medians in ms; ratios "
        "are medians of ratios taken side by side; memory is the peak over the inputs, in MB.",
        attention_table,
    ),
    "start": ("The import in a fresh process, and patching.", start_table),
}


def replace(text: str, name: str, content: str) -> str:
    pattern = re.compile(rf"(<!-- {name}: begin.*?-->\n).*?(<!-- {name}: end -->)", re.S)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no markers for {name}")
    return pattern.sub(lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="first keep the results of this demo output")
    options = parser.parse_args()
    if options.demo:
        keep_demo(options.demo)
    text = README.read_text()
    text = replace(text, "demo", demo_table())
    text = replace(text, "bench", bench_tables())
    README.write_text(text)
    print(f"wrote {README}")


if __name__ == "__main__":
    main()
