"""Conversions, from benchmarks/conversion.py."""

import json

from hf_graphfilter.tables import markdown_table
from pages import sources
from pages.sources import days


def read_cases(task: str) -> list[dict]:
    """Read the results of the cases of a task."""
    cases = [json.loads(file.read_text()) for file in sorted((sources.RESULTS / "conversion").glob("*.json"))]
    return [case for case in cases if case["task"] == task]


def conversion_overview(task: str) -> str:
    """Return a table of the cases of a task: what each costs, and how near it comes to the original."""
    if not (cases := read_cases(task)):
        return "Not run yet."
    names = [measure["name"] for measure in cases[0]["report"]["measures"]]
    body = []
    for case in cases:
        report = case["report"]
        values = {m["name"]: f"{m['original']:.4g} → {m['converted']:.4g}" for m in report["measures"]}
        values |= {name: f"{case['before'][name]:.4g} → {after:.4g}" for name, after in case["after"].items()}
        counts = [f"{n:,}" for n in (report["parameters"], report["tokens"])]
        body.append([f"`{case['name']}`", *counts, f"{report['error']:.3f}", *(values.get(name, "") for name in names)])
    return markdown_table(["case", "parameters added", "tokens", "error of the layers", *names], body)


def conversion_tables(task: str) -> str:
    """Show the cases of a task beside each other, and their errors by context."""
    if not (cases := read_cases(task)):
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
        description = f"`{case['name']}`: {config['filter']}, window {config['window']}"
        description += f", {config['sinks']} sinks" if config.get("sinks") else ""
        description += f", far {config.get('far', 'all')}"
        steps = sum(stage["steps"] for stage in report["stages"].values())
        counts = [f"{n:,}" for n in (report["parameters"], report["tokens"], steps)]
        body.append([description, options, *counts, error, "<br>".join(measures)])
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
    dates: dict[str, list[str]] = {}
    for case in cases:
        dates.setdefault(f"{case['device']}, torch {case['torch']}", []).append(case["date"])
    provenance = "; ".join(f"{machine}, {days(case_dates)}" for machine, case_dates in dates.items())
    test_parts = []
    if cases[0]["after"]:
        names = list(cases[0]["after"])
        cells = [["original", *(f"{cases[0]['before'][name]:.4g}" for name in names)]]
        cells += [[f"`{case['name']}`", *(f"{case['after'][name]:.4g}" for name in names)] for case in cases]
        test_parts = ["*On the test part*", markdown_table(["", *names], cells)]
    time_parts = []
    for title, key in (("A forward pass, of one text", "speed"), ("Decoding, a token", "decoding")):
        speeds = {case["name"]: case["report"][key] for case in cases if case["report"].get(key)}
        if speeds:
            counts = sorted({row["tokens"] for rows in speeds.values() for row in rows})
            cells = [
                [f"`{name}`", *(f"{by_tokens[n]['ratio']:.2f}" if n in by_tokens else "" for n in counts)]
                for name, by_tokens in ((name, {row["tokens"]: row for row in rows}) for name, rows in speeds.items())
            ]
            time_parts += [f"*{title}: time over the original's, by the number of tokens*"]
            time_parts += [markdown_table(["case", *(f"{n:,}" for n in counts)], cells)]
    return "\n\n".join(
        [
            f"**{cases[0]['about']}** {provenance}.",
            markdown_table(header, body),
            *test_parts,
            "*Relative error by the number of tokens that a token sees*",
            markdown_table(["case", *contexts], rows),
            *time_parts,
        ]
    )
