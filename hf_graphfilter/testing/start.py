"""Checks of a new filter: its config, its parameters, and its output at the start."""

from __future__ import annotations

import copy
import json

import torch
from torch import nn

from ..errors import GraphFilterError
from ..filters import FilterConfig
from ..filters.core.attached import filters_of
from ..patching.patch import patch_model
from .trial import ALL, DoesNotApply, Failed, Family, Trial, check, equal, one_line, output, state


def _check_initialised(model: nn.Module, complaint: str) -> None:
    for name, tensor in state(model).items():
        if not tensor.isfinite().all():
            raise Failed(f"{complaint} {name.split('graph_filter.')[-1].rpartition('.')[2]}, at {name}")


def _reset(model: nn.Module, complaint: str) -> None:
    """Fill the tensors of all filters with NaN, call ``reset_parameters``, and fail if a NaN is left."""
    for tensor in state(model).values():
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
    for _, graph_filter in filters_of(model):
        graph_filter.reset_parameters()
    _check_initialised(model, complaint)


@check("config", basic=True)
def _config(trial: Trial, _: Family) -> None:
    config = trial.config
    try:
        text = json.dumps(config.to_dict())
    except TypeError as error:
        raise Failed(f"its options cannot be written as JSON: {error}") from error
    if FilterConfig.from_dict(json.loads(text)) != config:
        raise Failed(f"{config!r} is not what is read back from {text}")


@check("patching", basic=True)
def _patching(trial: Trial, _: Family) -> str:
    refusals: dict[str, Exception] = {}
    for family in trial.families:
        try:
            patch_model(family.build(), trial.config)
        except GraphFilterError as error:
            refusals[family.name] = error
    if len(refusals) == len(trial.families):
        raise next(iter(refusals.values()))
    trial.families = [f for f in trial.families if f.name not in refusals]
    return "; ".join(f"not in {name}: {one_line(error)}" for name, error in refusals.items())


@check("start values", *ALL)
def _start_values(trial: Trial, family: Family) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # fills the result of torch.empty with NaN
    try:
        model = patch_model(family.build(), trial.config)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    _check_initialised(model, "__init__ leaves uninitialised memory (call reset_parameters at its end) in")
    _reset(model, "reset_parameters does not set")


@check("meta", *ALL)
def _meta(trial: Trial, family: Family) -> None:
    """Build a model on the meta device, as ``from_pretrained`` does."""
    with torch.device("meta"):
        model = patch_model(family.model_class(copy.deepcopy(family.config)), trial.config)
    if differences := {*state(patch_model(family.build(), trial.config))} ^ {*state(model)}:
        raise Failed(f"built on the meta device the filter has other parameters and buffers: {sorted(differences)}")
    model.to_empty(device="cpu")
    _reset(model, "after it was built on the meta device, reset_parameters does not set")


@check("forward", *ALL, basic=True)
def _forward(trial: Trial, family: Family) -> None:
    model = trial.patched(family)
    versions: list[int] = []
    for _, graph_filter in filters_of(model):
        graph_filter.register_forward_pre_hook(lambda _, args: versions.append(args[1]._version))
        graph_filter.register_forward_hook(lambda _, args, out: versions.append(args[1]._version))
    if not output(model, family.inputs()).isfinite().all():
        raise Failed("its output is not finite")
    if versions[::2] != versions[1::2]:
        raise Failed("forward changes the value in place, which the model and its cache hold too")


@check("starts as the original", *ALL)
def _starts_as_original(trial: Trial, family: Family) -> None:
    if not trial.config.starts_as_original:
        raise DoesNotApply("its config says that it does not (starts_as_original)")
    start = output(patch_model(family.build(), trial.config), family.inputs())
    equal(start, output(family.build(), family.inputs()), "right after patching the model is not the original")
