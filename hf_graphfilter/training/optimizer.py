"""Filter coefficients need a learning rate of their own.

AdamW moves a scalar by at most about the learning rate a step: at 2e-5 a coefficient ends a fine-tuning run within
about 0.01 of where it began, and the filter does almost nothing. Weight decay would pull it back to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ..errors import GraphFilterError, is_number, shown
from ..filters.attached import filters_of
from ..status import filter_parameters

FILTER_LR = 1e-2
_OWN_GROUPS = ("galore", "apollo", "lomo", "adalomo")


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, filter_lr: float = FILTER_LR
) -> list[dict[str, Any]]:
    """Optimizer groups: decayed weights, undecayed ones (biases, norms), and the filter's, with their own rate.

    Args:
        model: a patched model, wrapped or not.
        lr, weight_decay: of the model's own parameters.
        filter_lr: learning rate of the filter coefficients (``w_K``, ``theta`` ...), which get no weight decay. Weights
            of a filter (``sigma`` of AGF ...) are treated as the model's own.

    Returns:
        Groups of the parameters that require gradients; every one is in exactly one group, none is empty. Where expert
        parallelism has distributed some of a group only, these are one of their own.

    Raises:
        GraphFilterError: a rate that is none, a model without filter parameters, or with all of them frozen.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=2)))
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, lr=2e-5, weight_decay=0.01))
        >>> [g["lr"] for g in optimizer.param_groups]
        [2e-05, 2e-05, 0.01]
    """
    check_rates(lr=lr, filter_lr=filter_lr)
    if not any(True for _ in filter_parameters(model)):
        raise GraphFilterError(
            f"{type(model).__name__} has no filter parameters: patch it first, with learn= not empty"
        )
    if not any(p.requires_grad for p in filter_parameters(model)):
        raise GraphFilterError(
            f"the filter of {type(model).__name__} is frozen: with PEFT, use modules_to_save=['graph_filter'], or the "
            "adapter is saved without it; else call requires_grad_() on its parameters"
        )
    own = coefficient_ids(model)
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # uses nothing of a Trainer
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    rest = [(n, p) for n, p in named if id(p) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in rest if n in decayed], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for n, p in rest if n not in decayed], "lr": lr, "weight_decay": 0.0},
        {"params": [p for _, p in named if id(p) in own], "lr": filter_lr, "weight_decay": 0.0},
    ]
    return [{**group, "params": parameters} for group in groups for parameters in _by_mesh(group["params"])]


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """One call of a fused or foreach kernel takes the tensors of one device mesh, or plain ones: expert parallelism
    leaves both in a model."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [*meshes.values()]


def check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not is_number(rate):
            raise GraphFilterError(f"{name} must be a finite learning rate >= 0, got {shown(rate)}")


def coefficient_ids(model: nn.Module) -> set[int]:
    """``id`` of the parameters that are coefficients of a filter; its weights (``sigma`` of AGF ...) are not."""
    return {id(p) for _, graph_filter in filters_of(model) for p in graph_filter.coefficient_tensors().values()}


def filter_optimizer(args: TrainingArguments, filter_lr: float = FILTER_LR) -> tuple[Any, dict[str, Any]]:
    """The optimizer that ``args`` asks for, with the filter in a group of its own, for a plain ``Trainer``.

    The Trainer builds it itself, after the model is wrapped, and its schedule scales every group.

    Raises:
        GraphFilterError: a rate that is none, an ``optim`` with groups of its own (GaLore, APOLLO, LOMO); when the
            Trainer builds it, those of ``parameter_groups``.

    Example:
        ``Trainer(model, args, optimizer_cls_and_kwargs=filter_optimizer(args, filter_lr=1e-2))``
    """

    check_rates(filter_lr=filter_lr)
    name = str(getattr(args.optim, "value", args.optim))
    if name.startswith(_OWN_GROUPS):
        raise GraphFilterError(
            f"optim={name!r} makes parameter groups of its own, which have no place for the filter's: choose another "
            "optim, or train without filter_optimizer"
        )

    def factory() -> Callable[..., torch.optim.Optimizer]:
        def build(model: nn.Module, **_: Any) -> torch.optim.Optimizer:
            optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
            groups = parameter_groups(model, args.learning_rate, args.weight_decay, filter_lr)
            optimizer = optimizer_class(groups, **options)
            if optimizer_class.__module__.startswith("bitsandbytes") and options.get("optim_bits") == 8:
                _keep_embeddings(model)
            return optimizer

        return build

    return factory, {}


def _keep_embeddings(model: nn.Module) -> None:
    """In 32 bits, as the Trainer does with optimizers that it builds itself: in 8 they are unstable."""
    from bitsandbytes.optim import GlobalOptimManager

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
