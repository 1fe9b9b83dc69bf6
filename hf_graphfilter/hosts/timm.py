"""The host for timm: it runs an attention module's own forward on a view of the module.

timm has no attention interface; each module computes ``proj(attend(qkv(x)))`` in its ``forward``. A patched module gets
a subclass of its class whose ``forward`` runs the original one on a view. In the view, ``qkv`` returns the tensor that
we pass, and ``proj`` returns its input unchanged. So ``S(signal)`` is the module's own attention with another value,
whatever the module does with query and key (norms, position biases, shifted windows, rotary positions, fused or not).
If the module forms the matrix (unfused attention, the talking heads of CaiT), the view keeps it, and later applications
multiply by it.

Checkpoints: timm's ``save_for_hf(model, folder, safe_serialization=True)`` and ``push_to_hf_hub`` save a patched model
as it is, with its record in ``pretrained_cfg``; ``checkpoints.timm`` loads it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..filters import AttentionSite, GraphFilter
from ..filters.core.attached import CHILD, class_of
from ..ops.combine import Coefficients
from ..ops.polynomial_form import polynomial_form
from ..ops.visibility import visibility
from ..shift.attention import AttentionCall, AttentionShift
from ..text import quoted
from .base import collect_sites, looks_like_attention, without_wrappers
from .stand_ins import ModuleView
from .subclassing import derive_filtered, original_class, restore_classes, runs_subclass, swap_class
from .watching import REPLACED, as_written, note_filter_runs

LIBRARY = "timm"
RECORD = "hf_graphfilter"  # key in pretrained_cfg; timm's error names it if a model is loaded without this package


# what besides query and key makes the scores of the forms that are honoured
_HONOURED = {
    "timm.layers.attention.Attention": "",
    "timm.layers.attention.AttentionRope": "rotary positions",
    "timm.models.eva.EvaAttention": "rotary positions",
    "timm.models.swin_transformer.WindowAttention": "position bias",
    "timm.models.cait.TalkingHeadAttn": "talking heads",
}


def find(model: nn.Module) -> tuple[list[AttentionSite], dict[str, str]]:
    """Return all self-attention modules of a supported form, and the others with the reason."""
    return collect_sites(model, _find_refusal, _describe)


def _describe(name: str, module: Any) -> dict[str, Any]:
    """Return the fields of ``AttentionSite`` for a module of a supported form."""
    scores = _HONOURED[_class_name(module)]
    return {
        "heads": module.num_heads,
        "causal": False,
        "hidden_size": module.qkv.in_features,
        "head_dim": module.qkv.out_features // 3 // module.num_heads,
        "position_bias": scores == "position bias",
        "other_scores": scores if scores != "position bias" else "",
    }


def _class_name(module: nn.Module) -> str:
    cls = original_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def _find_refusal(name: str, module: Any) -> str | None:
    """Return None for a module of a supported form, "" for no attention, and otherwise the reason for its refusal."""
    if _class_name(module) not in _HONOURED:
        if _class_name(module) == "timm.models.cait.ClassAttn":
            return "class attention: one query, A is not square"
        return "an unsupported form of attention" if looks_like_attention(module) else ""
    if not leads_to_filter(module) and (
        CHILD in module._modules or "forward" in vars(module) or not as_written(module)
    ):
        return f"{REPLACED}: undo that, or replace it after patch_model by a function that calls the forward it finds"
    if getattr(module, "qkv", None) is None:  # of any class: adapters and quantizers put theirs in its place
        return "separate projections of query, key and value"
    if getattr(module, "q_bias", None) is not None:
        return "biases outside its qkv projection"
    if getattr(module, "gate", None) is not None:
        return "a gate on its output"
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        return "a norm between attention and projection (scale_norm)"
    return None


class _View(ModuleView):
    """A view of a module with another ``qkv`` and no output projection."""

    matrix: Tensor | None = None

    def __init__(self, module: Any, packed: Tensor):
        super().__init__(module)
        self._packed = packed
        if getattr(module, "fused_attn", False):  # which asks attn_drop for its rate
            self.attn_drop = module.attn_drop  # type: ignore[method-assign]

    def attn_drop(self, matrix: Tensor) -> Tensor:
        """Keep the matrix, which unfused attention passes through here."""
        self.matrix = matrix
        return self._module.attn_drop(matrix)  # type: ignore[no-any-return]

    def qkv(self, x: Tensor) -> Tensor:
        return self._packed

    @staticmethod
    def proj(x: Tensor) -> Tensor:
        return x

    proj_drop = proj


class _BaseAttention:
    """One call of a module's own forward, which computes attention for any value."""

    matrix: Tensor | None = None  # where the forward forms it, for all applications after the first

    def __init__(self, original: Callable[..., Tensor], module: Any, x: Tensor, args: Any, kwargs: Any):
        self.original, self.module, self.x, self.args, self.kwargs = original, module, x, args, kwargs
        self.packed = module.qkv(x)
        signals = self.packed.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        self.query, self.key, self.value = signals.unbind(0)
        if hasattr(module, "q_norm"):
            self.query, self.key = module.q_norm(self.query), module.k_norm(self.key)
        code = inspect.unwrap(original).__code__  # type: ignore[attr-defined]
        named = dict(zip(code.co_varnames[2 : code.co_argcount], args, strict=False)) | kwargs
        self.mask, self.causal = named.get("attn_mask", named.get("mask")), bool(named.get("is_causal", False))
        if self.mask is not None and self.mask.dim() == 2:  # queries by keys, as SDPA has it
            self.mask = self.mask[None, None]

    def to_call(self) -> AttentionCall:
        """Return the call as the shift operator takes it."""
        return AttentionCall(
            *(self.attend, self.query, self.key),
            hidden=self.x,
            scaling=self.module.scale,
            mask=self.mask,
            visible=self.read_mask,
            polynomial=self.apply_polynomial,
        )

    def attend(self, _: Tensor, signal: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the forward with ``signal`` as the value, or multiply by the matrix that it formed before."""
        if self.matrix is not None:
            return (self.module.attn_drop(self.matrix) @ signal).transpose(1, 2), None
        packed = self.packed
        if signal is not self.value:
            query_and_key = packed[..., : 2 * packed.shape[-1] // 3]
            packed = torch.cat([query_and_key, signal.transpose(1, 2).flatten(2)], dim=-1)
        view = _View(self.module, packed)
        output = self.original(view, self.x, *self.args, **self.kwargs)
        self.matrix = view.matrix
        return output.unflatten(-1, (self.module.num_heads, -1)), None

    def read_mask(self) -> tuple[bool, Tensor | None]:
        """Return (causal, keys): which tokens the mask leaves, see ``ops.visibility``."""
        if self.mask is not None and self.mask.dim() == 3:
            raise GraphFilterError(
                f"{self.module.graph_filter.site_name} attends within shifted windows, whose mask a linear-time filter "
                "cannot read; exclude these modules with layers="
            )
        return visibility(self.mask, self.causal, self.x.shape[1])

    def apply_polynomial(
        self, value: Tensor, coefficients: Coefficients, exact: bool
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the result of a joint form of several applications, or None if there is no faster one.

        Only query and key may enter the scores.
        """
        module = self.module
        if _HONOURED[_class_name(module)] or not module.fused_attn:
            return None
        dropout = module.attn_drop.p if module.training else 0.0
        options: dict[str, Any] = {"scale": module.scale, "causal": self.causal, "dropout": dropout, "exact": exact}
        return polynomial_form(self.query, self.key, value, self.mask, coefficients, **options)


def _forward(original: Callable[..., Tensor], module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    note_filter_runs(module)
    attention = _BaseAttention(original, module, x, args, kwargs)
    output = module.graph_filter(AttentionShift(attention.to_call()), attention.value)
    return module.proj_drop(module.proj(output.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@functools.cache
def _filtered(base: Any) -> Any:
    """Return the subclass that runs the filter; timm's tracer (FX) sees it as one node."""
    from timm.models import register_notrace_module

    def run(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _forward(base.forward, module, *args, **kwargs)  # as the class has it now

    return register_notrace_module(derive_filtered(base, _rebuild, run))


def _rebuild(base: Any) -> Any:
    cls = _filtered(base)
    return cls.__new__(cls)


def attach(site: AttentionSite, graph_filter: GraphFilter) -> None:
    """Add the filter to a module, and give the module the subclass that runs it."""
    site.module.add_module(CHILD, graph_filter)
    swap_class(site.module, _filtered)


def detach(model: nn.Module, modules: Iterable[Any]) -> None:
    """Undo ``attach`` of these modules."""
    restore_classes(modules, _filtered)


def leads_to_filter(module: nn.Module) -> bool:
    """Return whether the forward of a patched module, as it is now, is known to run the filter."""
    return runs_subclass(module, _filtered)


def backend(module: Any) -> str:
    """Return ``"sdpa"`` for fused attention, and otherwise ``"eager"``."""
    return "sdpa" if getattr(module, "fused_attn", False) else "eager"


def kind(module: Any) -> type:
    """Return one type for all modules, since a model has one stack."""
    return type(None)  # a model has one stack


def relative_name(model: nn.Module, name: str) -> str:
    """Return a module's name without the wrappers of PEFT."""
    return without_wrappers(model, name)


def saved_names(model: nn.Module, sites: list[AttentionSite]) -> dict[str, AttentionSite]:
    """Return no names: timm does not rename modules in checkpoints."""
    return {}


def read_record(model: Any) -> dict[str, Any] | None:
    """Return the record in ``pretrained_cfg``, or None."""
    return (getattr(model, "pretrained_cfg", None) or {}).get(RECORD)  # type: ignore[no-any-return]


def write_record(model: Any, record: dict[str, Any] | None) -> None:
    """Keep the record where timm's savers write it, in a copy, as other models may share the dict."""
    config = {k: v for k, v in (getattr(model, "pretrained_cfg", None) or {}).items() if k != RECORD}
    if record is not None:
        config[RECORD] = copy.deepcopy(record)
    model.pretrained_cfg = config


def model_type(model: Any) -> str:
    """Return the class name, which models must share for a filter to fit."""
    return class_of(model).__name__


def usage(model: Any, source: str) -> str:
    """Return Python code that loads a patched checkpoint, for its card."""
    return f"""from hf_graphfilter import load_timm_model  # pip install 'hf-graphfilter[vision]'

model = load_timm_model({quoted(source)})"""


def pipeline_tag(model: Any) -> str | None:
    """Return the task of the model as the Hub names it, for its card."""
    return "image-classification" if getattr(model, "num_classes", 0) else "image-feature-extraction"


def base_model(model: Any) -> str | None:
    """Return None: ``pretrained_cfg`` names a repository even if the weights did not come from there."""
    return None
