"""The seam into timm: an attention module's own forward, run on a view of the module.

timm has no attention interface; each module computes ``proj(attend(qkv(x)))`` in its ``forward``. A patched module gets
a subclass of its class whose ``forward`` runs the original one on a view, in which ``qkv`` gives what we hand in and
``proj`` gives back what it gets. So ``S(signal)`` is the module's own attention, whatever it does with query and key
(norms, position biases, shifted windows, rotary positions, fused or not), with another value. Where the module forms
the matrix (unfused attention, the talking heads of CaiT), the view keeps it, and later applications multiply by it.

Checkpoints: timm's ``save_for_hf(model, folder, safe_serialization=True)`` and ``push_to_hf_hub`` save a patched model
as it is, with its record in ``pretrained_cfg``; ``checkpoints.timm`` loads it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..filters import AttentionSite, GraphFilter
from ..filters.core.attached import CHILD
from ..ops.apply_twice import joint_form
from ..ops.visibility import visibility
from ..shift.attention import AttentionCall, AttentionShift
from ..text import quoted
from .base import locate, looks_like_attention, without_wrappers
from .watching import REPLACED, as_written, note_filter_runs, refuse_script, running_forward, unwatch, watch

LIBRARY = "timm"
RECORD = "hf_graphfilter"  # the key in pretrained_cfg: timm refuses it by this name where we are not used to load

_BASE = "_graph_filter_base"  # of the class of a patched module: the one that it had

# what besides query and key makes the scores of the forms that are honoured
_HONOURED = {
    "timm.layers.attention.Attention": "",
    "timm.layers.attention.AttentionRope": "rotary positions",
    "timm.models.eva.EvaAttention": "rotary positions",
    "timm.models.swin_transformer.WindowAttention": "position bias",
    "timm.models.cait.TalkingHeadAttn": "talking heads",
}


# ------------------------------------------------------------------------------------------------- finding sites


def find(model: nn.Module) -> tuple[list[AttentionSite], dict[str, str]]:
    """All self-attention modules of a form that is honoured, and the others with the reason."""
    sites, refused, counts = [], {}, Counter[str]()
    module: Any
    for name, module in model.named_modules():
        if CHILD in name.split("."):
            continue
        reason = _refusal(module)
        if reason is None:
            stack, group = locate(name, causal=False)
            scores = _HONOURED[_class_name(module)]
            sites.append(
                AttentionSite(
                    *(name, module, module.num_heads, False, stack, group, counts[group]),
                    hidden_size=module.qkv.in_features,
                    head_dim=module.qkv.out_features // 3 // module.num_heads,
                    position_bias=scores == "position bias",
                    other_scores=scores if scores != "position bias" else "",
                )
            )
            counts[group] += 1
        elif reason:
            refused[name] = reason
    return sites, refused


def _class_name(module: nn.Module) -> str:
    cls = getattr(type(module), _BASE, type(module))
    return f"{cls.__module__}.{cls.__qualname__}"


def _refusal(module: Any) -> str | None:
    """None for a module of an honoured form, the reason for another attention module, "" for anything else."""
    if _class_name(module) not in _HONOURED:
        if _class_name(module) == "timm.models.cait.ClassAttn":
            return "class attention: one query, A is not square"
        return "a form of attention that is not honoured" if looks_like_attention(module) else ""
    if not leads_to_filter(module) and (
        CHILD in module._modules or "forward" in vars(module) or not as_written(module)
    ):
        return f"{REPLACED}: undo that, or do it after patch_model with a function that calls the forward it finds"
    if getattr(module, "qkv", None) is None:  # of any class: adapters and quantizers put theirs in its place
        return "separate projections of query, key and value"
    if getattr(module, "q_bias", None) is not None:
        return "biases outside its qkv projection"
    if getattr(module, "gate", None) is not None:
        return "a gate on its output"
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        return "a norm between attention and projection (scale_norm)"
    return None


# ------------------------------------------------------------------------------------------------------- forward


class _View:
    """A module with another ``qkv`` and no output projection; everything else is the module's own."""

    def __init__(self, module: Any, packed: Tensor):
        self._module, self._packed = module, packed
        self.matrix: Tensor | None = None
        if getattr(module, "fused_attn", False):  # which asks attn_drop for its rate
            self.attn_drop = module.attn_drop  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def attn_drop(self, matrix: Tensor) -> Tensor:
        """Unfused attention passes its matrix through here."""
        self.matrix = matrix
        return self._module.attn_drop(matrix)  # type: ignore[no-any-return]

    def qkv(self, x: Tensor) -> Tensor:
        return self._packed

    @staticmethod
    def proj(x: Tensor) -> Tensor:
        return x

    proj_drop = proj


def _forward(original: Callable[..., Tensor], module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    note_filter_runs(module)
    graph_filter, heads = module.graph_filter, module.num_heads
    packed = module.qkv(x)
    query, key, value = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    matrix: Tensor | None = None

    def attend(_: Tensor, signal: Tensor) -> tuple[Tensor, Tensor | None]:
        nonlocal matrix
        if matrix is not None:
            return (module.attn_drop(matrix) @ signal).transpose(1, 2), None
        given = packed
        if signal is not value:
            given = torch.cat([packed[..., : 2 * packed.shape[-1] // 3], signal.transpose(1, 2).flatten(2)], dim=-1)
        view = _View(module, given)
        output = original(view, x, *args, **kwargs)
        matrix = view.matrix
        return output.unflatten(-1, (heads, -1)), None

    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    mask, causal = _mask(original, args, kwargs)
    call = AttentionCall(
        *(attend, query, key),
        twice=lambda signal, exact: _twice(module, query, key, signal, mask, causal, exact),
        hidden=x,
        scaling=module.scale,
        visible=lambda: _visible(module, mask, causal, x.shape[1]),
        mask=mask,
    )
    output = graph_filter(AttentionShift(call), value).transpose(1, 2).flatten(2)
    return module.proj_drop(module.proj(output))  # type: ignore[no-any-return]


def _mask(original: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """(mask, whether causal) among what follows ``x``, by the names that timm gives them."""
    code = inspect.unwrap(original).__code__  # type: ignore[attr-defined]
    names = code.co_varnames[2 : code.co_argcount]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("attn_mask", given.get("mask")), bool(given.get("is_causal", False))


def _visible(module: Any, mask: Tensor | None, causal: bool, tokens: int) -> tuple[bool, Tensor | None]:
    if mask is not None and mask.dim() == 3:
        raise GraphFilterError(
            f"{module.graph_filter.site_name} attends within shifted windows, whose mask a linear-time filter cannot "
            "read; leave these modules out with layers="
        )
    return visibility(mask, causal, tokens)


def _twice(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, exact: bool
) -> tuple[Tensor, Tensor] | None:
    """The joint form of two applications, where query and key alone make the scores and it is the faster one."""
    dropout = module.attn_drop.p if module.training else 0.0
    if _HONOURED[_class_name(module)] or not module.fused_attn:
        return None
    return joint_form(query, key, value, mask, scale=module.scale, causal=causal, dropout=dropout, exact=exact)


# --------------------------------------------------------------------------------------------- attach and detach


@functools.cache
def _filtered(base: Any) -> Any:
    """The subclass that runs the filter. It is named as its base and copied and pickled as it, and one node where timm
    traces a model (FX)."""
    from timm.models import register_notrace_module

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if CHILD not in self._modules:  # a wrapper has kept this function, and the module is no longer patched
            return base.forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
        return _forward(base.forward, self, x, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _rebuild, (base,), self.__dict__.copy()

    body = {"forward": forward, "__reduce_ex__": reduce, "__prepare_scriptable__": refuse_script, _BASE: base}
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return register_notrace_module(type(base.__name__, (base,), {**body, **named}))


def _rebuild(base: Any) -> Any:
    cls = _filtered(base)
    return cls.__new__(cls)


def attach(site: AttentionSite, graph_filter: GraphFilter) -> None:
    site.module.add_module(CHILD, graph_filter)
    site.module.__class__ = _filtered(type(site.module))  # type: ignore[arg-type]
    watch(site.module)


def detach(model: nn.Module, modules: Iterable[Any]) -> None:
    modules = list(modules)
    for module in modules:
        if (base := getattr(type(module), _BASE, None)) and type(module) is not _filtered(base):
            raise GraphFilterError(
                f"{module.graph_filter.site_name} was given the class {type(module).__name__}, which derives from that "
                "of the patched module: undo that (FSDP2, parametrizations ...) before unpatch_model"
            )
    for module in modules:
        module.__class__ = getattr(type(module), _BASE, type(module))  # where another has replaced ours, that stays
        unwatch(module)
        delattr(module, CHILD)


def leads_to_filter(module: nn.Module) -> bool:
    base = getattr(type(module), _BASE, None)
    return base is not None and running_forward(module) is _filtered(base).forward


def backend(module: Any) -> str:
    return "sdpa" if getattr(module, "fused_attn", False) else "eager"


def kind(module: Any) -> type:
    return type(None)  # a model has one stack


def relative_name(model: nn.Module, name: str) -> str:
    return without_wrappers(model, name)


def saved_names(model: nn.Module, sites: list[AttentionSite]) -> dict[str, AttentionSite]:
    return {}


# ------------------------------------------------------------------------------------------------------- records


def read_record(model: Any) -> dict[str, Any] | None:
    return (getattr(model, "pretrained_cfg", None) or {}).get(RECORD)  # type: ignore[no-any-return]


def write_record(model: Any, record: dict[str, Any] | None) -> None:
    """Keep the record where timm's savers write it; the dict may be shared with other models."""
    own = {k: v for k, v in (getattr(model, "pretrained_cfg", None) or {}).items() if k != RECORD}
    if record is not None:
        own[RECORD] = copy.deepcopy(record)
    model.pretrained_cfg = own


def model_type(model: Any) -> str:
    """What models must share for a filter to fit."""
    return type(model).__name__


def usage(model: Any, source: str) -> str:
    return f"""from hf_graphfilter import load_timm_model  # pip install 'hf-graphfilter[vision]'

model = load_timm_model({quoted(source)})"""


def pipeline_tag(model: Any) -> str | None:
    return "image-classification" if getattr(model, "num_classes", 0) else "image-feature-extraction"


def base_model(model: Any) -> str | None:
    """Its pretrained_cfg names a repository whether or not the weights came from there."""
    return None
