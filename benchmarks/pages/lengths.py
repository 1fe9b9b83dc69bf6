"""Time and memory by length: AGF and the other linear filters."""

from measure import fit_growth

from hf_graphfilter.tables import markdown_table
from pages import sources
from pages.sources import MASKS, over_plain, pivot, read, where, with_memory


def agf_ratios(device: str = "cpu") -> str:
    """Return a table of AGF's time over SDPA's, by length."""
    timed = [row for row in read(f"agf-{device}-attention") if row["form"] == "agf" and row["ratio_to_plain"]]
    lengths = sorted({int(row["n"]) for row in timed})
    body = []
    for causal, pass_name in dict.fromkeys((row["causal"], row["pass"]) for row in timed):
        ratios = {int(r["n"]): over_plain(r) for r in timed if (r["causal"], r["pass"]) == (causal, pass_name)}
        mask = "causal" if causal == "True" else "every token sees all"
        body.append([f"{mask}, {pass_name}", *(f"{ratios[n]:.2f}" if n in ratios else "" for n in lengths)])
    return markdown_table(["AGF / SDPA, by tokens", *(f"{n:,}" for n in lengths)], body)


def agf_speed(device: str = "cpu") -> str:
    timed, peaks = read(f"agf-{device}-attention"), read(f"agf-{device}-memory")
    for row in timed:
        row |= {"n": int(row["n"]), "causal": row["causal"] == "True", "median_ms": float(row["median_ms"])}
    memory = {(int(r["n"]), r["causal"] == "True", r["pass"], r["form"]): r["peak_mb"] for r in peaks}
    parts, body = [], []
    for causal in (False, True):
        for pass_name in ("fwd", "fwd+bwd"):
            rows = (row for row in timed if (row["causal"], row["pass"]) == (causal, pass_name))
            cases = {n: forms for (n,), forms in pivot(rows, "n").items()}
            for n, forms in cases.items():
                plain, agf = forms.get("plain"), forms["agf"]
                body.append(
                    [
                        "causal" if causal else "full",
                        pass_name,
                        n,
                        f"{plain['median_ms']:,.1f}" if plain else "",
                        f"{agf['median_ms']:,.1f}",
                        f"**{float(agf['ratio_to_plain']):.3f}**" if plain else "",
                        " / ".join(
                            memory.get((n, causal, pass_name, form), "-")
                            for form in (("plain", "agf") if plain else ("agf",))
                        ),
                    ]
                )
            faster = [n for n, f in cases.items() if "plain" in f and float(f["agf"]["ratio_to_plain"]) < 1]
            parts.append(
                f"- {'causal' if causal else 'every token sees all'}, {pass_name}: time grows as "
                f"n^{fit_growth(timed, causal, pass_name):.2f} between 4k and 64k; the faster one from n = "
                f"{min(faster)} on (of the lengths measured)."
            )
    header = ["mask", "pass", "n", "SDPA ms", "AGF ms", "AGF / SDPA", "peak MB (SDPA / AGF)"]
    caption = (
        "One sequence, 12 heads of 64 features, K = 3, random inputs. Times are medians in ms; ratios are medians of "
        f"ratios taken side by side; memory is the peak over the inputs. {where(timed)}"
    )
    layers = read(f"agf-{device}-layers")
    layer_body = []
    for (case, n), forms in pivot(layers, "case", "n").items():
        agf, ortho = (float(forms[f]["median_ms"]) for f in ("agf", "agf+ortho"))
        ratio = forms["agf"]["ratio_to_plain"]
        layer_body.append([case, n, f"{agf:,.0f}", ratio, f"{ortho:,.0f}", f"**{ortho / agf - 1:+.1%}**"])
    layer_table = markdown_table(
        [
            "module, forward and backward",
            "n",
            "AGF ms",
            "AGF / baseline",
            "with orthogonality loss",
            "it adds, of medians",
        ],
        layer_body,
    )
    decoding = pivot(read(f"agf-{device}-decoding"), "n")
    decoding_table = markdown_table(
        ["context", "baseline, ms per token", "AGF, ms per token"],
        [[f"{int(n):,}", f["plain"]["median_ms"], f["agf"]["median_ms"]] for (n,), f in decoding.items()],
    )
    batches = read(f"agf-{device}-batch")
    return "\n\n".join(
        [
            caption,
            "\n".join(parts),
            markdown_table(header, body),
            "In batches, 12 heads of 64 features, K = 3: over the same formula in PyTorch operations with "
            f"autograd, and over SDPA. {where(batches)}",
            batch_table(batches),
            f"Whole attention modules in training, 4,096 tokens per batch. {where(layers)}",
            layer_table,
            f"One more token after a context (GPT-2 shape, 4 layers, d 256). {where(read(f'agf-{device}-decoding'))}",
            decoding_table,
        ]
    )


def batch_table(rows: list[dict]) -> str:
    cases = pivot(rows, "case", "causal", "n", "pass")
    body = []
    for case, causal, n in dict.fromkeys(key[:3] for key in cases):
        batch, reference = case.removeprefix("batch of ").split(", over ")
        cells = []
        for pass_name in ("fwd", "fwd+bwd"):
            plain, agf = (cases[case, causal, n, pass_name][form] for form in ("plain", "agf"))
            times = (f"{float(x['median_ms']):,.1f}" for x in (plain, agf))
            cells += [*times, f"**{agf['ratio_to_plain']}**"]
        body.append([reference, MASKS[causal], f"{batch} x {n}", *cells])
    header = ["over", "mask", "batch x n", "fwd ms", "AGF ms", "ratio", "fwd+bwd ms", "AGF ms", "ratio"]
    return markdown_table(header, body)


LINEAR = {"plain": "SDPA", "agf": "AGF", "singularformer": "Singularformer", "synvolution": "Synvolution"}


SYSTEMS = {
    "plain": "baseline (SDPA)",
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
        "attention": "One sequence, 12 heads of 64 features, r = 64, K = 3, random inputs. The projections of the "
        "input are given, not timed. Times are medians in ms; ratios are medians of ratios taken side by side; memory "
        "is the peak over the inputs.",
        "batch": "The same with about 4,096 tokens per batch.",
    }
    for section, caption in captions.items():
        rows = read(f"linear-cpu-{section}")
        body, names = [], [form for form in LINEAR if any(row["form"] == form for row in rows)]
        for (pass_name, n), forms in pivot(rows, "pass", "n").items():
            ms = {form: float(row["median_ms"]) for form, row in forms.items()}
            times = [f"{ms[form]:,.1f}" if form in ms else "" for form in names]
            memory = " / ".join(peaks.get((n, pass_name, form), "-") for form in names)
            ratios = [f"**{forms[form]['ratio_to_plain']}**" if "plain" in ms else "" for form in names[1:]]
            body.append([pass_name, f"{int(n):,}", *times, *ratios, *([memory] if section == "attention" else [])])
        header = ["pass", "n", *(LINEAR[form] for form in names), *(f"{LINEAR[form]} / SDPA" for form in names[1:])]
        parts += [f"{caption} {where(rows)}", markdown_table(header + ["peak MB"] * (section == "attention"), body)]
        if section == "attention":
            timed = [{**row, "n": int(row["n"]), "causal": False, "median_ms": float(row["median_ms"])} for row in rows]
            exponents = (
                f"{LINEAR[form]}: n^{fit_growth(timed, False, 'fwd', form):.2f} forward, "
                f"n^{fit_growth(timed, False, 'fwd+bwd', form):.2f} forward and backward"
                for form in names[1:]
            )
            parts.append(f"Time between 4k and 64k tokens grows as: {'; '.join(exponents)}.")
    return "\n\n".join(parts)


def growth_tables() -> str:
    """Whole training steps by length: time, memory, time over the baseline's; and the same tokens in batches."""
    steps = with_memory(read("sequences-cpu-steps"), sources.RESULTS / "sequences-cpu-memory.csv")
    batches = read("sequences-cpu-batch")
    timed = [{**row, "n": int(row["n"]), "causal": False, "median_ms": float(row["median_ms"])} for row in steps]
    exponents = {form: f"n^{fit_growth(timed, False, steps[0]['pass'], form):.2f}" for form in SYSTEMS}
    return "\n\n".join(
        [
            f"One sequence per step: seconds, peak MB, **time over the baseline's**. {where(steps)}",
            by_length(steps, {"time from 4k on": exponents}),
            f"16,384 tokens per step: seconds, **time over the baseline's**. {where(batches)}",
            by_length(batches, {}),
        ]
    )


def by_length(rows: list[dict], more: dict[str, dict[str, str]]) -> str:
    """Return a table of a line per system and a column per length, and ``more`` columns by system."""
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
    body = []
    for (case, pass_name, n), forms in pivot(rows, "case", "pass", "n").items():
        times = [forms[form]["median_ms"] for form in ("plain", "blocks")]
        body.append([case, pass_name, f"{int(n):,}", *times, f"**{forms['blocks']['ratio_to_plain']}**"])
    header = ["", "pass", "n", "parallel scan of Algorithm 1 ms", "blocks ms", "ratio"]
    text = "One sequence. Times are medians; ratios are medians of ratios taken side by side."
    return f"{text} {where(rows)}\n\n{markdown_table(header, body)}"


def gibbs_table() -> str:
    """Return how each kernel approximates a step, by order."""
    cases = {(row["kernel"], row["K"]): row for row in read("gibbs")}
    kernels, orders = (list(dict.fromkeys(key[i] for key in cases)) for i in (0, 1))
    header = ["kernel", *(f"overshoot, K = {K}" for K in orders), *(f"0.9 from x =, K = {K}" for K in orders)]
    body = [
        [f"`{kernel}`"]
        + [f"{100 * float(cases[kernel, K]['overshoot']):.1f} %" for K in orders]
        + [cases[kernel, K]["reaches"] or "nowhere" for K in orders]
        for kernel in kernels
    ]
    return markdown_table(header, body)


def threshold_table() -> str:
    """Return memory and time of Singularformer against attention at short lengths."""
    rows, timed = read("linear-cpu-short-memory"), read("linear-cpu-short")
    times = pivot(timed, "pass", "n")
    body = []
    for (pass_name, n), forms in pivot(rows, "pass", "n").items():
        plain, linear = (forms[form]["peak_mb"] for form in ("plain", "singularformer"))
        time = times[pass_name, n]["singularformer"]["ratio_to_plain"]
        body.append([pass_name, n, plain, linear, f"**{float(linear) / float(plain):.2f}**", f"**{float(time):.2f}**"])
    header = ["pass", "n", "SDPA, peak MB", "Singularformer, peak MB", "memory / SDPA", "time / SDPA"]
    caption = "Batches of 64 sequences, 12 heads of 64 features, r = 64, float32; the peak over the inputs."
    return f"{caption} Memory: {where(rows)} Time: {where(timed)}\n\n{markdown_table(header, body)}"
