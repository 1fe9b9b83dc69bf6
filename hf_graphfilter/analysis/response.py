"""Frequency responses of attention and filters, and the response of a filter to eigenvalues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from ..filters.core.attached import filters_of
from ..shift.operator import ShiftOperator
from ..text import figure_text
from .observing import Call, observe
from .plots import make_figure
from .results import COLOURS, BandReader, Measured, pick_some

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 33  # from frequency 0 to half a cycle a token


@dataclass(frozen=True)
class FrequencyResponse(Measured):
    """The result of ``frequency_response``: gains by layer."""

    quantities: ClassVar[dict[str, str]] = {
        "gain": "gain of what the module applies",
        "attention_gain": "gain of attention",
        "high_to_low": "mean gain off frequency 0\n(of that at 0)",
    }
    title: ClassVar[str] = "What passes at which frequency of the tokens: mean over heads and texts"

    @classmethod
    def grid(cls, quantity: str, points: int) -> tuple[str, list[float]]:
        return "frequency (cycles per token)", torch.linspace(0, 0.5, points).tolist()


class ResponseReader(BandReader[FrequencyResponse]):
    """A reader that collects the gains of attention and filters."""

    result_class = FrequencyResponse
    lacking = "no text has two tokens, so that 0 is the only frequency: pass longer texts"
    matrices = True

    def attention(self, call: Call) -> None:
        attention = call.attention
        matrices_by_name = {"attention_gain": attention}
        if call.is_matrix:
            matrices_by_name["gain"] = call.filtered
        for name, matrices in matrices_by_name.items():
            for matrix in call.each(matrices):
                if matrix.shape[-1] < 2:
                    continue
                curve = gain(matrix)
                if name == "gain":
                    ratio = curve[:, 1:].mean(1) / curve[:, 0].clamp(min=1e-30)
                    self.samples[call.layer, "high_to_low"].add(ratio.mean())
                self.samples[call.layer, name].add(on_grid(curve.mean(0), matrix.shape[-1]))


def frequency_response(model: nn.Module, batches: Iterable[Any], **options: Any) -> FrequencyResponse:
    """Measure the gain of self-attention at the frequencies of the tokens' order, by layer.

    The gain is ``|(F H F^-1)_ff|``, where F is the discrete Fourier transform and H a matrix over tokens. These are the
    magnitudes on the (anti)diagonal of the 2-D transform of H, as Wang et al. (2022) and GFSA (Figure 2) show them.
    Gains are means over heads and texts, without padding.

    - ``gain``: the gain of what the module applies to its values: A, or the matrix of its filter, if it is one.
    - ``attention_gain``: the gain of A, also if the module has a filter.
    - ``high_to_low``: the mean of ``gain`` off frequency 0, divided by ``gain`` at 0. It is 0 for uniform attention and
      1 for the identity.

    Args:
        model: model of transformers or timm, with or without filters; it is left as it was.
        batches: dicts of the model's arguments, or tensors; any number.
        options: ``progress``, a function that wraps the batches, as a progress bar does.

    Raises:
        GraphFilterError: one of the errors of ``smoothing``.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=2))
        >>> measured = frequency_response(model, [{"input_ids": torch.arange(16).view(2, 8)}])
        >>> measured[0, "gain"].mean[0].round()  # rows of A sum to 1
        tensor(1., dtype=torch.float64)
    """
    reader = ResponseReader()
    observe(model, batches, [reader], **options)
    return reader.result(model)


def gain(matrix: Tensor) -> Tensor:
    """Return the gains (heads, frequencies) of matrices (heads, tokens, tokens).

    The frequencies go from 0 to at most half a cycle per token.
    """
    tokens = matrix.shape[-1]
    transformed = torch.fft.fft(torch.fft.ifft(matrix, dim=-1), dim=-2)  # F H F^-1
    return transformed.diagonal(dim1=-2, dim2=-1)[:, : tokens // 2 + 1].abs()


def on_grid(curve: Tensor, tokens: int) -> Tensor:
    """Interpolate the gains of ``tokens`` tokens at ``POINTS`` frequencies, from 0 to half a cycle per token."""
    if tokens % 2:  # the next frequency mirrors the last one at half a cycle
        curve = torch.cat([curve, curve[-1:]])
    positions = torch.linspace(0, 0.5 * tokens, POINTS, dtype=curve.dtype, device=curve.device)
    lower = positions.long().clamp(max=len(curve) - 2)
    return curve[lower].lerp(curve[lower + 1], positions - lower)


class _Scaled(ShiftOperator):
    """An operator that multiplies each token by its own number, so that a filter of it is a function of eigenvalues."""

    def __init__(self, eigenvalues: Tensor, heads: int):
        self.eigenvalues, self.heads = eigenvalues, heads

    @property
    def rows(self) -> tuple[int, int]:
        return self.heads, len(self.eigenvalues)

    def __call__(self, signal: Tensor) -> Tensor:
        return self.eigenvalues.view(-1, 1) * signal

    def identity(self, value: Tensor) -> Tensor:
        return value


class Curve(NamedTuple):
    """The response of a filter.

    Attributes:
        at: values (points,) that the filter responds to.
        response: the responses, (heads, points).
        domain: name of the values: ``"eigenvalue of A"`` or ``"singular value"``.
    """

    at: Tensor
    response: Tensor
    domain: str


def response_curves(model: nn.Module, points: int = 101) -> dict[str, Curve]:
    """Return the response of each filter with its current coefficients, by module.

    A filter that is a function of A responds to an eigenvalue in [-1, 1]. A filter of singular values responds to one
    in [0, 1] (AGF, Eq. 9). Other filters have no such function and are left out. The gate and the window of a
    replacement filter are not part of its response.

    Args:
        model: a patched model.
        points: number of points of a curve. Default: 101.

    Raises:
        GraphFilterError: the model is not patched, or ``points`` is below 2.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "gfsa", w_K=0.1)
        >>> (at, curve, domain), = response_curves(model).values()
        >>> curve.shape, domain
        (torch.Size([12, 101]), 'eigenvalue of A')
    """
    if type(points) is not int or points < 2:
        raise GraphFilterError(f"a curve has an integer number of points from 2 on, got points={shown(points)}")
    curves = {}
    for name, graph_filter in filters_of(model, required=True):
        device = next((t.device for t in (*graph_filter.parameters(), *graph_filter.buffers())), torch.device("cpu"))
        grid = torch.linspace(-1 if graph_filter.spectral else 0, 1, points, device=device)
        with torch.no_grad():
            if not graph_filter.spectral:
                response, domain = graph_filter.singular_response(grid), "singular value"
            else:
                ones = torch.ones(1, graph_filter.heads, points, 1, device=device)
                domain = "eigenvalue of A"
                try:
                    response = graph_filter(_Scaled(grid, graph_filter.heads), ones)[0, :, :, 0]
                except AttributeError:  # the filter also reads query, key or mask, so it is no function of A alone
                    response = None
        if response is not None:
            curves[name] = Curve(grid.cpu(), response.cpu(), domain)
    return curves


def start_curve(curve: Curve) -> Tensor:
    """Return the line (points,) that a response is compared with: that of attention, or 1 for singular values."""
    return curve.at if curve.domain == "eigenvalue of A" else torch.ones_like(curve.at)


def measure_change(curve: Curve) -> float:
    """Return the largest distance of a response from the line that it is compared with."""
    return (curve.response - start_curve(curve)).abs().max().item()


def plot_curves(curves: dict[str, Curve], most: int = 4) -> Figure:
    """Draw the curves of some modules, one line per head.

    The dashed line is that of attention, or 1 for singular values.

    Args:
        curves: curves by module, from ``response_curves``.
        most: number of modules to draw, from the first to the last. Default: 4.

    Raises:
        GraphFilterError: matplotlib is not installed.
    """
    selection = pick_some([*curves.items()], most)
    figure = make_figure(4.0 * len(selection), 3.1)
    for axes, (name, curve) in zip(figure.subplots(1, len(selection), squeeze=False)[0], selection, strict=True):
        for head, line in enumerate(curve.response):
            axes.plot(curve.at, line, color=COLOURS[head % len(COLOURS)], linewidth=1, alpha=0.8)
        baseline = "attention" if curve.domain == "eigenvalue of A" else "a response of 1"
        axes.plot(curve.at, start_curve(curve), "--", color="grey", linewidth=1, label=baseline)
        axes.set(xlabel=curve.domain)
        axes.set_label(f"{name.removesuffix('.graph_filter')}: up to {measure_change(curve):.2f} from {baseline}")
        axes.set_title(figure_text(name.removesuffix(".graph_filter")), fontsize=7)
        axes.legend(frameon=False, fontsize=7)
    figure.axes[0].set_ylabel("response, a line per head")
    figure.suptitle("Response of the filters to A", fontsize=9)
    return figure
