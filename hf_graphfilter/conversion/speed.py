"""Time and memory of the original and the converted model, by the number of tokens."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from ..errors import GraphFilterError
from ..patching import unpatch_model

LENGTHS = tuple(2**i for i in range(7, 15))


@dataclass(frozen=True)
class Speed:
    """Of one text of ``tokens`` tokens.

    Attributes:
        original_ms, converted_ms: a forward pass, median.
        ratio: of the two, median of ratios taken side by side.
        original_mb, converted_mb: peak memory beyond the weights, on a GPU; None elsewhere.
    """

    tokens: int
    original_ms: float
    converted_ms: float
    ratio: float
    original_mb: float | None = None
    converted_mb: float | None = None


@torch.no_grad()
def speed(model: nn.Module, lengths: Iterable[int] = LENGTHS, rounds: int = 5) -> list[Speed]:
    """Forward passes of a converted model of text and of a copy with its attention, taken in turn.

    Args:
        model: converted; a copy is made beside it.
        lengths: numbers of tokens; those beyond the positions that the model knows are left out.
        rounds: of each length.

    Raises:
        GraphFilterError: the model takes no ``input_ids``, or no length is within its positions.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> [row.tokens for row in speed(patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf"), [64, 1024])]
        [64]
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    vocabulary, most = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    chosen = [n for n in lengths if most is None or n <= most]
    if vocabulary is None or model.main_input_name != "input_ids" or not chosen:
        raise GraphFilterError(
            f"speed is measured on texts of at most {most} tokens: {type(model).__name__} takes none"
        )
    forms = {"original": unpatch_model(copy.deepcopy(model)).eval(), "converted": model}
    device = next(model.parameters()).device
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return [_row(forms, n, torch.randint(0, vocabulary, (1, n), device=device), rounds) for n in chosen]
    finally:
        for module in training:
            module.training = True


def crossover(rows: Iterable[Speed]) -> int | None:
    """The number of tokens from which on the converted model is the faster one, of those measured."""
    faster = None
    for row in sorted(rows, key=lambda row: -row.tokens):
        if row.ratio >= 1:
            break
        faster = row.tokens
    return faster


def _row(forms: dict[str, nn.Module], tokens: int, ids: torch.Tensor, rounds: int) -> Speed:
    times: dict[str, list[float]] = {name: [] for name in forms}
    peaks: dict[str, float | None] = dict.fromkeys(forms)
    inputs = {"input_ids": ids}
    if getattr(forms["original"].config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :1]
    for form in forms.values():
        form(**inputs)
    for _ in range(rounds):
        for name, form in forms.items():
            if ids.is_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.synchronize()
            begun = time.perf_counter()
            form(**inputs)
            if ids.is_cuda:
                torch.cuda.synchronize()
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            times[name].append(1e3 * (time.perf_counter() - begun))
    ratios = [b / a for a, b in zip(times["original"], times["converted"], strict=True)]
    of = {name: median(values) for name, values in times.items()}
    return Speed(tokens, of["original"], of["converted"], median(ratios), peaks["original"], peaks["converted"])
