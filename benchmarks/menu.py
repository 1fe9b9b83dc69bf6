"""Measure the cost of each filter in training: ``python benchmarks/menu.py`` (on the GPU if there is one).

Whole training steps (forward, backward, AdamW) are timed for BERT-base at 128 tokens, GPT-2 at 1,024 and the narrow
language models of docs/league.md, without attention dropout. Each registered filter is in all layers, with its default
options, and is compared with the unpatched model; filters without a causal form are timed in BERT only. Coefficients
are moved away from their start values, at which some filters are faster.

Both are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported;
writes benchmarks/results/menu-DEVICE-steps.csv with percentiles and hardware. ``--only FILTER`` or ``--only SHAPE``
times one of them, and keeps the rows of the others.
"""

from __future__ import annotations

import torch
from measure import Benchmark, read_others, write
from shapes import bert, gpt2, narrow, patch_filter, training_step

from hf_graphfilter import GraphFilterError, available_filters

SHAPES = {"BERT-base, 8 x 128": bert, "GPT-2, 1 x 1,024": gpt2, "GPT-2 of 32 features, 32 x 64": narrow}


def main() -> None:
    filters = available_filters()
    benchmark = Benchmark(__doc__, (*SHAPES, *filters), ())
    only, device = benchmark.only, benchmark.device
    size = {"num_hidden_layers": 1} if benchmark.smoke else {}
    file = benchmark.output / f"menu-{device}-steps.csv"
    table = read_others(file, only)
    for case in [only] if only in SHAPES else SHAPES:
        build, batch, n, causal = SHAPES[case](False, device, **size)
        with torch.device(device):
            baseline_step = training_step(build().train(), batch)
        for name in [only] if only in filters else filters:
            try:
                with torch.device(device):
                    step = training_step(patch_filter(build(), name).train(), batch)
            except GraphFilterError as error:
                print(f"{case}: {name} is refused ({error})")
                continue
            table += benchmark.time({"plain": baseline_step, name: step}, case, n, causal)[1:]
            write(table, file, quiet=True)


if __name__ == "__main__":
    main()
