"""What each filter costs in training: ``python benchmarks/menu.py`` (on the GPU where there is one).

Whole training steps (forward, backward, AdamW) of BERT-base at 128 tokens and of GPT-2 at 1,024, without attention
dropout, with each filter of the registry in all layers and its default options, beside the plain model; filters without
a causal form in BERT only. Coefficients are moved off their start, where some filters are quicker.

Both are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
writes benchmarks/results/menu-DEVICE-steps.csv with percentiles and hardware. ``--only FILTER`` times one of them, and
keeps the rows of the others.
"""

from __future__ import annotations

import csv

import torch
from gfsa import bert, gpt2, training_step
from measure import arguments, report, rounds, rows, write

from hf_graphfilter import GraphFilterError, available_filters, patch_model
from hf_graphfilter.filters.attached import filters_of

SHAPES = {"BERT-base, 8 x 128": bert, "GPT-2, 1 x 1,024": gpt2}


def patched(model: torch.nn.Module, name: str) -> torch.nn.Module:
    patch_model(model, name)
    with torch.no_grad():
        for _, graph_filter in filters_of(model):
            for coefficient in graph_filter.coefficient_tensors().values():
                coefficient.add_(0.05)
    return model


def main() -> None:
    options, common = arguments(__doc__, available_filters(), ())
    size = {"num_hidden_layers": 1} if options.smoke else {}
    file = options.output / f"menu-{options.device}-steps.csv"
    table = []
    if options.only and file.is_file():
        with file.open() as before:
            table = [row for row in csv.DictReader(before) if row["form"] != options.only]
    for case, make in SHAPES.items():
        build, batch, n, causal = make(False, options.device, **size)
        plain = training_step(build().to(options.device).train(), batch)
        for name in [options.only] if options.only else available_filters():
            try:
                step = training_step(patched(build(), name).to(options.device).train(), batch)
            except GraphFilterError as error:
                print(f"{case}: {name} is refused ({error})")
                continue
            times = rounds({"plain": plain, name: step}, options.device, options.seconds)
            fields = {**common, "case": case, "n": n, "causal": causal, "pass": "fwd+bwd+AdamW"}
            table += report([row for row in rows(fields, times) if row["form"] != "plain"])
            write(table, file)


if __name__ == "__main__":
    main()
