"""docs/compatibility.md from the tests' results: ``python tests/compatibility.py`` (some minutes; -n 2 in parallel).

A test marked ``feature("Section: feature")`` shows that feature for the filter and the family among its parameters.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import FAMILIES, Family

from hf_graphfilter import FilterConfig
from hf_graphfilter.card import markdown_table

ROOT = Path(__file__).parents[1]
FILTERS = {"gfsa": "GFSA", "agf": "AGF"}
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # anyio, by what this module imports before pytest begins
OUTCOMES = ("fails", "works", "refused", "not tested")
TEXT = """# What works

Every row is what tests show: a command runs them and writes this page (`python tests/compatibility.py`). A cell names
the models that a feature was tested on with a filter whose coefficients are on; **works** means the results of the same
model used in the plain way (the tests say to what tolerance), **refused** that the call stops with the message below.
What no test shows is *not tested*. Every other architecture of transformers: [coverage.md](coverage.md).

{summary}

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
    for value in getattr(item, "callspec", None).params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, Family):
            found["family"] = next(name for name, family in FAMILIES.items() if family is value)
        elif isinstance(value, FilterConfig):
            found["filter"] = value.filter
        elif isinstance(value, str) and value in FAMILIES:
            found["family"] = value
        elif isinstance(value, str) and value.partition("-")[0] in FILTERS:
            found["filter"] = value.partition("-")[0]
    return found | marker.kwargs


class Collector:
    """A pytest plugin: the outcomes by feature, filter, family."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, dict[str, set[str]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(set))
        )
        self.messages: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        properties = dict(report.user_properties)
        if "feature" not in properties or (report.when != "call" and report.passed) or report.when == "teardown":
            return
        outcome = "fails" if report.failed else "not tested" if report.skipped else "works"
        for name in (properties["filter"],) if "filter" in properties else FILTERS:
            if outcome == "works" and "refused" in properties:
                outcome = "refused"
                self.messages[f"{properties['feature']} ({FILTERS[name]})"] = properties["refused"]
            self.found[properties["feature"]][name][properties.get("family", "")].add(outcome)

    def cell(self, feature: str, name: str) -> str:
        by_outcome = defaultdict(list)
        for family, outcomes in self.found[feature][name].items():
            by_outcome[next(o for o in OUTCOMES if o in outcomes)].append(family)
        parts = []
        for outcome in OUTCOMES:
            if outcome in by_outcome and (outcome != "not tested" or len(by_outcome) == 1):
                families = ", ".join(sorted(filter(None, by_outcome[outcome]), key=list(FAMILIES).index))
                parts.append(f"**{outcome}**" * (outcome != "not tested") + (f": {families}" if families else ""))
        return "; ".join(filter(None, parts)) or "*not tested*"

    def page(self) -> str:
        sections = defaultdict(list)
        for feature in sorted(self.found):
            section, _, title = feature.partition(": ")
            sections[section].append([title, *(self.cell(feature, name) for name in FILTERS)])
        outcomes = [o for by in self.found.values() for f in by.values() for family in f.values() for o in family]
        return TEXT.format(
            summary=(
                f"{len(self.found)} features; transformers {transformers.__version__}, torch {torch.__version__}, "
                f"{'CUDA' if torch.cuda.is_available() else 'CPU'}, {date.today()}."
                + f" **{outcomes.count('fails')} fail.**"
                * ("fails" in outcomes)
            ),
            tables="".join(
                f"## {section}\n\n{markdown_table(['feature', *FILTERS.values()], rows)}\n\n"
                for section, rows in sections.items()
            ),
            refusals="\n".join(f"- {feature}: “{message}”" for feature, message in sorted(self.messages.items())),
        )


def main() -> None:
    collector = Collector()
    folder = str(Path(__file__).parent)
    status = pytest.main(["-q", "-m", "feature", "-W", IMPORTED, folder, *sys.argv[1:]], plugins=[collector])
    (ROOT / "docs" / "compatibility.md").write_text(collector.page())
    sys.exit(status)


if __name__ == "__main__":
    main()
