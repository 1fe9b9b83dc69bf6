"""A gradual change from attention to a replacement filter.

With ``init="blend"`` a layer computes (1 - g) attention + g filter, and training carries the gate g from 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import nn

from ..errors import GraphFilterError, is_number
from ..filters import FilterConfig, ReplacingConfig, ReplacingFilter, available_filters, get_filter
from ..filters.core.attached import filters_of
from ..hosts import host_of, own_record, unwrapped
from .callbacks import LoggingCallback

M = TypeVar("M", bound=nn.Module)


def set_blend(model: M, gate: float) -> M:
    """Set the gate g of every blended layer: 0 is the original attention, 1 is the filter alone.

    Args:
        model: a model patched with ``init="blend"``.
        gate: the gate, from 0 to 1.

    Returns:
        The model.

    Raises:
        GraphFilterError: the gate is not between 0 and 1, or the model has no blended layer.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import filter_status, patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf", init="blend")
        >>> filter_status(set_blend(model, 0.5))[0].coefficients["gate"][:2]
        tensor([0.5000, 0.5000])
    """
    if not is_number(gate, 1):
        raise GraphFilterError(f"the gate of a blend is between 0 and 1, got {gate!r}")
    for layer in _find_blended(model):
        assert layer.gate is not None
        layer.gate.fill_(gate)
    return model


def drop_blend(model: M, *, force: bool = False) -> M:
    """Remove the softmax attention from a blended model, in place.

    The filter alone is left, and its cost is that of the filter alone.

    Args:
        model: a model patched with ``init="blend"``.
        force: remove the attention also if a gate is not 1, which changes the outputs. Default: ``False``.

    Returns:
        The model.

    Raises:
        GraphFilterError: the model has no blended layer, a gate is not 1, or the layers belong to a part that was
            patched separately.
    """
    wrapped, model = model, unwrapped(model, running=False)  # type: ignore[assignment]
    host, layers = host_of(model), _find_blended(model)
    for layer in layers:
        assert layer.gate is not None
        if not force and not bool((layer.gate == 1).all()):
            raise GraphFilterError(
                f"{layer.site_name}: its gate is {layer.gate.min().item():.3g}, not 1, so that dropping the attention "
                "would change the model; let BlendSchedule carry it to 1, or pass force=True"
            )
    record = own_record(host, model)
    configs = [FilterConfig.from_dict(group["config"]) for group in record["filters"]]
    unblended = [replace(config, init="copy") if isinstance(config, ReplacingConfig) else config for config in configs]
    # in place, since the config of an outer model may hold this config
    record["filters"] = [
        {**g, "config": config.to_dict()} for g, config in zip(record["filters"], unblended, strict=True)
    ]
    host.write_record(model, record)
    for layer in layers:
        layer.gate = None
        layer.config = replace(layer.config, init="copy")
    return wrapped


class BlendSchedule(LoggingCallback):
    """A callback that raises the gate of a blended model from 0 to 1 while the Trainer trains.

    It logs the gate as ``blend_gate``.

    Args:
        start, end: fractions of the training between which the gate rises; it is 1 after ``end``. Default: 0 and 0.5.
        shape: curve of the rise, ``"linear"`` or ``"cosine"``. Default: ``"linear"``.

    With ``load_best_model_at_end`` (and early stopping) only checkpoints whose gate is 1 compete, since an earlier one
    still is partly attention.

    Raises:
        GraphFilterError: an argument is out of range, or training begins on a model without blended layers.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[BlendSchedule(end=0.6)]).train(); drop_blend(model)``
    """

    def __init__(self, start: float = 0.0, end: float = 0.5, shape: Literal["linear", "cosine"] = "linear"):
        if not (is_number(start) and is_number(end, 1) and start < end):
            raise GraphFilterError(f"BlendSchedule: 0 <= start < end <= 1, got start={start!r}, end={end!r}")
        if shape not in ("linear", "cosine"):
            raise GraphFilterError(f"BlendSchedule: shape={shape!r}: use 'linear' or 'cosine'")
        self.start, self.end, self.shape = start, end, shape
        self.gate = 0.0

    def gate_at(self, done: float) -> float:
        """Return the gate after this share of the training, 0 to 1.

        In your own training loop, pass it to ``set_blend``.
        """
        rise = min(1.0, max(0.0, (done - self.start) / (self.end - self.start)))
        return rise if self.shape == "linear" else 0.5 * (1 - math.cos(math.pi * rise))

    def _set(self, model: nn.Module, state: Any) -> None:
        self.gate = self.gate_at(state.global_step / max(1, state.max_steps))
        set_blend(model, self.gate)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control)
        self._set(model, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.gate < 1:  # what was measured before this step
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        self._set(model, state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._set(model, state)  # what is saved and evaluated after this step is what the next one begins with

    def values(self) -> dict[str, float]:
        return {"blend_gate": self.gate}


def _find_blended(model: nn.Module) -> list[ReplacingFilter]:
    blended = [f for _, f in filters_of(model, ReplacingFilter, copies=True) if f.gate is not None]
    if not blended:
        blend_filters = [name for name in available_filters() if issubclass(get_filter(name), ReplacingConfig)]
        raise GraphFilterError(
            f'{type(model).__name__} has no blended layer; patch it with init="blend" and a filter that can blend: '
            f"{', '.join(blend_filters)}"
        )
    return blended
