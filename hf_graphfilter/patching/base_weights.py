"""A sample of the weights outside the filter, which shows whether a separately saved filter fits them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..filters.core.attached import CHILD
from ..hosts import Host

SAMPLE = "_graph_filter_base_weights"  # attribute of a model: a sample taken when it was patched or loaded
_VALUES = 8  # number of values per tensor; training changes nearly all of them
_WRITTEN_COUNT = 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def remember_weights(host: Host, model: nn.Module, *, again: bool = False) -> None:
    """Keep a sample of the weights outside the filter; an existing sample is replaced only with ``again``."""
    if again or SAMPLE not in vars(model):
        for part in model.modules():  # a part that was patched before has an outdated sample
            vars(part).pop(SAMPLE, None)
        vars(model)[SAMPLE] = _sample(host, model)


def changed_weights(host: Host, model: nn.Module) -> list[str]:
    """Return the names of the parameters outside the filter that changed since ``remember_weights``.

    Casts to another dtype and moves to another device do not count. Adapters do not count either, since they are saved
    in files of their own.
    """
    old: dict[str, Tensor] = vars(model).get(SAMPLE) or {}
    new = _sample(host, model) if old else {}
    return [name for name, values in new.items() if name in old and not _is_same(old[name], values)]


def written_weights(host: Host, model: nn.Module, modules: Iterable[str]) -> dict[str, list[float]]:
    """Return a few weights of each of these modules, to be written to a file."""
    sample = {**_sample(host, model), **(vars(model).get(SAMPLE) or {})}
    names = tuple(f"{module}." for module in modules)
    chosen = {k: v for k, v in sample.items() if k.startswith(names) and v.is_floating_point()}
    return {name: round_values(values[:_WRITTEN_COUNT]) for name, values in chosen.items()}


def differing_weights(written: object, host: Host, model: nn.Module) -> list[str]:
    """Return the names of the parameters that differ from ``written_weights``, to the precision of bfloat16."""
    new = _sample(host, model) if isinstance(written, Mapping) else {}
    pairs = [(name, values[:_WRITTEN_COUNT], written.get(name)) for name, values in new.items()]  # type: ignore[attr-defined]
    return [
        name
        for name, values, saved in pairs
        if isinstance(saved, list)
        and [*map(type, saved)] == [float] * len(values)
        and values.is_floating_point()
        and not torch.allclose(values.float(), torch.tensor(saved), rtol=2**-7, atol=1e-6, equal_nan=True)
    ]


def _sample(host: Host, model: nn.Module) -> dict[str, Tensor]:
    """Return evenly spaced values of each parameter: name without PEFT's wrappers -> values.

    Parameters that are sharded, offloaded or quantized are left out.
    """
    sample: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if is_whole(parameter) and f".{CHILD}." not in f".{name}":
            values = sample_evenly(parameter).to("cpu", copy=True)
            sample.setdefault(host.relative_name(model, name), values)  # PEFT's wrapper holds the original first
    return sample


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor itself holds all its values: it is not sharded, offloaded or quantized."""
    if nn.parameter.is_lazy(tensor):
        return False
    return not (tensor.is_meta or type(tensor.data) is not Tensor or hasattr(tensor, "ds_id")) and tensor.numel() > 0


def sample_evenly(tensor: Tensor) -> Tensor:
    """Return a few values of a tensor, from which it can be recognised."""
    return tensor.detach().flatten()[:: max(1, tensor.numel() // _VALUES)][:_VALUES]


def round_values(values: Tensor) -> list[float]:
    """Return the values as floats, rounded to the six digits that a file keeps."""
    return [float(f"{x:.6g}") for x in values.tolist()]


def _is_same(before: Tensor, now: Tensor) -> bool:
    if before.shape != now.shape or before.is_floating_point() != now.is_floating_point():
        return True  # sharded or quantized since
    if not now.is_floating_point():
        return before.dtype != now.dtype or torch.equal(before, now)
    casts = (before.to(dtype).to(now.dtype) for dtype in (before.dtype, *_DTYPES))
    # PEFT merges and unmerges adapters to rounding
    return any(torch.allclose(c.double(), now.double(), rtol=1e-5, atol=1e-7, equal_nan=True) for c in casts)
