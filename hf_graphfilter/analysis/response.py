"""Frequencies: what attention and its filter let through, and how a filter answers to eigenvalues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..filters.attached import filters_of
from ..shift import ShiftOperator
from .observing import Call, observe
from .results import BandReader, Measured

POINTS = 33  # from frequency 0 to half a cycle a token


@dataclass(frozen=True)
class FrequencyResponse(Measured):
    """What ``frequency_response`` gives."""

    quantities: ClassVar[dict[str, str]] = {
        "gain": "gain of what the module applies",
        "attention_gain": "gain of attention",
        "high_to_low": "mean gain off frequency 0\n(of that at 0)",
    }
    title: ClassVar[str] = "What passes at which frequency of the tokens: mean over heads and texts"

    @classmethod
    def grid(cls, quantity: str, points: int) -> tuple[str, list[float]]:
        return "frequency (cycles a token)", torch.linspace(0, 0.5, points).tolist()


class ResponseReader(BandReader[FrequencyResponse]):
    result_class = FrequencyResponse
    lacking = "no text has two tokens: there is no frequency but 0"
    matrices = True

    def attention(self, call: Call) -> None:
        attention = call.attention
        kinds = {"attention_gain": attention, "gain": call.filtered if call.graph_filter else attention}
        for name, matrices in kinds.items():
            for matrix in call.each(matrices):
                if matrix.shape[-1] < 2:
                    continue
                curve = gain(matrix)
                if name == "gain":
                    ratio = curve[:, 1:].mean(1) / curve[:, 0].clamp(min=1e-30)
                    self.samples[call.layer, "high_to_low"].add(ratio.mean())
                between = torch.nn.functional.interpolate(curve[None], POINTS, mode="linear", align_corners=True)
                self.samples[call.layer, name].add(between.mean((0, 1)))


def frequency_response(model: nn.Module, batches: Iterable[Any], **options: Any) -> FrequencyResponse:
    """The gain of self-attention at the frequencies of the tokens' order, by layer, over heads and texts, without
    padding: ``|(F H F^-1)_ff|`` with F the discrete Fourier transform, that is, the magnitudes on the (anti)diagonal of
    the 2-D transform of H, as Wang et al. (2022) and GFSA (Figure 2) show them.

    - ``gain``: of H, what the module applies to its values: A, or what a filter makes of it.
    - ``attention_gain``: of A, also where a filter is.
    - ``high_to_low``: mean of H's gain off frequency 0 over that at 0. Uniform attention has 0, the identity 1.

    Arguments, errors: as of ``smoothing``.

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
    """(heads, tokens, tokens) to the gains (heads, frequencies) from 0 to at most half a cycle a token."""
    tokens = matrix.shape[-1]
    transformed = torch.fft.fft(torch.fft.ifft(matrix, dim=-1), dim=-2)  # F H F^-1, but for the order of columns
    return transformed.diagonal(dim1=-2, dim2=-1)[:, : tokens // 2 + 1].abs()


class _Scaled(ShiftOperator):
    """An operator that multiplies each token by a number of its own: the eigenvalues as a function sees them."""

    def __init__(self, eigenvalues: Tensor, heads: int):
        self.eigenvalues, self.heads = eigenvalues, heads

    @property
    def rows(self) -> tuple[int, int]:
        return self.heads, len(self.eigenvalues)

    def __call__(self, signal: Tensor) -> Tensor:
        return self.eigenvalues.view(-1, 1) * signal

    def identity(self, value: Tensor) -> Tensor:
        return value


def response_curves(model: nn.Module, points: int = 101) -> dict[str, tuple[Tensor, Tensor]]:
    """What each filter of the model makes of an eigenvalue of A: by module, (eigenvalues in [-1, 1], the response
    (heads, eigenvalues)), with the coefficients as they are now. Filters in the place of attention are no functions of
    A and are left out.

    Raises:
        GraphFilterError: the model is not patched.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model = patch_model(BertModel(BertConfig(num_hidden_layers=1)), "gfsa", w_K=0.1)
        >>> (at, curve), = response_curves(model).values()
        >>> curve.shape
        torch.Size([12, 101])
    """
    curves = {}
    eigenvalues = torch.linspace(-1, 1, points)
    for name, graph_filter in filters_of(model, required=True):
        if graph_filter.reads_hidden:
            continue
        device = next((t.device for t in (*graph_filter.parameters(), *graph_filter.buffers())), torch.device("cpu"))
        ones = torch.ones(1, graph_filter.heads, points, 1, device=device)
        with torch.no_grad():
            out = graph_filter(_Scaled(eigenvalues.to(device), graph_filter.heads), ones)
        curves[name] = eigenvalues, out[0, :, :, 0].cpu()
    return curves
