"""The check of a preference trainer's reference model, which needs the same filters as the trained model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..filters import GraphFilter
from ..filters.core.attached import filters_of, has_start_values, is_whole
from ..filters.core.record import describe_record, record_of
from ..filters.core.replacing import ReplacingFilter


def check_reference(trainer: Any) -> str | None:
    """Return a sentence if the reference model of a trainer has other filters than its model, else None.

    TRL's trainers (DPO, KTO, GRPO, RLOO) load the reference model from the folder that the model came from. That folder
    has no filters that ``load_filter`` or ``patch_model`` added afterwards. Filters that still equal the original
    attention are no problem, and a resumed run is not checked again.
    """
    model, reference = (getattr(trainer, name, None) for name in ("model", "ref_model"))
    if not isinstance(model, nn.Module) or not isinstance(reference, nn.Module) or model is reference:
        return None
    filters = [[f for _, f in filters_of(each)] for each in (model, reference)]
    configs, reference_configs = ([f.config for f in each] for each in filters)
    resumed = getattr(getattr(trainer, "state", None), "global_step", 0) > 0
    if configs == reference_configs or resumed:
        return None
    if all(_is_original(f) for each in filters for f in each):
        return None
    model_text, reference_text = (_describe(each) for each in (configs, reference_configs))
    return (
        f"the model that is trained has {model_text}, and the reference model has {reference_text}: pass "
        "ref_model=copy.deepcopy(model), or save the patched model and load it from there, as TRL loads the reference"
    )


def _describe(configs: list[Any]) -> str:
    return describe_record(record_of("", ((str(i), config) for i, config in enumerate(configs)))) or "no graph filter"


def _is_original(graph_filter: GraphFilter) -> bool:
    """Return whether a filter still has its start values and with them equals the original attention."""
    if not is_whole(graph_filter) or not graph_filter.config.starts_as_original:
        return False
    if isinstance(graph_filter, ReplacingFilter):
        return not graph_filter.gate.any()  # type: ignore[union-attr]  # has a gate, since it starts as the original
    return has_start_values(graph_filter)
