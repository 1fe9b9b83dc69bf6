"""Choose the tests that ``make test`` leaves to ``make test-long``, from the times of a run of both:

    python -m pytest -n 2 -m "not slow and not gpu" --junitxml=build/times.xml
    python tests/durations.py build/times.xml

Tests are left out, those with the longest cases first, until the rest takes ``KEPT`` of the time of all. A share does
not depend on the machine. Names are those of functions, so all cases of a test are in the same part.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from statistics import fmean

FILE = Path(__file__).parent / "data" / "long_tests.txt"
KEPT = 0.4


def read_times(report):
    """Return the seconds of all cases of each test, by ``tests/FILE.py::NAME``."""
    times = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname").replace(".", "/") + ".py"
        times[f"{file}::{case.get('name').partition('[')[0]}"].append(float(case.get("time")))
    return times


def choose_long(times):
    """Return the names of the tests to leave out, sorted."""
    left, long = sum(map(sum, times.values())), []
    most = KEPT * left
    for name in sorted(times, key=lambda name: fmean(times[name]), reverse=True):
        if left <= most:
            break
        left -= sum(times[name])
        long.append(name)
    return sorted(long)


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in choose_long(read_times(sys.argv[1]))))
