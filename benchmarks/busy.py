"""Measure the cost of a filter beside other processes: ``python benchmarks/busy.py`` (on the CPU).

Training steps of typical shapes are timed, with the baseline and the filters in turn, while none, one or two other
processes each keep a core busy. ``AGF, 32 x 256`` is attention alone, forward and backward, beside the same formula in
PyTorch operations. The memory layout makes processes differ by some per cent, so the rounds of several processes are
put together. The rows also have the peak memory of a step.

With ``--compiled`` all models are compiled by ``torch.compile``, and an uncompiled baseline is measured, too. With
``--waiting`` the baseline and one filter are measured with two wait policies: PyTorch's threads keep their cores while
they wait for each other, or leave them to other processes (``OMP_WAIT_POLICY=PASSIVE``).

Writes benchmarks/results/busy-cpu.csv, compiled-cpu.csv or waiting-cpu.csv; ``--only SHAPE`` measures one and keeps the
rows of the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from measure import (
    FIELDS,
    PASSES,
    STEP,
    Call,
    make_parser,
    make_pass,
    percentiles,
    random_heads,
    read_others,
    rounds,
    show,
    stamp,
    write,
)
from shapes import bert, deit_s, gpt2, minilm, narrow, patch_filter, training_step

from hf_graphfilter.fitting.memory import begin_peak_memory, peak_memory
from hf_graphfilter.ops import spectral
from hf_graphfilter.ops.polynomials import expand, recurrence


def molecules(graphs: int, dropout: bool, device: str) -> tuple:
    """Return Graphormer-slim and graphs of ZINC; the recipe that reads them is imported only where this is measured."""
    from graph_steps import graphormer

    return graphormer(dropout, device, graphs=graphs)


def has_zinc() -> bool:
    from graph_steps import ZINC

    return ZINC.is_file()


WIDE = {"width": 128, "batch": 32, "tokens": 64, "heads": 4}
LEAGUE = {"K": 3, "learn": ("w_0", "w_1", "w_K")}  # of the variants whose equal time the league measures
LEAGUE_LAYERS: dict[str, str | list[int]] = {  # where these variants have GFSA
    "gfsa, all coefficients": "all",
    "gfsa, every second layer": "even",
    "gfsa, layers 0, 2 and 4": [0, 2, 4],
    "gfsa, first layer": [0],
}
MIDDLE = {"width": 64, "batch": 16, "tokens": 128, "heads": 4}
LONG = {"width": 128, "batch": 8, "tokens": 256, "heads": 2}
MODELS: dict[str, tuple[Callable[..., tuple], tuple[str, ...]]] = {
    "GPT-2 12 x 32, 32 x 64": (narrow, ("gfsa", *LEAGUE_LAYERS, "contranorm", "agf", "hedgehog")),
    "GPT-2 12 x 64, 16 x 128": (partial(narrow, **MIDDLE), ("gfsa", "gfsa, layers 0, 2 and 4")),
    "GPT-2 12 x 128, 32 x 64": (partial(narrow, **WIDE), ("gfsa",)),
    "GPT-2 12 x 128, 8 x 256": (partial(narrow, **LONG), ("gfsa",)),
    "MiniLM, 32 x 40 padded": (minilm, ("gfsa",)),
    "BERT-base, 8 x 128": (bert, ("gfsa", "contranorm")),
    "DeiT-S, 16 x 197": (deit_s, ("gfsa",)),
    "GPT-2, 1 x 1,024": (gpt2, ("gfsa",)),
    "Graphormer-slim, 32 graphs": (partial(molecules, 32), ("gfsa",)),
    "Graphormer-slim, 256 graphs": (partial(molecules, 256), ("gfsa",)),
}
BATCHED = "AGF, 32 x 256"
WAITING = ("GPT-2 12 x 32, 32 x 64", "GPT-2 12 x 128, 8 x 256", "MiniLM, 32 x 40 padded", "GPT-2, 1 x 1,024", BATCHED)
NOT_COMPILED = "plain, not compiled"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def filter_batch() -> dict[str, Call]:
    """Return the call of AGF's operator over a batch, and that of its formula."""
    u, v, value, sigma = random_heads(4, 32, 256, "cpu", True, torch.float32)
    theta, steps = torch.ones(4, requires_grad=True), recurrence("jacobi", 3)
    left = spectral.Left(u, sigma, theta, steps)

    def formula() -> torch.Tensor:
        return (u.softmax(-1) * expand(sigma.sigmoid(), theta, steps)) @ (v.softmax(-2).mT @ value)

    inputs = (u, v, value, sigma, theta)
    forms = {"plain": formula, "agf": lambda: spectral.filter_all(left, v, value, None)}
    return {form: make_pass(forward, inputs, True) for form, forward in forms.items()}


def build_step(shape: str, form: str, compiled: bool) -> Call:
    if shape == BATCHED:
        return filter_batch()[form]
    build, batch, *_ = MODELS[shape][0](False, "cpu")
    model = build()
    if form in LEAGUE_LAYERS:
        patch_filter(model, "gfsa", layers=LEAGUE_LAYERS[form], **LEAGUE)
    elif form not in ("plain", NOT_COMPILED):
        patch_filter(model, form)
    if compiled and form != NOT_COMPILED:
        model.compile()
    return training_step(model.train(), batch)


def list_forms(shape: str, compiled: bool) -> list[str]:
    forms = ["plain", *(("agf",) if shape == BATCHED else MODELS[shape][1])]
    return [*forms, NOT_COMPILED] if compiled else forms


@contextmanager
def keep_busy(count: int) -> Iterator[None]:
    """Let other processes keep ``count`` cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_here(shape: str, forms: str | list[str], compiled: bool, seconds: float, loads: list[int]) -> object:
    """Return the times of a list of forms under each load, or the peak memory of a step of one form in MB."""
    torch.manual_seed(0)
    if isinstance(forms, list):
        calls, times = {form: build_step(shape, form, compiled) for form in forms}, []
        for load in loads:
            with keep_busy(load):
                times.append(rounds(calls, "cpu", seconds))
        return times
    step, device = build_step(shape, forms, compiled), torch.device("cpu")
    step()
    base = begin_peak_memory(device)
    step()
    assert base is not None
    return peak_memory(device) - base


def run(*arguments: object, **environment: str) -> object:
    """Return what ``measure_here`` returns in another process."""
    command = [sys.executable, __file__, "--here", json.dumps(arguments)]
    env = {**os.environ, **environment}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout
    return json.loads(output.splitlines()[-1])


def measure(shape: str, compiled: bool, processes: int, seconds: float, loads: list[int]) -> Iterator[dict]:
    forms = list_forms(shape, compiled)
    runs = [run(shape, forms, compiled, seconds, loads) for _ in range(processes)]
    peaks = {form: round(run(shape, form, compiled, seconds, loads), 1) for form in forms}  # type: ignore[call-overload]
    for number, load in enumerate(loads):
        times = {form: [t for times in runs for t in times[number][form]] for form in peaks}  # type: ignore[index]
        for form, values in times.items():
            yield {**about(shape, load), "form": form, "peak_mb": peaks[form], **percentiles(values, times["plain"])}


def measure_waiting(shape: str, processes: int, seconds: float, loads: list[int]) -> Iterator[dict]:
    """Measure both ways of waiting in turn; the ratios are to the baseline of the same process."""
    ways: dict[str, dict[str, str]] = {"": {}, ", passive": PASSIVE}
    forms = ["plain", list_forms(shape, False)[1]]
    runs = [{way: run(shape, forms, False, seconds, loads, **ways[way]) for way in ways} for _ in range(processes)]
    for way in ways:
        for number, load in enumerate(loads):
            times = {form: [t for pair in runs for t in pair[way][number][form]] for form in forms}  # type: ignore[index]
            for form, values in times.items():
                yield {**about(shape, load), "form": form + way, **percentiles(values, times["plain"])}


def about(shape: str, load: int) -> dict:
    """Return the fields of a row that say where and what was measured."""
    pass_name = f"{PASSES[True] if shape == BATCHED else STEP}, {load} busy"
    return {**stamp("cpu", "torch", "transformers"), "case": shape, "n": "", "causal": "", "pass": pass_name}


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(measure_here(*json.loads(sys.argv[2]))))
        return
    shapes = (*MODELS, BATCHED)
    parser = make_parser(__doc__, shapes)
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, beside no busy process")
    parser.add_argument("--waiting", action="store_true", help="with waiting threads that keep and that leave a core")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of rounds for each process and load")
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes")
    options = parser.parse_args()
    kind = "compiled" if options.compiled else "waiting" if options.waiting else "busy"
    file = options.output / f"{kind}-cpu.csv"
    if options.waiting and options.compiled:
        parser.error("--waiting times steps that are not compiled")
    if options.compiled:
        if options.only == BATCHED:
            parser.error(f"--compiled times models, and {BATCHED} is a filter alone")
        shapes, options.loads = tuple(MODELS), [0]
    if options.waiting:
        shapes = WAITING
    table = read_others(file, options.only)
    for shape in [options.only] if options.only else shapes:
        if shape.startswith("Graphormer") and not options.only and not has_zinc():
            print(f"{shape}: left out, ZINC is not in ../shared/data")
            continue
        settings = (options.processes, options.seconds, options.loads)
        measured = measure_waiting(shape, *settings) if options.waiting else measure(shape, options.compiled, *settings)
        table += show([*measured])
        write(table, file, FIELDS)


if __name__ == "__main__":
    main()
