"""The common parts of the benchmarks: the command line, times of several forms side by side, and peak memory.

A benchmark is a dictionary of sections for ``main``. A section yields rows, which ``Benchmark.time`` and
``Benchmark.peaks`` measure. All forms are timed in turn within a round and ratios are taken within a round.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path

import torch

from hf_graphfilter.fitting.memory import begin_peak_memory, peak_memory

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = [
    *("date", "device", "case", "n", "causal", "pass", "form"),
    *("p10_ms", "median_ms", "p90_ms", "ratio_p10", "ratio_to_plain", "ratio_p90", "peak_mb", "rounds"),
    *("torch", "transformers"),
]
PASSES = {False: "fwd", True: "fwd+bwd"}  # by whether gradients are computed
STEP = "fwd+bwd+AdamW"
HEADS, FEATURES = 12, 64
SDPA_UP_TO = {"cpu": 16384, "cuda": 131072}  # beyond, one backward pass takes minutes

Call = Callable[[], object]
Section = Callable[["Benchmark"], Iterable[list[dict]]]


class Benchmark:
    """The command line of a benchmark, and what measures by it."""

    def __init__(self, description: str, choices: Iterable[str], lengths: tuple[int, ...]):
        parser = make_parser(description, choices)
        parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
        parser.add_argument("--seconds", type=float, default=6.0, help="of rounds for each case")
        parser.add_argument("--smoke", action="store_true", help="models of one layer: whether it runs, not how fast")
        options = parser.parse_args()
        self.device, self.only, self.smoke = options.device, options.only, options.smoke
        self.lengths, self.seconds, self.output = tuple(options.lengths), options.seconds, options.output
        self.common = stamp(self.device, "torch", "transformers")

    def time(
        self, calls: dict[str, Call], case: str, n: int | str, causal: bool, which: str = STEP, seconds: float = 1.0
    ) -> list[dict]:
        """Time calls by form in turn; return a row each. ``seconds`` is a factor of the option of that name."""
        times = rounds(calls, self.device, self.seconds * seconds)
        fields = {**self.common, "case": case, "n": n, "causal": causal, "pass": which}
        rows = [{**fields, "form": form, **percentiles(values, times.get("plain"))} for form, values in times.items()]
        return show(rows)

    def peaks(
        self, forms: Iterable[str], case: str, n: int, causal: bool, which: str, *arguments: object
    ) -> Iterator[list[dict]]:
        """Measure the peak memory of each form over its inputs, in MB, each in a process of its own.

        It runs the same program, whose ``inside`` is called with device, form, n and ``arguments``. The process gives
        freed memory back at once.
        """
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        for form in forms:
            command = [sys.executable, sys.argv[0], "--measure", json.dumps([self.device, form, n, *arguments])]
            result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            peak = {"form": form, "peak_mb": round(float(result.stdout.split()[-1]), 1)}
            yield show([{**self.common, "case": case, "n": n, "causal": causal, "pass": which, **peak}])


def main(
    name: str,
    description: str,
    sections: dict[str, Section],
    lengths: tuple[int, ...],
    inside: Callable[..., Call] | None = None,
    file: str | None = None,
    fields: list[str] = FIELDS,
) -> None:
    """Run the sections of a benchmark and write results/NAME-DEVICE-SECTION.csv, or one ``file`` for all of them.

    Args:
        name: of the program.
        description: its documentation.
        sections: each yields rows.
        lengths: the default of --lengths.
        inside: (device, form, n, ...) to what ``Benchmark.peaks`` measures.
        file: the name of the one file of all sections, with {device}.
        fields: its columns.
    """
    if sys.argv[1:2] == ["--measure"]:
        assert inside is not None
        device, form, n, *arguments = json.loads(sys.argv[2])
        print_peak(device, *(inside(device, form, tokens, *arguments) for tokens in (32, n)))
        return
    benchmark = Benchmark(description, sections, lengths)
    rows: list[dict] = []
    part = "case" if "case" in fields else "model"
    old_file = benchmark.output / f"{file.format(device=benchmark.device)}.csv" if file and benchmark.only else Path()
    old_rows = list(csv.DictReader(old_file.open())) if old_file.is_file() else []
    for section, measure in sections.items():
        if benchmark.only in (None, section):
            target = file.format(device=benchmark.device) if file else f"{name}-{benchmark.device}-{section}"
            finished, section_rows = rows if file else [], []
            for new_rows in measure(benchmark):
                section_rows += new_rows
                other_rows = [row for row in old_rows if row[part] not in {str(new[part]) for new in section_rows}]
                write([*other_rows, *finished, *section_rows], benchmark.output / f"{target}.csv", fields, quiet=True)
            rows = [*finished, *section_rows]
            print(f"wrote {benchmark.output / f'{target}.csv'}")
            show_growth(section_rows)


def make_parser(description: str, choices: Iterable[str], runs: str | None = None) -> ArgumentParser:
    """Return the flags of every benchmark; with ``runs``, a name, also those of one that reads data and trains."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=choices, help="one part")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder; one below this is of another machine")
    if runs:
        parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of data/ and weights/")
        parser.add_argument("--runs", type=Path, default=ROOT / "runs" / runs, help="folder for what is trained")
    return parser


def stamp(device: str, *libraries: str) -> dict[str, str]:
    """Return the fields of a measurement: when, on what, and with which versions."""
    versions = {name: importlib.import_module(name).__version__ for name in libraries}
    return {"date": date.today().isoformat(), "device": hardware(device), **versions}


def half(device: str) -> torch.dtype:
    """Return the dtype to run models in; on a GPU it is the one that its attention kernels are made for."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def hardware(device: str) -> str:
    """Return the name of the device."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor()}, {torch.get_num_threads()} threads"


def write(rows: list[dict], output: Path, fields: list[str] = FIELDS, *, quiet: bool = False) -> None:
    """Write a CSV file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    if not quiet:
        print(f"wrote {output}")


def read_others(file: Path, only: str | None) -> list[dict]:
    """Return the rows of a CSV file that measuring ``only`` one form or case leaves as they are; none without it."""
    if not only or not file.is_file():
        return []
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if only not in (row["form"], row["case"])]


# --------------------------------------------------------------------------------------------------------------- time


def sync(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(forms: dict[str, Call], device: str, seconds: float) -> dict[str, list[float]]:
    """Return milliseconds of every form, timed in turn, as many rounds (3 to 30) as fit into ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for run in forms.values():
        run()
    begin_time = time.perf_counter()
    for number in range(30):
        if number >= 3 and time.perf_counter() - begin_time > seconds:
            break
        for name, run in forms.items():
            sync(device)
            start = time.perf_counter()
            run()
            sync(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def percentiles(times: list[float], plain: list[float] | None) -> dict[str, float]:
    """Return the fields of a row: times, and their ratios to those of the baseline, if there is one."""
    fields = {"rounds": len(times)}
    names = {"p10_ms": times, "median_ms": times, "p90_ms": times}
    if plain:
        ratios = [value / baseline for value, baseline in zip(times, plain, strict=True)]
        names |= {"ratio_p10": ratios, "ratio_to_plain": ratios, "ratio_p90": ratios}
    for name, values in names.items():
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        value = cuts[0] if "p10" in name else cuts[-1] if "p90" in name else statistics.median(values)
        fields[name] = round(value, 3)
    return fields


def show(rows: list[dict]) -> list[dict]:
    """Print rows, and return them."""
    for row in rows:
        print(
            f"{row['case'][:42]:42} n={row['n']:<5} {'causal' if row['causal'] else '      '} {row['pass']:13} "
            f"{row['form']:6}"
            + (f"{row['median_ms']:10.2f} ms" if "median_ms" in row else f"{row['peak_mb']:10} MB")
            + (f"  x{row['ratio_to_plain']}" if "ratio_to_plain" in row else ""),
            flush=True,
        )
    return rows


def fit_growth(rows: list[dict], causal: bool, which: str, form: str = "agf") -> float:
    """Return the fitted exponent of a form's time in n, least squares on logarithms from 4k tokens on."""
    points = [
        (math.log(row["n"]), math.log(row["median_ms"]))
        for row in rows
        if row["form"] == form and row["causal"] == causal and row["pass"] == which and row["n"] >= 4096
    ]
    x, y = zip(*points, strict=True)
    return statistics.linear_regression(x, y).slope


def show_growth(rows: list[dict]) -> None:
    """Print how the time of each form grows, where two long lengths were timed."""
    timed = [row for row in rows if "median_ms" in row and "causal" in row and row["n"] != "" and row["n"] >= 4096]
    cases = {(row["form"], row["causal"], row["pass"]): row["n"] for row in timed}
    for form, causal, which in cases:
        if len({row["n"] for row in timed if row["form"] == form}) > 1:
            exponent = fit_growth(timed, causal, which, form)
            print(f"{form}, {'causal' if causal else 'encoder'}, {which}: time grows as n^{exponent:.2f}")


# ------------------------------------------------------------------------------------------------------------- inputs


def random_heads(count: int, batch: int, n: int, device: str, backward: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return random tensors (batch, heads, n, features), stored as models store them."""
    generator = torch.Generator(device).manual_seed(0)
    shape = batch, n, HEADS, FEATURES
    stored = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(count))
    return [x.transpose(1, 2).requires_grad_(backward) for x in stored]


def make_pass(forward: Callable[[], torch.Tensor], inputs: Iterable[torch.Tensor], backward: bool) -> Call:
    """Return a call of ``forward``, with gradients of its inputs or without."""

    def run() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        for x in inputs:
            x.grad = None
        return forward().sum().backward()

    return run


def print_peak(device: str, tiny: Call, run: Call) -> None:
    """Print the peak memory of a call in MB beyond what was in use after ``tiny``. On a CPU it needs Linux."""
    tiny()
    place = torch.device(device)
    base = begin_peak_memory(place)
    assert base is not None
    result = run()  # what the call returns is part of what it needs
    print(peak_memory(place) - base)
    del result
