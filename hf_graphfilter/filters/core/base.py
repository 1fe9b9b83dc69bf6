"""What a graph filter is: a config dataclass and a module, in one file, for one attention module of a model.

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
    """A function of the shift operator with learned coefficients; the child ``graph_filter`` of an attention module.

    Coefficients (``coefficient_names``) stay in float32 when the model is cast to bfloat16 or float16: they are few,
    and steps of a learning rate would be lost in half precision. The other parameters are weights, cast and trained as
    the model's own. Both are real: a complex coefficient is a parameter (..., 2) that ``forward`` reads through
    ``torch.view_as_complex``.

    Args:
        config: the filter's config.
        site: the attention module that it goes into (name, heads, stack, causality).

    Class attributes:
        linear: whether what it gives is a matrix times the values, as analysis shows it.
        spectral: whether it is a function of ``A`` alone, with a response to its eigenvalues.
        reads_hidden: whether ``shift.hidden`` is needed, the input of the attention module.
        reads_earlier: whether ``shift.earlier`` is needed, what the filters of earlier layers left. ``__init__`` may
            set it, and must refuse a site without a ``stack_module`` then.
        reads_mask: whether ``forward`` asks which tokens a query sees (``shift.mean``, ``shift.visible``), which not
            all shifted windows of images tell.
        per_head: parameters and buffers (heads, ...), where they are all that the filter is made of; tensor parallelism
            then hands each process the part of its heads.

    Attributes:
        recorder: set while someone asks for the losses of ``penalised``.
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
        """``forward``, and a look at what it returned."""
        out = super().__call__(shift, value)
        wanted = (value.shape[0], *shift.rows, value.shape[-1])
        has_shape = isinstance(out, Tensor) and out.shape == wanted
        if has_shape and (out.dtype == value.dtype or torch.is_autocast_enabled(value.device.type)):
            return out
        returned = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise GraphFilterError(
            f"{self.site_name}: {type(self).__name__}.forward must return a tensor (batch, heads, query tokens, "
            f"features) = {wanted} of {value.dtype}, as the value is, and returned {returned}"
        )

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """Filter ``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        raise NotImplementedError

    def approximate(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """What attention transfer fits to ``S(value)``; shapes as in ``forward``, which it is by default."""
        return type(self).forward(self, shift, value)  # not the instance's, which transfer replaces

    def penalised(self, out: Tensor, **losses: Loss) -> Tensor:
        """``out``, with losses that training may add: ``return self.penalised(out, sparsity=lambda: ...)``.

        Args:
            out: what ``forward`` returns.
            **losses: functions of nothing that give a scalar, by the names in ``FilterConfig.penalties``. They are
                called, and what they hold on to is kept, only if ``RegularizerCallback`` or ``collect_penalties`` asks.
        """
        if self.recorder is None or not self.training:
            return out
        if unknown := losses.keys() - self.config.penalties.keys():
            raise GraphFilterError(
                f"{type(self).__name__} penalises {min(unknown)!r}, and {type(self.config).__name__}.penalties gives "
                f"weights for {', '.join(self.config.penalties) or 'nothing'}: add it there"
            )
        return self.recorder(self, out, losses)

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

    def coefficient_names(self) -> set[str]:
        """Names of the parameters and buffers that are coefficients: kept in float32, checked when they are loaded, and
        trained with a learning rate of their own. By default those of the module itself; a filter may name some of its
        children's too (``"mix.weight"``).
        """
        tensors = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return {name for name, _ in tensors}

    def coefficient_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that are coefficients, by name."""
        names, tensors = self.coefficient_names(), (*self.named_parameters(), *self.named_buffers())
        return {name: tensor for name, tensor in tensors if name in names}

    def coefficients(self) -> dict[str, Tensor]:
        """The coefficients by name, learned or fixed, as they enter the formula."""
        return {name: tensor.detach() for name, tensor in self.coefficient_tensors().items()}

    def learned_coefficients(self) -> dict[str, Tensor]:
        """Those of ``coefficients`` that are trained: theta_0 ... theta_K of a filter are its parameter theta."""
        learned = {name for name, _ in self.named_parameters()}
        return {k: v for k, v in self.coefficients().items() if k in learned or k.rpartition("_")[0] in learned}

    def branches(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """The parts that can be switched off, by name, each with a context in which it is: see
        ``analysis.branch_report``. None by default."""
        return {}

    def singular_response(self, values: Tensor) -> Tensor | None:
        """(heads, values): what a filter makes of singular values in [0, 1], where that is a function of them and its
        coefficients alone; None, the default, where it is not."""
        return None

    def extra_repr(self) -> str:
        return f"{self.config}, heads={self.heads}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphFilter:
        coefficients = {id(t) for c in self.coefficient_tensors().values() for t in (c, c.grad)}

        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            lowered = moved.is_floating_point() and moved.element_size() < min(4, t.element_size())
            return t.to(moved.device, torch.float32) if lowered and id(t) in coefficients else moved

        return super()._apply(keep_precision, recurse)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "recorder"}  # of a training run


class FilterConfig:
    """Base of all filter configs: frozen dataclasses whose fields are checked by type and by ``validate``.

    Class attributes:
        filter: the registered name, set by ``register_filter``.
        version: of the serialised form; raise it when fields change meaning.
        module: the ``GraphFilter`` that the config builds.
        citation: BibTeX of its source, for model cards.
        formula, cost: what it computes, and of how many applications of A, for tables of filters.
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
        """The losses of the filter's own, by name, with the weight that ``RegularizerCallback`` gives each; see
        ``GraphFilter.penalised``."""
        return {}

    def validate(self) -> None:
        """Check what types cannot say; raise ``GraphFilterError`` naming the field."""

    def check_sites(self, sites: Sequence[AttentionSite]) -> None:
        """Check the modules that get this filter, together; raise ``GraphFilterError`` naming one."""

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
        """The config with these options; an unknown one is named, with the nearest known."""
        known = fields.options(cls)
        for option in options:
            if option not in known:
                close = nearest(option, (*known, "layers", "stack"))  # those of patch_model
                raise GraphFilterError(
                    f"{cls.__name__} has no option {shown(option)}{close}; its options are {', '.join(known) or 'none'}"
                )
        return cls(**options)
