"""Models on long texts, from benchmarks/long.py."""

import json
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

from retrieval import TASKS, wilson

from hf_graphfilter.tables import markdown_table
from pages import sources
from pages.sources import days

NONE = "Not run yet."
STATIC, BARE = "plain, static cache", "no attention"
SPEED = ("smollm2-far-field", "smollm2-far-field-filters", "smollm2-far-field-lora")  # filters in all heads
HALF = 0.5  # below it, a task says little of what a conversion loses


def read_models(kind: str) -> list[dict]:
    """Read the results of decoders or encoders, originals first."""
    models = [json.loads(file.read_text()) for file in (sources.RESULTS / "long").glob("*.json")]
    return sorted((m for m in models if m["kind"] == kind), key=lambda m: (m["original"] is not None, m["name"]))


def of(model: dict, *what: str) -> list[dict]:
    """Return the measurements of some kinds that gave values, by their order in ``what`` and by length."""
    measurements = [m for m in model["measurements"] if m["what"] in what and "refused" not in m["values"]]
    return sorted(measurements, key=lambda m: (what.index(m["what"]), m.get("tokens", 0), m.get("batch", 1)))


def measured(found: Iterable[dict]) -> str:
    rows = list(found)
    devices, versions = ("; ".join(dict.fromkeys(m[key] for m in rows)) for key in ("device", "torch"))
    precisions = " and ".join(dict.fromkeys(m["settings"].get("precision", "float32") for m in rows))
    return f"{devices}, torch {versions}, {precisions}, {days(m['date'] for m in rows)}."


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def added(model: dict) -> str:
    return "none in use" if model["without"] else f"{model['added']:,}"


def long_quality(models: list[dict] | None = None) -> str:
    """Return perplexity by position, the distance from the original, and what greedy generation shows."""
    models = read_models("decoder") if models is None else models
    rows = [(model, m) for model in models for m in of(model, "perplexity")]
    if not rows:
        return NONE
    parts = list(dict.fromkeys(part for _, m in rows for part in m["values"]["by tokens before"]))
    body = []
    for model, m in rows:
        by_position, overall = m["values"]["by tokens before"], m["values"]["all"]
        cells = [number(by_position[part]["perplexity"], 2) if part in by_position else "" for part in parts]
        nearness = [number(overall.get(name)) for name in ("divergence", "agreement")]
        windows = f"{m['settings']['samples']} x {m['tokens']:,}"
        body.append([f"`{model['name']}`", added(model), windows, *cells, *nearness])
    header = ["model", "parameters added", "windows", *(f"perplexity, {p} tokens before" for p in parts)]
    tables = [markdown_table([*header, "divergence", "agreement"], body)]
    generations = [(model, m) for model in models for m in of(model, "generation")]
    if generations:
        body = []
        for model, m in generations:
            values = m["values"]
            agree = [f"{values[k]:.3g}" if k in values else "" for k in ("agree, median", "agree, mean")]
            counts = [f"{n:,}" for n in (m["tokens"], m["settings"]["samples"], values["generated"])]
            body.append([f"`{model['name']}`", *counts, *agree, number(values["repeated"])])
        header = ["model", "tokens of the prompt", "prompts", "tokens written"]
        header += ["agree with the original, median", "mean", "repeated 4-grams"]
        tables += ["*Greedy generation*", markdown_table(header, body)]
    return "\n\n".join([measured(m for _, m in [*rows, *generations]), *tables])


def scores(model: dict) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the scores of a decoder by task and length; a needle's are those of all depths."""
    cells: dict[tuple[str, int], list[dict]] = {}
    for m in model["measurements"]:
        if "log-probability" in m["values"]:
            cells.setdefault((m["what"], m["tokens"]), []).append(m)
    results = {}
    for cell, parts in cells.items():
        accuracy, count = mean(m["values"]["accuracy"] for m in parts), sum(m["settings"]["samples"] for m in parts)
        log_probability = mean(m["values"]["log-probability"] for m in parts)
        results[cell] = {"accuracy": accuracy, "samples": count, "log-probability": log_probability, "parts": parts}
    return results


SHARES = ("copying", "vt", "cwe", "fwe")  # tasks of which a sample may be right in part


def show_score(score: dict[str, Any], mark: str = "", shares: bool = False) -> str:
    """Without an interval where a sample has a share of right answers, and is not right or wrong."""
    low, high = wilson(score["accuracy"], score["samples"])
    interval = "" if shares else f" [{low:.2f}, {high:.2f}]"
    return f"{score['accuracy']:.2f}{interval}{mark}; {score['log-probability']:.2f}"


def long_retrieval(models: list[dict] | None = None) -> str:
    """Return accuracy, with its interval, and log-probability by task and length."""
    models = [model for model in (read_models("decoder") if models is None else models) if scores(model)]
    by_model = {model["name"]: scores(model) for model in models}
    originals = {model["name"]: model["original"] or model["name"] for model in models}
    cells = {cell: None for by_cell in by_model.values() for cell in by_cell}
    if not cells:
        return NONE
    tasks = ("needle", *TASKS)
    body = []
    for task, tokens in sorted(cells, key=lambda cell: (tasks.index(cell[0]), cell[1])):
        cell_scores = {name: by_cell[task, tokens] for name, by_cell in by_model.items() if (task, tokens) in by_cell}
        row = [task, f"{tokens:,}", str(max(score["samples"] for score in cell_scores.values()))]
        for name in by_model:
            original_score = cell_scores.get(originals[name])
            mark = " †" if original_score is not None and original_score["accuracy"] < HALF else ""
            row.append(show_score(cell_scores[name], mark, task in SHARES) if name in cell_scores else "")
        body.append(row)
    provenance = measured(m for by_cell in by_model.values() for score in by_cell.values() for m in score["parts"])
    legend = "Accuracy with its 95 % interval, or the mean share of right answers; mean log-probability of a token of "
    legend += "the answer, in nats. "
    legend += "†: the original is right in less than half, so the accuracy says little."
    table = markdown_table(["task", "tokens", "samples", *(f"`{name}`" for name in by_model)], body)
    return "\n\n".join([f"{legend} {provenance}", table])


def long_depth() -> str:
    """Return how many needles are found by depth."""
    body, depths = [], []
    for model in read_models("decoder"):
        for (task, tokens), score in scores(model).items():
            if task == "needle":
                parts = {m["depth"]: m for m in score["parts"]}
                depths = sorted({*depths, *parts})
                body.append((f"`{model['name']}`", f"{tokens:,}", parts))
    if not body:
        return NONE
    header = ["model", "tokens", *(f"{100 * depth:.0f} %" for depth in depths)]
    rows = [
        [*row, *(number(parts[d]["values"]["accuracy"], 2) if d in parts else "" for d in depths)]
        for *row, parts in body
    ]
    counts = sorted({m["settings"]["samples"] for *_, parts in body for m in parts.values()})
    caption = f"{' to '.join(map(str, counts))} needles per cell, by their place in the text."
    return f"{caption}\n\n{markdown_table(header, rows)}"


def long_encoders(models: list[dict] | None = None) -> str:
    """Return what the embeddings of encoders are good for."""
    body, measurements = [], []
    names = {"scifact": "nDCG@10", "20newsgroups-4cat": "accuracy", "imdb": "accuracy", "embeddings": "cosine"}
    for model in read_models("encoder") if models is None else models:
        values = {m["what"]: m for m in of(model, *names)}
        cells = [number(values[kind]["values"][name], 4) if kind in values else "" for kind, name in names.items()]
        body.append([f"`{model['name']}`", added(model), *cells])
        measurements += values.values()
    if not measurements:
        return NONE
    header = ["model", "parameters added", "SciFact, nDCG@10", "20 Newsgroups (4 classes)", "IMDb"]
    return f"{measured(measurements)}\n\n{markdown_table([*header, 'cosine with the original'], body)}"


def rows_of_speed(model: dict) -> Iterator[list[str]]:
    for m in of(model, "prefill", "first token", "decoding"):
        forms = m["values"]
        row = [f"`{model['name']}`", m["what"], f"{m['tokens']:,}", str(m.get("batch", 1))]
        times = (forms.get(form, {}).get("median_ms") for form in ("plain", STATIC, "converted"))
        ratios = (forms.get(form, {}).get("ratio_to_plain") for form in (STATIC, "converted", BARE))
        row += [number(time, 1) for time in times] + [number(ratio, 2) for ratio in ratios]
        row.append(number(forms.get("converted", {}).get("ratio_to_static"), 2))
        peaks = [forms[form]["peak_mb"] for form in ("plain", "converted") if form in forms]
        row.append(m["device"].partition(",")[0])
        yield [*row, " / ".join("-" if mb is None else f"{mb:,.0f}" for mb in peaks)]


def long_speed(models: list[dict] | None = None) -> str:
    """Return times and peak memory beside the original's."""
    models = [*read_models("decoder"), *read_models("encoder")] if models is None else models
    rows = [row for model in models for row in rows_of_speed(model)]
    if not rows:
        return NONE
    header = ["model", "what", "tokens", "batch", "original ms", "static cache ms", "converted ms"]
    header += ["static / original", "converted / original", "no attention / original", "converted / static"]
    header += ["processor", "peak MB"]
    provenance = measured(m for model in models for m in of(model, "prefill", "first token", "decoding"))
    caption = (
        "Compare the ratios, which are medians over rounds: rows were timed on different days and machines. Peak "
        "memory is beyond what was in use before. *No attention* is the original whose attention computes nothing: no "
        "filter is faster."
    )
    grows = [
        [
            f"`{model['name']}`",
            " to ".join(f"{int(n):,}" for n in m["values"]["median_ms"]),
            " to ".join(number(ms / 1000, 1) for ms in m["values"]["median_ms"].values()),
            m["memory"],
            *(f"n^{form['exponent']:.2f}" if form else "" for form in (m["values"], m["values"].get(BARE))),
        ]
        for model in models
        for m in of(model, "growth")
    ]
    columns = ["forward pass", "tokens", "s", "freed memory is", "time grows as", "no attention"]
    grown = f"\n\n{markdown_table(columns, grows)}" if grows else ""
    return f"{caption} {provenance}\n\n{markdown_table(header, rows)}{grown}"


def long_ratios() -> str:
    """Return the time of SmolLM2 with filters in all heads over the original's, by processor."""
    models = [m for m in read_models("decoder") if m["name"] in SPEED]
    cells: dict[tuple, dict[str, str]] = {}
    for model in models:
        for m in of(model, "prefill", "decoding"):
            texts = f", {m['batch']} text{'s' * (m['batch'] > 1)} at once" if "batch" in m else ""
            title = {"prefill": "forward pass", "decoding": "decoding a token"}[m["what"]]
            row = cells.setdefault((title + texts, m["tokens"]), {})
            processor = m["device"].partition(",")[0]
            row[processor] = number(m["values"]["converted"]["ratio_to_plain"], 2)
            if BARE in m["values"]:  # a bound for this processor alone
                row[f"{processor}, {BARE}"] = number(m["values"][BARE]["ratio_to_plain"], 2)
    columns = sorted({column for row in cells.values() for column in row})
    body = [[title, f"{n:,}", *(row.get(c, "") for c in columns)] for (title, n), row in sorted(cells.items())]
    return markdown_table(["time over the original's", "tokens", *columns], body)


def long_of_filter(mark: str) -> str:
    """Return all tables of the models that were made with one filter file, and of their originals, for its card.

    Args:
        mark: the hash of the file's folder, as ``loaded`` in the results.
    """
    tables = []
    for kind, pages in (("decoder", (long_quality, long_retrieval)), ("encoder", (long_encoders,))):
        models = read_models(kind)
        loaded = [model for model in models if model.get("loaded") == mark]
        if loaded:
            models = [model for model in models if model in loaded or model["name"] in {m["original"] for m in loaded}]
            tables += [*(page(models) for page in pages), f"*Speed*\n\n{long_speed(loaded)}"]
    return "\n\n".join(page for page in tables if NONE not in page)
