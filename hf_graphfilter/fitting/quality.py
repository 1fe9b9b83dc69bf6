"""Measure how near a linearized model is to the original, on held-out batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..analysis.model_inputs import mask_of
from ..errors import GraphFilterError
from ..filters import GraphFilter
from .objectives import Batch, Original, Outputs, logits_of, mask_of_logits

AT_ONCE = 2**20  # largest number of logits that are copied at a time
BOUNDS = [2**i for i in range(4, 17)]  # ends of the parts of a text, in tokens
RANGES = [f"{low + 1} to {high}" for low, high in itertools.pairwise([0, *BOUNDS])] + [f"over {BOUNDS[-1]}"]


class Comparison(NamedTuple):
    """Measures of two models, each for the ``"original"`` and the ``"converted"`` one.

    Attributes:
        measures: the measures by name.
        by_position: for text decoders, the perplexity by the number of tokens before the predicted one.
    """

    measures: dict[str, dict[str, float]]
    by_position: dict[str, dict[str, float]]


@torch.no_grad()
def compare(model: nn.Module, original: Original, batches: list[Batch], causal: bool) -> Comparison:
    """Compare two models on the same batches.

    Measures of models with logits: ``agreement``, the share of cases where the likeliest class or token is the same;
    ``divergence``, the mean Kullback-Leibler divergence from the original in nats; and, for text decoders, the
    ``perplexity``. Other models are compared by the embedding of each text, the mean of its last hidden states:
    ``cosine`` is that between the two models' embeddings (mean over the texts), ``rank correlation`` (Spearman) is that
    of the similarities of all pairs of texts.
    """
    sums: dict[str, Tensor] = {}
    embedded: dict[str, list[Tensor]] = {"original": [], "converted": []}
    config: Any = getattr(model, "config", None)
    vocabulary = getattr(config.get_text_config(), "vocab_size", math.inf) if config is not None else math.inf
    for batch in batches:
        pair = {"original": original(batch), "converted": model(**batch, output_hidden_states=True)}
        if "logits" in pair["original"]:
            for name, value in _sum_measures(pair, batch, vocabulary if causal else math.inf).items():
                sums[name] = sums.get(name, 0) + value
        else:
            for kind, outputs in pair.items():
                embedded[kind].append(embeddings(outputs, batch))
        del pair  # frees the memory before the next outputs are computed
    if not sums:
        return Comparison(compare_embeddings(*(torch.cat(parts).double() for parts in embedded.values())), {})
    rows = sums["rows"]
    measures = {
        "agreement": {"original": 1.0, "converted": (sums["agreement"] / rows).item()},
        "divergence": {"original": 0.0, "converted": (sums["divergence"] / rows).item()},
    }
    by_position: dict[str, dict[str, float]] = {}
    if "predicted" in sums:
        totals = {name: sums[name].sum() for name in ("predicted", *embedded)}
        measures["perplexity"] = _perplexities(totals, embedded)
        range_sums = ({name: sums[name][i] for name in totals} for i in range(len(RANGES)))
        ranges = zip(RANGES, range_sums, strict=True)
        by_position = {label: _perplexities(part, embedded) for label, part in ranges if part["predicted"]}
    return Comparison(measures, by_position)


def _perplexities(sums: Mapping[str, Tensor], models: Iterable[str]) -> dict[str, float]:
    return {kind: math.exp(min((sums[kind] / sums["predicted"]).item(), 700.0)) for kind in models}


def _sum_measures(pair: Mapping[str, Outputs], batch: Batch, vocabulary: float) -> dict[str, Tensor]:
    original, converted = (logits_of(outputs) for outputs in pair.values())
    mask = mask_of_logits(batch, pair["original"])
    is_token = (
        torch.ones(original.shape[:-1], device=original.device)
        if mask is None or mask.shape != original.shape[:-1]
        else mask.bool().float()
    )
    agreement, divergence = compare_logits(original, converted)
    sums = {
        "rows": is_token.sum(),
        "agreement": (agreement * is_token).sum(),
        "divergence": (divergence * is_token).sum(),
    }
    ids = batch.get("input_ids")
    # logits of tokens, not of classes
    if ids is not None and original.shape[:-1] == ids.shape and original.shape[-1] >= vocabulary:
        is_predicted = is_token[:, 1:] * is_token[:, :-1]
        bins = torch.bucketize(is_token.cpu().cumsum(1)[:, :-1].flatten(), torch.tensor(BOUNDS))

        def sum_by_position(values: Tensor) -> Tensor:
            return torch.bincount(bins, values.flatten().cpu().double(), len(RANGES))  # Macs have no float64

        sums["predicted"] = sum_by_position(is_predicted)
        for kind, logits in (("original", original), ("converted", converted)):
            rows = zip(_rows(logits), ids.roll(-1, 1).flatten().split(_rows_per_chunk(logits)), strict=True)
            loss = torch.cat([functional.cross_entropy(part, targets, reduction="none") for part, targets in rows])
            sums[kind] = sum_by_position(loss.view_as(ids)[:, :-1] * is_predicted)
    return {name: x.cpu().double() for name, x in sums.items()}


def compare_logits(original: Tensor, converted: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row whether the likeliest entry is the same, and the divergence from the original in nats."""
    agreement, divergence = [], []
    for original_rows, converted_rows in zip(_rows(original), _rows(converted), strict=True):
        log_probabilities = original_rows.log_softmax(-1)
        divergence.append((log_probabilities.exp() * (log_probabilities - converted_rows.log_softmax(-1))).sum(-1))
        agreement.append(original_rows.argmax(-1) == converted_rows.argmax(-1))
    return torch.cat(agreement).view(original.shape[:-1]), torch.cat(divergence).view(original.shape[:-1])


def _rows_per_chunk(logits: Tensor) -> int:
    return max(1, AT_ONCE // logits.shape[-1])


def _rows(logits: Tensor) -> Sequence[Tensor]:
    """Return the rows in parts that are small enough to copy."""
    return logits.flatten(0, -2).split(_rows_per_chunk(logits))


def embeddings(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the mean of each text's last hidden states, padding left out."""
    states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states") or [None]
    last = outputs.get("last_hidden_state", states[-1])
    if last is None:
        raise GraphFilterError(
            f"the model gives neither logits nor hidden states to compare (but {', '.join(outputs)}): linearize one of "
            "its parts by itself"
        )
    last = last.float()
    last = last.flatten(2).mT if last.dim() == 4 else last  # feature maps to (batch, tokens, features)
    mask = mask_of(batch, "decoder" if "decoder_hidden_states" in outputs else "")
    if mask is None or mask.shape != last.shape[:2]:
        return last.mean(1).cpu()
    is_token = mask[..., None].float()
    return ((last * is_token).sum(1) / is_token.sum(1).clamp(min=1)).cpu()


def compare_embeddings(original: Tensor, converted: Tensor) -> dict[str, dict[str, float]]:
    """Return cosine and rank correlation of embeddings (texts, features), see ``compare``."""
    measures = {"cosine": functional.cosine_similarity(original, converted).mean().item()}
    if len(original) > 2:
        pairs = torch.triu_indices(len(original), len(original), 1)
        unit = (functional.normalize(x) for x in (original, converted))
        ranks = torch.stack([_rank((x @ x.T)[pairs[0], pairs[1]]) for x in unit])
        if (ranks.std(1) > 0).all():
            measures["rank correlation"] = torch.corrcoef(ranks)[0, 1].item()
    return {name: {"original": 1.0, "converted": value} for name, value in measures.items()}


def _rank(values: Tensor) -> Tensor:
    """Return the ranks of the values; values that are equal up to rounding share their mean rank."""
    _, inverse, counts = values.double().round(decimals=6).unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[inverse].double()


def parts_of(modules: Mapping[str, GraphFilter]) -> list[str]:
    """Return the names of the parts of the filters that can be switched off."""
    return list(dict.fromkeys(name for graph_filter in modules.values() for name in graph_filter.branches()))
