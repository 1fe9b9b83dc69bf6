"""Read and check the settings of a linearization that do not depend on the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from ..devices import process
from ..errors import GraphFilterError, is_number, nearest, shown
from ..filters import FilterConfig, ReplacingConfig, as_config
from ..filters.core.registry import get_filter
from .run import Rates
from .weights import Train

STAGES = ("attention", "hidden", "logits", "task")
USUAL = {"attention": 0.7, "logits": 0.3}


def read_config(filter: str | FilterConfig, options: dict[str, Any]) -> ReplacingConfig:
    """Return the config of the filter, with the options that fit pretrained attention best if it is given by name."""
    kind = get_filter(filter) if isinstance(filter, str) else type(as_config(filter, **options))
    if not issubclass(kind, ReplacingConfig):
        raise GraphFilterError(
            f"{kind.filter!r} computes softmax attention, which costs O(n^2): linearize with a replacement filter, "
            "such as 'far_field' or 'agf'"
        )
    config = kind.for_conversion(**options) if isinstance(filter, str) else filter
    assert isinstance(config, ReplacingConfig)
    if config.init == "blend":
        raise GraphFilterError("init='blend' would leave attention in the model: linearize with init='copy'")
    return config


def read_rates(wanted: Any) -> Rates:
    """Return the learning rates: the defaults of ``Rates``, replaced by those in ``wanted``."""
    names = [field.name for field in fields(Rates)]
    values = asdict(wanted) if isinstance(wanted, Rates) else wanted
    if not isinstance(values, Mapping) or not all(
        name in names and (is_number(rate) or (name == "filter_lr" and rate is None)) for name, rate in values.items()
    ):
        raise GraphFilterError(f"rates are numbers >= 0 by the names of Rates, {', '.join(names)}; got {shown(wanted)}")
    rates = Rates(**values)
    if not rates.attention and rates.filter_lr is not None:  # later stages keep their ratio
        raise GraphFilterError("rates: filter_lr goes with an attention rate > 0, got attention=0")
    return rates


def read_shares(stages: Mapping[str, float] | None, budget: int) -> dict[str, float]:
    """Return the shares of the budget, or an empty dictionary if ``stages`` is None (the usual shares)."""
    if type(budget) is not int or budget < 1:
        raise GraphFilterError(f"budget must be a number of tokens, at least 1, got {shown(budget)}")
    if stages is None:
        return {}
    if not isinstance(stages, Mapping) or not stages:
        raise GraphFilterError(f"stages must give shares of the budget by name, such as {USUAL}, got {shown(stages)}")
    for name, share in stages.items():
        if name not in STAGES:
            raise GraphFilterError(f"there is no stage {shown(name)}{nearest(name, STAGES)}: {', '.join(STAGES)}")
        if not isinstance(share, (int, float)) or not 0 < share < math.inf:
            raise GraphFilterError(f"stages: the share of {name!r} must be a number > 0, got {shown(share)}")
    if list(stages) != sorted(stages, key=STAGES.index):
        raise GraphFilterError(f"stages come in the order {', '.join(STAGES)}, got {', '.join(stages)}")
    return dict(stages)


def split_budget(shares: dict[str, float], budget: int) -> dict[str, int]:
    """Return the number of tokens per stage."""
    total = sum(shares.values())
    return {name: max(1, round(budget * share / total)) for name, share in shares.items()}


def check_choices(evaluations: int, rank: int, precision: str | None, train: str, blocks: int) -> None:
    """Raise a ``GraphFilterError`` if one of these arguments of ``linearize`` has an invalid value."""
    if type(blocks) is not int or blocks < 1 or (blocks > 1 and process()[1] > 1):
        raise GraphFilterError(f"blocks must be a number >= 1, and 1 in several processes, got {shown(blocks)}")
    if not all(type(x) is int and x >= 1 for x in (evaluations, rank)):
        raise GraphFilterError(f"evaluations and rank are integers >= 1, got {shown(evaluations)} and {shown(rank)}")
    if precision not in (None, "bf16"):
        raise GraphFilterError(f"precision={shown(precision)}: use 'bf16' or None")
    if train not in get_args(Train):
        raise GraphFilterError(f"train={shown(train)}: use {', '.join(map(repr, get_args(Train)))}")
