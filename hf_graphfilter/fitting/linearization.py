"""Linearize a model: check what is asked, and run the stages."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from ..analysis.model_inputs import longest_text, name_mistakes
from ..errors import GraphFilterError
from ..filters import FilterConfig, ReplacingFilter
from ..filters.core.attached import filters_of
from ..hosts import encoder_of
from ..logs import logger
from ..patching.layers import Layers, parse_layers
from ..patching.patch import patch_model, unpatch_model
from .batches import Batches
from .checkpoint import check_directory
from .choice import Choose, check_choose, keep_attention, leave_sliding_windows, parse_share
from .head_choice import check_heads, choose_heads, parse_heads
from .layer_blocks import fit_in_blocks
from .report import ConversionReport
from .run import Rates
from .settings import check_choices, read_config, read_rates, read_shares, split_budget
from .stages import Linearization
from .weights import Train, check_trainable, recomputed, trained

SHORT = 512  # number of tokens up to which softmax attention is fast


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
        data: batches: mappings of model inputs, or tensors that are the model's main input. They are repeated when they
            end, unless ``data`` is an iterator. For the same budget, many small batches fit better than few large ones.
        filter: a replacement filter, by name or as a config. A name stands for the options that fit pretrained
            attention best (``FilterConfig.for_conversion``); ``options`` override them.
        budget: number of tokens of all stages together, without padding; for images, the tokens that attention sees.
        stages: shares of the budget, in order. ``"attention"`` fits each layer to its original attention;
            ``"hidden"`` the hidden states of all layers; ``"logits"`` the output distribution (Kullback-Leibler
            divergence from the original's); ``"task"`` minimises the model's own loss on batches with labels. The
            default is 0.7 for ``"attention"`` and 0.3 for ``"logits"`` (``"hidden"`` for a model without logits).
        train: what the stages after ``"attention"`` train: the ``"filters"``; ``"lora"``, the filters and low-rank
            adapters of the attention's projections, which are merged into the weights at the end (rounded, if the model
            is in half precision); or ``"all"`` weights.
        layers: which layers are linearized, as in ``patch_model``. The default is all but those that see a sliding
            window, which are linear already: a warning names them. With ``"auto:75%"`` all these layers get filters at
            first. After the first stage a quarter of them get their attention back: those where that lowers the loss
            most.
        choose: the loss that ``layers="auto:..."`` lowers. ``"text"``: the distance from the original's outputs on at
            most two held-out batches. ``"retrieval"``: the negative log-likelihood of the answers in six probes
            (dictionaries, pass keys, copying). The probes are made of the token ids of the held-out batches. They have
            at most 384 tokens, or four times the reach of the window if that is more (508 by default). ``"both"``: the
            gains in the two at equal spread, added. None means ``"both"`` for a decoder that predicts the next token,
            if its held-out batches are text with at least 32 different ids, and ``"text"`` otherwise. To choose each of
            the first three layers takes one forward pass per candidate layer over these batches; to choose all others
            takes one more round.
        stack: the stack of an encoder-decoder to linearize, as in ``patch_model``.
        holdout: batches to measure on: how many to take from the start of ``data``, or the batches themselves. If
            ``data`` is a ``DataLoader`` that shuffles, the rows of so many batches are drawn at random and held out.
        rates: learning rates that differ from those of ``Rates``, such as ``{"attention": 2e-2}``.
        rank: rank of the low-rank adapters.
        precision: ``"bf16"`` computes under autocast.
        gradient_checkpointing: whether to compute activations again in the backward pass, to save memory.
        blocks: number of parts into which the stage "attention" splits the layers. It fits them one after the other,
            and keeps the inputs of a part on disk. If ``from_pretrained(device_map=...)`` offloaded the model, only one
            part is in memory at a time.
        evaluations: number of measurements per stage. It is lower if they would read more tokens than the stage itself.
            The best state is kept.
        checkpoint: a directory that keeps the progress at every measurement. The same call resumes from it.
        progress: whether to show a progress bar.
        **options: options of the filter, if it is given by name. With ``far_field`` and ``keep="20%"``, a fifth of the
            key heads keep their attention; ``choose_heads`` chooses them before training.

    Returns:
        ``ConversionReport``: the error of each layer, the error by context length, and measures of the model before,
        after, and with each part of the filters switched off.

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
    heads, shares, share = parse_heads(options.get("keep")), read_shares(stages, budget), parse_share(layers)
    config = read_config(filter, options if heads is None else {**options, "keep": None})
    check_heads(config, heads, share)
    rates = read_rates({} if rates is None else rates)
    check_choices(evaluations, rank, precision, train, blocks)
    check_choose(choose, share)
    model = encoder_of(model)
    _check_model(model, train, gradient_checkpointing)
    check_directory(checkpoint)
    started = time.monotonic()
    batches = Batches(model, data, holdout, labels="task" in shares)
    _warn_of_short_texts(model)
    batches.stream()  # raises before the model changes if a batch is missing
    if isinstance(layers, str):
        layers = None if share is not None else parse_layers(layers)
    if layers is None:
        layers = leave_sliding_windows(model, stack)
    if heads is not None:
        keep = choose_heads(model, batches.held_out, heads, config, layers, stack)  # type: ignore[arg-type]
        config = replace(config, keep=keep)  # type: ignore[call-arg]
    patch_model(model, config, layers=layers, stack=stack)
    settings: dict[str, Any] = {"filter": config.to_dict(), "share": share, "train": train, "rank": rank}
    settings |= {"evaluations": evaluations, "precision": precision}
    # under the name "coefficients", so that progress of earlier versions can be resumed
    settings["rates"] = {name: rate for name, rate in asdict(rates).items() if name != "filter_lr"}
    settings["rates"]["coefficients"] = rates.ratio
    gains: dict[str, float] = {}
    chosen_by: Choose | None = None
    try:
        fit = Linearization(
            model, batches, rates, settings, checkpoint, progress, evaluations=evaluations, precision=precision
        )
        filters = [f for f in fit.modules.values() if isinstance(f, ReplacingFilter)]
        reach, exact_reach = max(0, *(f.span - 1 for f in filters)), max(0, *(f.exact_span - 1 for f in filters))
        with fit.exclusive(), name_mistakes(model):
            with fit.only_filters():
                final_stage = fit.check(shares)
                if share is not None:
                    fit.settings["choose"] = chosen_by = fit.prepare_choice(choose, reach)
                fit.tokens = split_budget(shares or {"attention": 0.7, final_stage: 0.3}, budget)
                fit.begin(exact_reach)
                if "attention" in fit.tokens:
                    fit_in_blocks(fit, fit.tokens["attention"], blocks)
                if share is not None and chosen_by is not None:
                    restored, gains = fit.restore(chosen_by, share, final_stage)
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
    with fit.only_filters(), trained(fit.model, fit.modules, train, rank) as weights:
        fit.weights = weights.parameters
        with recomputed(fit.model, recompute):
            fit.finish(weights.original)
        weights.merge()
        fit.round_filters()
        return fit.measured(weights.original)


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
    longest = longest_text(model)
    if longest is not None and longest <= SHORT:
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
