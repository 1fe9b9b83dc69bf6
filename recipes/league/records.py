"""The records of a league's runs, and the numbers in them."""

from operator import eq, gt
from typing import Any, NamedTuple

from hf_graphfilter.files import check_content


class Run(NamedTuple):
    """One training: tuning where the seed is 0."""

    task: str
    variant: str
    seed: int
    rate: float  # of the model a factor, of the filter's coefficients the learning rate


Records = dict[Run, dict[str, Any]]


def by_run(content: dict[str, Any]) -> Records:
    """Return the records of a results file.

    Raises:
        GraphFilterError: the file is damaged.
    """
    for record in content["runs"]:
        check_content(record, "the results of this league", task=str, rate=float)
    return {Run(*(record[name] for name in Run._fields)): record for record in content["runs"]}


def level(score: float) -> float:
    """As equal for means of the same right answers in another order, which differ in their last bit."""
    return float(f"{score:.12g}")


def ranked(scores: dict[str, float]) -> dict[str, float]:
    """Ranks from 1, of the highest score; those that are level share theirs.

    Example:
        >>> ranked({"a": 0.5, "b": 0.7, "c": 0.5})
        {'a': 2.5, 'b': 1.0, 'c': 2.5}
    """
    counts = {
        name: [sum(by(other, own) for other in scores.values()) for by in (gt, eq)] for name, own in scores.items()
    }
    return {name: above + (level + 1) / 2 for name, (above, level) in counts.items()}
