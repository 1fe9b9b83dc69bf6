"""``linearize``: what is asked, checked and put together."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from ..analysis.model_inputs import name_mistakes
from ..errors import GraphFilterError, is_number, nearest, shown
from ..filters import FilterConfig, GraphFilter, ReplacingConfig, as_config
from ..filters.core.attached import filters_of
from ..filters.core.registry import get_filter
from ..hosts import encoder_of, host_of
from ..patching.layers import Layers
from ..patching.patch import patch_model, unpatch_model
from .batches import one_pass, repeated, set_aside, split_holdout
from .checkpoint import exclusive, fitted_to
from .choice import least_sensitive, parse_share
from .report import ConversionReport
from .run import filter_groups
from .stages import Conversion, check_stages, recomputed
from .transfer import only_filters
from .weights import Train, check_trainable, trained

STAGES = ("attention", "hidden", "logits", "task")
USUAL = {"attention": 0.7, "logits": 0.3}


@dataclass(frozen=True)
class Rates:
    """Peak learning rates.

    Attributes:
        attention: of the filters' weights in the regression of each layer.
        end_to_end: of these in later stages.
        filter_lr: of the filter coefficients in the regression; None for three times ``attention``. Later stages keep
            the ratio of the two.
        weights: of the model's own weights, or their adapters.
    """

    attention: float = 1e-2
    end_to_end: float = 1e-3
    filter_lr: float | None = None
    weights: float = 1e-4

    @property
    def ratio(self) -> float:
        """The rate of the coefficients over that of the filters' weights."""
        return 3.0 if self.filter_lr is None else self.filter_lr / self.attention


def linearize(
    model: nn.Module,
    data: Iterable[Any],
    filter: str | FilterConfig = "agf",
    *,
    budget: int = 1_000_000,
    stages: Mapping[str, float] | None = None,
    train: Train = "filters",
    layers: Layers | str = None,
    stack: Literal["encoder", "decoder"] | None = None,
    holdout: int | Iterable[Any] = 8,
    rates: Rates | Mapping[str, float] = Rates(),
    rank: int = 8,
    precision: Literal["bf16"] | None = None,
    gradient_checkpointing: bool = False,
    evaluations: int = 20,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> ConversionReport:
    """Put a filter in the place of a pretrained model's attention, in place, and fit it so that little is lost.

    Args:
        model: a pretrained transformers model that is not patched, or a ``SentenceTransformer`` around one, in any
            precision, on any device.
        data: batches, gone through again when they end: mappings of model inputs, or tensors, the model's main input.
            Of one budget, many small ones fit better than few large ones (docs/linearize.md).
        filter: one in the place of attention, by name or as a config. By name it gets the options that fit pretrained
            attention best, ``FilterConfig.for_conversion``, with ``options`` on top.
        budget: tokens of all stages together, without padding; of images, the tokens that attention sees.
        stages: shares of the budget, in order. ``"attention"``: each layer to its original attention; ``"hidden"``: the
            hidden states of all layers; ``"logits"``: the output distribution (Kullback-Leibler divergence from the
            original's); ``"task"``: the loss that the model itself gives for batches with labels. If not given, 0.7 of
            ``"attention"`` and 0.3 of ``"logits"``, or of ``"hidden"`` where the model gives no logits.
        train: what the stages after ``"attention"`` train: the ``"filters"``; these and low-rank adapters of the
            attention's projections, ``"lora"``, which are merged into the weights at the end (those of a model in half
            precision round what is merged); or ``"all"`` weights.
        layers, stack: as for ``patch_model``; ``"auto:75%"`` keeps three quarters of the layers as filters and gives
            the others, where the filter costs most, their attention back after the first stage.
        holdout: batches to measure on: how many to set aside from the start of ``data``, or the batches. Of a
            ``DataLoader`` that shuffles, as many rows are set aside.
        rates: learning rates, those of ``Rates`` that are to be others: ``{"attention": 2e-2}``.
        rank: of the adapters.
        precision: ``"bf16"`` computes under autocast.
        gradient_checkpointing: compute activations again in the backward pass, for memory.
        evaluations: measurements in each stage, fewer if they would read more tokens than the stage itself; the best
            state is kept.
        checkpoint: a directory that keeps the progress at every measurement; the same call goes on from there.
        progress: show a progress bar.
        **options: options of the filter, when it is given by name.

    Returns:
        ``ConversionReport``: errors of each layer, by the number of tokens that a token sees, the model's measures
        before and after, and with each part of the filters switched off.

    Raises:
        GraphFilterError: a budget, share or stage that cannot be; a filter that is not in the place of attention; a
            model that is patched already; texts that the window spans; an original that gives NaN; a checkpoint of
            another run, or one that another call is writing. The model is then as it was.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=1))
        >>> batches = [{"input_ids": torch.randint(0, 1000, (4, 16))} for _ in range(6)]
        >>> report = linearize(model, batches, "agf", window=4, budget=200, holdout=2, progress=False)
        >>> report.error <= report.error_before
        True

    Source: attention transfer and low-rank adaptation after it are those of Zhang et al., LoLCATs (2024).
    """
    config, shares, share = _config(filter, options), _shares(stages, budget), parse_share(layers)
    rates = _rates(rates)
    _check(evaluations, rank, precision, train)
    model = encoder_of(model)
    if not isinstance(model, PreTrainedModel):
        raise GraphFilterError(f"linearize takes a model of transformers or a SentenceTransformer, got {type(model)}")
    if list(filters_of(model)):
        raise GraphFilterError(
            f"{type(model).__name__} has graph filters already, converted or patched: fit them further with "
            "transfer_attention, or call unpatch_model first"
        )
    check_trainable(model, train)
    if gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise GraphFilterError(f"{type(model).__name__} does not support gradient checkpointing: leave it out")
    started, labels = time.monotonic(), "task" in shares
    causal = all(site.causal for site in host_of(model).find(model)[0])
    data, holdout = split_holdout(data, holdout)
    held, skip = set_aside(model, data, holdout, labels)
    batches = partial(repeated, model, data, skip, labels)
    fitted = fitted_to(model, held)
    patch_model(model, config, layers=None if share is not None else layers, stack=stack)  # type: ignore[arg-type]
    sensitivity: dict[str, float] = {}
    claimed = contextlib.ExitStack()
    try:
        claimed.enter_context(exclusive(checkpoint))
        modules = dict(filters_of(model))
        with only_filters(model, modules), name_mistakes(model, held[0]):
            ends_in = check_stages(model, modules, held[0], shares, causal)
        shares = shares or {"attention": 0.7, ends_in: 0.3}
        run = Conversion(
            model=model,
            modules=modules,
            held=held,
            batches=one_pass(batches()) if isinstance(data, Iterator) else batches,
            tokens=_tokens(shares, budget),
            evaluations=evaluations,
            precision=precision,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            progress=progress,
            ends_in=ends_in,
            settings={
                **fitted,
                "filter": config.to_dict(),
                "modules": sorted(modules),
                "share": share,
                "train": train,
                "rank": rank,
                # by these names: progress that earlier code kept can be resumed
                "rates": {
                    "attention": rates.attention,
                    "end_to_end": rates.end_to_end,
                    "coefficients": rates.ratio,
                    "weights": rates.weights,
                },
                "evaluations": evaluations,
                "precision": precision,
            },
        )
        with only_filters(model, modules):
            run.attention(filter_groups(modules, rates.attention, rates.attention * rates.ratio), config.window)
            if share is not None:
                sensitivity = run.sensitivity()
        if share is not None:
            run.modules = modules = _keep(model, config, modules, least_sensitive(sensitivity, share))
        kept_in = [(p, p.dtype) for graph_filter in modules.values() for p in graph_filter.parameters()]
        with only_filters(model, modules), trained(model, modules, train, rank) as weights:
            groups = filter_groups(modules, rates.end_to_end, rates.end_to_end * rates.ratio)
            if weights.parameters:
                groups.append((weights.parameters, rates.weights))
            with recomputed(model, gradient_checkpointing):
                run.end_to_end(groups, weights.original)
            for parameter, dtype in kept_in:  # half precision rounds what was fitted in float32
                parameter.data.copy_(parameter.data.to(dtype))
            report = run.measured(weights.original, causal)
    except BaseException:
        unpatch_model(model)
        raise
    finally:
        claimed.close()
    report.config, report.sensitivity, report.budget = config.to_dict(), sensitivity, budget
    report.parameters = sum(p.numel() for graph_filter in modules.values() for p in graph_filter.parameters())
    report.seconds = time.monotonic() - started
    return report


def _config(filter: str | FilterConfig, options: dict[str, Any]) -> ReplacingConfig:
    kind = get_filter(filter) if isinstance(filter, str) else type(as_config(filter, **options))
    if not issubclass(kind, ReplacingConfig):
        raise GraphFilterError(
            f"{kind.filter!r} is a function of the attention matrix, with its cost: linearize with a filter in the "
            "place of attention, such as agf or singularformer"
        )
    config = kind.for_conversion(**options) if isinstance(filter, str) else filter
    assert isinstance(config, ReplacingConfig)
    if config.init == "blend":
        raise GraphFilterError("init='blend' would leave attention in the model: linearize with init='copy'")
    return config


def _rates(given: Any) -> Rates:
    known = [field.name for field in fields(Rates)]
    own = asdict(given) if isinstance(given, Rates) else given
    if not isinstance(own, Mapping) or not all(
        name in known and (is_number(own[name]) or (name == "filter_lr" and own[name] is None)) for name in own
    ):
        raise GraphFilterError(f"rates are numbers >= 0 by the names of Rates, {', '.join(known)}; got {shown(given)}")
    rates = Rates(**own)
    if not rates.attention and rates.filter_lr is not None:  # later stages keep their ratio
        raise GraphFilterError("rates: filter_lr goes with an attention rate > 0, got attention=0")
    return rates


def _shares(stages: Mapping[str, float] | None, budget: int) -> dict[str, float]:
    """Of the budget; empty for the usual ones."""
    if type(budget) is not int or budget < 1:
        raise GraphFilterError(f"budget must be a number of tokens, at least 1, got {shown(budget)}")
    if stages is None:
        return {}
    if not isinstance(stages, Mapping) or not stages:
        raise GraphFilterError(f"stages must give shares of the budget by name, such as {USUAL}, got {shown(stages)}")
    for name, share in stages.items():
        if name not in STAGES:
            raise GraphFilterError(f"there is no stage {shown(name)}{nearest(name, STAGES)}: {', '.join(STAGES)}")
        if not isinstance(share, (int, float)) or not 0 < share < math.inf:
            raise GraphFilterError(f"stages: the share of {name!r} must be a number > 0, got {shown(share)}")
    if list(stages) != sorted(stages, key=STAGES.index):
        raise GraphFilterError(f"stages come in the order {', '.join(STAGES)}, got {', '.join(stages)}")
    return dict(stages)


def _tokens(shares: dict[str, float], budget: int) -> dict[str, int]:
    whole = sum(shares.values())
    return {name: max(1, round(budget * share / whole)) for name, share in shares.items()}


def _check(evaluations: int, rank: int, precision: str | None, train: str) -> None:
    if evaluations < 1 or rank < 1:
        raise GraphFilterError(f"evaluations and rank must be >= 1, got {shown(evaluations)} and {shown(rank)}")
    if precision not in (None, "bf16"):
        raise GraphFilterError(f"precision={shown(precision)}: use 'bf16' or None")
    if train not in get_args(Train):
        raise GraphFilterError(f"train={shown(train)}: use {', '.join(map(repr, get_args(Train)))}")


def _keep(
    model: nn.Module, config: FilterConfig, modules: dict[str, GraphFilter], chosen: list[str]
) -> dict[str, GraphFilter]:
    """Give the other modules their attention back."""
    states = {name: modules[name].state_dict() for name in chosen}
    patch_model(unpatch_model(model), config, layers=lambda index, name: name in states)
    kept = dict(filters_of(model))
    for name, graph_filter in kept.items():
        graph_filter.load_state_dict(states[name])
    return kept


def convert(*arguments: Any, **options: Any) -> ConversionReport:
    """Call ``linearize``; this is its earlier name."""
    warnings.warn("convert is called linearize now, and takes the same arguments", FutureWarning, stacklevel=2)
    return linearize(*arguments, **options)
