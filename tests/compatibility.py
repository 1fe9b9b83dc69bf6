"""docs/compatibility.md from the tests' results: ``python tests/compatibility.py``, with further arguments of pytest.

A test marked ``feature("Section: feature")`` shows that feature for the filter and the family among its parameters.
What tests found is kept in docs/compatibility.json. A run of all replaces it. A run of some (``-k quantized``) replaces
what these show, and leaves the date and the versions of the last run of all. ``pytest --outcomes FILE`` does that
beside any run.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from filters import FILTERS, Entry, cases
from models import FAMILIES, Family
from versions import VERSIONS

from hf_graphfilter.tables import markdown_table

ROOT = Path(__file__).parents[1]
COLUMNS = {entry.config.filter: entry.config.module.__name__ for _, entry in cases()}
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # anyio, by what this module imports before pytest begins
OUTCOMES = ("fails", "works", "refused", "not tested")
TEXT = """# What works

This page lists what works with which filter and model, feature by feature. The tests write it (`python
tests/compatibility.py`).

- A cell names the models that a feature was tested on. In these tests the coefficients of the filter are not at their
  start values.
- **works**: the results equal those of the same patched model without the feature (the tests say to what tolerance).
- **refused**: the call raises an error with the message [below](#refusals).
- *not tested*: no test shows it.
- "All" means {families}.

All other architectures of transformers are in [Architectures](coverage.md).

{summary}

{versions}

{tables}

## Refusals

{refusals}
"""


def described(item: pytest.Item) -> dict[str, str]:
    """Feature, filter and family of a marked test."""
    marker = item.get_closest_marker("feature")
    if marker is None:
        return {}
    found = {"feature": marker.args[0]}
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for value in parameters.values():
        if isinstance(value, Family):
            found["family"] = next(name for name, family in FAMILIES.items() if family is value)
        elif isinstance(value, Entry):
            found["filter"] = value.config.filter
        elif isinstance(value, str) and value in FAMILIES:
            found["family"] = value
        elif isinstance(value, str) and value in FILTERS:
            found["filter"] = FILTERS[value].config.filter
    return found | marker.kwargs


class Collector:
    """A pytest plugin: the outcomes by feature, filter, family, kept in a file."""

    def __init__(self, file: Path):
        self.file = file
        self.now: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        self.messages: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        properties = dict(report.user_properties)
        if "feature" not in properties or (report.when != "call" and report.passed) or report.when == "teardown":
            return
        outcome = "fails" if report.failed else "not tested" if report.skipped else "works"
        feature = properties["feature"]
        for name in (properties["filter"],) if "filter" in properties else COLUMNS:
            if outcome == "works" and "refused" in properties:
                outcome = "refused"
                without_paths = re.sub(r"/\S*/", "", properties["refused"])
                self.messages[name_refusal(feature, name)] = without_paths
            self.now[feature, name, properties.get("family", "")].add(outcome)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_whole = ran_all(session, exitstatus) or not self.file.exists()
        kept = {"found": {}, "messages": {}} if is_whole else json.loads(self.file.read_text())
        for (feature, name, family), outcomes in self.now.items():
            by_filter = kept["found"].setdefault(feature, {}).setdefault(name, {})
            by_filter[family] = next(o for o in OUTCOMES if o in outcomes)
        refused = {
            name_refusal(feature, name)
            for feature, by_filter in kept["found"].items()
            for name, by_family in by_filter.items()
            if "refused" in by_family.values()
        }
        messages = kept["messages"] | self.messages
        kept["messages"] = {name: message for name, message in messages.items() if name in refused}
        kept["versions" if is_whole else "versions of some"] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": "CUDA" if torch.cuda.is_available() else "CPU",
            "date": date.today().isoformat(),
        }
        self.file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def ran_all(session: pytest.Session, exitstatus: int) -> bool:
    """Return whether a run came to its end and had all tests that are marked ``feature``."""
    option = session.config.option
    places = {Path(session.config.invocation_params.dir, argument).resolve() for argument in session.config.args}
    chosen = option.markexpr not in ("", "feature") or option.keyword or option.deselect or option.ignore
    stopped = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return places == {Path(__file__).resolve().parent} and not (
        chosen or stopped or session.shouldfail or session.shouldstop
    )


def name_refusal(feature: str, name: str) -> str:
    """Return what a refusal of a feature by a filter is listed under."""
    return f"{feature} ({COLUMNS.get(name, name)})"


def cell(by_family: dict[str, str]) -> str:
    by_outcome = defaultdict(list)
    for family, outcome in by_family.items():
        by_outcome[outcome].append(family)
    parts = []
    for outcome in OUTCOMES:
        if outcome in by_outcome and outcome != "not tested":
            families = ", ".join(sorted(filter(None, by_outcome[outcome]), key=list(FAMILIES).index))
            families = f"all {len(FAMILIES)}" if len(by_outcome[outcome]) == len(FAMILIES) else families
            parts.append(f"**{outcome}**" + (f": {families}" if families else ""))
    return "; ".join(parts) or "*not tested*"


def version_table() -> str:
    """Return the table of the releases that the quick suite ran on, as versions.py left it."""
    if not VERSIONS.exists():
        return ""
    rows = []
    for name, row in json.loads(VERSIONS.read_text()).items():
        _, torch_release, _, python = name.split("-")
        python, torch_release, transformers_release = row.get("seen") or [python, torch_release, ""]
        counts = f"{row['passed']} passed, {row['skipped']} skipped" if "passed" in row else row["why"]
        failed = f", {len(row['failed'])} failed ({', '.join(row['failed'])})" if row.get("failed") else ""
        where = [row.get(key, "") for key in ("machine", "date")]
        rows.append([python, torch_release, transformers_release, f"**{row['outcome']}**", counts + failed, *where])
    header = ["Python", "torch", "transformers", "quick suite", "tests", "machine", "date"]
    return f"## Versions\n\nWritten by `make test-versions`.\n\n{markdown_table(header, rows)}"


def write_page() -> None:
    """Write docs/compatibility.md from what was found so far."""
    file = ROOT / "docs" / "compatibility.json"
    file.with_suffix(".md").write_text(page(json.loads(file.read_text())))


def page(kept: dict[str, Any]) -> str:
    sections = defaultdict(list)
    for feature, by_filter in sorted(kept["found"].items()):
        section, _, title = feature.partition(": ")
        sections[section].append([title, *(cell(by_filter.get(name, {})) for name in COLUMNS)])
    outcomes = [o for by_filter in kept["found"].values() for f in by_filter.values() for o in f.values()]
    failing = outcomes.count("fails")
    runs = [
        "transformers {transformers}, torch {torch}, {device}, {date}".format(**kept[key])
        for key in ("versions", "versions of some")
        if key in kept
    ]
    return TEXT.format(
        families=", ".join(FAMILIES),
        summary=(
            f"{len(kept['found'])} features, {len(outcomes)} combinations with a filter and a model; "
            f"{'. Some of them were tested again: '.join(runs)}." + f" **{failing} fail.**" * bool(failing)
        ),
        versions=version_table(),
        tables="\n\n".join(
            f"## {section}\n\n{markdown_table(['feature', *COLUMNS.values()], rows)}"
            for section, rows in sections.items()
        ),
        refusals="\n".join(f"- {feature}: “{message}”" for feature, message in sorted(kept["messages"].items())),
    )


def main() -> None:
    file = ROOT / "docs" / "compatibility.json"
    folder = str(Path(__file__).parent)
    status = pytest.main(["-q", "-m", "feature", "-W", IMPORTED, "--outcomes", str(file), folder, *sys.argv[1:]])
    write_page()
    sys.exit(status)


if __name__ == "__main__":
    main()
