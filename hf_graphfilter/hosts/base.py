"""The interface of a host, and functions that hosts share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

from ..errors import GraphFilterError
from ..filters import AttentionSite, GraphFilter
from ..filters.core.attached import CHILD


class Host(Protocol):
    """The functions that ``patching`` needs for one library."""

    LIBRARY: str  # as the Hub names it

    def find(self, model: nn.Module) -> tuple[list[AttentionSite], dict[str, str]]:
        """Return the sites in module order, and the refused attention modules: name -> reason."""

    def attach(self, site: AttentionSite, graph_filter: GraphFilter) -> None:
        """Route the module's attention through the filter."""

    def detach(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Undo ``attach`` of these modules of a model."""

    def backend(self, module: nn.Module) -> str:
        """Return the name of the attention implementation behind a patched module."""

    def leads_to_filter(self, module: nn.Module) -> bool:
        """Return whether the forward of a patched module, as it is now, is known to run the filter."""

    def kind(self, module: nn.Module) -> type:
        """Return a type that all attention modules of one model share.

        The parts of a composite model, such as the towers of CLIP, have different types.
        """

    def read_record(self, model: nn.Module) -> dict[str, Any] | None:
        """Return what ``write_record`` wrote, or None."""

    def write_record(self, model: nn.Module, record: dict[str, Any] | None) -> None:
        """Keep the record of the patch where the library saves it, or remove it (None)."""

    def model_type(self, model: nn.Module) -> str | None:
        """Return the type of a model; models of one type and number of heads may share a filter."""

    def usage(self, model: nn.Module, source: str) -> str:
        """Return Python code that loads a patched checkpoint, for its card."""

    def pipeline_tag(self, model: nn.Module) -> str | None:
        """Return the task of the model as the Hub names it, for its card."""

    def base_model(self, model: nn.Module) -> str | None:
        """Return the id of the Hub repository that the model was loaded from."""

    def relative_name(self, model: nn.Module, name: str) -> str:
        """Return the module's name without the prefixes of task heads and PEFT's wrappers."""

    def saved_names(self, model: nn.Module, sites: list[AttentionSite]) -> dict[str, AttentionSite]:
        """Return the sites by the relative names of their modules in checkpoints, where these differ."""


def describe_site(module: Any) -> str:
    """Return the name and class of a patched module, for errors."""
    return f"{module.graph_filter.site_name} ({type(module).__name__})"


def unwrapped(model: Any, *, running: bool = True) -> nn.Module:
    """Return the model inside its wrappers: a PEFT model, a SentenceTransformer, DataParallel.

    Args:
        model: a model, wrapped or not.
        running: whether to unwrap ``torch.compile`` and DDP too, which do not follow changes of the model inside.
    """
    while True:
        if running and hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel) or (running and isinstance(model, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "get_base_model") or type(model).__name__ == "PeftMixedModel":
            inner = model.base_model  # get_base_model() fails once the only adapter is deleted
            model = inner.model if _is_of_peft(inner) else inner
        elif (inner := encoder_of(model)) is not model:
            model = inner
        else:
            return model  # type: ignore[no-any-return]


# what PyTorch's wrappers name the module inside
WRAPPED_NAMES = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def _is_of_peft(module: object) -> bool:
    return type(module).__module__.startswith("peft.")


def without_wrappers(model: nn.Module, name: str) -> str:
    """Return a module's name without the parts that come from wrappers of PEFT and PyTorch."""
    module: Any = model
    parts, in_wrapper = [], False
    for part in name.split("."):
        if part in WRAPPED_NAMES:
            module = module._modules[part]
            continue
        # a wrapper names what it wraps as it likes, and may hold one copy per adapter
        in_wrapper = _is_of_peft(module) or (in_wrapper and isinstance(module, nn.ModuleDict))
        if not in_wrapper:
            parts.append(part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(parts)


def encoder_of(model: Any) -> Any:
    """Return the transformers model inside a model of sentence-transformers, or any other model unchanged.

    Raises:
        GraphFilterError: a model of sentence-transformers with no such model, or with several.
    """
    if not any(cls.__module__.partition(".")[0] == "sentence_transformers" for cls in type(model).__mro__):
        return model
    from transformers import PreTrainedModel

    encoders: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # from the outside in
        inside = any(name.startswith(f"{outer}.") for outer in encoders)
        if isinstance(module, PreTrainedModel) and not inside:
            encoders[name] = module
    if len(encoders) != 1:
        raise GraphFilterError(
            f"{type(model).__name__} holds {len(encoders)} transformers models ({', '.join(encoders) or 'none'}): pass "
            "the one that you mean"
        )
    return next(iter(encoders.values()))


def locate(name: str, causal: bool) -> tuple[str, str]:
    """Return (stack, group) of a module path.

    ``decoder.block.3.SelfAttention`` is in the stack ``decoder`` and the group ``decoder.block``.
    """
    parts = name.split(".")
    named = next((p for p in parts if p in ("encoder", "decoder")), None)
    number = next((i for i, p in enumerate(parts) if is_numbered(p)), len(parts))
    return named or ("decoder" if causal else "encoder"), ".".join(parts[:number])


def is_numbered(part: str) -> bool:
    """Return whether a part of a path counts layers: ``3``, or ``encoder_layer_3`` as torchvision names them."""
    return part.isdigit() or re.search(r"layer_\d+$", part) is not None


def collect_sites(
    model: nn.Module,
    find_refusal: Callable[[str, Any], str | None],
    describe: Callable[[str, Any], dict[str, Any]],
) -> tuple[list[AttentionSite], dict[str, str]]:
    """Return the sites of a model in module order, and the refused attention modules: name -> reason.

    Args:
        model: any model of the library.
        find_refusal: called with name and module. It returns None for a site, "" for a module that is no attention, and
            otherwise the reason for the refusal.
        describe: called with name and module of a site. It returns heads, causality and the other fields of
            ``AttentionSite`` that the library knows.
    """
    sites: list[AttentionSite] = []
    refused, counts = {}, Counter[str]()
    for name, module in model.named_modules():
        if CHILD in name.split("."):
            continue
        reason = find_refusal(name, module)
        if reason is None:
            fields = describe(name, module)
            stack, group = locate(name, fields["causal"])
            sites.append(AttentionSite(name, module, stack=stack, group=group, index=counts[group], **fields))
            counts[group] += 1
        elif reason:
            refused[name] = reason
    return sites, refused


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a refused module should be reported.

    One of its children must be a linear layer, and its class or a base class must be named attention.
    """
    names = " ".join(cls.__name__ for cls in type(module).__mro__)  # another library may have put its class on top
    return bool(re.search(r"attention|attn", names, re.I)) and any(
        isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D" for child in module.children()
    )
