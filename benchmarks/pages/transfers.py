"""Tables of attention transfer to replacement filters."""

from transfer import STARTS

from hf_graphfilter.analysis.comparison import mean_and_sd, paired_comparison
from hf_graphfilter.tables import markdown_table
from pages.sources import read, where


def encoder_transfer(rows: list[dict], filter: str) -> list[str]:
    body, errors_before = [], {}
    for row in rows:
        if row["stage"] == "before transfer":
            errors_before[row["variant"]] = row["value"]
        elif row["stage"] in ("after transfer", "end to end"):
            name = row["variant"] + ", then end to end" * (row["stage"] == "end to end")
            body.append([name, errors_before[row["variant"]], f"**{row['value']}**", row["steps"], row["seconds"]])
    return [
        "**MiniLM-L6, transfer on film reviews** (windows of 128 tokens, 8 per batch). *Before* and *after* are the "
        "relative L2 error of the attention output, a mean over the layers, on held-out texts of the same kind. The "
        f"machine did other work meanwhile. {where(rows)}",
        markdown_table([filter, "before", "after", "steps", "seconds"], body),
    ]


def singular_transfer() -> str:
    return "\n\n".join(encoder_transfer(read("transfer-cpu-singular"), "filter"))


def agf_transfer(device: str = "cpu") -> str:
    parts = []
    if rows := [*read(f"transfer-{device}-minilm"), *read(f"transfer-{device}-mixed")]:
        parts += encoder_transfer(rows, "AGF")
    if rows := read(f"transfer-{device}-finetune"):
        parts += [
            "**MiniLM-L6 fine-tuned**, one epoch (2,000 snippets; 2,500 sentences of SST-2, its dev set). All filters "
            "have window 4 and corrections. *Mixed* is transferred on reviews and snippets, then end to end. The table "
            "shows the accuracy in %, mean ± standard deviation over the seeds, and the paired difference from the "
            f"original with its 95 % interval. {where(rows)}",
            markdown_table(*finetune_table(rows)),
        ]
    for section, caption in (
        ("gpt2", "**A GPT-2 shape trained from scratch on WikiText-2**"),
        ("smollm2", "**SmolLM2-135M-Instruct, weights dequantised from four bits, on WikiText-2**"),
        ("deit", "**DeiT-Tiny, its real weights, on 20 classes of Tiny ImageNet** (500 images of these classes)"),
    ):
        if rows := read(f"transfer-{device}-{section}"):
            parts += [f"{caption}. {where(rows)}", markdown_table(*stage_table(rows))]
    return "\n\n".join(parts)


def finetune_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    header, body = ["task", "start", "seeds", "accuracy", "against the original", "95 % interval"], []
    for task in dict.fromkeys(row["task"] for row in rows):
        by_variant: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["task"] == task:
                by_variant.setdefault(row["variant"], {})[row["seed"]] = 100 * float(row["value"])
        for variant in (v for v in STARTS if v in by_variant):
            accuracy = by_variant[variant]
            cells = [task, variant, str(len(accuracy)), mean_and_sd(list(accuracy.values()), ".2f"), "", ""]
            shared = [seed for seed in accuracy if seed in by_variant["original"]]
            if variant != "original" and len(shared) > 1:
                paired = paired_comparison([by_variant["original"][s] for s in shared], [accuracy[s] for s in shared])
                cells[4:] = [f"{paired.mean:+.2f}", f"[{paired.low:+.2f}, {paired.high:+.2f}]"]
            body.append(cells)
    return header, body


def stage_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
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
