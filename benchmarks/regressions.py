"""Which ratio got worse by more than its spread: ``python benchmarks/regressions.py [BEFORE [AFTER]]``.

BEFORE and AFTER are commits. Without AFTER, what is in the working tree; without BEFORE, what each file of
benchmarks/results was before it last changed. Rows are compared by file, case, length, mask, pass and form, where both
were measured on the same device.

A ratio got worse where it rose and each median lies outside the other's p10 to p90. Files written before these were
kept for ratios have those of the times alone; the ratio's are then taken to be as far apart as the times allow. Rounds
of one process differ less than processes do, so a run on a busy machine can still be blamed.
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
Ratio = tuple[float, float, float]  # p10, median, p90


def ratios(text: str) -> dict[tuple[str, ...], Ratio]:
    """Of the rows of a file, by device and case."""
    rows = [row for row in csv.DictReader(text.splitlines()) if row.get("ratio_to_plain") and row.get("p10_ms")]
    plain = {tuple(row[key] for key in KEY[:-1]): row for row in rows if row["form"] == "plain"}
    found = {}
    for row in rows:
        if row["form"] == "plain":
            continue
        low, high = row.get("ratio_p10"), row.get("ratio_p90")
        if not low or not high:
            beside = plain[tuple(row[key] for key in KEY[:-1])]
            low = float(row["p10_ms"]) / float(beside["p90_ms"])
            high = float(row["p90_ms"]) / float(beside["p10_ms"])
        found[row["device"], *(row[key] for key in KEY)] = float(low), float(row["ratio_to_plain"]), float(high)
    return found


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
        earlier = before or last_change(name)
        texts = read_at(earlier, name) if earlier else None, read_at(after, name)
        if None in texts:
            continue
        for (device, case, n, causal, which, form), old, new in find_worse(*texts):
            described = f"{case}, n = {n}, {'causal, ' if causal == 'True' else ''}{which}, {form} on {device}"
            spreads = (f"{median:g} [{low:.3g}, {high:.3g}]" for low, median, high in (old, new))
            lines.append(f"{Path(name).stem}: {described}: {' -> '.join(spreads)}")
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
