"""The open registry of graph filters: a filter is a config dataclass and a module, in one file.

Example: a filter of one's own.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> from hf_graphfilter import FilterConfig, GraphFilter, register_filter
    >>> class Damped(GraphFilter):
    ...     def __init__(self, config, site):
    ...         super().__init__(config, site)
    ...         self.damping = torch.nn.Parameter(torch.empty(site.heads))
    ...         self.reset_parameters()
    ...     def reset_parameters(self):
    ...         torch.nn.init.ones_(self.damping)
    ...     def forward(self, shift, value):
    ...         return self.damping.view(-1, 1, 1) * shift(value)
    >>> @register_filter("damped")
    ... @dataclass(frozen=True)
    ... class DampedConfig(FilterConfig):
    ...     module = Damped
"""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from ..shift import ShiftOperator

if typing.TYPE_CHECKING:
    from ..hosts import AttentionSite

_FILTERS: dict[str, type[FilterConfig]] = {}
STARTED = "_started"  # of a filter built on meta: its buffers that are not saved, as __init__ makes them elsewhere
LARGEST_ORDER = 1000  # of a polynomial, whose cost grows with it; the papers use 2 to 10
Decoding = Literal["rows", "state", "state and keys"]
C = TypeVar("C", bound="type[FilterConfig]")


class UnknownFilterError(GraphFilterError):
    """No filter is registered by this name."""


class GraphFilter(nn.Module):
    """A function of the shift operator with learned coefficients; the child ``graph_filter`` of an attention module.

    Coefficients, the parameters and buffers of the module itself, stay in float32 when the model is cast to bfloat16 or
    float16: they are few, and steps of a learning rate would be lost in half precision. Weights, the parameters of its
    children, are cast and trained as the model's own.

    Args:
        config: the filter's config.
        site: the attention module that it goes into (name, heads, stack, causality).

    Class attributes:
        reads_hidden: whether ``shift.hidden`` is needed, the input of the attention module.
        per_head: parameters and buffers (heads, ...), where they are all that the filter is made of; tensor parallelism
            then hands each process the part of its heads.
    """

    reads_hidden: ClassVar[bool] = False
    per_head: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: FilterConfig, site: AttentionSite):
        super().__init__()
        self.config = config
        self.site_name, self.heads, self.position_bias = site.name, site.heads, site.position_bias

    def __call__(self, shift: ShiftOperator, value: Tensor) -> Tensor:  # type: ignore[override]
        """``forward``, and a look at what it returned."""
        out = super().__call__(shift, value)
        wanted = (value.shape[0], *shift.rows, value.shape[-1])
        if isinstance(out, Tensor):
            if out.shape == wanted and (out.dtype == value.dtype or torch.is_autocast_enabled(value.device.type)):
                return out
            found = f"{tuple(out.shape)} of {out.dtype}"
        else:
            found = type(out).__name__
        raise GraphFilterError(
            f"{self.site_name}: {type(self).__name__}.forward must return a tensor (batch, heads, query tokens, "
            f"features) = {wanted} of {value.dtype}, as the value is, and returned {found}"
        )

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        raise NotImplementedError

    def approximate(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """What attention transfer fits to ``S(value)``; shapes as in ``forward``, which it is by default."""
        return type(self).forward(self, shift, value)  # not the instance's, which transfer replaces

    @property
    def decoding(self) -> Decoding:
        """What the cache keeps: rows of signals, or a state, with or without the model's own keys and values."""
        return "rows"

    def reset_parameters(self) -> None:
        """Set the start values, in whatever way; what a checkpoint has loaded stays."""
        if any(True for _ in (*self.parameters(), *self.buffers())):
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__} has parameters or buffers and no reset_parameters(), which "
                "sets their start values in place: a checkpoint without them could not be loaded"
            )

    def coefficients(self) -> dict[str, Tensor]:
        """The coefficients by name, learned or fixed, as they enter the formula."""
        own = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return {name: t.detach() for name, t in own}

    def learned_coefficients(self) -> dict[str, Tensor]:
        """Those of ``coefficients`` that are trained: theta_0 ... theta_K of a filter are its parameter theta."""
        own = {name for name, _ in self.named_parameters(recurse=False)}
        return {k: v for k, v in self.coefficients().items() if k in own or k.rpartition("_")[0] in own}

    def extra_repr(self) -> str:
        return f"{self.config}, heads={self.heads}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphFilter:
        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            lowered = moved.is_floating_point() and moved.element_size() < min(4, t.element_size())
            return t.to(moved.device, torch.float32) if lowered else moved

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keep_precision, recurse=False)


class FilterConfig:
    """Base of all filter configs: frozen dataclasses whose fields are checked by type and by ``validate``.

    Class attributes:
        filter: the registered name, set by ``register_filter``.
        version: of the serialised form; raise it when fields change meaning.
        module: the ``GraphFilter`` that the config builds.
        citation: BibTeX of its source, for model cards.
    """

    filter: ClassVar[str] = ""
    version: ClassVar[int] = 1
    module: ClassVar[type[GraphFilter]] = GraphFilter
    citation: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            value, where = _plain(getattr(self, field.name)), f"{type(self).__name__}: {field.name}"
            object.__setattr__(self, field.name, value)
            if not _has_type(value, hints[field.name]):
                raise GraphFilterError(f"{where} must be {_describe(hints[field.name])}, got {shown(value)}")
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise GraphFilterError(f"{where} must be finite, got {shown(value)}")
                if isinstance(number, (int, float)) and abs(number) > torch.finfo(torch.float32).max:
                    raise GraphFilterError(f"{where} must be in the range of float32, got {shown(value)}")
            if hints[field.name] is float:  # torch takes no integer beyond 64 bits
                object.__setattr__(self, field.name, float(value))
        self.validate()

    @property
    def starts_as_original(self) -> bool:
        """Whether a model equals the original right after it is patched."""
        return True

    def validate(self) -> None:
        """Check what types cannot say; raise ``GraphFilterError`` naming the field."""

    def build(self, site: AttentionSite) -> GraphFilter:
        """The filter's module for one attention module."""
        return self.module(self, site)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: ``{"filter": name, "version": int, field: value, ...}``."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}  # type: ignore[call-overload]
        return {"filter": self.filter, "version": self.version, **values}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> FilterConfig:
        """The config that ``to_dict`` wrote; unknown filters, versions, fields and wrong types are errors by name."""
        if (
            not isinstance(data, dict)
            or not isinstance(data.get("filter"), str)
            or not all(isinstance(key, str) for key in data)
        ):
            raise GraphFilterError(f"a filter config is a dict of options with a key 'filter', got {shown(data)}")
        options = dict(data)
        config_class = get_filter(options.pop("filter"))
        version = options.pop("version", None)
        if type(version) is not int or version != config_class.version:
            raise GraphFilterError(
                f"{config_class.__name__}: version {shown(version)} of its config is unknown, this installation reads "
                f"version {config_class.version}; install the hf_graphfilter release that wrote it"
            )
        return config_class.from_options(**options)

    @classmethod
    def from_options(cls, /, **options: Any) -> FilterConfig:
        """The config with these options; an unknown one is named, with the nearest known."""
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for option in options:
            if option not in known:
                raise GraphFilterError(
                    f"{cls.__name__} has no option {shown(option)}{_nearest(option, known)}; its options are "
                    f"{', '.join(known) or 'none'}"
                )
        return cls(**options)


def register_filter(name: str) -> Callable[[C], C]:
    """Class decorator that makes a config class known by ``name`` to ``patch_model`` and to saved checkpoints.

    A package may also name its module under the entry point group ``hf_graphfilter.filters``; it is then imported when
    a checkpoint or a user asks for the name.

    Raises:
        GraphFilterError: the name is taken by another class, or the class has no module of its own.
    """

    def register(config_class: C) -> C:
        if not isinstance(name, str) or not name or not isinstance(config_class, type):
            raise GraphFilterError(f"register_filter names a class, got {shown(name)} for {shown(config_class)}")
        taken = _FILTERS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (
            config_class.__module__,
            config_class.__qualname__,
        ):
            raise GraphFilterError(f"the filter name {shown(name)} is taken by {taken.__module__}.{taken.__qualname__}")
        module = getattr(config_class, "module", None)
        if not issubclass(config_class, FilterConfig) or not _is_filter(module) or module is GraphFilter:
            raise GraphFilterError(
                f"{config_class.__name__} must derive from FilterConfig and set `module` to its GraphFilter class"
            )
        if "__dataclass_fields__" not in vars(config_class) or not config_class.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise GraphFilterError(
                f"{config_class.__name__} must be a frozen dataclass, or its options would be lost: write "
                f"@dataclass(frozen=True) between @register_filter({name!r}) and the class"
            )
        if taken_names := {f.name for f in fields(config_class)} & {*dir(FilterConfig)}:  # type: ignore[arg-type]
            raise GraphFilterError(
                f"{config_class.__name__}: {min(taken_names)!r} belongs to FilterConfig and cannot be an option: give "
                "the option another name, or leave out the annotation if it is meant as the class attribute"
            )
        config_class.filter = name
        _FILTERS[name] = config_class
        return config_class

    return register


def build_filter(config: FilterConfig, site: AttentionSite) -> GraphFilter:
    """``config.build(site)``, and what its author may have forgotten.

    Raises:
        GraphFilterError: a filter that cannot be built, or that could not be loaded, split or run afterwards.
    """
    name = f"{site.name}: {config.module.__name__}"
    try:
        built: Any = config.build(site)
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise GraphFilterError(
            f"{name} cannot be built ({type(error).__name__}: {' '.join(str(error).split())}): its __init__ takes "
            "(config, site) and first calls super().__init__(config, site)"
        ) from error
    if not isinstance(built, GraphFilter) or "site_name" not in vars(built):
        found = f"a {type(built).__name__}" + " without super().__init__(config, site)" * isinstance(built, GraphFilter)
        raise GraphFilterError(f"{name}: {type(config).__name__}.build must return a GraphFilter, got {found}")
    if type(built).forward is GraphFilter.forward:
        raise GraphFilterError(f"{name} has no forward(shift, value)")
    if type(built).reset_parameters is GraphFilter.reset_parameters:
        built.reset_parameters()  # which says that it is wanted
    for attribute, value in vars(built).items():
        if attribute not in ("_parameters", "_buffers", "_modules") and _holds_tensors(value):
            raise GraphFilterError(
                f"{name}: self.{attribute} holds tensors that would not be moved, trained or saved: make them an "
                "nn.Parameter, a buffer (register_buffer), an nn.ParameterList or an nn.ModuleList"
            )
    tensors = [t for t in built.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
    if len({id(t) for t in tensors}) < len(tensors):
        raise GraphFilterError(
            f"{name} has one tensor under two names, which safetensors does not save: register it once, and read it "
            "from there"
        )
    if built.decoding not in typing.get_args(Decoding):
        known = ", ".join(map(repr, typing.get_args(Decoding)))
        raise GraphFilterError(f"{name}: decoding must be one of {known}, got {built.decoding!r}")
    _check_per_head(built, name)
    return built


def _check_per_head(built: GraphFilter, name: str) -> None:
    if not isinstance(built.per_head, tuple):
        raise GraphFilterError(f"{name}: per_head must be a tuple of names, got {built.per_head!r}")
    for wanted in built.per_head:
        found = getattr(built, wanted, None)
        # ZeRO-3 has partitioned it already, and tells what it was
        shape = tuple(getattr(found, "ds_shape", found.shape)) if isinstance(found, Tensor) else found
        if not isinstance(shape, tuple) or shape[:1] != (built.heads,):
            raise GraphFilterError(
                f"{name}: per_head names {wanted!r}, which must be a parameter or buffer ({built.heads}, ...), one "
                f"entry a head, and is {shape}"
            )
    if built.per_head and (others := {n for n, _ in built.named_parameters()} - {*built.per_head}):
        raise GraphFilterError(
            f"{name}: per_head must name all parameters or none, and lacks {min(others)!r}: tensor parallelism would "
            "train it apart on each process"
        )


def _is_filter(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, GraphFilter)


def _holds_tensors(value: object) -> bool:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(v, (Tensor, nn.Module)) for v in held)


def available_filters() -> tuple[str, ...]:
    """Names of the registered filters, sorted."""
    return tuple(sorted(_FILTERS))


def get_filter(name: str) -> type[FilterConfig]:
    """The config class registered as ``name``; an unknown name lists the known ones."""
    if name not in _FILTERS:
        for entry in metadata.entry_points(group="hf_graphfilter.filters", name=name):
            try:
                entry.load()
            except Exception as error:
                raise GraphFilterError(
                    f"the filter {shown(name)} is in {entry.value}, which cannot be imported: {shown(error)}"
                ) from error
    if name not in _FILTERS:
        known = available_filters()
        raise UnknownFilterError(
            f"unknown filter {shown(name)}{_nearest(name, known)}; known filters: {', '.join(known)} (a third party's "
            "filter must be imported first)"
        )
    return _FILTERS[name]


def import_filters(modules: Sequence[str]) -> None:
    """Import modules that register filters: ``--import`` of the command line and of the recipes.

    Args:
        modules: dotted names, found from the current directory too as by ``python -m``, or paths of ``.py`` files,
            whose folder goes on the path as by ``python file.py``. Importing one again does nothing.

    Raises:
        GraphFilterError: a module is not there or raises while it is imported; its error is named.

    Example:
        >>> import_filters(["hf_graphfilter.filters.gfsa"])
    """
    if isinstance(modules, str):
        raise GraphFilterError(f"modules to import are a list of names, got the string {modules!r}: give [{modules!r}]")
    for name in modules:
        path = Path(name).resolve() if name.endswith(".py") or os.sep in name else None
        if path is not None and not path.is_file():
            raise GraphFilterError(f"cannot import filters from {name!r}: there is no such file")
        folder = os.getcwd() if path is None else str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        importlib.invalidate_caches()  # the file may be new
        try:
            module = importlib.import_module(name if path is None else path.stem)
        except (Exception, SystemExit) as error:
            raise GraphFilterError(
                f"cannot import filters from {name!r}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        there = getattr(module, "__file__", None)
        if path is not None and not path.samefile(there or os.devnull):
            raise GraphFilterError(
                f"cannot import filters from {name!r}: the name {path.stem!r} is taken by {there or 'Python'}; rename "
                "the file"
            )


def foreign_modules(configs: Iterable[FilterConfig]) -> list[str]:
    """The modules that register the filters of other packages; none for what a script or notebook defines."""
    modules = {type(config).__module__ for config in configs}
    return sorted(m for m in modules if m.partition(".")[0] != __name__.partition(".")[0] and m != "__main__")


def as_config(filter: str | FilterConfig, **options: Any) -> FilterConfig:
    """A config from a name with options, or from a config object (then without options)."""
    if isinstance(filter, str):
        return get_filter(filter).from_options(**options)
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


def _nearest(word: str, known: Iterable[str]) -> str:
    by_lower = {k.lower(): k for k in known}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[match[0]]!r}?)" if match else ""


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, and a list, which JSON has instead, as a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(v if isinstance(v, (list, tuple)) else _plain(v) for v in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    return value


def _has_type(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(isinstance(value, type(a)) and value == a for a in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(v, args[0]) for v in value)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, a) for a in args)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple of {_describe(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in args)
    return {int: "an integer", float: "a number", str: "a string", bool: "True or False"}.get(hint, str(hint))


def summary(config_class: type[FilterConfig]) -> str:
    """The first line of its documentation, or of its filter's."""
    lines = [(owner.__doc__ or "").strip().partition("\n")[0] for owner in (config_class, config_class.module)]
    generated = f"{config_class.__name__}("  # by dataclass, where the author wrote none
    return next((line for line in lines if line and not line.startswith(generated)), "")


def options(config_class: type[FilterConfig]) -> dict[str, tuple[str, Any]]:
    """What ``from_options`` takes: name -> (type in words, default or ``dataclasses.MISSING``)."""
    hints = typing.get_type_hints(config_class)
    return {f.name: (_describe(hints[f.name]), f.default) for f in fields(config_class)}  # type: ignore[arg-type]
