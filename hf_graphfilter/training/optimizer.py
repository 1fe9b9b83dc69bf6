"""Optimizers with a separate group for the filter: for the Trainer, and for your own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ..errors import GraphFilterError
from ..patching.status import filter_parameters
from ..wrappers import Function, wrap
from .learning_rate import (
    FILTER_LR,
    check_rates,
    coefficient_ids,
    find_caller,
    given_rate,
    rate_from_environment,
    split_by_mesh,
    split_filter_groups,
)

_OWN_GROUPS = ("galore", "apollo", "lomo", "adalomo")
_FROM_ARGUMENTS: Any = object()


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float | None = None, filter_lr: float = FILTER_LR
) -> list[dict[str, Any]]:
    """Return optimizer groups: decayed weights, undecayed weights (biases, norms), and the filter's coefficients.

    Args:
        model: a patched model, wrapped or not.
        lr: learning rate of the model's own parameters.
        weight_decay: weight decay of the model's weights. Default: that of the optimizer.
        filter_lr: learning rate of the filter's coefficients (``w_K``, ``theta`` ...), which get no weight decay. The
            weights of a filter (``sigma`` of AGF ...) are treated as the model's own. Default: 1e-2.

    Returns:
        Groups of the parameters that require gradients; each is in exactly one group, and no group is empty. If expert
        parallelism has distributed only some parameters of a group, these get a group of their own.

    Raises:
        GraphFilterError: a rate is not a finite number >= 0, or the model has no filter parameters, or all of them are
            frozen.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=2)))
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, lr=2e-5), weight_decay=0.01)
        >>> [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
        [(2e-05, 0.01), (2e-05, 0.0), (0.01, 0.0)]
    """
    check_rates(lr=lr, filter_lr=filter_lr, **({} if weight_decay is None else {"weight_decay": weight_decay}))
    _check_trainable(model)
    filter_ids = coefficient_ids(model)
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # uses nothing of a Trainer
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    weights = [(n, p) for n, p in trainable if id(p) not in filter_ids]
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in weights if n in decayed], "lr": lr, **decay},
        {"params": [p for n, p in weights if n not in decayed], "lr": lr, "weight_decay": 0.0},
        {"params": [p for _, p in trainable if id(p) in filter_ids], "lr": filter_lr, "weight_decay": 0.0},
    ]
    return [{**group, "params": parameters} for group in groups for parameters in split_by_mesh(group["params"])]


def _check_trainable(model: nn.Module) -> None:
    if not any(True for _ in filter_parameters(model)):
        raise GraphFilterError(
            f"{type(model).__name__} has no filter parameters: patch it first, with learn= not empty"
        )
    if not any(p.requires_grad for p in filter_parameters(model)):
        raise GraphFilterError(
            f"the filter of {type(model).__name__} is frozen: with PEFT, use modules_to_save=['graph_filter'], or the "
            "adapter is saved without it; else call requires_grad_() on its parameters"
        )


def filter_optimizer(args: TrainingArguments, filter_lr: float = _FROM_ARGUMENTS) -> tuple[Any, dict[str, Any]]:
    """Return what a ``Trainer`` needs to build its usual optimizer with a separate group for the filter.

    The Trainer builds the optimizer that it would build anyway, after the model is wrapped. Then the coefficients leave
    its groups for one with their rate and without weight decay. The schedule scales every group.

    Args:
        args: the arguments of the Trainer.
        filter_lr: learning rate of the filter's coefficients. Default: ``args.filter_lr`` when the optimizer is built,
            so that a hyperparameter search may vary it, or else 1e-2.

    Raises:
        GraphFilterError: the rate is not a finite number >= 0, or ``optim`` makes its own groups (GaLore, APOLLO,
            LOMO). When the Trainer builds the optimizer: the model has no filter parameters, or all are frozen.

    Example:
        ``Trainer(model, args, optimizer_cls_and_kwargs=filter_optimizer(args, filter_lr=1e-2))``
    """
    if not hasattr(args, "optim"):
        raise GraphFilterError(f"filter_optimizer takes the arguments of the Trainer, got {type(args).__name__}")
    has_rate = filter_lr is not _FROM_ARGUMENTS
    if has_rate:
        check_rates(filter_lr=filter_lr)
    _check_optimizer(args)
    return _Factory(filter_lr if has_rate else None), {}


def _check_optimizer(args: TrainingArguments) -> None:
    name = str(getattr(args.optim, "value", args.optim))
    if name.startswith(_OWN_GROUPS):
        raise GraphFilterError(
            f"optim={name!r} makes parameter groups of its own, to which the filter cannot add one: choose another "
            "optim, or train without filter_optimizer"
        )


class _Factory:
    """A factory of the optimizer that builds it when the Trainer asks for it."""

    def __init__(self, filter_lr: float | None):
        self.filter_lr = filter_lr

    def __call__(self) -> Callable[..., torch.optim.Optimizer]:
        return self.build

    def build(self, model: nn.Module, **_: Any) -> torch.optim.Optimizer:
        if (trainer := find_caller(Trainer)) is None:
            raise GraphFilterError("filter_optimizer is for a Trainer; in a loop of your own use parameter_groups")
        _check_trainable(model)
        trainer.optimizer_cls_and_kwargs, factory = None, trainer.optimizer_cls_and_kwargs
        try:
            optimizer = Trainer.create_optimizer(trainer, model)  # not the subclass's, which has called this function
        finally:
            trainer.optimizer, trainer.optimizer_cls_and_kwargs = None, factory
        split_filter_groups(optimizer, model, _rate(trainer.args, self.filter_lr))
        return optimizer


def _rate(args: TrainingArguments, filter_lr: float | None = None) -> float:
    """Return the first rate that is set: in the environment, in ``filter_lr``, in the arguments, or the default."""
    rates = (rate_from_environment(), filter_lr, given_rate(args))
    rate: float = next((rate for rate in rates if rate is not None), FILTER_LR)
    check_rates(filter_lr=rate)
    return rate


def give_filter_rate(trainer_class: type[Trainer]) -> None:
    """Give the filter a separate group in the optimizers that trainers of this class create, however they create them.

    This applies to a rate in the arguments or the environment. An optimizer that was passed to the trainer stays as it
    is, and so does that of ``filter_optimizer``. A second call changes nothing.
    """
    owner = next(c for c in trainer_class.__mro__ if "create_optimizer" in vars(c))
    wrap(owner, "create_optimizer", _create_optimizer)


def _create_optimizer(original: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> torch.optim.Optimizer | None:
    has_rate = hasattr(trainer.args, "filter_lr") or rate_from_environment() is not None
    model: Any = next(iter((*args, *kwargs.values())), None) or trainer.model
    uses_factory = isinstance((trainer.optimizer_cls_and_kwargs or (None,))[0], _Factory)
    has_filter = (has_rate or uses_factory) and any(p.requires_grad for p in filter_parameters(model))
    if has_filter and type(trainer.optimizer).__name__ == "DummyOptim":  # of accelerate, for one that DeepSpeed makes
        raise GraphFilterError(
            "the DeepSpeed file names an optimizer, which would train the filter at the rate of the model: remove its "
            "sections optimizer and scheduler, so that the Trainer makes them"
        )
    trains_filter = has_filter and has_rate and trainer.optimizer is None
    if trains_filter:
        _check_optimizer(trainer.args)
    result: torch.optim.Optimizer | None = original(trainer, *args, **kwargs)
    if trains_filter and not uses_factory:
        optimizer: Any = trainer.optimizer if result is None else result  # the Trainer needs no result
        split_filter_groups(optimizer, model, _rate(trainer.args))
    return result
