"""The record of filters in the weights of an adapter, checked wherever these weights enter a model.

One tensor holds the record of the filters, and a sample of the coefficients that are not in the adapter. The record in
the configuration is not enough: weights can be loaded without a configuration, and a configuration has no coefficients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..filters import FilterConfig
from ..filters.core.attached import CHILD, class_of, filters_of, patched_modules
from ..filters.core.record import describe_record, read_groups, record_of
from ..hosts import Host, host_of, unwrapped
from ..patching.base_weights import is_whole, round_values, sample_evenly
from ..patching.restore import resolve
from .copies import strip_adapters
from .values import check_values

KEY = "graph_filter_record"  # bytes of JSON as float32, since programs average and scale the weights of adapters
SAMPLES = "samples"
State = Mapping[str, Any]


def filters_by_name(host: Host, base: nn.Module) -> dict[str, FilterConfig]:
    """Return the configurations by the relative names of their modules."""
    return {host.relative_name(base, name): graph_filter.config for name, graph_filter in filters_of(base)}


def live_record(model: nn.Module) -> dict[str, Any] | None:
    """Return the record of the filters that a model has now, or None if it has none or no host knows it."""
    if (base := _find_base(model)) is None or not patched_modules(base, required=False):
        return None
    return record_of(class_of(base).__name__, filters_by_name(host_of(base), base).items())


def encode_record(adapter: State, record: dict[str, Any], model: nn.Module, model_state: State | None) -> Tensor:
    """Return the record as a tensor for the weights of an ``adapter``.

    Args:
        adapter: the weights of the adapter.
        record: the record of the model's filters.
        model: the model that the adapter was trained on.
        model_state: the gathered weights of that model if FSDP has sharded them, else None.
    """
    base = unwrapped(model)
    adapter_tensors = _group_by_owner(base, adapter)
    model_tensors = _group_by_owner(base, base.state_dict() if model_state is None else model_state)
    samples = {
        owner: {name: _sample(tensor) for name, tensor in tensors.items() if _has_sample(tensor)}
        for owner, tensors in model_tensors.items()
        if not tensors.keys() <= adapter_tensors.get(owner, {}).keys()
    }
    text = json.dumps({**record, SAMPLES: samples})
    return torch.tensor([*text.encode()], dtype=torch.float32)


def check_adapter(model: nn.Module, adapter: State) -> dict[str, Any]:
    """Check that the weights of an adapter fit a model, and return them without the record.

    Raises:
        GraphFilterError: the weights were trained over other filters, or hold coefficients that are not finite or that
            the model has no filter for.
    """
    weights = {key: tensor for key, tensor in adapter.items() if not _is_record_key(key)}
    if (base := _find_base(model)) is None:
        return weights
    if (record := _decode_record(adapter)) is not None:
        check_record(base, record)
    host, tensors_by_owner = host_of(base), _group_by_owner(base, weights)
    sites = resolve(host, base, tensors_by_owner)
    filters = {host.relative_name(base, name): graph_filter for name, graph_filter in filters_of(base)}
    uses_fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in base.modules())
    for owner, tensors in tensors_by_owner.items():
        module_name = host.relative_name(base, sites[owner].name) if owner in sites else owner
        if (graph_filter := filters.get(module_name)) is None:
            raise GraphFilterError(
                f"the adapter holds {sum(map(len, tensors_by_owner.values()))} filter coefficients that this "
                f"{type(base).__name__} has no filter for, first at {owner}: patch it as it was, with patch_model or "
                "load_filter"
            )
        filter_tensors = graph_filter.coefficient_tensors()
        coefficients = {f"{owner}.{CHILD}.{name}": x for name, x in tensors.items() if name in filter_tensors}
        local_tensors = {
            f"{owner}.{CHILD}.{name}": x
            for name, x in filter_tensors.items()
            if not uses_fsdp and not hasattr(x, "ds_id")
        }
        check_values(coefficients, local_tensors, "the adapter")
    return weights


def check_record(model: nn.Module, record: Any) -> None:
    """Raise a ``GraphFilterError`` unless a model has the filters that an adapter was trained over."""
    groups, base = read_groups(record, "the adapter", f" of {CHILD} in its configuration or weights"), unwrapped(model)
    host, kind = host_of(base), type(base).__name__
    trained_on = f"the adapter was trained on a model with {describe_record(record)}"
    module_names = [name for _, names in groups for name in names]
    new_names = {name: host.relative_name(base, site.name) for name, site in resolve(host, base, module_names).items()}
    if (filters := filters_by_name(host, base)) != {
        new_names.get(name, name): f for f, names in groups for name in names
    }:
        patch_status = f"patched with {describe_record(record_of(kind, filters.items()))}" if filters else "not patched"
        raise GraphFilterError(
            f"{trained_on}, and this {kind} is {patch_status}: load it into a base that is patched like that one"
        )
    samples = record.get(SAMPLES)
    model_tensors = _group_by_owner(base, base.state_dict()) if samples else {}
    float32_names = {name for _, f in filters_of(base) for name in f.coefficient_names()}  # always in float32
    for owner, tensors in samples.items() if isinstance(samples, dict) else ():
        own_tensors = model_tensors.get(new_names.get(owner) or owner, {})
        for name, values in tensors.items() if isinstance(tensors, dict) else ():
            if (
                name in own_tensors
                and _has_sample(own_tensors[name])
                and not _is_same(values, own_tensors[name], 1e-4 if name in float32_names else 2**-6)
            ):
                raise GraphFilterError(
                    f"{trained_on} whose coefficients it does not hold, and {owner}.{CHILD}.{name} of this {kind} has "
                    "other values (such as the start values of patch_model): load the model that it was trained on, or "
                    "its filter with load_filter"
                )


def _find_base(model: nn.Module) -> nn.Module | None:
    try:
        base = unwrapped(model)
        host_of(base)
    except GraphFilterError:
        return None
    return base


def _is_record_key(key: str) -> bool:
    return key.rpartition(".")[2] == KEY


def _decode_record(adapter: State) -> Any:
    """Return the record, or None if there is none.

    A tensor of zeros, from which programs start an average of adapters, counts as none.
    """
    encoded: Tensor | None = next((tensor for key, tensor in adapter.items() if _is_record_key(key)), None)
    if encoded is None or not encoded.any():
        return None
    values = encoded.detach().cpu().double()
    try:
        return json.loads(bytes((values / values[0] * ord("{")).round().int().tolist()))
    except (ValueError, IndexError, RecursionError) as error:
        raise GraphFilterError(
            f"the adapter's {KEY} is damaged, or is an average of adapters over different filters ({error}): save or "
            "download it again"
        ) from error


def _group_by_owner(base: nn.Module, state: State) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the filters by the relative names of their modules.

    The tensors of adapters, and the copies that adapters hold, are left out.
    """
    host, by_owner = host_of(base), dict[str, dict[str, Tensor]]()
    for key, tensor in state.items():
        owner, marker, name = key.removeprefix("base_model.model.").partition(f".{CHILD}.")
        if not marker or "modules_to_save." in key:
            continue
        by_owner.setdefault(host.relative_name(base, owner), {})[name.removeprefix("original_module.")] = tensor
    return {owner: strip_adapters(tensors) for owner, tensors in by_owner.items()}


def _has_sample(tensor: Tensor) -> bool:
    return is_whole(tensor) and tensor.is_floating_point()


def _sample(tensor: Tensor) -> list[float]:
    tensor = tensor.detach().cpu().double()  # some devices have no float64
    return round_values(torch.cat([sample_evenly(tensor), tensor.norm().view(1)]))


def _is_same(values: Any, tensor: Tensor, tolerance: float) -> bool:
    sample = _sample(tensor)
    if not isinstance(values, list) or [*map(type, values)] != [float] * len(sample):
        return False
    return torch.allclose(torch.tensor(values).double(), torch.tensor(sample).double(), rtol=tolerance, atol=1e-6)
