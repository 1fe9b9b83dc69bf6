"""Write the measured tables into the documents: ``python benchmarks/tables.py``.

Reads ``benchmarks/results/*.csv`` (from the other programs here), ``recipes/results/*.json`` (from
recipes/compare.py) and ``model_cards/minilm-movie-snippets/results.json`` (copied from a demo's output with
``--demo runs/demo``), and replaces what stands between the markers.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from agf import growth
from measure import RESULTS
from transfer import STARTS

from hf_graphfilter.analysis.comparison import mean_and_sd, paired_comparison
from hf_graphfilter.checkpoints.card import markdown_table
from hf_graphfilter.demo import result_rows
from hf_graphfilter.filters.overview import HEADER as MENU
from hf_graphfilter.filters.overview import overview as menu

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from recipes.league.plan import League  # noqa: E402
from recipes.league.records import by_run  # noqa: E402
from recipes.league.standings import comparisons, details, levels, overview, tuning, verdict  # noqa: E402
from recipes.records import lower_is_better  # noqa: E402
from recipes.summary import PLAIN, by_seed, interval, summary_rows  # noqa: E402

RECIPES = ROOT / "recipes" / "results"
CARD = ROOT / "model_cards" / "minilm-movie-snippets"


def keep_demo(output: Path) -> None:
    """Keep card, plot and results of a demo run that really happened."""
    CARD.mkdir(parents=True, exist_ok=True)
    shutil.copy(output / "checkpoint" / "README.md", CARD / "README.md")
    for name in ("results.json", "coefficients.png"):
        shutil.copy(output / name, CARD / name)


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
        ["GFSA, MiniLM-L6 fine-tuned on film-review snippets", demo_results()["verdict"], "benchmarks.md#the-demo"],
        [
            "GFSA, time over plain",
            f"training step: {least} to {most}; a token after {context:,}: {', '.join(caches)}",
            "benchmarks.md#speed-and-memory",
        ],
        [
            "AGF, time over SDPA, attention forward and backward",
            f"every token sees all: {lengths[0]}; causal: {lengths[1]}",
            "agf.md#measured-speed-and-memory",
        ],
    ]
    body = [[what, result, f"[more](docs/{page})"] for what, result, page in body]
    return f"{markdown_table(['measured', 'result', ''], body)}\n\nTimes: {where(steps)}"


def over_plain(row: dict) -> float:
    return float(row["ratio_to_plain"])


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


def bench_tables() -> str:
    parts = []
    for file in sorted(RESULTS.glob("gfsa-*.csv"), reverse=True):
        section = file.stem.split("-")[2]
        if section == "memory":
            continue  # a column of the attention table
        rows = list(csv.DictReader(file.open()))
        if section == "attention":
            rows = with_memory(rows, file.with_name(file.name.replace("attention", "memory")))
        caption, table = SECTIONS[section]
        parts += [f"{caption} {where(rows)}", table(rows)]
    return "\n\n".join(parts)


def with_memory(rows: list[dict], file: Path) -> list[dict]:
    def key(row: dict) -> tuple:
        return row["n"], row["causal"], row["pass"], row["form"]

    peaks = {key(row): row["peak_mb"] for row in read(file.stem)}
    return [{**row, "peak_mb": peaks.get(key(row), "-")} for row in rows]


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


def decoding_table() -> str:
    rows, body = read("decoding-cpu"), {}
    for row in rows:
        body.setdefault(int(row["n"]), {})[row["case"].split()[2], row["form"]] = row
    forms = [("dynamic", "plain"), ("dynamic", "gfsa"), ("static", "plain"), ("static", "gfsa")]
    cells = []
    for n, by_form in body.items():
        plain, gfsa, static_plain, static_gfsa = (f"{float(by_form[form]['median_ms']):,.0f}" for form in forms)
        ratio, static_ratio = (f"**{by_form[form]['ratio_to_plain']}**" for form in forms[1::2])
        cells.append([f"{n:,}", plain, gfsa, ratio, static_plain, static_gfsa, static_ratio])
    header = ["context", "dynamic cache: plain ms", "GFSA ms", "ratio", "static cache: plain ms", "GFSA ms", "ratio"]
    return (
        "One token of GPT-2's shape (12 layers, d 768), K = 3, with w_K = 0.1; medians in ms, and of the ratios. "
        f"{where(rows)}\n\n{markdown_table(header, cells)}"
    )


# ------------------------------------------------------------------------------------------------------------ AGF


def overhead_table() -> str:
    rows = read("overhead-cpu")
    packages = list(dict.fromkeys(row["package"] for row in rows))
    cells = {(row["package"], row["form"]): row for row in rows}
    header = ["microseconds a layer beyond the plain model", *packages]
    forms = {"route": "a filter that only applies S", "gfsa": "GFSA", "agf": "AGF"}
    body = [[text, *(cells[package, form]["overhead"] for package in packages)] for form, text in forms.items()]
    held = [cells[package, "agf, after a training step"]["held_mb"] for package in packages]
    body.append(["MB held after a training step of four AGF layers, 8 x 512 tokens", *held])
    return f"By commit of the package. {where(rows)}\n\n{markdown_table(header, body)}"


SIDE_BY_SIDE = {
    "gfsa-*-steps": "Whole training steps",
    "gfsa-*-attention": "Attention alone",
    "decoding-*": "One token",
    "agf-*-attention": "AGF in the place of attention",
}


def machines_tables() -> str:
    """Ratios to the plain form on every machine: results stand in RESULTS, or in a folder below it for another one."""
    parts = []
    for name, caption in SIDE_BY_SIDE.items():
        files = [*sorted(RESULTS.glob(f"{name}.csv")), *sorted(RESULTS.glob(f"*/{name}.csv"))]
        by_machine = {}
        for file in files:
            rows = list(csv.DictReader(file.read_text().splitlines()))
            ratios = {
                tuple(row[key] for key in ("case", "n", "causal", "pass", "form")): row["ratio_to_plain"]
                for row in rows
                if row["form"] in ("gfsa", "agf", "kernel") and row["ratio_to_plain"]
            }
            by_machine[where(rows)] = ratios
        if len(by_machine) < 2:
            continue
        body = [
            [case, n, "causal" if causal == "True" else "full", which, form]
            + [machine.get((case, n, causal, which, form), "") for machine in by_machine.values()]
            for case, n, causal, which, form in dict.fromkeys(itertools.chain(*by_machine.values()))
        ]
        header = ["case", "n", "mask", "pass", "form", *(f"machine {i}" for i in range(1, len(by_machine) + 1))]
        machines = " ".join(f"Machine {i}: {text}" for i, text in enumerate(by_machine, 1))
        parts += [f"{caption}, time over plain. {machines}", markdown_table(header, body)]
    return "\n\n".join(parts) or "Measured on one machine so far."


def read(name: str) -> list[dict]:
    """Rows of a results file; none where it has not been measured on this kind of device."""
    file = RESULTS / f"{name}.csv"
    return list(csv.DictReader(file.open())) if file.is_file() else []


def where(rows: list[dict]) -> str:
    versions = f"; torch {rows[0]['torch']}, transformers {rows[0]['transformers']}" if "torch" in rows[0] else ""
    return f"{rows[0]['device']}, {days(row['date'] for row in rows)}{versions}."


def days(dates: Iterable[str]) -> str:
    """The first and the last."""
    ordered = sorted(dates)
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))


def agf_speed(device: str = "cpu") -> str:
    timed, peaks = read(f"agf-{device}-attention"), read(f"agf-{device}-memory")
    for row in timed:
        row |= {"n": int(row["n"]), "causal": row["causal"] == "True", "median_ms": float(row["median_ms"])}
    memory = {(int(r["n"]), r["causal"] == "True", r["pass"], r["form"]): r["peak_mb"] for r in peaks}
    parts, body = [], []
    for causal in (False, True):
        for which in ("fwd", "fwd+bwd"):
            cases: dict[int, dict[str, dict]] = {}
            for row in timed:
                if (row["causal"], row["pass"]) == (causal, which):
                    cases.setdefault(row["n"], {})[row["form"]] = row
            for n, forms in cases.items():
                plain, agf = forms.get("plain"), forms["agf"]
                body.append(
                    [
                        "causal" if causal else "full",
                        which,
                        n,
                        f"{plain['median_ms']:,.1f}" if plain else "",
                        f"{agf['median_ms']:,.1f}",
                        f"**{float(agf['ratio_to_plain']):.3f}**" if plain else "",
                        " / ".join(
                            memory.get((n, causal, which, form), "-")
                            for form in (("plain", "agf") if plain else ("agf",))
                        ),
                    ]
                )
            faster = [n for n, f in cases.items() if "plain" in f and float(f["agf"]["ratio_to_plain"]) < 1]
            parts.append(
                f"- {'causal' if causal else 'every token sees all'}, {which}: time grows as "
                f"n^{growth(timed, causal, which):.2f} between 4k and 64k; the faster one from n = {min(faster)} on "
                f"(of the lengths measured)."
            )
    header = ["mask", "pass", "n", "SDPA ms", "AGF ms", "AGF / SDPA", "peak MB (SDPA / AGF)"]
    caption = (
        "One sequence, 12 heads of 64 features, K = 3, random inputs. Times are medians in ms; ratios are medians of "
        f"ratios taken side by side; memory is the peak over the inputs. {where(timed)}"
    )
    layers = read(f"agf-{device}-layers")
    by_case: dict[tuple[str, str], dict[str, dict]] = {}
    for row in layers:
        by_case.setdefault((row["case"], row["n"]), {})[row["form"]] = row
    layer_body = []
    for (case, n), forms in by_case.items():
        agf, ortho = (float(forms[f]["median_ms"]) for f in ("agf", "agf+ortho"))
        ratio = forms["agf"]["ratio_to_plain"]
        layer_body.append([case, n, f"{agf:,.0f}", ratio, f"{ortho:,.0f}", f"**{ortho / agf - 1:+.1%}**"])
    layer_table = markdown_table(
        ["module, forward and backward", "n", "AGF ms", "AGF / plain", "with orthogonality loss", "it adds"], layer_body
    )
    decoding: dict[str, dict[str, dict]] = {}
    for row in read(f"agf-{device}-decoding"):
        decoding.setdefault(row["n"], {})[row["form"]] = row
    decoding_table = markdown_table(
        ["context", "plain ms a token", "AGF ms a token"],
        [[f"{int(n):,}", f["plain"]["median_ms"], f["agf"]["median_ms"]] for n, f in decoding.items()],
    )
    batches = read(f"agf-{device}-batch")
    return "\n\n".join(
        [
            caption,
            "\n".join(parts),
            markdown_table(header, body),
            "In batches, 12 heads of 64 features, K = 3: over the same formula in plain PyTorch operations with "
            f"autograd, and over SDPA. {where(batches)}",
            batch_table(batches),
            f"Whole attention modules in training, 4,096 tokens a batch. {where(layers)}",
            layer_table,
            f"One more token after a context (GPT-2 shape, 4 layers, d 256). {where(read(f'agf-{device}-decoding'))}",
            decoding_table,
        ]
    )


def batch_table(rows: list[dict]) -> str:
    cases: dict[tuple[str, str, str], dict[tuple[str, str], dict]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["causal"], row["n"]), {})[row["pass"], row["form"]] = row
    body = []
    for (case, causal, n), by_form in cases.items():
        batch, over = case.removeprefix("batch of ").split(", over ")
        cells = []
        for which in ("fwd", "fwd+bwd"):
            plain, agf = (by_form[which, form] for form in ("plain", "agf"))
            times = (f"{float(x['median_ms']):,.1f}" for x in (plain, agf))
            cells += [*times, f"**{agf['ratio_to_plain']}**"]
        body.append([over, "causal" if causal == "True" else "full", f"{batch} x {n}", *cells])
    header = ["over", "mask", "batch x n", "fwd ms", "AGF ms", "ratio", "fwd+bwd ms", "AGF ms", "ratio"]
    return markdown_table(header, body)


def encoder_transfer(rows: list[dict], filter: str) -> list[str]:
    body, before = [], {}
    for row in rows:
        if row["stage"] == "before transfer":
            before[row["variant"]] = row["value"]
        elif row["stage"] in ("after transfer", "end to end"):
            name = row["variant"] + ", then end to end" * (row["stage"] == "end to end")
            body.append([name, before[row["variant"]], f"**{row['value']}**", row["steps"], row["seconds"]])
    return [
        "**MiniLM-L6, transfer on film reviews** (128 tokens a window, 8 a batch): mean over the layers of the "
        "relative L2 error of the attention output, on held-out texts of the same kind; seconds with other work on "
        f"the machine. {where(rows)}",
        markdown_table([filter, "before", "after", "steps", "seconds"], body),
    ]


def singular_transfer() -> str:
    return "\n\n".join(encoder_transfer(read("transfer-cpu-singular"), "filter"))


LINEAR = {"plain": "SDPA", "agf": "AGF", "singularformer": "Singularformer", "synvolution": "Synvolution"}
SYSTEMS = {
    "plain": "plain (SDPA)",
    "gfsa": "GFSA",
    "agf": "AGF",
    "singularformer": "Singularformer",
    "kernelution": "Kernelution",
    "converter, gru": "Converter, GRU",
    "converter, sinusoidal": "Converter, sinusoids",
}


def linear_tables() -> str:
    parts = []
    peaks = {(row["n"], row["pass"], row["form"]): row["peak_mb"] for row in read("linear-cpu-memory")}
    captions = {
        "attention": "One sequence, 12 heads of 64 features, r = 64, K = 3, random inputs, what the filters project "
        "from the input given. Medians in ms; ratios are medians of ratios taken side by side; memory is the peak over "
        "the inputs.",
        "batch": "The same with about 4,096 tokens a batch.",
    }
    for section, caption in captions.items():
        rows = read(f"linear-cpu-{section}")
        cases: dict[tuple[str, str], dict[str, dict]] = {}
        for row in rows:
            cases.setdefault((row["pass"], row["n"]), {})[row["form"]] = row
        body, names = [], [form for form in LINEAR if any(row["form"] == form for row in rows)]
        for (which, n), forms in cases.items():
            ms = {form: float(row["median_ms"]) for form, row in forms.items()}
            times = [f"{ms[form]:,.1f}" if form in ms else "" for form in names]
            memory = " / ".join(peaks.get((n, which, form), "-") for form in names)
            over = [f"**{forms[form]['ratio_to_plain']}**" if "plain" in ms else "" for form in names[1:]]
            body.append([which, f"{int(n):,}", *times, *over, *([memory] if section == "attention" else [])])
        header = ["pass", "n", *(LINEAR[form] for form in names), *(f"{LINEAR[form]} / SDPA" for form in names[1:])]
        parts += [f"{caption} {where(rows)}", markdown_table(header + ["peak MB"] * (section == "attention"), body)]
        if section == "attention":
            timed = [{**row, "n": int(row["n"]), "causal": False, "median_ms": float(row["median_ms"])} for row in rows]
            exponents = (
                f"{LINEAR[form]}: n^{growth(timed, False, 'fwd', form):.2f} forward, "
                f"n^{growth(timed, False, 'fwd+bwd', form):.2f} forward and backward"
                for form in names[1:]
            )
            parts.append(f"Time between 4k and 64k tokens grows as: {'; '.join(exponents)}.")
    return "\n\n".join(parts)


def growth_tables() -> str:
    """Whole training steps by length: time, memory, time over plain; and the same tokens in batches."""
    steps = with_memory(read("sequences-cpu-steps"), RESULTS / "sequences-cpu-memory.csv")
    batches = read("sequences-cpu-batch")
    timed = [{**row, "n": int(row["n"]), "causal": False, "median_ms": float(row["median_ms"])} for row in steps]
    exponents = {form: f"n^{growth(timed, False, steps[0]['pass'], form):.2f}" for form in SYSTEMS}
    return "\n\n".join(
        [
            f"One sequence a step: seconds, peak MB, **time over plain's**. {where(steps)}",
            by_length(steps, {"time from 4k on": exponents}),
            f"16,384 tokens a step: seconds, **time over plain's**. {where(batches)}",
            by_length(batches, {}),
        ]
    )


def by_length(rows: list[dict], more: dict[str, dict[str, str]]) -> str:
    """A line a system and a column a length, and ``more`` columns by system."""
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        cell = [f"{float(row['median_ms']) / 1e3:#.3g} s"]
        cell += [f"{float(row['peak_mb']):,.0f} MB"] if row["peak_mb"] else []
        cell += [f"**{over_plain(row):.3f}**"] if row["ratio_to_plain"] and row["form"] != "plain" else []
        cells[row["form"], row["n"]] = ", ".join(cell)
    lengths = list(dict.fromkeys(row["n"] for row in rows))
    body = [
        [name, *(cells.get((form, n), "") for n in lengths), *(column[form] for column in more.values())]
        for form, name in SYSTEMS.items()
    ]
    return markdown_table(["", *(f"{int(n):,}" for n in lengths), *more], body)


def scan_table() -> str:
    rows = read("synvolution-cpu")
    cases: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["pass"], row["n"]), {})[row["form"]] = row
    body = []
    for (case, which, n), forms in cases.items():
        times = [forms[form]["median_ms"] for form in ("plain", "blocks")]
        body.append([case, which, f"{int(n):,}", *times, f"**{forms['blocks']['ratio_to_plain']}**"])
    header = ["", "pass", "n", "parallel scan of Algorithm 1 ms", "blocks ms", "ratio"]
    return f"One sequence; medians, and of ratios taken side by side. {where(rows)}\n\n{markdown_table(header, body)}"


def agf_transfer(device: str = "cpu") -> str:
    parts = []
    if rows := [*read(f"transfer-{device}-minilm"), *read(f"transfer-{device}-mixed")]:
        parts += encoder_transfer(rows, "AGF")
    if rows := read(f"transfer-{device}-finetune"):
        parts += [
            "**MiniLM-L6 fine-tuned**, one epoch (2,000 snippets; 2,500 sentences of SST-2, its dev set), all with "
            "window 4 and corrections; *mixed* is transferred on reviews and snippets, then end to end; accuracy in %, "
            "mean ± standard deviation over the seeds, and the paired difference to the original with its 95 % "
            f"interval. {where(rows)}",
            markdown_table(*finetuned(rows)),
        ]
    for section, caption in (
        ("gpt2", "**A GPT-2 shape trained from scratch on WikiText-2**"),
        ("smollm2", "**SmolLM2-135M, its real weights, on WikiText-2**"),
        ("deit", "**DeiT-Tiny, its real weights, on 20 classes of Tiny ImageNet** (of these 20, 500 images)"),
    ):
        if rows := read(f"transfer-{device}-{section}"):
            parts += [f"{caption}. {where(rows)}", markdown_table(*staged(rows))]
    return "\n\n".join(parts)


def finetuned(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    header, body = ["task", "start", "seeds", "accuracy", "against the original", "95 % interval"], []
    for task in dict.fromkeys(row["task"] for row in rows):
        by: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["task"] == task:
                by.setdefault(row["variant"], {})[row["seed"]] = 100 * float(row["value"])
        for variant in (v for v in STARTS if v in by):
            accuracy = by[variant]
            cells = [task, variant, str(len(accuracy)), mean_and_sd(list(accuracy.values()), ".2f"), "", ""]
            shared = [seed for seed in accuracy if seed in by["original"]]
            if variant != "original" and len(shared) > 1:
                paired = paired_comparison([by["original"][s] for s in shared], [accuracy[s] for s in shared])
                cells[4:] = [f"{paired.mean:+.2f}", f"[{paired.low:+.2f}, {paired.high:+.2f}]"]
            body.append(cells)
    return header, body


def staged(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """One line a model and start, one column a stage."""
    stages = [s for s in dict.fromkeys(row["stage"] for row in rows) if ":" not in s and s != "before transfer"]
    columns = [(s, m) for s in stages for m in dict.fromkeys(r["metric"] for r in rows if r["stage"] == s)]
    lines: dict[tuple[str, str], dict[tuple[str, str], dict]] = {}
    for row in rows:
        lines.setdefault((row["task"], row["variant"]), {})[row["stage"], row["metric"]] = row
    body = []
    for (task, variant), stage_rows in lines.items():
        cells = []
        for column in columns:
            row = stage_rows.get(column)
            effort = f" ({row['steps']} steps, {row['seconds']} s)" if row and row["steps"] else ""
            cells.append(f"{float(row['value']):.4g}{effort}" if row else "")
        body.append([task, variant, *cells])
    return ["model", "start", *(f"{metric} {stage}" for stage, metric in columns)], body


def vision_table() -> str:
    rows = list(csv.DictReader((RESULTS / "vision-cpu-throughput.csv").open()))
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if a["form"] == "plain" and b["form"] == "gfsa"]
    header = ["model", "K", "pass", "batch", "plain images/s", "GFSA images/s", "ratio", "GFLOPs", "parameters"]
    body = [
        [
            *(b["model"], b["K"], b["pass"], b["batch"], a["images_per_s"], b["images_per_s"]),
            *(f"**{b['ratio_to_plain']}**", f"{a['gflops']} → {b['gflops']}", f"{int(a['parameters']):,}"),
        ]
        for a, b in pairs
    ]
    first = rows[0]
    where = f"{first['device']}, {first['date']}; torch {first['torch']}, timm {first['timm']}."
    return f"{where}\n\n{markdown_table(header, body)}"


def menu_steps() -> str:
    """Time over plain's, a column a shape."""
    steps = read("menu-cpu-steps")
    found = {(row["form"], row["case"]): f"**{over_plain(row):.2f}**" for row in steps}
    shapes = list(dict.fromkeys(row["case"] for row in steps))
    names = dict.fromkeys(row["form"] for row in steps)
    names = sorted(names, key=lambda name: float(found.get((name, shapes[0]), "**9**")[2:-2]))
    body = [[f"`{name}`", *(found.get((name, shape), "") for shape in shapes)] for name in names]
    return f"{where(steps)}\n\n{markdown_table(['filter', *shapes], body)}"


def league_tables(name: str) -> str:
    """The verdict, the tables of each stage, and how far plain was trained."""
    content = json.loads((RECIPES / "league" / f"{name}.json").read_text())
    league, found = League(content["league"], name, Path()), by_run(content)
    made = [f"**{verdict(league, found)}**"]
    for number, stage in enumerate(league.stages, 1):
        if comparisons(league, found, stage):
            title = f"Stage {number}, seeds {min(stage.seeds)} to {max(stage.seeds)}" if len(league.stages) > 1 else ""
            made += [f"*{title}*" if title else "", markdown_table(*overview(league, found, stage))]
            made += [
                "<details><summary>in detail</summary>",
                markdown_table(*details(league, found, stage)),
                "</details>",
            ]
    machines = sorted(
        {f"{run['machine']}, torch {run['versions']['torch']}" for run in found.values() if "machine" in run}
    )
    dates = [run["date"] for run in found.values() if "date" in run]
    titles = {tuning: "Tuning, on validation, one seed", levels: "How far plain was trained"}
    for part, title in titles.items():
        header, rows = part(league, found)
        made += [f"*{title}*", markdown_table(header, rows)] if rows else []
    made += [f"{'; '.join(machines)}. {days(dates)}."]
    return "\n\n".join(filter(None, made))


def conversion_tables(task: str) -> str:
    """The cases of a task beside each other, and their errors by context."""
    cases = [json.loads(file.read_text()) for file in sorted((RESULTS / "conversion").glob("*.json"))]
    cases = [case for case in cases if case["task"] == task]
    if not cases:
        return "Not run yet."
    body = []
    for case in cases:
        report = case["report"]
        parts = report["errors_without"]
        measures = [
            f"{m['name']} {m['original']:.4g} → **{m['converted']:.4g}**"
            + "".join(f", {value:.4g} without {part}" for part, value in m["without"].items())
            for m in report["measures"]
        ]
        options = "; ".join(f"{name} {value}" for name, value in case["options"].items())
        config = report["config"]
        error = f"{report['error_before']:.3f} → **{report['error']:.3f}**"
        error += "".join(f"; {value:.3f} without {part}" for part, value in parts.items())
        what = f"`{case['name']}`: {config['filter']}, window {config['window']}"
        what += f", {config['sinks']} sinks" if config.get("sinks") else ""
        what += f", far {config.get('far', 'all')}"
        steps = sum(stage["steps"] for stage in report["stages"].values())
        counts = [f"{n:,}" for n in (report["parameters"], report["tokens"], steps)]
        body.append([what, options, *counts, error, "<br>".join(measures)])
    header = [
        "case",
        "options",
        "parameters added",
        "tokens",
        "steps",
        "relative error of the layers",
        "the model, held out",
    ]
    contexts = list(dict.fromkeys(label for case in cases for label in case["report"]["by_context"]))
    rows = [
        [f"`{case['name']}`", *(f"{e:.3f}" if (e := case["report"]["by_context"].get(c)) else "" for c in contexts)]
        for case in cases
    ]
    when = days(case["date"] for case in cases)
    tested = []
    if cases[0]["after"]:
        names = list(cases[0]["after"])
        cells = [["original", *(f"{cases[0]['before'][name]:.4g}" for name in names)]]
        cells += [[f"`{case['name']}`", *(f"{case['after'][name]:.4g}" for name in names)] for case in cases]
        tested = ["*On the test part*", markdown_table(["", *names], cells)]
    timed = []
    for title, key in (("A forward pass, of one text", "speed"), ("Decoding, a token", "decoding")):
        found = {case["name"]: case["report"][key] for case in cases if case["report"].get(key)}
        if found:
            counts = sorted({row["tokens"] for rows in found.values() for row in rows})
            cells = [
                [f"`{name}`", *(f"{by[n]['ratio']:.2f}" if n in by else "" for n in counts)]
                for name, by in ((name, {row["tokens"]: row for row in rows}) for name, rows in found.items())
            ]
            timed += [f"*{title}: time over the original's, by the number of tokens*"]
            timed += [markdown_table(["case", *(f"{n:,}" for n in counts)], cells)]
    return "\n\n".join(
        [
            f"**{cases[0]['about']}** {cases[0]['device']}, torch {cases[0]['torch']}, {when}.",
            markdown_table(header, body),
            *tested,
            "*Relative error by the number of tokens that a token sees*",
            markdown_table(["case", *contexts], rows),
            *timed,
        ]
    )


GALLERY = {  # quantity: (column, of what it is shown)
    "cosine": ("cosine of two tokens", ".2f"),
    "high_frequency": ("energy off the mean token", ".2f"),
    "effective_rank": ("effective rank", ".0f"),
    "stable_rank": ("stable rank", ".1f"),
    "high_to_low": ("gain off frequency 0", ".2f"),
}


def gallery(section: str) -> str:
    """From before the first layer (of gains: in it) to the last, with the largest or smallest between them."""
    rows = read(f"gallery-cpu-{section}")
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: int(row["layer"])):
        quantities = curves.setdefault((row["model"], row["stack"]), {})
        quantities.setdefault(row["quantity"], []).append(float(row["mean"]))
    names = [name for name, _ in curves]
    body = []
    for (name, stack), found in curves.items():
        cells = [name + (f", {stack}" if names.count(name) > 1 else ""), str(len(found["K=3"]))]
        for quantity, (_, form) in GALLERY.items():
            values = found[quantity]
            furthest = max(values, key=lambda x: abs(x - values[0]))
            between = "" if furthest in (values[0], values[-1]) else f"{furthest:{form}} … "
            cells.append(f"{values[0]:{form}} … {between}{values[-1]:{form}}")
        for K in (3, 10):
            shares = [value / (2 * K) for value in found[f"K={K}"]]
            cells.append(f"{min(shares):.0%} to {max(shares):.0%}")
        body.append(cells)
    header = ["model", "layers", *(title for title, _ in GALLERY.values()), "E_3 of its bound", "E_10 of its bound"]
    return f"{rows[0]['samples']} {rows[0]['data']}. {where(rows)}\n\n{markdown_table(header, body)}"


def gallery_costs() -> str:
    rows = read("gallery-cpu-costs")
    body = [[row["case"], row["seconds"], f"{int(row['peak_mb']):,}"] for row in rows]
    return f"{where(rows)}\n\n{markdown_table(['a report of', 's', 'peak MB'], body)}"


def listops_table() -> str:
    rows = read("listops")
    lengths = list(dict.fromkeys(row["lengths"] for row in rows))
    rules = dict.fromkeys(row["rule"] for row in rows)
    found = {(row["rule"], row["lengths"]): row["accuracy"] for row in rows}
    body = [[rule, *(found[rule, name] for name in lengths)] for rule in rules]
    return markdown_table(["answer", *lengths], body)


def recipe_tables(*names: str) -> str:
    """What recipes/compare.py measured, a table a task, and the mean over the tasks of a family of models."""
    files = [file for name in names for file in sorted(RECIPES.glob(f"{name}*.json"))]
    contents = [json.loads(file.read_text()) for file in files]
    parts = []
    for content in contents:
        run = content["runs"][0]
        notes = [f"metric: {content['metric']}" + (", lower is better" * lower_is_better(content["metric"]))]
        notes += [f"split: {run['split']}; rows: {run['rows']}".replace("'", "")] if "split" in run else []
        if content["name"].startswith("lra-") and content["task"] != "image":
            notes += [f"at most {run['settings']['max_length']:,} tokens"]
        notes += [f"{run['settings']['num_train_epochs']:g} epochs"] if content["name"].startswith("lra-") else []
        notes += [f"{run['date']}, {run['machine']}, torch {run['versions']['torch']}"]
        title = f"**{content['model']} on {content['task']}**" + (" (sweep)" if content["sweep"] else "")
        parts += [f"{title}. {'; '.join(notes)}.", markdown_table(*summary_rows(content))]
        if content["sweep"]:
            parts += [f"![{content['metric']} over the sweep](results/{content['name']}.png)"]
    plain = [c for c in contents if not c["sweep"]]
    mean = [mean_over_tasks(plain)] if len(plain) > 1 and names == ("glue",) else []
    return "\n\n".join(mean + parts)


def mean_over_tasks(contents: list[dict]) -> str:
    """Per variant: the difference to the plain model, mean over the tasks for every seed, then paired over seeds."""
    rows = []
    for variant in [v for v in contents[0]["variants"] if v != PLAIN]:
        cells = [variant]
        for which in ("metric", "loss"):
            by_task = []
            for content in contents:
                metric = content["metric"] if which == "metric" else f"{content['metric'].partition('/')[0]}/loss"
                plain, treated = (by_seed(content, v, metric) for v in (PLAIN, variant))
                pairs = {seed: treated[seed] - plain.get(seed, math.nan) for seed in treated}
                by_task.append({seed: pair for seed, pair in pairs.items() if math.isfinite(pair)})
            seeds = sorted(set.intersection(*(set(differences) for differences in by_task)))
            means = [statistics.mean(differences[seed] for differences in by_task) for seed in seeds]
            paired = paired_comparison([0.0] * len(means), means)
            cells += [interval(dataclasses.asdict(paired)), f"{paired.p:.3f}"]
        rows.append([*cells, len(seeds)])
    tasks = ", ".join(content["task"] for content in contents)
    header = ["variant", "metric, against plain", "p", "loss, against plain", "p", "seeds"]
    return f"**{contents[0]['model']}, mean over {tasks}**\n\n{markdown_table(header, rows)}"


def replace(file: Path, name: str, content: str) -> None:
    text = file.read_text()
    pattern = re.compile(rf"(<!-- {name}: begin.*?-->\n).*?(<!-- {name}: end -->)", re.S)
    if not pattern.search(text):
        raise SystemExit(f"{file.name} has no markers for {name}")
    file.write_text(pattern.sub(lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text))
    print(f"wrote {name} into {file.name}")


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headlines": headlines},
    "docs/benchmarks.md": {
        "demo": demo_table,
        "bench": bench_tables,
        "decoding": decoding_table,
        "overhead": overhead_table,
        "machines": machines_tables,
    },
    "docs/filters.md": {"menu": lambda: markdown_table(MENU, menu()), "steps": menu_steps},
    "docs/agf.md": {"speed": agf_speed, "transfer": agf_transfer},
    "docs/singularformer.md": {
        "linear": linear_tables,
        "singular": singular_transfer,
        "scratch": partial(recipe_tables, "sequences-bbc", "sequences-20newsgroups"),
    },
    "docs/analysis.md": {
        **{section: partial(gallery, section) for section in ("pretrained", "minilm", "deit")},
        "costs": gallery_costs,
    },
    "docs/conversion.md": {
        **{name: partial(conversion_tables, name) for name in ("reviews", "images", "text", "translation")},
        "finetuned": partial(recipe_tables, "converted-"),
    },
    "docs/league.md": {name: partial(league_tables, name) for name in ("depth", "small")},
    "docs/converter.md": {"scan": scan_table, "imdb": partial(recipe_tables, "sequences-imdb")},
    "docs/sequences.md": {
        "growth": growth_tables,
        "arena": partial(recipe_tables, "lra-"),
        "listops": listops_table,
        "series": partial(recipe_tables, "sequences-JapaneseVowels", "sequences-BasicMotions", "sequences-Handwriting"),
    },
    "docs/vision.md": {"throughput": vision_table},
    "recipes/README.md": {
        name: partial(recipe_tables, name) for name in ("glue", "language_modeling", "code", "imagenet")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="first keep the results of this demo output")
    options = parser.parse_args()
    if options.demo:
        keep_demo(options.demo)
    for file, parts in TABLES.items():
        for name, make in parts.items():
            replace(ROOT / file, name, make())


if __name__ == "__main__":
    main()
