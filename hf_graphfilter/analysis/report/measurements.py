"""The measurements of a report, which come from one pass over the batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ...hosts import unwrapped
from ...patching.status import FilterStatus, filter_status
from ..observing import Layer, Reader, observe
from ..response import Curve, FrequencyResponse, ResponseReader, response_curves
from ..results import Measured
from ..smoothing import Smoothing, SmoothingReader
from ..spectrum import Spectrum, SpectrumReader
from ..taylor import TaylorError, TaylorReader
from .costs import Cost, cost_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ConversionCost(Protocol):
    """The part of ``ConversionReport`` that a page shows; the class itself belongs to a higher package."""

    @property
    def crossing(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    def tables(self) -> dict[str, list[list[str]]]: ...
    def plot(self) -> Figure: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Inputs:
    """The inputs that a model was measured on, without padding.

    Attributes:
        kind: ``"texts"``, ``"images"`` or, for anything else, ``"inputs"``.
        samples: number of them.
        tokens: number of their tokens, by stack.
        longest: tokens of the longest one, by stack.
        max_length: number of tokens at which texts were cut, if the caller said so.
    """

    kind: str = "inputs"
    samples: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    max_length: int | None = None

    def __str__(self) -> str:
        kind = self.kind.removesuffix("s") if self.samples == 1 else self.kind
        stack_notes = {stack: f" in the {stack}" if len(self.tokens) > 1 else "" for stack in self.tokens}
        counts = [
            f"{n:,} tokens{stack_notes[stack]} (at most {self.longest[stack]:,} each)"
            for stack, n in self.tokens.items()
        ]
        cut_note = "" if self.max_length is None else f"; cut at {self.max_length:,} tokens"
        return f"{self.samples:,} {kind}, {', '.join(counts)}{cut_note}"


class InputReader(Reader):
    """A reader that counts inputs and tokens."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.longest: Counter[str] = Counter()

    def tokens(self, layer: Layer, tokens: Tensor, is_token: Tensor) -> None:
        if layer.index == 0:
            lengths = is_token.sum(1)
            self.samples[layer.stack] += int((lengths > 0).sum())
            self.counts[layer.stack] += int(lengths.sum())
            self.longest[layer.stack] = max(self.longest[layer.stack], int(lengths.max()))

    def inputs(self, batch: Any, max_length: int | None) -> Inputs:
        """Return the counts; ``batch`` is one of those that were read."""
        names = batch.keys() if isinstance(batch, Mapping) else ()
        images = "pixel_values" in names if names else batch.is_floating_point() and batch.dim() == 4
        kind = "texts" if "input_ids" in names and not images else "images" if images else "inputs"
        samples = max(self.samples.values(), default=0)
        return Inputs(kind, samples, dict(self.counts), dict(self.longest), max_length)


@dataclass(frozen=True)
class Measurements:
    """All measurements of one model; ``seconds`` is the time that they took."""

    smoothing: Smoothing
    response: FrequencyResponse
    spectrum: Spectrum
    taylor: TaylorError
    cost: Cost
    status: FilterStatus = field(default_factory=FilterStatus)
    curves: dict[str, Curve] = field(default_factory=dict)
    inputs: Inputs = field(default_factory=Inputs)
    seconds: float = 0.0

    @property
    def has_gfsa(self) -> bool:
        """Whether a filter of the model is GFSA, whose approximation of a power of A has an error."""
        return any(row.filter.filter == "gfsa" for row in self.status)

    def parts(self) -> dict[str, Measured]:
        return {name: getattr(self, name) for name in ("smoothing", "response", "spectrum", "taylor")}


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    progress: Callable[..., Iterable[Any]] = iter,
    max_length: int | None = None,
) -> Measurements:
    """Measure a model in one pass over the batches; ``max_length`` is only kept for the page."""
    start = time.perf_counter()
    readers = SmoothingReader(), ResponseReader(), SpectrumReader(), TaylorReader(), InputReader()
    first: list[Any] = []

    def keep_first(batches: Iterable[Any]) -> Iterable[Any]:
        for batch in progress(batches):
            first[:] = first or [batch]
            yield batch

    observe(model, batches, readers, keep_first)
    smooth, response, spectrum, taylor, input_reader = readers
    results = smooth.result(model), response.result(model), spectrum.result(model), taylor.result(model)
    status = filter_status(model)
    curves = response_curves(model) if status else {}
    cost, inputs = cost_of(unwrapped(model), first[0]), input_reader.inputs(first[0], max_length)
    return Measurements(*results, cost, status, curves, inputs, time.perf_counter() - start)
