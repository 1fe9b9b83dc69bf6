"""List the ratios of times or of peak memory that got worse: ``python benchmarks/regressions.py [BEFORE [AFTER]]``.

BEFORE and AFTER are commits. The default of AFTER is the working tree; that of BEFORE is, for each file of
benchmarks/results, the version before its last change. Rows with the same file, case, length, mask, pass and form are
compared, if both were measured on the same device.

A ratio of times got worse if it rose and each median lies outside the other's range from p10 to p90. Older files have
these percentiles only for times, not for ratios; then the widest range that the times allow is used. Processes differ
more than the rounds of one process, so a busy machine can still cause a false alarm. Peak memory is measured only once:
its ratio got worse if it rose by more than a tenth.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

from measure import RESULTS

ROOT = RESULTS.parents[1]
KEY = ("case", "n", "causal", "pass", "form")
MEMORY = 1 / 11  # to each side of a ratio of peaks, so that a rise by a tenth is a change
LEAST = 4.0  # MB of the baseline's peak; below it, the rest of the process distorts the ratio
Ratio = tuple[float, float, float]  # p10, median, p90


def time_ratios(row: dict[str, str], plain: dict[str, str]) -> Ratio | None:
    """Return the ratio of the times of a form to those of the baseline."""
    if not row.get("ratio_to_plain") or not row.get("p10_ms"):
        return None
    low, high = row.get("ratio_p10"), row.get("ratio_p90")
    if not low or not high:
        low = float(row["p10_ms"]) / float(plain["p90_ms"])
        high = float(row["p90_ms"]) / float(plain["p10_ms"])
    return float(low), float(row["ratio_to_plain"]), float(high)


def memory_ratios(row: dict[str, str], plain: dict[str, str]) -> Ratio | None:
    """Return the ratio of the peak memory of a form to that of the baseline."""
    peaks = [float(x.get("peak_mb") or 0) for x in (row, plain)]
    if peaks[1] < LEAST or not peaks[0]:
        return None
    ratio = peaks[0] / peaks[1]
    return ratio * (1 - MEMORY), ratio, ratio * (1 + MEMORY)


KINDS = {"": time_ratios, "peak memory": memory_ratios}


def ratios(text: str) -> dict[tuple[str, ...], Ratio]:
    """Return those of the rows of a file, by device, case and what is compared."""
    rows = [row for row in csv.DictReader(text.splitlines()) if set(KEY) <= row.keys()]
    baselines = {tuple(row[key] for key in ("device", *KEY[:-1])): row for row in rows if row["form"] == "plain"}
    ratio_by_case = {}
    for row in rows:
        place = tuple(row[key] for key in ("device", *KEY[:-1]))
        if row["form"] == "plain" or place not in baselines:
            continue
        for kind, compute_ratio in KINDS.items():
            if (ratio := compute_ratio(row, baselines[place])) is not None:
                ratio_by_case[*place, row["form"], kind] = ratio
    return ratio_by_case


def find_worse(before: str, after: str) -> Iterator[tuple[tuple[str, ...], Ratio, Ratio]]:
    """(case, ratio before, ratio after) of two versions of a file."""
    old = ratios(before)
    for case, new in ratios(after).items():
        if case in old and new[1] > old[case][2] and old[case][1] < new[0]:
            yield case, old[case], new


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_at(commit: str | None, name: str) -> str | None:
    """Return a file of the repository at a commit, or in the working tree; None where it is not there."""
    if commit is None:
        return (ROOT / name).read_text() if (ROOT / name).is_file() else None
    return git("show", f"{commit}:{name}") if git("ls-tree", "--name-only", commit, name) else None


def last_change(name: str) -> str | None:
    """Return the commit that a file is compared with: HEAD where it is changed, else the one before its last change."""
    if git("status", "--porcelain", name):
        return "HEAD"
    commits = git("log", "-2", "--format=%H", "--", name).split()
    return commits[1] if len(commits) == 2 else None


def report(before: str | None, after: str | None) -> list[str]:
    """Return a line for every ratio that got worse."""
    if after is None:
        names = [str(file.relative_to(ROOT)) for file in sorted(RESULTS.rglob("*.csv"))]
    else:
        folder = str(RESULTS.relative_to(ROOT))
        names = [name for name in git("ls-tree", "-r", "--name-only", after, folder).split() if name.endswith(".csv")]
    lines = []
    for name in names:
        old_commit = before or last_change(name)
        texts = read_at(old_commit, name) if old_commit else None, read_at(after, name)
        if None in texts:
            continue
        for (device, case, n, causal, pass_name, form, kind), old, new in find_worse(*texts):
            description = f"{case}, n = {n}, {'causal, ' if causal == 'True' else ''}{pass_name}, {form} on {device}"
            description += f", {kind}" * bool(kind)
            spreads = (f"{median:g} [{low:.3g}, {high:.3g}]" for low, median, high in (old, new))
            lines.append(f"{Path(name).stem}: {description}: {' -> '.join(spreads)}")
    return lines


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    options = parser.parse_args()
    lines = report(options.before, options.after)
    print("\n".join(lines) or "no ratio got worse by more than its spread")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
