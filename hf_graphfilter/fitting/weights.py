"""What the last stages train besides the filters: nothing, low-rank adapters, or all weights; and the original, which
stays as it was."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import GraphFilterError, needs
from ..filters import GraphFilter
from ..filters.core.attached import CHILD
from .objectives import Batch, Original, Outputs, original_of
from .transfer import restored_on_error

Train = Literal["filters", "lora", "all"]


class Trained(NamedTuple):
    """Weights by name that are trained, and what the model was like before."""

    parameters: dict[str, nn.Parameter]
    original: Original


def check_trainable(model: nn.Module, kind: Train) -> None:
    """Whether these weights can be trained, before any long work."""
    if kind == "lora":
        with needs("peft", "train='lora'"):
            import peft  # noqa: F401
    narrow = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() < 4), None)
    if kind == "all" and narrow is not None:
        raise GraphFilterError(
            f"train='all' would lose small steps in {narrow}: load the model in float32; precision='bf16' is fast too"
        )


@contextlib.contextmanager
def trained(model: nn.Module, modules: dict[str, GraphFilter], kind: Train, rank: int) -> Iterator[Trained]:
    """The weights; adapters are merged into them afterwards. After an exception all are as they were."""
    if kind == "filters":
        yield Trained({}, original_of(model, modules))
    elif kind == "lora":
        with _adapters(model, modules, rank) as found:
            yield found
    else:
        with _all(model, modules) as found:
            yield found


@contextlib.contextmanager
def _adapters(model: Any, modules: dict[str, GraphFilter], rank: int) -> Iterator[Trained]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_projections(model, modules))
    with warnings.catch_warnings():  # PEFT asks transformers by names that are to go
        warnings.simplefilter("ignore", FutureWarning)
        adapted: Any = get_peft_model(model, config)
    for graph_filter in modules.values():
        graph_filter.requires_grad_(True)
    inside = original_of(model, modules)

    def original(batch: Batch) -> Outputs:
        with adapted.disable_adapter():
            return inside(batch)

    end = adapted.unload
    try:
        yield Trained({name: p for name, p in model.named_parameters() if ".lora_" in name}, original)
        end = adapted.merge_and_unload
    finally:
        end()
        vars(model).pop("peft_config", None)


def _projections(model: nn.Module, modules: dict[str, GraphFilter]) -> list[str]:
    """The linear layers of the attention of each module: its own, and those around it that hold nothing else."""
    found = []
    for name in modules:
        block = name
        while (around := block.rpartition(".")[0]) and not around.rpartition(".")[2].isdigit():
            block = around
        for inner, layer in model.get_submodule(block).named_modules():
            if isinstance(layer, (nn.Linear, Conv1D)) and CHILD not in inner.split("."):
                found.append(f"{block}.{inner}")
    return found


@contextlib.contextmanager
def _all(model: nn.Module, modules: dict[str, GraphFilter]) -> Iterator[Trained]:
    filters = {id(p) for graph_filter in modules.values() for p in graph_filter.parameters()}
    weights = {n: p for n, p in model.named_parameters() if id(p) not in filters and p.is_floating_point()}
    before = copy.deepcopy(model).requires_grad_(False)
    original = original_of(before, {name: before.get_submodule(f"{name}.{CHILD}") for name in modules})  # type: ignore
    with restored_on_error((parameter, before.get_parameter(name)) for name, parameter in weights.items()):
        for parameter in weights.values():
            parameter.requires_grad_(True)
        yield Trained(weights, original)
