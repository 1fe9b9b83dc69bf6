"""Filters fitted to single layers, and layers fitted block by block, from single_layers.py and blocks.py."""

from statistics import fmean, stdev

from hf_graphfilter.tables import markdown_table
from pages.sources import read, where

TITLES = {"smollm2": "SmolLM2-135M, windows of 512 tokens", "minilm": "MiniLM-L6, film reviews of 256 to 512 tokens"}


def single_layers() -> str:
    """Return the mean error over the layers by model and filter, and what a filter adds to a layer."""
    rows = read("single-layers-cpu")
    body = []
    for model in dict.fromkeys(row["model"] for row in rows):
        model_rows = [row for row in rows if row["model"] == model]
        for variant in dict.fromkeys(row["variant"] for row in model_rows):
            variant_rows = [row for row in model_rows if row["variant"] == variant]
            seeds = {row["seed"] for row in variant_rows}
            means = [fmean(float(row["error"]) for row in variant_rows if row["seed"] == seed) for seed in seeds]
            spread = f" ± {stdev(means):.4f}" if len(means) > 1 else ""
            parameters = f"{int(variant_rows[0]['parameters']):,}"
            body.append([TITLES[model], f"`{variant}`", f"{fmean(means):.4f}{spread}", str(len(seeds)), parameters])
    header = ["model and texts", "filter", "relative squared error", "seeds", "parameters per layer"]
    steps = rows[0]["steps"] if rows else "0"
    caption = f"Four layers of each model, {steps} texts, one per step. {where(rows)}" if rows else "Not run yet."
    return f"{caption}\n\n{markdown_table(header, body)}"


def blocks_table() -> str:
    """Return the memory of a linearization of all layers at once, and block by block."""
    rows = read("linearize-blocks-cpu")
    header = ["model", "blocks", "tokens", "all layers, MB", "in blocks, MB", "ratio", "time, ratio", "difference"]
    body = []
    for row in rows:
        all_layers, blocks = float(row["whole mb"]), float(row["blocks mb"])
        time = float(row["blocks seconds"]) / float(row["whole seconds"])
        numbers = [f"{all_layers:.0f}", f"{blocks:.0f}", f"{blocks / all_layers:.2f}", f"{time:.2f}"]
        body.append([row["model"], row["blocks"], row["tokens"], *numbers, row["difference"]])
    text = (
        f"The stage `attention` with {int(rows[0]['budget']):,} tokens in all; the column *tokens* is the length of a "
        "text. Memory is the peak of the process above what it takes after a small model. It includes measuring the "
        "whole model. *Difference* is the largest difference between the errors of a layer in the two runs."
    )
    return f"{text} {where(rows)}\n\n{markdown_table(header, body)}"
