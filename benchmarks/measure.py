"""What the benchmarks share: hardware, rounds of timing, rows, and peak memory in a process of its own."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from hf_graphfilter.fitting.memory import begin_peak_memory, peak_memory

RESULTS = Path(__file__).parent / "results"
FIELDS = [
    *("date", "device", "case", "n", "causal", "pass", "form"),
    *("p10_ms", "median_ms", "p90_ms", "ratio_p10", "ratio_to_plain", "ratio_p90", "peak_mb", "rounds"),
    *("torch", "transformers"),
]

RATIOS = ("ratio_p10", "ratio_to_plain", "ratio_p90")


def half(device: str) -> torch.dtype:
    """What models are run in: on a GPU the dtype that its attention kernels are made for."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor()}, {torch.get_num_threads()} threads"


def arguments(description: str, sections: tuple[str, ...], lengths: tuple[int, ...]) -> tuple[Namespace, dict]:
    """The command line of a benchmark, and the fields that all its rows have."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=sections, help="one part")
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--seconds", type=float, default=6.0, help="of rounds for each case")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder; one below this is for another machine")
    parser.add_argument("--smoke", action="store_true", help="models of one layer: whether it runs, not how fast")
    options = parser.parse_args()
    return options, {
        "date": date.today().isoformat(),
        "device": hardware(options.device),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(forms: dict[str, Callable[[], object]], device: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every form, timed in turn, as many rounds (3 to 30) as fit into ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for run in forms.values():
        run()
    begun = time.perf_counter()
    for done in range(30):
        if done >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, run in forms.items():
            sync(device)
            start = time.perf_counter()
            run()
            sync(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def rows(common: dict, times: dict[str, list[float]]) -> list[dict]:
    made = []
    for form, values in times.items():
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        ratios = (
            [value / plain for value, plain in zip(values, times["plain"], strict=True)] if "plain" in times else []
        )
        made.append(
            {
                **common,
                "form": form,
                "p10_ms": round(cuts[0], 3),
                "median_ms": round(statistics.median(values), 3),
                "p90_ms": round(cuts[-1], 3),
                **ratio_fields(ratios),
                "rounds": len(values),
            }
        )
    return made


def ratio_fields(ratios: list[float]) -> dict[str, float]:
    if not ratios:
        return {}
    cuts = statistics.quantiles(ratios, n=10, method="inclusive")
    return {name: round(x, 3) for name, x in zip(RATIOS, (cuts[0], statistics.median(ratios), cuts[-1]), strict=True)}


def report(made: list[dict]) -> list[dict]:
    for row in made:
        print(
            f"{row['case'][:42]:42} n={row['n']:<5} {'causal' if row['causal'] else '      '} {row['pass']:13} "
            f"{row['form']:6}"
            + (f"{row['median_ms']:10.2f} ms" if "median_ms" in row else f"{row['peak_mb']:10} MB")
            + (f"  x{row['ratio_to_plain']}" if "ratio_to_plain" in row else ""),
            flush=True,
        )
    return made


def write(made: list[dict], output: Path, fields: list[str] = FIELDS) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(made)
    print(f"wrote {output}")


# -------------------------------------------------------------------------------------------------------- memory


def peak_mb(script: str, device: str, *case: object) -> float:
    """Peak memory of one case over its inputs, in MB: ``script --measure DEVICE *case`` calls ``measure``.

    It runs in a process of its own that gives freed memory back at once.
    """
    command = [sys.executable, script, "--measure", device, *map(str, case)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return round(float(done.stdout.split()[-1]), 1)


def measure(device: str, tiny: Callable[[], object], run: Callable[[], object]) -> None:
    """The inside of ``peak_mb``: beyond what was in use after ``tiny``. On a CPU it needs Linux."""
    tiny()
    place = torch.device(device)
    base = begin_peak_memory(place)
    assert base is not None
    kept = run()  # what the call returns is part of what it needs
    print(peak_memory(place) - base)
    del kept
