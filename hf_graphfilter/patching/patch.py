"""Patch a model in place, and undo it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from torch import nn

from ..errors import GraphFilterError
from ..filters import AttentionSite, FilterConfig, as_config
from ..filters.core.attached import CHILD, patched_modules
from ..filters.core.kept_heads import KeepingConfig
from ..filters.core.record import extend_record
from ..hosts import encoder_of, host_of, host_of_module, own_record, unwrapped
from ..hosts.watching import REPLACED
from ..logs import logger
from .base_weights import SAMPLE
from .layers import Layers, select_sites
from .restore import attach, build_at

STARTS = "_graph_filter_starts"  # attribute of a model whose filters have start values, since adapters hold others
M = TypeVar("M", bound=nn.Module)


def patch_model(
    model: M,
    filter: str | FilterConfig = "gfsa",
    *,
    layers: Layers = None,
    stack: Literal["encoder", "decoder"] | None = None,
    **options: Any,
) -> M:
    """Replace self-attention by a graph filter, in place.

    Every selected attention module gets one child module, ``graph_filter``. Existing parameters keep their names and
    values. Cross-attention is never patched. Some filters start at random values (AGF, Singularformer ...). Call
    ``transformers.set_seed`` before ``patch_model`` to get the same values again.

    Args:
        model: a transformers ``PreTrainedModel`` whose attention runs through the attention interface, a
            ``SentenceTransformer`` around one, a timm model, or any module with ``torch.nn.MultiheadAttention`` or
            ``GraphFilterAttention``. Pass the whole model that you will save, since the record of the patch is stored
            in it. Choose parts with ``layers`` and ``stack``.
        filter: the name of a registered filter, or its config object. Default: ``"gfsa"``.
        layers: the layers to patch, counted from 0 in each list of layers of the model: ``"all"``, ``"even"``,
            ``"odd"``, a list of indices (negative ones count from the end), a slice, or a predicate
            ``(index, module name) -> bool``. A string can also give indices, ``"0,2,-1"``, or a slice, ``"2:8"``. With
            ``stack``, only the layers of that stack are counted. Default: all layers.
        stack: ``"encoder"`` or ``"decoder"`` to patch only that stack. Default: both.
        **options: options of the filter, if ``filter`` is a name.

    Returns:
        The model itself.

    Raises:
        GraphFilterError: an unknown filter or option, an empty or impossible selection, or a model that has nothing to
            patch or is already patched at these layers. The model then stays unchanged.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> patch_model(model, "gfsa", K=3) is model
        True
    """
    config = as_config(filter, **options)
    outer_model, model = model, encoder_of(model)
    host = host_of(model)
    sites, refused = host.find(model)
    if not sites:
        raise GraphFilterError(_nothing_to_patch(model, refused))
    if replaced := next((name for name, reason in refused.items() if reason.startswith(REPLACED)), None):
        raise GraphFilterError(f"{replaced} cannot be patched: {refused[replaced]}")  # and must not be skipped silently
    selected = select_sites(sites, layers, stack)
    if isinstance(config, KeepingConfig) and config.keep and stack is not None:
        _check_counts(sites, selected, stack)
    for site in selected:
        if hasattr(site.module, CHILD):
            raise GraphFilterError(
                f"{type(model).__name__} is already patched at {site.name} "
                f"({site.module.get_submodule('graph_filter').config}); call unpatch_model first (hf-graphfilter "
                "unpatch), or select other layers"
            )
    patched = (site for site in sites if (f := site.module._modules.get(CHILD)) and type(f.config) is type(config))
    config.check_sites([*patched, *selected])
    filters = [build_at(config, site, model) for site in selected]  # build all first, so that a failure changes nothing
    names = [*dict.fromkeys(host.relative_name(model, site.name) for site in selected)]  # PEFT's copies share one name
    # a model that was built from a patched one's config has a record, but no filters
    earlier = own_record(host, model) if host.read_record(model) and patched_modules(model, required=False) else None
    record = extend_record(earlier, type(model).__name__, config, names)
    attach(host, model, list(zip(selected, filters, strict=True)), record)
    counts, kind = (len(selected), len(sites)), type(model).__name__
    logger.info("patched %d of %d attention modules of %s with %s", *counts, kind, config.filter)
    return outer_model


def unpatch_model(model: M) -> M:
    """Remove all filters from a model, in place.

    The model then computes exactly what the original architecture does, with the weights it has now.

    Args:
        model: a patched model, also within a PEFT model or a ``SentenceTransformer``.

    Returns:
        The model itself.

    Raises:
        GraphFilterError: the model is not patched.
    """
    outer_model, model = model, unwrapped(model, running=False)  # type: ignore[assignment]
    host = host_of(model)
    patched = patched_modules(model, required=host.read_record(model) is None)  # patched parts may have been removed
    owners = {module: host_of_module(module, host) for _, module in patched}
    for owner in dict.fromkeys(owners.values()):
        owner.detach(model, [module for module, each in owners.items() if each is owner])
    host.write_record(model, None)
    for attribute in (STARTS, SAMPLE):
        vars(model).pop(attribute, None)
    logger.info("removed the graph filters from %d attention modules of %s", len(patched), type(model).__name__)
    return outer_model


@contextlib.contextmanager
def restore_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the modules, attributes and ``requires_grad`` flags of a model if the block raises an exception.

    The values of tensors are not restored.
    """
    modules = [*model.modules()]
    classes = [(module, type(module)) for module in modules]
    grad_flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    configs = {id(c): vars(c) for m in modules if hasattr(c := vars(m).get("config"), "__dict__")}
    attributes = [*map(vars, modules), *configs.values()]
    containers = {id(v): v for a in attributes for v in a.values() if isinstance(v, (dict, list, set))}  # may be shared
    contents = [(container, container.copy()) for container in (*attributes, *containers.values())]
    try:
        yield
    except BaseException:
        for module, kind in classes:
            module.__class__ = kind
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for parameter, requires_grad in grad_flags:
            parameter.requires_grad_(requires_grad)
        raise


def _check_counts(sites: list[AttentionSite], selected: list[AttentionSite], stack: str) -> None:
    """Raise if one list holds layers of both stacks, so that ``keep`` and ``layers`` give a layer other numbers."""
    groups = {site.group for site in selected}
    if any(site.group in groups and site.stack != stack for site in sites):
        raise GraphFilterError(
            f"keep= counts the layers of both stacks, and stack={stack!r} those of one: leave out stack=, and pass "
            f"layers={[site.index for site in selected]}, which counts as keep= does"
        )


def _nothing_to_patch(model: nn.Module, refused: dict[str, str]) -> str:
    reasons = Counter((type(model.get_submodule(name)).__name__, reason) for name, reason in refused.items())
    refusals = "; ".join(f"{count} x {cls}: {reason}" for (cls, reason), count in reasons.items())
    return f"{type(model).__name__} has no self-attention to patch. Attention found: {refusals or 'none'}"
