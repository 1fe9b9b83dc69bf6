"""Run all measurements that need a GPU, in ten minutes: ``make bench-gpu``, or ``python benchmarks/gpu.py``.

These are the correctness of the kernels on the device, training steps, attention, AGF up to 131,072 tokens, decoding
with and without CUDA graphs, DeiT throughput, every filter in BERT-base, compiled steps, classifiers by length, and the
tests marked gpu. Each section is a process with its own time limit; the most important ones come first. The results of
a section are in benchmarks/results as soon as it ends. gpu-DEVICE-sections.csv says how the sections ended. A second
run resumes with the sections that are not yet done at this commit on this device.

At the end it says where kernels won, as lines of ``hf_graphfilter/ops/triton/enabled.py``.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from pathlib import Path

import torch
from measure import RESULTS, stamp, write

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
FIELDS = ["date", "device", "commit", "section", "outcome", "seconds", "torch"]
WON = 0.97  # a kernel wins if it takes at most this share of the time without it
PYTEST = ["-m", "pytest", "-q", "-p", "no:xdist", "-m"]


def sections(smoke: bool) -> dict[str, tuple[int, list[str]]]:
    """Seconds and command of every section; the tests that need a GPU are only collected in a smoke run."""
    lengths = ["64"] if smoke else ["128", "197", "512", "1024", "2048", "4096"]
    long_lengths = ["64"] if smoke else ["512", "2048", "8192", "32768", "131072"]
    contexts = ["128"] if smoke else ["512", "2048", "8192"]
    collect = ["--collect-only"] if smoke else []

    def program(name: str, *arguments: str) -> list[str]:
        return [str(HERE / name), *arguments]

    return {
        "kernels": (90, [*PYTEST, "gpu", *collect, str(TESTS / "test_triton.py")]),
        "steps": (60, program("gfsa.py", "--only", "steps")),
        "attention": (80, program("gfsa.py", "--only", "attention", "--lengths", *lengths)),
        "agf": (80, program("agf.py", "--only", "attention", "--lengths", *long_lengths)),
        "decoding": (60, program("decoding.py", "--lengths", *contexts)),
        "vision": (50, program("vision.py", "--only", "DeiT-S, 12 layers", "--lengths", "1" if smoke else "128")),
        "menu": (60, program("menu.py", "--only", "BERT-base, 8 x 128")),
        "compiled": (120, program("gfsa.py", "--only", "compiled")),
        "sequences": (40, program("sequences.py", "--only", "steps", "--lengths", *contexts)),
        "tests": (90, [*PYTEST, "gpu and not slow", *collect, str(TESTS), "--ignore", str(TESTS / "test_triton.py")]),
    }


def find_winners(rows: Iterable[dict], kernel: str) -> int | None:
    """Return the fewest tokens from which a kernel won in training, whatever the mask.

    It is timed as "kernel" beside the form without it, which has the kernel's name.
    """
    times: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        if row["pass"] == "fwd+bwd":
            times.setdefault((int(row["n"]), row["causal"]), {})[row["form"]] = float(row["median_ms"])
    pairs = [(n, forms["kernel"] <= WON * forms[kernel]) for (n, _), forms in times.items() if "kernel" in forms]
    lost = max((n for n, won in pairs if not won), default=0)
    return min((n for n, _ in pairs if n > lost), default=None)


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--smoke", action="store_true", help="whether every section runs, not how fast")
    parser.add_argument("--only", nargs="+", choices=sections(False), help="sections")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"bench-gpu needs a CUDA device, and PyTorch {torch.__version__} sees none.")
    common = stamp(options.device, "torch") | {"commit": commit()}
    file = options.output / f"gpu-{options.device}-sections.csv"
    rows = list(csv.DictReader(file.read_text().splitlines())) if file.is_file() else []
    keys = ("device", "commit")
    rows = [row for row in rows if all(row[key] == common[key] for key in keys) and row["outcome"] == "done"]
    patience = 10 if options.smoke else 1
    end = time.monotonic() + 60 * options.minutes
    for section, (limit, command) in sections(options.smoke).items():
        if any(row["section"] == section for row in rows) or (options.only and section not in options.only):
            continue
        command = [sys.executable, *command]
        if command[1] != "-m":
            command += ["--device", options.device, "--output", str(options.output)]
            command += ["--seconds", "0.01", "--smoke"] if options.smoke else ["--seconds", "0.4"]
        start = time.monotonic()
        print(f"== {section}", flush=True)
        try:
            code = subprocess.run(command, check=False, timeout=max(1, min(limit * patience, end - start))).returncode
            outcome = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            outcome = "out of time"
        seconds = round(time.monotonic() - start)
        rows.append({**common, "section": section, "outcome": outcome, "seconds": seconds})
        print(f"== {section}: {outcome} after {seconds} s", flush=True)
        write(rows, file, FIELDS)
    for kernel in ("gfsa", "agf"):
        timings = options.output / f"{kernel}-{options.device}-attention.csv"
        fewest = find_winners(csv.DictReader(timings.read_text().splitlines()), kernel) if timings.is_file() else None
        print(f"FASTER, {common['device']}: the kernel of {kernel} from {fewest or 'no number of'} tokens on")
    if any(row["outcome"] != "done" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
