"""The orthogonality loss of AGF (Eq. 11 and 12) in the plain Trainer, or in a loop of one's own.

The callback does not touch the loss that the Trainer computes. Each AGF layer passes its output on through an identity
whose backward pass adds the gradient of gamma * loss / layers. So it reaches the gradients exactly once whoever
computes the loss (the model, label smoothing, ``compute_loss_func``), under both kinds of gradient checkpointing, and
under DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from .. import functional
from ..errors import GraphFilterError
from ..filters.agf import AGF
from ..functional import Norm
from .callbacks import LoggingCallback


def orthogonality_loss(model: nn.Module, *, norm: Norm = "mean_abs") -> Tensor:
    """The orthogonality loss of the last training forward pass, mean over the AGF layers; for a loop of one's own.

    Args:
        model: a model with AGF layers, wrapped or not, with ``gamma`` > 0 in their config, in training mode.
        norm: see ``functional.orthogonality_loss``.

    Returns:
        A scalar to be added, times gamma, to the loss. A layer that ran more than once (ALBERT) counts its last run.

    Raises:
        GraphFilterError: no AGF layer, or no training forward pass with gradients since the last call. Reentrant
            gradient checkpointing makes none; use ``use_reentrant=False``, or ``OrthogonalityCallback``.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf").train()
        >>> out = model(torch.randint(0, 1000, (2, 8))).last_hidden_state
        >>> loss = out.square().mean() + 1e-2 * orthogonality_loss(model)
        >>> loss.backward()
    """
    filters = _agf_layers(model)
    seen = [f.last for f in filters if f.last is not None]
    for f in filters:
        f.last = None
    if not seen:
        raise GraphFilterError(
            "orthogonality_loss(model) found no training forward pass since its last call: it needs model.train(), "
            "AGFConfig(gamma=...) > 0 and gradients; with reentrant gradient checkpointing use use_reentrant=False or "
            "OrthogonalityCallback"
        )
    losses = [functional.orthogonality_loss(u, v, keys, norm=norm) for u, v, keys in seen]
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


class OrthogonalityCallback(LoggingCallback):
    """Adds ``gamma * orthogonality loss``, mean over the AGF layers, to what the Trainer minimises.

    Logs ``ortho_loss``, the loss without gamma, mean over the batches since the last log; the Trainer's own ``loss``
    stays that of the task. Costs nothing at evaluation.

    Args:
        gamma: weight; ``None`` for that of each layer's config. The paper uses 1e-1 to 1e-4.
        norm: ``"mean_abs"`` (the authors' code) or ``"frobenius"`` (Eq. 11 as printed).

    Raises:
        GraphFilterError: when training begins: no AGF layer; ``torch.nn.DataParallel`` or DeepSpeed, under which it
            would not be counted right.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[OrthogonalityCallback(gamma=1e-2)]).train()``
    """

    def __init__(self, gamma: float | None = None, norm: Norm = "mean_abs"):
        if gamma is not None and not gamma >= 0:
            raise GraphFilterError(f"OrthogonalityCallback: gamma must be >= 0, got {gamma!r}")
        if norm not in ("mean_abs", "frobenius"):
            raise GraphFilterError(f"OrthogonalityCallback: norm={norm!r}: use 'mean_abs' or 'frobenius'")
        self.gamma, self.norm = gamma, norm
        self.shared = _Shared()

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control)
        layers = _agf_layers(model)
        if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED and args.n_gpu > 1:
            raise GraphFilterError("OrthogonalityCallback: torch.nn.DataParallel is not supported; use torchrun (DDP)")
        if args.deepspeed:
            raise GraphFilterError(
                "OrthogonalityCallback: DeepSpeed scales the loss where a callback cannot see it; use DDP or FSDP"
            )
        if self.gamma is None and not any(layer.config.gamma for layer in layers):
            raise GraphFilterError(
                "OrthogonalityCallback: gamma is 0 in the config of every AGF layer; give it one, say gamma=1e-2"
            )
        self.shared = _Shared()
        for layer in layers:
            gamma = layer.config.gamma if self.gamma is None else self.gamma
            layer.regulariser = _Regulariser(self.shared, gamma, self.norm) if gamma else None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        scaler = getattr(optimizer, "scaler", None)  # float16: the gradients are scaled until the optimizer's step
        scale = 1.0 if scaler is None else scaler.get_scale()
        self.shared.scale = scale / _accumulated(args.gradient_accumulation_steps, state.global_step, train_dataloader)

    def values(self) -> dict[str, float]:
        total, count = self.shared.total, self.shared.recorded
        self.shared.total, self.shared.recorded = None, 0
        return {} if total is None else {"ortho_loss": total.item() / count}

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for layer in _agf_layers(model):
            layer.regulariser = None


def _agf_layers(model: nn.Module) -> list[AGF]:
    found = [module for module in model.modules() if isinstance(module, AGF)]
    if not found:
        raise GraphFilterError(f'{type(model).__name__} has no AGF layer; call patch_model(model, "agf") first')
    return found


def _accumulated(steps: int, step: int, dataloader: Any) -> int:
    """Batches of this optimizer step; an epoch may end with fewer."""
    try:
        batches = len(dataloader)
    except TypeError:
        return steps
    updates = -(-batches // steps)
    return batches % steps or steps if step % updates == updates - 1 else steps


class _Shared:
    """What the layers of a model share during training."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.applications = 0  # of AGF in the last forward pass
        self.backward_began = False
        self.total: Tensor | None = None
        self.recorded = 0

    def count(self) -> None:
        if torch._C._current_graph_task_id() != -1:  # checkpointing runs a layer again, during the backward pass
            return
        if self.backward_began:
            self.applications, self.backward_began = 0, False
        self.applications += 1

    def record(self, value: Tensor) -> None:
        self.backward_began = True
        self.total = value.clone() if self.total is None else self.total + value.to(self.total.device)
        self.recorded += 1


class _Regulariser:
    """Called by a layer with its output and its projections; returns the output."""

    def __init__(self, shared: _Shared, gamma: float, norm: Norm):
        self.shared, self.gamma, self.norm = shared, gamma, norm

    def __call__(self, out: Tensor, u: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
        self.shared.count()
        if not torch.is_grad_enabled():
            return out
        penalty = functional.orthogonality_loss(u, v, keys, norm=self.norm)
        return _AddGradient.apply(out, penalty, self)  # type: ignore[no-any-return]


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, penalty: Tensor, regulariser: _Regulariser) -> Tensor:  # type: ignore[override]
        ctx.regulariser, ctx.penalty = regulariser, penalty.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        shared = ctx.regulariser.shared
        shared.record(ctx.penalty)
        weight = ctx.regulariser.gamma * shared.scale / shared.applications
        return grad, torch.full_like(ctx.penalty, weight), None
