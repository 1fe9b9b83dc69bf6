"""Registration and building of filters, with one message for each mistake that an author can make."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor, nn

from ...errors import GraphFilterError, shown
from .base import Decoding, FilterConfig, GraphFilter
from .registry import CONFIG_CLASSES, available_filters, get_filter
from .site import AttentionSite

C = TypeVar("C", bound="type[FilterConfig]")


def register_filter(name: str) -> Callable[[C], C]:
    """Return a class decorator that registers a config class as ``name``.

    ``patch_model`` and saved checkpoints then know the name. A package can also declare its module as an entry point of
    the group ``hf_graphfilter.filters``. The module is then imported when a checkpoint or a user asks for the name.

    Args:
        name: what users pass to ``patch_model``, such as ``"gfsa"``.

    Raises:
        GraphFilterError: the name is taken by another class, or the class is not a frozen dataclass that derives from
            ``FilterConfig`` and sets ``module`` to its ``GraphFilter`` class.
    """
    if not isinstance(name, str) or not name:
        raise GraphFilterError(f"register_filter needs a name, got {shown(name)}: write @register_filter(NAME)")

    def register(config_class: C) -> C:
        taken = CONFIG_CLASSES.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (
            config_class.__module__,
            config_class.__qualname__,
        ):
            raise GraphFilterError(f"the filter name {shown(name)} is taken by {taken.__module__}.{taken.__qualname__}")
        module = getattr(config_class, "module", None)
        is_filter = isinstance(module, type) and issubclass(module, GraphFilter)
        if not issubclass(config_class, FilterConfig) or not is_filter or module is GraphFilter:
            raise GraphFilterError(
                f"{config_class.__name__} must derive from FilterConfig and set `module` to its GraphFilter class"
            )
        dataclass_type: Any = config_class
        if "__dataclass_fields__" not in vars(dataclass_type) or not dataclass_type.__dataclass_params__.frozen:
            raise GraphFilterError(
                f"{config_class.__name__} must be a frozen dataclass, or its options would be lost: write "
                f"@dataclass(frozen=True) between @register_filter({name!r}) and the class"
            )
        if taken_names := {f.name for f in fields(dataclass_type)} & {*dir(FilterConfig)}:
            raise GraphFilterError(
                f"{config_class.__name__}: {min(taken_names)!r} belongs to FilterConfig and cannot be an option: give "
                "the option another name, or leave out the annotation if it is meant as the class attribute"
            )
        config_class.filter = name
        CONFIG_CLASSES[name] = config_class
        return config_class

    return register


def as_config(filter: str | FilterConfig, **options: Any) -> FilterConfig:
    """Return a config from a name with options, or from a config object without options."""
    if isinstance(filter, str):
        config_class: type[FilterConfig] = get_filter(filter)
        return config_class.from_options(**options)
    if not isinstance(filter, FilterConfig):
        raise GraphFilterError(
            f"filter must be a name or a FilterConfig, got {type(filter).__name__}; known filters: "
            f"{', '.join(available_filters())}"
        )
    if not vars(type(filter)).get("filter"):
        raise GraphFilterError(
            f"{type(filter).__name__} is not registered, and a checkpoint could not name it: decorate the class with "
            "@register_filter(name)"
        )
    if options:
        raise GraphFilterError(
            f"options {shown(sorted(options))} go into the {type(filter).__name__} object, not beside it"
        )
    return filter


def foreign_modules(configs: Iterable[FilterConfig]) -> list[str]:
    """Return the modules of other packages that register these filters; those of a script or notebook are left out."""
    modules = {type(config).__module__ for config in configs}
    return sorted(m for m in modules if m.partition(".")[0] != __name__.partition(".")[0] and m != "__main__")


def build_filter(config: FilterConfig, site: AttentionSite) -> GraphFilter:
    """Return ``config.build(site)``, with coefficients in float32, after checking what its author may have forgotten.

    Raises:
        GraphFilterError: a filter that could not be loaded, split or run afterwards.
    """
    name = f"{site.name}: {config.module.__name__}"
    built: Any = config.build(site)
    if not isinstance(built, GraphFilter) or "site_name" not in vars(built):
        got = f"a {type(built).__name__}" + " without super().__init__(config, site)" * isinstance(built, GraphFilter)
        raise GraphFilterError(f"{name}: {type(config).__name__}.build must return a GraphFilter, got {got}")
    if type(built).forward is GraphFilter.forward:
        raise GraphFilterError(f"{name} has no forward(shift, value)")
    if type(built).reset_parameters is GraphFilter.reset_parameters:
        built.reset_parameters()  # which says that it is wanted
    _check_tensors(built, name)
    if built.decoding not in typing.get_args(Decoding):
        known = ", ".join(map(repr, typing.get_args(Decoding)))
        raise GraphFilterError(f"{name}: decoding must be one of {known}, got {built.decoding!r}")
    _check_per_head(built, name)
    for tensor in built.coefficient_tensors().values():  # made in the default dtype, which may be half
        if tensor.is_floating_point() and tensor.element_size() < 4:
            tensor.data = tensor.data.float()
    built.register_load_state_dict_pre_hook(_refuse_other)
    return built


def _refuse_other(graph_filter: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise for the weights of another filter, which ``load_state_dict(strict=False)`` would drop silently."""
    saved = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
    known = graph_filter.state_dict().keys()
    if saved - known and known - saved:
        raise GraphFilterError(
            f"the weights at {prefix.rstrip('.')} are those of another filter, with {', '.join(sorted(saved))}, and "
            f"that of this model has {', '.join(sorted(known))}: patch it as it was when they were saved"
        )


def _check_tensors(graph_filter: GraphFilter, name: str) -> None:
    for attribute, value in vars(graph_filter).items():
        if attribute not in ("_parameters", "_buffers", "_modules") and _holds_tensors(value):
            raise GraphFilterError(
                f"{name}: self.{attribute} holds tensors that would not be moved, trained or saved: make them an "
                "nn.Parameter, a buffer (register_buffer), an nn.ParameterList or an nn.ModuleList"
            )
    tensors = [t for t in graph_filter.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
    if len({id(t) for t in tensors}) < len(tensors):
        raise GraphFilterError(
            f"{name} has one tensor under two names, which safetensors does not save: register it once, and read it "
            "from there"
        )
    named = {**dict(graph_filter.named_parameters()), **dict(graph_filter.named_buffers())}
    for tensor_name, tensor in named.items():
        if tensor.is_complex():
            raise GraphFilterError(
                f"{name}: {tensor_name!r} is complex, and casting the model to another dtype would drop its imaginary "
                "part: make it a real tensor (..., 2) and read it through torch.view_as_complex"
            )
    if unknown := {*graph_filter.coefficient_names()} - named.keys():
        raise GraphFilterError(
            f"{name}: coefficient_names() must return the set of names of parameters and buffers, and gave "
            f"{shown(sorted(unknown))}"
        )


def _check_per_head(graph_filter: GraphFilter, name: str) -> None:
    if not isinstance(graph_filter.per_head, tuple):
        raise GraphFilterError(f"{name}: per_head must be a tuple of names, got {graph_filter.per_head!r}")
    for attribute in graph_filter.per_head:
        tensor = getattr(graph_filter, attribute, None)
        # ZeRO-3 has partitioned it already, and tells what it was
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape)) if isinstance(tensor, Tensor) else tensor
        if not isinstance(shape, tuple) or shape[:1] != (graph_filter.heads,):
            raise GraphFilterError(
                f"{name}: per_head names {attribute!r}, which must be a parameter or buffer "
                f"({graph_filter.heads}, ...), one entry per head, but is {shape}"
            )
    if graph_filter.per_head and (others := {n for n, _ in graph_filter.named_parameters()} - {*graph_filter.per_head}):
        raise GraphFilterError(
            f"{name}: per_head must name all parameters or none, but lacks {min(others)!r}: tensor parallelism would "
            "train it separately in each process"
        )


def _holds_tensors(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(v, (Tensor, nn.Module)) for v in values)
