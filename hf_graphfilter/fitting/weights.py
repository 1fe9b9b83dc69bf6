"""The weights that a fit trains: the filters and, after the first stage, also low-rank adapters or all weights."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ..analysis.model_inputs import evaluate
from ..errors import GraphFilterError, needs
from ..filters import GraphFilter
from ..filters.core.attached import CHILD
from .objectives import Batch, Original, Outputs, original_of

Train = Literal["filters", "lora", "all"]


class Trained(NamedTuple):
    """The weights that are trained.

    Attributes:
        parameters: the weights by name.
        original: a function that runs the original model.
        merge: a function that merges adapters into the weights, so that they are rounded as in the saved model.
    """

    parameters: dict[str, nn.Parameter]
    original: Original
    merge: Callable[[], None] = lambda: None


def check_trainable(model: nn.Module, kind: Train) -> None:
    """Raise an error before long work if the weights of this kind cannot be trained."""
    if kind == "lora":
        with needs("peft", "train='lora'"):
            from peft.tuners.tuners_utils import BaseTunerLayer
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise GraphFilterError(
                "train='lora' would merge the adapters that this model already has: merge or unload them before"
            )
    narrow = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() < 4), None)
    if kind == "all" and narrow is not None:
        raise GraphFilterError(
            f"train='all' would lose small steps in {narrow}: load the model in float32; precision='bf16' is fast too"
        )


@contextlib.contextmanager
def trained(model: nn.Module, modules: dict[str, GraphFilter], kind: Train, rank: int) -> Iterator[Trained]:
    """Yield the weights to train; merge the adapters at the end, or restore all weights after an exception."""
    if kind == "filters":
        yield Trained({}, original_of(model, modules))
    elif kind == "lora":
        with _train_adapters(model, modules, rank) as weights:
            yield weights
    else:
        with _train_all(model, modules) as weights:
            yield weights


@contextlib.contextmanager
def _train_adapters(model: Any, modules: dict[str, GraphFilter], rank: int) -> Iterator[Trained]:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_projections(model, modules))
    with warnings.catch_warnings():  # PEFT uses names that transformers has deprecated
        warnings.simplefilter("ignore", FutureWarning)
        peft_model: Any = get_peft_model(model, config)
    for graph_filter in modules.values():
        graph_filter.requires_grad_(True)
    run_original = original_of(model, modules)
    earlier_weights: list[tuple[Any, nn.Parameter]] = []  # layers with merged adapters, and their earlier weights

    def original(batch: Batch) -> Outputs:
        with _swap_weights(earlier_weights) if earlier_weights else peft_model.disable_adapter():
            return run_original(batch)

    def merge() -> None:
        layers: list[Any] = [part.get_base_layer() for part in model.modules() if isinstance(part, BaseTunerLayer)]
        before = [(layer, layer.weight, layer.weight.data.clone()) for layer in layers]
        peft_model.merge_and_unload()
        for layer, weight, data in before:  # merging gives quantized layers a new parameter
            earlier_weights.append(
                (layer, nn.Parameter(data, requires_grad=False) if layer.weight is weight else weight)
            )

    try:
        yield Trained({n: p for n, p in model.named_parameters() if ".lora_" in n}, original, merge)
        if not earlier_weights:
            merge()
    except BaseException:
        if not earlier_weights:
            peft_model.unload()
        for layer, weight in earlier_weights:
            if type(weight) is nn.Parameter:
                layer.weight.data = weight.data
            else:
                layer.weight = weight
        raise
    finally:
        vars(model).pop("peft_config", None)


@contextlib.contextmanager
def _swap_weights(weights: list[tuple[Any, nn.Parameter]]) -> Iterator[None]:
    """Give layers other weights inside the ``with`` block."""
    own_weights = [layer.weight for layer, _ in weights]
    try:
        for layer, weight in weights:
            layer.weight = weight
        yield
    finally:
        for (layer, _), weight in zip(weights, own_weights, strict=True):
            layer.weight = weight


def _projections(model: nn.Module, modules: dict[str, GraphFilter]) -> list[str]:
    """Return the names of the linear layers in the attention block of each module, below its numbered layer."""
    names = []
    for name in modules:
        block = name
        while (parent := block.rpartition(".")[0]) and not parent.rpartition(".")[2].isdigit():
            block = parent
        for inner, layer in model.get_submodule(block).named_modules():
            if isinstance(layer, (nn.Linear, Conv1D)) and CHILD not in inner.split("."):
                names.append(f"{block}.{inner}")
    return names


@contextlib.contextmanager
def _train_all(model: nn.Module, modules: dict[str, GraphFilter]) -> Iterator[Trained]:
    filters = {id(p) for graph_filter in modules.values() for p in graph_filter.parameters()}
    weights = {n: p for n, p in model.named_parameters() if id(p) not in filters and p.is_floating_point()}
    twin = copy.deepcopy(model).requires_grad_(False)
    original = original_of(twin, {name: twin.get_submodule(f"{name}.{CHILD}") for name in modules})  # type: ignore
    with restored_on_error((parameter, twin.get_parameter(name)) for name, parameter in weights.items()):
        for parameter in weights.values():
            parameter.requires_grad_(True)
        yield Trained(weights, original)


@contextlib.contextmanager
def restored_on_error(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Set tensors back to these values after an exception inside the ``with`` block."""
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


@contextlib.contextmanager
def only_filters(model: nn.Module, modules: dict[str, GraphFilter]) -> Iterator[None]:
    """Freeze all but the filters, in evaluation mode, and keep the filters in float32 inside the ``with`` block.

    Half precision would lose small steps. At the end modes, dtypes and ``requires_grad`` are restored; after an
    exception the values of the filters are restored, too.
    """
    before = [(p, p.requires_grad, p.dtype) for p in model.parameters()]
    values = [(p, p.detach().clone()) for graph_filter in modules.values() for p in graph_filter.parameters()]
    model.requires_grad_(False)
    for graph_filter in modules.values():
        for parameter in graph_filter.requires_grad_(True).parameters():
            if parameter.element_size() < 4:
                parameter.data = parameter.data.float()
    try:
        with evaluate(model), restored_on_error(values):
            yield
    finally:
        for parameter, required, dtype in before:
            if parameter.requires_grad:
                parameter.grad = None
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(required)


@contextlib.contextmanager
def recomputed(model: Any, wanted: bool) -> Iterator[None]:
    """Enable gradient checkpointing in evaluation mode, where transformers ignores it; dropout stays off."""
    if not wanted:
        yield
        return
    has_new_name = hasattr(type(model), "is_activation_checkpointing")  # its later name
    was_enabled = model.is_activation_checkpointing if has_new_name else model.is_gradient_checkpointing
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # its later name
    enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    rates = [(layer, k, v) for layer in layers for k, v in vars(layer).items() if "drop" in k and isinstance(v, float)]
    for layer in layers:
        layer.training = True  # only the layer itself, not its parts
    for layer, name, _ in rates:
        setattr(layer, name, 0.0)  # BART's layers apply dropout themselves
    try:
        yield
    finally:
        if not was_enabled:
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        for layer in layers:
            layer.training = False
        for layer, name, rate in rates:
            setattr(layer, name, rate)
