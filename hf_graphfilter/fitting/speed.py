"""Time the original and the linearized model by the number of tokens, and measure their memory."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from ..analysis.model_inputs import longest_text
from ..devices import device_of, wait_for
from ..errors import GraphFilterError, has_type, shown
from ..hosts import encoder_of
from ..hosts.transformers.cache import NAME as CACHE
from ..patching.patch import unpatch_model
from .memory import begin_peak_memory, peak_memory

LENGTHS = tuple(2**i for i in range(7, 15))
UNBOUNDED = 4096
CONTEXTS = (100, 1000, 8000)


@dataclass(frozen=True)
class Speed:
    """Time and memory for one text of ``tokens`` tokens.

    Attributes:
        original_ms, converted_ms: median time of a forward pass, or of one decoding step after so many tokens.
        ratio: converted over original, as the median of the ratios within each round.
        original_mb, converted_mb: peak memory of the same, beyond the memory that was in use before. It is that of the
            GPU, or on Linux that of this process; None elsewhere.
    """

    tokens: int
    original_ms: float
    converted_ms: float
    ratio: float
    original_mb: float | None = None
    converted_mb: float | None = None


@torch.no_grad()
def speed(model: nn.Module, lengths: Iterable[int] | None = None, rounds: int = 5) -> list[Speed]:
    """Time forward passes of a linearized text model and of a copy with the original attention, in turn.

    Args:
        model: the linearized model. A copy of it is made in memory.
        lengths: numbers of tokens; by default powers of 2 from 128 to 16,384. Lengths beyond the positions of the model
            are left out. For a model without a limit, the default ends at 4,096.
        rounds: number of timed passes per length.

    Raises:
        GraphFilterError: the model takes no ``input_ids``, or no length is within its positions.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> [row.tokens for row in speed(patch_model(BertModel(BertConfig(num_hidden_layers=1)), "agf"), [64, 1024])]
        [64]
    """
    model = encoder_of(model)
    token_counts, vocabulary = _limit_lengths(model, lengths, LENGTHS)
    with _forms(model) as (forms, device):
        return [_row(forms, n, torch.randint(0, vocabulary, (1, n), device=device), rounds) for n in token_counts]


@torch.no_grad()
def decoding_speed(
    model: nn.Module, contexts: Iterable[int] | None = None, rounds: int = 3, steps: int = 8
) -> list[Speed]:
    """Time decoding steps with a cache, of a linearized decoder and of a copy with the original attention, in turn.

    Args:
        model: the linearized model. A copy of it is made in memory.
        contexts: numbers of tokens in the cache; by default 100, 1,000 and 8,000. Contexts beyond the positions of the
            model are left out.
        rounds: number of timed rounds per context.
        steps: number of decoding steps per round, one token each.

    Raises:
        GraphFilterError: the model takes no ``input_ids``, or no context is within its positions.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_graphfilter import patch_model
        >>> config = GPT2Config(n_layer=1, vocab_size=100, bos_token_id=0, eos_token_id=0)
        >>> model = patch_model(GPT2LMHeadModel(config), "agf")
        >>> [row.tokens for row in decoding_speed(model, [64, 4096])]
        [64]
    """
    # one step to warm up, one for memory
    token_counts, vocabulary = _limit_lengths(model, contexts, CONTEXTS, steps * rounds + 2)
    rows = []
    with _forms(model) as (forms, device):
        for n in token_counts:
            ids = torch.randint(0, vocabulary, (1, n), device=device)
            decode = {name: _decoder(form, ids) for name, form in forms.items()}
            rows.append(taken_in_turn(n, decode, device, rounds, steps))
    return rows


def _decoder(form: nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    """Return a function that decodes one token after ``ids``; the first step has been made, to warm up."""
    cache = form(input_ids=ids, use_cache=True, **last_logits(form))[CACHE]
    step = lambda: form(input_ids=ids[:, :1], **{CACHE: cache}, use_cache=True)  # noqa: E731
    step()
    return step


def last_logits(model: nn.Module, count: int = 1) -> dict[str, int]:
    """Return the argument that limits the logits to the last ``count`` tokens, if the model has such an argument."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _limit_lengths(
    model: nn.Module, lengths: Iterable[int] | None, defaults: Iterable[int], margin: int = 0
) -> tuple[list[int], int]:
    """Return the lengths that leave room for ``margin`` tokens, and the size of the vocabulary.

    If none of the usual lengths leaves room, return the longest length that does.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    vocabulary, limit = getattr(config, "vocab_size", None), longest_text(model)
    if limit is None and lengths is None:  # no limit (T5), but the model was not made for 16,384 tokens
        limit = UNBOUNDED
    lengths = list(lengths) if isinstance(lengths, Iterable) else lengths
    if lengths is not None and not (has_type(lengths, list[int]) and all(n >= 1 for n in lengths)):
        raise GraphFilterError(f"numbers of tokens must be a list of integers from 1 on, got {shown(lengths)}")
    token_counts = [n for n in (defaults if lengths is None else lengths) if limit is None or n + margin <= limit]
    if lengths is None and not token_counts and limit is not None and limit > margin:
        token_counts = [limit - margin]
    if vocabulary is None or model.main_input_name != "input_ids" or not token_counts:
        raise GraphFilterError(
            f"speed is measured on texts of at most {limit} tokens: {type(model).__name__} takes none"
        )
    return token_counts, vocabulary


@contextlib.contextmanager
def _forms(model: nn.Module) -> Iterator[tuple[dict[str, nn.Module], torch.device]]:
    """Yield the model and a copy with the original attention, both in evaluation mode, and their device."""
    forms = {"original": unpatch_model(copy.deepcopy(model)).eval(), "converted": model}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield forms, device_of(model)
    finally:
        for module in training:
            module.training = True


def crossover(rows: Iterable[Speed]) -> int | None:
    """Return the number of tokens from which the linearized model is faster, among those measured."""
    faster = None
    for row in sorted(rows, key=lambda row: -row.tokens):
        if row.ratio >= 1:
            break
        faster = row.tokens
    return faster


def _row(forms: dict[str, nn.Module], tokens: int, ids: torch.Tensor, rounds: int) -> Speed:
    inputs = {"input_ids": ids}
    if getattr(forms["original"].config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :1]
    for form in forms.values():
        form(**inputs)
    return taken_in_turn(tokens, {name: partial(form, **inputs) for name, form in forms.items()}, ids.device, rounds)


def taken_in_turn(
    tokens: int, calls: dict[str, Callable[[], object]], device: torch.device, rounds: int, times: int = 1
) -> Speed:
    """Time and measure an original and a converted call, see ``time_in_turn``."""
    durations, mb = time_in_turn(calls, device, rounds, times)
    ratios = [b / a for a, b in zip(durations["original"], durations["converted"], strict=True)]
    ms = {name: median(values) for name, values in durations.items()}
    return Speed(tokens, ms["original"], ms["converted"], median(ratios), mb["original"], mb["converted"])


def time_in_turn(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int, times: int = 1, memory: bool = True
) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Time each of ``calls``, which run ``times`` times per round, and run each once more to measure its memory.

    Memory is measured in a separate run, since a reset of the peak frees pages that a timed call would need again.

    Returns:
        The milliseconds of each call, one number per round, and its peak memory in MB beyond what was in use before.
    """
    if type(rounds) is not int or rounds < 1:
        raise GraphFilterError(f"rounds must be a whole number from 1 on, got {shown(rounds)}")
    durations: dict[str, list[float]] = {name: [] for name in calls}
    mb: dict[str, float | None] = dict.fromkeys(calls)
    for _ in range(rounds):
        for name, call in calls.items():
            wait_for(device)
            start = time.perf_counter()
            for _ in range(times):
                call()
            wait_for(device)
            durations[name].append(1e3 * (time.perf_counter() - start) / times)
    for name, call in calls.items() if memory else ():
        if (before := begin_peak_memory(device)) is not None:
            call()
            mb[name] = peak_memory(device) - before
    return durations, mb
