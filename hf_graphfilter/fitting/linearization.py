"""Linearize a model: check what is asked, and run the stages."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from ..analysis.model_inputs import name_mistakes
from ..devices import process
from ..errors import GraphFilterError, is_number, nearest, shown
from ..filters import FilterConfig, ReplacingConfig, ReplacingFilter, as_config
from ..filters.core.attached import filters_of
from ..filters.core.registry import get_filter
from ..hosts import encoder_of
from ..logs import logger
from ..patching.layers import Layers, parse_layers
from ..patching.patch import patch_model, unpatch_model
from .batches import Batches
from .choice import Choose, check_choose, keep_attention, leave_sliding_windows, parse_share
from .head_choice import check_heads, choose_heads, parse_heads
from .layer_blocks import fit_in_blocks
from .report import ConversionReport
from .run import Rates
from .stages import Linearization
from .weights import Train, check_trainable, recomputed, trained

STAGES = ("attention", "hidden", "logits", "task")
SHORT = 512  # tokens, up to which softmax attention is fast
USUAL = {"attention": 0.7, "logits": 0.3}


def linearize(
    model: nn.Module,
    data: Iterable[Any],
    filter: str | FilterConfig = "far_field",
    *,
    budget: int = 1_000_000,
    stages: Mapping[str, float] | None = None,
    train: Train = "filters",
    layers: Layers = None,
    choose: Choose | None = None,
    stack: Literal["encoder", "decoder"] | None = None,
    holdout: int | Iterable[Any] = 8,
    rates: Rates | Mapping[str, float] | None = None,
    rank: int = 8,
    precision: Literal["bf16"] | None = None,
    gradient_checkpointing: bool = False,
    blocks: int = 1,
    evaluations: int = 20,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> ConversionReport:
    """Replace the attention of a pretrained model by a filter in linear time, in place, and fit the filter to it.

    The model is patched, fitted in stages without labels, and measured against the original on held-out batches.

    Args:
        model: a pretrained transformers model that is not patched, or a ``SentenceTransformer`` around one, in any
            precision, on any device.
        data: batches: mappings of model inputs, or tensors, the model's main input. They are read again when they end,
            except those of an iterator. For one budget, many small batches fit better than few large ones.
        filter: a replacement filter, by name or as a config. By name it gets the options that fit pretrained attention
            best, ``FilterConfig.for_conversion``, with ``options`` on top.
        budget: number of tokens of all stages together, without padding; for images, the tokens that attention sees.
        stages: shares of the budget, in order. ``"attention"`` fits each layer to its original attention;
            ``"hidden"`` the hidden states of all layers; ``"logits"`` the output distribution (Kullback-Leibler
            divergence from the original's); ``"task"`` minimises the model's own loss on batches with labels. The
            default is 0.7 of ``"attention"`` and 0.3 of ``"logits"``, or of ``"hidden"`` for a model without logits.
        train: what the stages after ``"attention"`` train: the ``"filters"``; ``"lora"``, the filters and low-rank
            adapters of the attention's projections, which are merged into the weights at the end (rounded, if the model
            is in half precision); or ``"all"`` weights.
        layers: which layers are linearized, as in ``patch_model``. The default is all but those that see a sliding
            window, which are linear already: a warning names them. ``"auto:75%"`` makes these layers filters, and gives
            a quarter of them their attention back after the first stage: those where that lowers the loss most.
        choose: the loss that ``layers="auto:..."`` lowers. ``"text"``: the distance from the original's outputs on at
            most two held-out batches. ``"retrieval"``: the negative log-likelihood of the answers in six probes
            (dictionaries, pass keys, copying). The probes are made of the token ids of the held-out batches, and have
            at most 384 tokens, or four windows. ``"both"``: the gains in the two at equal spread, added. None means
            ``"both"`` for a decoder that predicts the next token, if its held-out batches are text with at least 32
            different ids, and ``"text"`` otherwise. Each of the first three chosen layers costs one forward pass per
            layer over these batches, and all others together cost one more.
        stack: which stack of an encoder-decoder, as in ``patch_model``.
        holdout: batches to measure on: how many to take from the start of ``data``, or the batches themselves. From a
            ``DataLoader`` that shuffles, as many rows are taken.
        rates: learning rates that differ from those of ``Rates``: ``{"attention": 2e-2}``.
        rank: rank of the adapters.
        precision: ``"bf16"`` computes under autocast.
        gradient_checkpointing: whether to compute activations again in the backward pass, to save memory.
        blocks: in how many parts, one after the other, the stage "attention" fits the layers. The inputs of a part are
            kept on disk. Of a model that ``from_pretrained(device_map=...)`` offloads, one part is in memory at a time.
        evaluations: number of measurements per stage, fewer if they would read more tokens than the stage itself. The
            best state is kept.
        checkpoint: a directory that keeps the progress at every measurement. The same call resumes from it.
        progress: whether to show a progress bar.
        **options: options of the filter, if it is given by name. ``keep="20%"`` of ``far_field`` leaves a fifth of the
            key heads their attention, chosen by ``choose_heads`` before training.

    Returns:
        ``ConversionReport``: the error of each layer and by context length, and measures of the model before, after,
        and with each part of the filters switched off.

    Raises:
        GraphFilterError: an argument is not possible, the filter does not replace attention, the model is patched
            already, the window spans all texts, the original gives NaN, or the checkpoint belongs to another run or is
            in use. The model is then as it was.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=1))
        >>> batches = [{"input_ids": torch.randint(0, 1000, (4, 16))} for _ in range(6)]
        >>> report = linearize(model, batches, window=4, budget=200, holdout=2, progress=False)
        >>> report.error <= report.error_before
        True

    Source: attention transfer, and low-rank adaptation after it, follow Zhang et al., LoLCATs (2024).
    """
    heads, shares, share = parse_heads(options.get("keep")), _shares(stages, budget), parse_share(layers)
    config = _config(filter, options if heads is None else {**options, "keep": None})
    check_heads(config, heads, share)
    rates = _rates({} if rates is None else rates)
    _check_arguments(evaluations, rank, precision, train, blocks)
    check_choose(choose, share)
    model = encoder_of(model)
    _check_model(model, train, gradient_checkpointing)
    started = time.monotonic()
    batches = Batches(model, data, holdout, labels="task" in shares)
    _warn_of_short_texts(model)
    batches.stream()  # what it lacks is said before the model changes
    if isinstance(layers, str):
        layers = None if share is not None else parse_layers(layers)
    if layers is None:
        layers = leave_sliding_windows(model, stack)
    if heads is not None:
        keep = choose_heads(model, batches.held, heads, config, layers, stack)  # type: ignore[arg-type]
        config = replace(config, keep=keep)  # type: ignore[call-arg]
    patch_model(model, config, layers=layers, stack=stack)
    settings: dict[str, Any] = {"filter": config.to_dict(), "share": share, "train": train, "rank": rank}
    settings |= {"evaluations": evaluations, "precision": precision}
    # "coefficients": progress that earlier code kept can be resumed
    settings["rates"] = {name: rate for name, rate in asdict(rates).items() if name != "filter_lr"}
    settings["rates"]["coefficients"] = rates.ratio
    gains: dict[str, float] = {}
    chosen_by: Choose | None = None
    try:
        fit = Linearization(
            model, batches, rates, settings, checkpoint, progress, evaluations=evaluations, precision=precision
        )
        reach = max(0, *(f.span - 1 for f in fit.modules.values() if isinstance(f, ReplacingFilter)))
        with fit.exclusive(), name_mistakes(model):
            with fit.only_filters():
                ends_in = fit.check(shares)
                if share is not None:
                    fit.settings["choose"] = chosen_by = fit.prepare_choice(choose, reach)
                fit.tokens = _tokens(shares or {"attention": 0.7, ends_in: 0.3}, budget)
                fit.begin(reach)
                if "attention" in fit.tokens:
                    fit_in_blocks(fit, fit.tokens["attention"], blocks)
                if share is not None and chosen_by is not None:
                    restored, gains = fit.restore(chosen_by, share, ends_in)
            if share is not None:
                fit.modules = keep_attention(model, config, fit.modules, restored)
            report = _finish(fit, train, rank, gradient_checkpointing)
    except BaseException:
        unpatch_model(model)
        raise
    report.config, report.sensitivity, report.budget = config.to_dict(), gains, budget
    report.choose = chosen_by or ""
    report.parameters = sum(p.numel() for graph_filter in fit.modules.values() for p in graph_filter.parameters())
    report.seconds = time.monotonic() - started
    return report


def _finish(fit: Linearization, train: Train, rank: int, recompute: bool) -> ConversionReport:
    """Run the stages after "attention", and measure the model as it will be saved."""
    dtypes = [(p, p.dtype) for graph_filter in fit.modules.values() for p in graph_filter.parameters()]
    with fit.only_filters(), trained(fit.model, fit.modules, train, rank) as weights:
        fit.weights = weights.parameters
        with recomputed(fit.model, recompute):
            fit.finish(weights.original)
        weights.merge()
        for parameter, dtype in dtypes:  # half precision rounds what was fitted in float32
            parameter.data = parameter.data.to(dtype)
        return fit.measured(weights.original)


def _config(filter: str | FilterConfig, options: dict[str, Any]) -> ReplacingConfig:
    kind = get_filter(filter) if isinstance(filter, str) else type(as_config(filter, **options))
    if not issubclass(kind, ReplacingConfig):
        raise GraphFilterError(
            f"{kind.filter!r} computes softmax attention, which costs O(n^2): linearize with a replacement filter, "
            "such as 'far_field' or 'agf'"
        )
    config = kind.for_conversion(**options) if isinstance(filter, str) else filter
    assert isinstance(config, ReplacingConfig)
    if config.init == "blend":
        raise GraphFilterError("init='blend' would leave attention in the model: linearize with init='copy'")
    return config


def _rates(wanted: Any) -> Rates:
    names = [field.name for field in fields(Rates)]
    values = asdict(wanted) if isinstance(wanted, Rates) else wanted
    if not isinstance(values, Mapping) or not all(
        name in names and (is_number(rate) or (name == "filter_lr" and rate is None)) for name, rate in values.items()
    ):
        raise GraphFilterError(f"rates are numbers >= 0 by the names of Rates, {', '.join(names)}; got {shown(wanted)}")
    rates = Rates(**values)
    if not rates.attention and rates.filter_lr is not None:  # later stages keep their ratio
        raise GraphFilterError("rates: filter_lr goes with an attention rate > 0, got attention=0")
    return rates


def _shares(stages: Mapping[str, float] | None, budget: int) -> dict[str, float]:
    """Return the shares of the budget; none where the usual ones are meant."""
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
    total = sum(shares.values())
    return {name: max(1, round(budget * share / total)) for name, share in shares.items()}


def _check_arguments(evaluations: int, rank: int, precision: str | None, train: str, blocks: int) -> None:
    if type(blocks) is not int or blocks < 1 or (blocks > 1 and process()[1] > 1):
        raise GraphFilterError(f"blocks must be a number >= 1, and 1 in several processes, got {shown(blocks)}")
    if not all(type(x) is int and x >= 1 for x in (evaluations, rank)):
        raise GraphFilterError(f"evaluations and rank are integers >= 1, got {shown(evaluations)} and {shown(rank)}")
    if precision not in (None, "bf16"):
        raise GraphFilterError(f"precision={shown(precision)}: use 'bf16' or None")
    if train not in get_args(Train):
        raise GraphFilterError(f"train={shown(train)}: use {', '.join(map(repr, get_args(Train)))}")


def _check_model(model: nn.Module, train: Train, recompute: bool) -> None:
    if not isinstance(model, PreTrainedModel):
        raise GraphFilterError(f"linearize takes a model of transformers or a SentenceTransformer, got {type(model)}")
    if list(filters_of(model)):
        raise GraphFilterError(
            f"{type(model).__name__} has graph filters already, converted or patched: fit them further with "
            "transfer_attention, or call unpatch_model first"
        )
    check_trainable(model, train)
    if recompute and not model.supports_gradient_checkpointing:
        raise GraphFilterError(f"{type(model).__name__} does not support gradient checkpointing: leave it out")


def _warn_of_short_texts(model: Any) -> None:
    """Log a warning if the model's longest text is so short that attention is fast."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and longest <= SHORT:
        logger.warning(
            "%s takes at most %d tokens. At this length a linearized model is hardly faster than the original: see "
            "report.time(model) before you use it",
            type(model).__name__,
            longest,
        )


def convert(*arguments: Any, **options: Any) -> ConversionReport:
    """Call ``linearize``; this is its earlier name."""
    warnings.warn("convert is called linearize now, and takes the same arguments", FutureWarning, stacklevel=2)
    return linearize(*arguments, **options)
