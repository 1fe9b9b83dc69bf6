"""All that a report measures, in one pass over the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ...hosts import unwrapped
from ...patching.status import FilterStatus, filter_status
from ..observing import observe
from ..response import Curve, FrequencyResponse, ResponseReader, response_curves
from ..results import Measured
from ..smoothing import Smoothing, SmoothingReader
from ..spectrum import Spectrum, SpectrumReader
from ..taylor import TaylorError, TaylorReader
from .costs import Cost, cost_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ConversionCost(Protocol):
    """What a page shows of ``conversion.ConversionReport``, which is made of what lies above this package."""

    @property
    def crossing(self) -> str: ...
    def tables(self) -> dict[str, list[list[str]]]: ...
    def plot(self) -> Figure: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Measurements:
    """All that is measured of one model."""

    smoothing: Smoothing
    response: FrequencyResponse
    spectrum: Spectrum
    taylor: TaylorError
    cost: Cost
    status: FilterStatus = field(default_factory=FilterStatus)
    curves: dict[str, Curve] = field(default_factory=dict)

    def parts(self) -> dict[str, Measured]:
        return {name: getattr(self, name) for name in ("smoothing", "response", "spectrum", "taylor")}


def measure(model: nn.Module, batches: Iterable[Any], progress: Callable[..., Iterable[Any]] = iter) -> Measurements:
    readers = SmoothingReader(), ResponseReader(), SpectrumReader(), TaylorReader()
    first: list[Any] = []

    def keep_first(batches: Iterable[Any]) -> Iterable[Any]:
        for batch in progress(batches):
            first[:] = first or [batch]
            yield batch

    observe(model, batches, readers, keep_first)
    smooth, response, spectrum, taylor = readers
    results = smooth.result(model), response.result(model), spectrum.result(model), taylor.result(model)
    status = filter_status(model)
    return Measurements(*results, cost_of(unwrapped(model), first[0]), status, response_curves(model) if status else {})
