"""Choose the heads that keep their attention: those that attend to one far token in a retrieval task."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..analysis.model_inputs import longest_text
from ..analysis.observing import Call, Reader, observe
from ..errors import GraphFilterError, is_number, shown
from ..filters import ReplacingConfig
from ..filters.core.kept_heads import Keep
from ..filters.far_field import FarFieldConfig
from ..hosts import host_of
from ..ops.spectral import to_float32
from ..patching.layers import Layers, select_sites
from .batches import inputs_of
from .choice import leave_sliding_windows
from .objectives import Batch
from .probes import make_probes, problem_of

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


def parse_heads(keep: Any) -> float | None:
    """Return the share of heads that ``"20%"`` keeps; None for values that the filter reads itself."""
    if not isinstance(keep, str):
        return None
    match = _SHARE.fullmatch(keep)
    if match is None or not 0 < (share := float(match[1]) / 100) < 1:
        raise GraphFilterError(f"keep={shown(keep)}: the share of heads is given as '20%', above 0 and below 100")
    return share


def check_heads(config: ReplacingConfig, heads: float | None, layers: float | None) -> None:
    """Raise an error if both layers and heads are to be chosen to keep their attention."""
    if layers is not None and (heads is not None or getattr(config, "keep", None)):
        raise GraphFilterError("layers='auto:75%' and keep= both choose what keeps its attention: give one of them")


class _FarPeaks(Reader):
    """A reader that sums, per key head, the largest attention weight that each answer gives to a far token."""

    def __init__(self, answers: Tensor, reach: int, sinks: int):
        positions = torch.arange(len(answers))
        self.far = (positions[:, None] - positions > reach) & (positions >= sinks)
        self.later = positions[:, None] < positions
        self.rows = answers.roll(-1) & self.far.any(1)  # a token is predicted by the one before it
        self.peaks: dict[int, Tensor] = {}

    def attention(self, call: Call) -> None:
        shift, groups = call.shift, call.value.shape[1]
        query, key = (to_float32(x)[0] for x in (shift.query[:, :, self.rows.to(shift.query.device)], shift.key))
        scores = query.unflatten(0, (groups, -1)) @ key[:, None].mT * shift.scaling
        later = self.later[self.rows].to(scores.device)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        self.peaks[call.layer.index] = (weights * self.far[self.rows].to(weights)).amax(-1).sum(-1).mean(1).cpu()


def score_heads(model: nn.Module, probes: Iterable[Batch], *, reach: int, sinks: int = 4) -> dict[int, list[float]]:
    """Return how much attention each key head gives to a single far token at the answers of retrieval probes.

    Attention spread over many far tokens does not count, since the far part of a filter can replace it.

    Args:
        model: a decoder, with or without filters, whose self-attention is all in one stack.
        probes: batches of token ids with labels, which are -100 except for the answers.
        reach: number of preceding tokens that count as near.
        sinks: number of tokens at the start of the text that do not count as far.

    Returns:
        For each layer, the largest weight of a far token in each of its key heads: the mean over its query heads,
        answers and probes.
    """
    sums: dict[int, Tensor] = {}
    count = 0
    for probe in probes:
        for ids, labels in zip(probe["input_ids"], probe["labels"], strict=True):
            reader = _FarPeaks((labels != -100).cpu(), reach, sinks)
            observe(model, [{"input_ids": ids[None]}], [reader])
            count += int(reader.rows.sum())
            for layer, peaks in reader.peaks.items():
                sums[layer] = sums.get(layer, 0) + peaks
    return {layer: (peaks / max(1, count)).tolist() for layer, peaks in sorted(sums.items())}


def choose_heads(
    model: Any,
    held_out: list[Batch],
    share: float | str,
    config: ReplacingConfig | None = None,
    layers: Layers = None,
    stack: Literal["encoder", "decoder"] | None = None,
) -> Keep:
    """Return the key heads of a decoder that ``keep=`` of ``far_field`` should keep; nothing is trained.

    The heads are ranked by the attention that they give to a single far token in retrieval probes. At least one head
    per layer is left to the filter.

    Args:
        model: a decoder, with or without filters. It is left as it was.
        held_out: batches of texts; the probes are made of their token ids.
        share: share of all key heads to keep, such as 0.2 or ``"20%"``.
        config: the config of the filter; its window and sinks determine which tokens are far. None stands for the
            config that ``far_field`` has in ``linearize``.
        layers: layers that get the filter, as in ``patch_model``; by default all but those with a sliding window.
        stack: the stack that gets the filter, as in ``patch_model``.

    Raises:
        GraphFilterError: the model is no decoder with one stack, no probes can be made of the batches, or ``share``
            leaves no head for the filter in some layer.
    """
    if not isinstance(share, str) and not is_number(share):
        raise GraphFilterError(f"share must be a number such as 0.2, or text such as '20%', got {shown(share)}")
    layers = leave_sliding_windows(model, stack) if layers is None else layers
    share = parse_heads(share if isinstance(share, str) else f"{share * 100:f}%") or 0.0
    held_out = [inputs_of(model, batch, labels=False) for batch in held_out]
    sites, _ = host_of(model).find(model)
    if not all(site.causal for site in sites) or len({site.group for site in sites}) != 1:
        remedy = "give them as keep={4: [0, 2]}" if any(site.causal for site in sites) else "leave keep= out"
        raise GraphFilterError(f"keep='{share:.0%}' chooses heads of decoders with one stack: {remedy}")
    config = FarFieldConfig.for_conversion() if config is None else config
    reach = 2 * config.window - 1
    if not (problem := problem_of(held_out)):
        probes = make_probes(held_out, reach, longest_text(model) or sys.maxsize)
        problem = "" if probes else "the held-out batches are too short for probes of retrieval"
    if problem:
        raise GraphFilterError(f"keep='{share:.0%}': {problem}; give the heads as keep={{4: [0, 2]}}")
    scores = score_heads(model, probes, reach=reach, sinks=config.sinks)
    indices = {site.index: number for number, site in enumerate(sites)}
    by_layer = {site.index: scores[indices[site.index]] for site in select_sites(sites, layers, stack)}
    count = max(1, round(share * sum(map(len, by_layer.values()))))
    if count > sum(len(heads) - 1 for heads in by_layer.values()):
        raise GraphFilterError(
            f"keep='{share:.0%}' keeps {count} heads, and the filter needs one per layer: keep fewer, or exclude "
            "layers with layers= instead"
        )
    keep: dict[int, list[int]] = {}
    for _, layer, head in sorted((-score, i, head) for i, row in by_layer.items() for head, score in enumerate(row)):
        kept_heads = keep.get(layer, [])
        if count and len(kept_heads) < len(by_layer[layer]) - 1:
            keep[layer], count = sorted([*kept_heads, head]), count - 1
    return {layer: tuple(keep[layer]) for layer in sorted(keep)}
