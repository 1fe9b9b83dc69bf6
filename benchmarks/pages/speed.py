"""Time and memory of GFSA, of the menu and of the routes."""

import csv
import itertools

from hf_graphfilter.tables import markdown_table
from pages import sources
from pages.sources import MASKS, over_plain, pivot, read, where, with_memory
from recipes.summary import name_variant


def bench_tables() -> str:
    parts = []
    for file in sorted(sources.RESULTS.glob("gfsa-cpu-*.csv"), reverse=True):
        section = file.stem.split("-")[2]
        if section == "memory":
            continue  # a column of the attention table
        rows = list(csv.DictReader(file.open()))
        if section == "attention":
            rows = with_memory(rows, file.with_name(file.name.replace("attention", "memory")))
        caption, table = SECTIONS[section]
        parts += [f"{caption} {where(rows)}", table(rows)]
    return "\n\n".join(parts)


def start_table(rows: list[dict]) -> str:
    body = [[row["case"], {"plain": "without", "gfsa": "with"}[row["form"]], row["median_ms"]] for row in rows]
    body[-1][1] = ""
    return markdown_table(["", "hf_graphfilter", "ms"], body)


def step_table(rows: list[dict]) -> str:
    body = [
        [
            case,
            forms["plain"]["n"],
            *(f"{float(forms[f]['median_ms']):,.0f}" for f in ("plain", "gfsa")),
            f"**{forms['gfsa']['ratio_to_plain']}**",
        ]
        for (case,), forms in pivot(rows, "case").items()
    ]
    return markdown_table(["step", "n", "baseline ms", "GFSA ms", "ratio"], body)


def by_mask(row: dict) -> tuple:
    return row["causal"], int(row["n"]), row["pass"]


def attention_table(rows: list[dict]) -> str:
    body = []
    for (causal, n, pass_name), forms in pivot(sorted(rows, key=by_mask), "causal", "n", "pass").items():
        plain, gfsa, dense = (forms[f] for f in ("plain", "gfsa", "dense"))
        speedup = float(dense["median_ms"]) / float(gfsa["median_ms"])
        body.append(
            [
                *(MASKS[causal], n, pass_name),
                *(f"{float(f['median_ms']):,.1f}" for f in (plain, gfsa, dense)),
                f"**{gfsa['ratio_to_plain']}**",
                f"{speedup:.1f}x",
                " / ".join(f["peak_mb"] for f in (plain, gfsa, dense)),
            ]
        )
    header = ["mask", "n", "pass", "SDPA", "GFSA", "dense A²", "GFSA / SDPA", "faster than dense", "peak MB (three)"]
    return markdown_table(header, body)


SECTIONS = {
    "steps": (
        "Whole training steps (forward, backward, AdamW). Ratios are those of a step with GFSA over the baseline's, "
        "medians of pairs.",
        step_table,
    ),
    "attention": (
        "Attention alone, 12 heads of 64 features, about 4,096 tokens per batch, K = 3. Times are medians in ms. "
        "Ratios are medians of ratios taken side by side; the ratio to the dense form is one of medians. Memory is the "
        "peak over the inputs, in MB.",
        attention_table,
    ),
    "start": ("The import in a fresh process, and patching.", start_table),
}


FORMS = {"gfsa": "GFSA", "no kernel": "without kernels", "kernel": "with all kernels"}  # on a GPU


def gpu_tables() -> str:
    """Write steps and attention alone on a GPU, by which kernels are used, and the steps of the menu."""
    steps, attention, agf, menu = (read(f"{name}-cuda-{section}") for name, section in GPU)
    rows = [
        [case, n, f"{float(forms['plain']['median_ms']):,.0f}", *(f"**{over_plain(forms[f]):.2f}**" for f in FORMS)]
        for (case, n), forms in pivot(steps, "case", "n").items()
    ]
    alone = [
        [pass_name, MASKS[causal], f"{int(n):,}", f"{float(forms['plain']['median_ms']):,.2f}"]
        + [f"{over_plain(forms[f]):.2f}" for f in FORMS]
        for (pass_name, causal, n), forms in pivot(attention, "pass", "causal", "n").items()
    ]
    linear = [
        [pass_name, f"{int(n):,}", f"{float(forms['plain']['median_ms']):,.2f}"]
        + [f"{over_plain(forms[f]):.2f}" for f in ("kernel", "agf")]
        for (pass_name, causal, n), forms in pivot(agf, "pass", "causal", "n").items()
        if causal == "True"
    ]
    costs = sorted((over_plain(row), row["form"]) for row in menu)
    parts = [
        "Training steps in bfloat16 (autocast). Batches are 16 times those of the CPU's table; MiniLM has 512 texts "
        f"and the narrow GPT-2 has 16. {where(steps)}",
        markdown_table(["step", "n", "baseline ms", *FORMS.values()], rows),
        "Training steps of BERT-base with 128 texts of 128 tokens, by filter:",
        markdown_table(["filter", "time over the baseline's"], [[f"`{n}`", f"**{r:.2f}**"] for r, n in costs]),
        "Attention alone, 65,536 tokens per batch, bfloat16:",
        markdown_table(["pass", "mask", "n", "SDPA ms", *(f"{name} / SDPA" for name in FORMS.values())], alone),
        f"Causal AGF in place of attention, one sequence, bfloat16. {where(agf)}",
        markdown_table(["pass", "n", "SDPA ms", "AGF / SDPA", "without its kernel"], linear),
    ]
    return "\n\n".join(parts)


GPU = (("gfsa", "steps"), ("gfsa", "attention"), ("agf", "attention"), ("menu", "steps"))


def decoding_table() -> str:
    rows = read("decoding-cpu")
    cases = pivot(rows, "n", "case")
    cells = []
    for n in dict.fromkeys(n for n, _ in cases):
        cells.append([f"{int(n):,}"])
        for kind in ("dynamic", "static"):
            forms = cases[n, f"one token, {kind} cache"]
            cells[-1] += [f"{float(forms[form]['median_ms']):,.0f}" for form in ("plain", "gfsa")]
            cells[-1] += [f"**{forms['gfsa']['ratio_to_plain']}**"]
    header = [
        "context",
        "dynamic cache: baseline ms",
        "GFSA ms",
        "ratio",
        "static cache: baseline ms",
        "GFSA ms",
        "ratio",
    ]
    return (
        "One token of GPT-2's shape (12 layers, d 768), K = 3, with w_K = 0.1. Times are medians in ms; ratios are "
        "medians. "
        f"{where(rows)}\n\n{markdown_table(header, cells)}"
    )


def overhead_table() -> str:
    rows = read("overhead-cpu")
    packages = list(dict.fromkeys(row["package"] for row in rows))
    cells = {(row["package"], row["form"]): row for row in rows}
    header = ["microseconds per layer beyond the baseline", *packages]
    forms = {"route": "a filter that only applies S", "gfsa": "GFSA", "agf": "AGF"}
    body = [[text, *(cells[package, form]["overhead"] for package in packages)] for form, text in forms.items()]
    held_mb = [cells[package, "agf, after a training step"]["held_mb"] for package in packages]
    body.append(["MB held after a training step of four AGF layers, 8 x 512 tokens", *held_mb])
    return f"By commit of the package. {where(rows)}\n\n{markdown_table(header, body)}"


SIDE_BY_SIDE = {
    "gfsa-*-steps": "Whole training steps",
    "gfsa-*-attention": "Attention alone",
    "decoding-*": "One token",
    "agf-*-attention": "AGF instead of attention",
    "busy-*": "Training steps, and AGF alone, beside other processes",
}
REFERENCES = ("plain", "dense", "no kernel")  # forms that others are compared with


def machines_tables() -> str:
    """Return the ratios to the baseline on every machine; those of other machines stand in folders below RESULTS."""
    parts = []
    for name, caption in SIDE_BY_SIDE.items():
        local_files = sources.RESULTS.glob(f"{name.replace('*', 'cpu')}.csv")  # a GPU has a section of its own
        files = [*local_files, *sorted(sources.RESULTS.glob(f"*/{name}.csv"))]
        ratios_by_machine = {}
        for file in files:
            rows = list(csv.DictReader(file.read_text().splitlines()))
            ratios = {
                tuple(row[key] for key in ("case", "n", "causal", "pass", "form")): row["ratio_to_plain"]
                for row in rows
                if row["form"] not in REFERENCES and row["ratio_to_plain"]
            }
            ratios_by_machine[where(rows)] = ratios
        if len(ratios_by_machine) < 2:
            continue
        body = [
            [case, n, MASKS[causal], pass_name, form]
            + [machine.get((case, n, causal, pass_name, form), "") for machine in ratios_by_machine.values()]
            for case, n, causal, pass_name, form in dict.fromkeys(itertools.chain(*ratios_by_machine.values()))
        ]
        header = ["case", "n", "mask", "pass", "form", *(f"machine {i}" for i in range(1, len(ratios_by_machine) + 1))]
        machines = " ".join(f"Machine {i}: {text}" for i, text in enumerate(ratios_by_machine, 1))
        parts += [f"{caption}, time over the baseline's. {machines}", markdown_table(header, body)]
    return "\n\n".join(parts) or "Measured on one machine so far."


def vision_table() -> str:
    rows = list(csv.DictReader((sources.RESULTS / "vision-cpu-throughput.csv").open()))
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if a["form"] == "plain" and b["form"] == "gfsa"]
    header = ["model", "K", "pass", "batch", "baseline images/s", "GFSA images/s", "ratio", "GFLOPs", "parameters"]
    body = [
        [
            *(b["model"], b["K"], b["pass"], b["batch"], a["images_per_s"], b["images_per_s"]),
            *(f"**{b['ratio_to_plain']}**", f"{a['gflops']} → {b['gflops']}", f"{int(a['parameters']):,}"),
        ]
        for a, b in pairs
    ]
    first = rows[0]
    provenance = f"{first['device']}, {first['date']}; torch {first['torch']}, timm {first['timm']}."
    return f"{provenance} Ratios are medians of pairs.\n\n{markdown_table(header, body)}"


def menu_steps() -> str:
    """Return the time over that of the baseline, one column per shape."""
    steps = read("menu-cpu-steps")
    ratios = {(row["form"], row["case"]): f"**{over_plain(row):.2f}**" for row in steps}
    shapes = list(dict.fromkeys(row["case"] for row in steps))
    names = dict.fromkeys(row["form"] for row in steps)
    names = sorted(names, key=lambda name: float(ratios.get((name, shapes[0]), "**9**")[2:-2]))
    body = [[f"`{name}`", *(ratios.get((name, shape), "") for shape in shapes)] for name in names]
    return f"{where(steps)}\n\n{markdown_table(['filter', *shapes], body)}"


def steps_table(head: str, rows: list[dict[str, str]], column: str, unit: str = "") -> str:
    """Return a row for each form: its time in every case of ``column``, and that over the baseline's."""
    cases = pivot(rows, column)
    body = []
    for name in dict.fromkeys(row["form"] for row in rows):
        cells = (forms[name] for forms in cases.values())
        body.append([name_variant(name), *(f"{float(c['median_ms']):,.0f} ms, **{over_plain(c):.2f}**" for c in cells)])
    return markdown_table([head, *(f"{case}{unit}" for (case,) in cases)], body)


def speech_tables() -> str:
    """Write the steps of Speech2Text and the encoder of Whisper by filter."""
    steps, encoder = read("speech-cpu-steps"), read("speech-cpu-encoder")
    if not steps:
        return "Not measured yet."
    parts = [where(steps), steps_table("training step", steps, "n", " seconds")]  # may be of different machines
    return "\n\n".join([*parts, where(encoder), steps_table("encoder", encoder, "case")])


def whisper_table() -> str:
    """Write a row for each set of options: word errors and encoder time, original and linear."""
    rows = read("speech-cpu-linear")
    if not rows:
        return "Not measured yet."
    head = [
        "layers",
        "window",
        "tokens fitted on",
        "trained",
        "time to fit",
        "WER",
        "linear: WER",
        "encoder, CPU time",
        "linear: CPU time",
    ]
    body = []
    for row in sorted(rows, key=lambda r: (r["layers"], int(r["window"]), int(r["budget"]))):
        errors = (f"{float(row[f'wer_{name}']):.1%}" for name in ("original", "linear"))
        times = (f"{float(row[f'encoder_{name}']):.2f} s" for name in ("original", "linear"))
        fit = f"{int(row['fit_seconds']) / 60:.0f} min"
        body.append([row["layers"], row["window"], f"{int(row['budget']):,}", row["train"], fit, *errors, *times])
    return f"{where(rows)} {rows[0]['model']}, {rows[0]['minutes']} minutes of digits.\n\n{markdown_table(head, body)}"


def graph_tables() -> str:
    """Write the steps of Graphormer by filter, and the share of the data in one."""
    steps, data = read("graphs-cpu-steps"), read("graphs-cpu-data")
    if not steps:
        return "Not measured yet."
    parts = [where(steps), steps_table("step", steps, "case")]
    names = {"plain": "a step of 256 graphs"}
    body = [
        [names.get(row["form"], row["form"]), f"{float(row['median_ms']):,.0f} ms", f"**{over_plain(row):.3f}**"]
        for row in data
    ]
    parts += [where(data), markdown_table(["data", "time", "over the baseline's step of 256 graphs"], body)]
    return "\n\n".join(parts)


def busy_table() -> str:
    """Write a row for each shape and filter: time over the baseline's beside 0, 1 and 2 busy processes, and memory."""
    rows = read("busy-cpu")
    quiet = [row for row in rows if row["pass"].endswith("0 busy")]
    baseline = {row["case"]: float(row["peak_mb"]) for row in quiet if row["form"] == "plain"}
    by_load = {(row["case"], row["form"], row["pass"].split(", ")[1]): row for row in rows}
    body = []
    for row in quiet:
        case, form = row["case"], row["form"]
        if form == "plain":
            continue
        ratios = [by_load.get((case, form, f"{load} busy")) for load in (0, 1, 2)]
        measured = [None if ratio is None else over_plain(ratio) for ratio in ratios]
        busy_cells = ["" if ratio is None else f"{ratio:.2f} ({ratio / over_plain(row):.2f})" for ratio in measured[1:]]
        memory = f"{float(row['peak_mb']) / baseline[case]:.2f}"
        spread = f"**{over_plain(row):.2f}** [{float(row['ratio_p10']):.2f}, {float(row['ratio_p90']):.2f}]"
        body.append([case, f"`{form}`", spread, *busy_cells, memory])
    header = ["model, batch x tokens", "filter", "quiet [p10, p90]", "1 busy (over quiet)", "2 busy (over quiet)"]
    return f"{where(rows)}\n\n{markdown_table([*header, 'peak memory'], body)}"


def waiting_table() -> str:
    """Write a row for each shape and load: a step without and with a filter, by how PyTorch's threads wait."""
    rows = read("waiting-cpu")
    cases = {(row["case"], row["pass"], row["form"]): row for row in rows}
    body = []
    for case, pass_name, form in cases:
        if form == "plain" or form.endswith(", passive"):
            continue
        cells = [case, pass_name.split(", ")[1].replace("0 busy", "quiet")]
        for name in ("plain", form):
            ways = [float(cases[case, pass_name, name + way]["median_ms"]) for way in ("", ", passive")]
            cells += [f"`{name}`"] * (name == form) + [f"{time / 1000:.3g} s" for time in ways]
            cells += [f"**{ways[1] / ways[0]:.2f}**"]
        body.append(cells + [f"{over_plain(cases[case, pass_name, form + way]):.2f}" for way in ("", ", passive")])
    header = ["model, batch x tokens", "beside", "baseline", "baseline, passive", "passive over default"]
    header += ["filter", "with it", "with it, passive", "passive over default"]
    header += ["filter over baseline", "the same, passive"]
    return f"{where(rows)}\n\n{markdown_table(header, body)}"


def compiled_table() -> str:
    """Write a row for each shape and filter: a compiled step over that of the compiled baseline, and memory."""
    rows = read("compiled-cpu")
    baseline = {row["case"]: row for row in rows if row["form"] == "plain"}
    eager = {row["case"]: row for row in rows if row["form"].endswith("not compiled")}
    body = []
    for row in rows:
        case, form = row["case"], row["form"]
        if form.startswith("plain"):
            continue
        spread = f"**{over_plain(row):.2f}** [{float(row['ratio_p10']):.2f}, {float(row['ratio_p90']):.2f}]"
        memory = f"{float(row['peak_mb']) / float(baseline[case]['peak_mb']):.2f}"
        low, high = sorted(1 / float(eager[case][name]) for name in ("ratio_p10", "ratio_p90"))
        compiled = f"{1 / over_plain(eager[case]):.2f} [{low:.2f}, {high:.2f}]"
        body.append([case, f"`{form}`", spread, memory, compiled])
    header = [
        "model, batch x tokens",
        "filter",
        "time [p10, p90]",
        "peak memory",
        "the baseline, compiled over not [p10, p90]",
    ]
    return f"{where(rows)}\n\n{markdown_table(header, body)}"
