"""The records of a league's runs, the numbers in them, and what its files must hold."""

from typing import Any, NamedTuple

from scipy.stats import rankdata

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import nearest
from hf_graphfilter.files import check_content
from recipes.summary import PLAIN


class Run(NamedTuple):
    """One training: tuning where the seed is 0."""

    task: str
    variant: str
    seed: int
    rate: float  # of the model a factor, of the filter's coefficients the learning rate

    def order(self) -> tuple[Any, ...]:
        """Return the sort key of a run: by task, then by seed, the unpatched model first."""
        return self.task, self.seed, self.variant != PLAIN, self.variant, self.rate


Records = dict[Run, dict[str, Any]]


def index_runs(content: dict[str, Any]) -> Records:
    """Return the records of a results file.

    Raises:
        GraphFilterError: the file is damaged.
    """
    for record in content["runs"]:
        check_content(record, "the results of this league", task=str, rate=float)
    return {Run(*(record[name] for name in Run._fields)): record for record in content["runs"]}


def round_score(score: float) -> float:
    """Round away the last bit, in which means of the same right answers in another order differ."""
    return float(f"{score:.12g}")


def rank_scores(scores: dict[str, float]) -> dict[str, float]:
    """Return ranks from 1, the rank of the highest score; equal scores share their mean rank.

    Example:
        >>> rank_scores({"a": 0.5, "b": 0.7, "c": 0.5})
        {'a': 2.5, 'b': 1.0, 'c': 2.5}
    """
    return dict(zip(scores, rankdata([-score for score in scores.values()]).tolist(), strict=True))


def check_keys(content: Any, what: str, needed: dict[str, type], others: dict[str, type] | None = None) -> None:
    """Raise unless a part of the file has what it needs, and nothing that would be overlooked."""
    if not isinstance(content, dict):
        raise GraphFilterError(f"{what} must be given as NAME: VALUE, found {content!r}")
    others = others or {}
    if unknown := [key for key in content if key not in (*needed, *others)]:
        raise GraphFilterError(f"{what} has no {unknown[0]!r}{nearest(unknown[0], (*needed, *others))}")
    for key, kind in needed.items():
        if not isinstance(content.get(key), kind) or not content[key]:
            raise GraphFilterError(f"{what} needs {key!r}, a {kind.__name__}, found {content.get(key)!r}")
    for key, kind in others.items():
        if content.get(key) is not None and not isinstance(content[key], kind):
            raise GraphFilterError(f"{what} has {key!r} as a {kind.__name__}, found {content[key]!r}")


def check_file(content: Any, name: str) -> None:
    """Raise unless a league file has the parts of a league, each of its kind."""
    parts = {"tasks": dict, "variants": dict, "rates": dict, "stages": list}
    check_keys(content, f"the league {name}", parts, {"longer": object})
    check_keys(content["rates"], "rates", {"learning_rate": list, "filter_lr": list})
    for task, entry in content["tasks"].items():
        optional = {"task": str, "data": str, "settings": dict}
        check_keys(entry, f"the task {task!r}", {"recipe": str, "config": str}, optional)
    for stage in content["stages"]:
        check_keys(stage, "a stage", {"seeds": list}, {"tasks": list, "best": int})
        if not all(type(seed) is int and 0 <= seed < 2**32 for seed in stage["seeds"]):
            raise GraphFilterError(f"the seeds of a stage are whole numbers from 0, found {stage['seeds']!r}")
