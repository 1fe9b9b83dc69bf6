"""The records of a league's runs, and the numbers in them."""

from typing import Any, NamedTuple

from scipy.stats import rankdata

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


def rank_scores(scores: dict[str, float]) -> dict[str, float]:
    """Return ranks from 1, the rank of the highest score; equal scores share their mean rank.

    Example:
        >>> rank_scores({"a": 0.5, "b": 0.7, "c": 0.5})
        {'a': 2.5, 'b': 1.0, 'c': 2.5}
    """
    return dict(zip(scores, rankdata([-score for score in scores.values()]).tolist(), strict=True))
