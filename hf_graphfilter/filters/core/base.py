"""The base classes of a graph filter: a config dataclass and a module, for one attention module of a model.

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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...errors import GraphFilterError, nearest, shown
from ...shift.operator import ShiftOperator
from . import fields
from .registry import get_filter
from .site import AttentionSite

LARGEST_ORDER = 1000  # of a polynomial, whose cost grows with it; the papers use 2 to 10
Decoding = Literal["rows", "state", "state and keys"]
Loss = Callable[..., Tensor]


class GraphFilter(nn.Module):
    """Base class of all filters: a learned function of the shift operator, applied to the values.

    A filter is the child ``graph_filter`` of an attention module. A subclass creates its parameters in ``__init__`` and
    defines ``reset_parameters`` and ``forward``.

    Coefficients (``coefficient_names``) stay in float32 when the model is cast to bfloat16 or float16. They are few,
    and half precision would lose small steps of the optimizer. The other parameters are weights, which are cast and
    trained like those of the model. All parameters are real: store a complex coefficient as (..., 2), and read it
    through ``torch.view_as_complex``.

    Args:
        config: the filter's config.
        site: the attention module that the filter goes into (name, heads, stack, causality).

    Class attributes:
        linear: whether the output is a matrix times the values, so analysis can show the matrix.
        spectral: whether the filter is a function of ``A`` alone, with a response to its eigenvalues.
        reads_hidden: whether ``forward`` reads ``shift.hidden``, the input of the attention module.
        reads_earlier: whether ``forward`` reads ``shift.earlier``, what the filters of earlier layers left.
            ``__init__`` may set it, and must then raise an error for a site without a ``stack_module``.
        reads_mask: whether ``forward`` asks which tokens a query sees; some models with shifted windows cannot say it.
        per_head: names of the parameters and buffers (heads, ...), if the filter has no others. Tensor parallelism then
            gives each process the entries of its heads.

    Attributes:
        recorder: function that receives the losses of ``penalised``; None if nobody asks for them.
    """

    linear: ClassVar[bool] = True
    spectral: ClassVar[bool] = True
    reads_hidden: ClassVar[bool] = False
    reads_earlier: bool = False
    reads_mask: ClassVar[bool] = False
    per_head: ClassVar[tuple[str, ...]] = ()
    recorder: Callable[[GraphFilter, Tensor, dict[str, Loss]], Tensor] | None = None

    def __init__(self, config: FilterConfig, site: AttentionSite):
        super().__init__()
        self.config = config
        self.site_name, self.heads, self.position_bias = site.name, site.heads, site.position_bias

    def __call__(self, shift: ShiftOperator, value: Tensor) -> Tensor:  # type: ignore[override]
        """Run ``forward`` and check the shape and dtype of its result."""
        out = super().__call__(shift, value)
        shape = (value.shape[0], *shift.rows, value.shape[-1])
        has_shape = isinstance(out, Tensor) and out.shape == shape
        if has_shape and (out.dtype == value.dtype or torch.is_autocast_enabled(value.device.type)):
            return out
        returned = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise GraphFilterError(
            f"{self.site_name}: {type(self).__name__}.forward must return a tensor (batch, heads, query tokens, "
            f"features) = {shape} of {value.dtype}, like the value, but returned {returned}"
        )

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        raise NotImplementedError

    def approximate(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Return the output that attention transfer fits to ``S(value)``; by default, that of ``forward``."""
        return type(self).forward(self, shift, value)  # not the instance's, which transfer replaces

    def penalised(self, out: Tensor, **losses: Loss) -> Tensor:
        """Return ``out`` and declare losses that training may add.

        In ``forward``, write ``return self.penalised(out, sparsity=lambda: ...)``.

        Args:
            out: what ``forward`` returns.
            **losses: functions without arguments that return a scalar, by the names in ``FilterConfig.penalties``. They
                are called only if ``RegularizerCallback`` or ``collect_penalties`` asks for them. Otherwise they cost
                neither time nor memory.
        """
        if self.recorder is None or not self.training:
            return out
        if unknown := losses.keys() - self.config.penalties.keys():
            raise GraphFilterError(
                f"{type(self).__name__} penalises {min(unknown)!r}, but {type(self.config).__name__}.penalties gives "
                f"weights for {', '.join(self.config.penalties) or 'nothing'}: add it there"
            )
        return self.recorder(self, out, losses)

    @property
    def decoding(self) -> Decoding:
        """The content of the cache: rows of signals, or a state, with or without the model's own keys and values."""
        return "rows"

    def reset_parameters(self) -> None:
        """Set the start values in place; values that a checkpoint has loaded stay."""
        if any(True for _ in (*self.parameters(), *self.buffers())):
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__} has parameters or buffers but no reset_parameters(), which "
                "must set their start values in place: without it a checkpoint that lacks them could not be loaded"
            )

    def coefficient_names(self) -> set[str]:
        """Return the names of the parameters and buffers that are coefficients.

        Coefficients are kept in float32, checked when they are loaded, and trained with their own learning rate. By
        default they are the tensors of the module itself; a filter may name some of its children's too
        (``"mix.weight"``).
        """
        tensors = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return {name for name, _ in tensors}

    def coefficient_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are coefficients, by name."""
        names, tensors = self.coefficient_names(), (*self.named_parameters(), *self.named_buffers())
        return {name: tensor for name, tensor in tensors if name in names}

    def coefficients(self) -> dict[str, Tensor]:
        """Return the coefficients by name, learned or fixed, as they enter the formula."""
        return {name: tensor.detach() for name, tensor in self.coefficient_tensors().items()}

    def learned_coefficients(self) -> dict[str, Tensor]:
        """Return the ``coefficients`` that are trained; theta_0 ... theta_K belong to the parameter theta."""
        names = {name for name, _ in self.named_parameters()}
        return {k: v for k, v in self.coefficients().items() if k in names or k.rpartition("_")[0] in names}

    def branches(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Return the parts that can be switched off: name -> context manager that switches the part off.

        ``analysis.branch_report`` reads them. By default there are none.
        """
        return {}

    def singular_response(self, values: Tensor) -> Tensor | None:
        """Return the response of the filter to singular values in [0, 1], (heads, values).

        None, the default, means that the response depends on more than the values and the coefficients.
        """
        return None

    def extra_repr(self) -> str:
        return f"{self.config}, heads={self.heads}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphFilter:
        coefficients = {id(t) for c in self.coefficient_tensors().values() for t in (c, c.grad)}

        def keep_precision(t: Tensor) -> Tensor:
            result = fn(t)
            loses_precision = result.is_floating_point() and result.element_size() < min(4, t.element_size())
            return t.to(result.device, torch.float32) if loses_precision and id(t) in coefficients else result

        return super()._apply(keep_precision, recurse)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "recorder"}  # of a training run


class FilterConfig:
    """Base class of all filter configs: frozen dataclasses whose fields are checked.

    Each field is checked by its type, then ``validate`` checks the rest.

    Class attributes:
        filter: the registered name, set by ``register_filter``.
        version: number of the serialised form; raise it when a field changes its meaning.
        module: the ``GraphFilter`` class that the config builds.
        citation: BibTeX of the source, for model cards.
        formula: what the filter computes, for tables of filters.
        cost: how many applications of A it takes, for tables of filters.
    """

    filter: ClassVar[str] = ""
    version: ClassVar[int] = 1
    module: ClassVar[type[GraphFilter]] = GraphFilter
    citation: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    cost: ClassVar[str] = ""

    def __post_init__(self) -> None:
        fields.check_fields(self)
        self.validate()

    @property
    def starts_as_original(self) -> bool:
        """Whether a model equals the original right after it is patched."""
        return True

    @property
    def penalties(self) -> dict[str, float]:
        """The losses that the filter declares, by name, with the weight that ``RegularizerCallback`` gives each.

        See ``GraphFilter.penalised``.
        """
        return {}

    def validate(self) -> None:
        """Check what types cannot express, and raise a ``GraphFilterError`` that names the field."""

    def check_sites(self, sites: Sequence[AttentionSite]) -> None:
        """Check all modules that get this filter, and raise a ``GraphFilterError`` that names an unfit one."""

    def build(self, site: AttentionSite) -> GraphFilter:
        """Return the filter's module for one attention module."""
        return self.module(self, site)

    def to_dict(self) -> dict[str, Any]:
        """Return the config for JSON: ``{"filter": name, "version": int, field: value, ...}``."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}  # type: ignore[call-overload]
        return {"filter": self.filter, "version": self.version, **values}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> FilterConfig:
        """Return the config that ``to_dict`` wrote.

        Raises:
            GraphFilterError: an unknown filter, version or field, or a value of the wrong type; the message names it.
        """
        named = isinstance(data, dict) and isinstance(data.get("filter"), str)
        if not named or not all(isinstance(key, str) for key in data):
            raise GraphFilterError(f"a filter config is a dict of options with a key 'filter', got {shown(data)}")
        options = dict(data)
        config_class: type[FilterConfig] = get_filter(options.pop("filter"))
        version = options.pop("version", None)
        if type(version) is not int or version != config_class.version:
            raise GraphFilterError(
                f"{config_class.__name__}: version {shown(version)} of its config is unknown, this installation reads "
                f"version {config_class.version}; install the hf_graphfilter release that wrote it"
            )
        return config_class.from_options(**options)

    @classmethod
    def from_options(cls, /, **options: Any) -> FilterConfig:
        """Return the config with these options.

        Raises:
            GraphFilterError: an unknown option; the message names the nearest known one.
        """
        known = fields.options(cls)
        for option in options:
            if option not in known:
                close = nearest(option, (*known, "layers", "stack"))  # those of patch_model
                raise GraphFilterError(
                    f"{cls.__name__} has no option {shown(option)}{close}; its options are {', '.join(known) or 'none'}"
                )
        return cls(**options)
