"""The error of GFSA's first-order approximation of a power of A, and its bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, has_type, shown
from .observing import Call, observe
from .results import BandReader, Measured


@dataclass(frozen=True)
class TaylorError(Measured):
    """The result of ``taylor_error``; its quantities are named ``"K=2"`` and so on."""

    title: ClassVar[str] = "Error of the first-order approximation of A^K: mean over heads and texts"

    def __post_init__(self) -> None:
        names = dict.fromkeys(name for _, name in self.bands)
        object.__setattr__(self, "quantities", {n: f"E_K, {n} (bound {2 * int(n[2:])})" for n in names})


class TaylorReader(BandReader[TaylorError]):
    """A reader that collects the errors."""

    result_class = TaylorError
    lacking = "no text has a token, so that there is no error to measure: check the inputs and their mask"
    matrices = True

    def __init__(self, orders: Sequence[int] = (2, 3, 4, 5, 10), most: int = 64) -> None:
        orders = list(orders) if isinstance(orders, Iterable) else orders
        if not has_type(orders, list[int]) or not orders or min(orders) < 2:
            raise GraphFilterError(f"orders must be a list of one or more integers from 2 on, got {shown(orders)}")
        if not has_type(most, int) or most < 1:
            raise GraphFilterError(f"most must be 1 or more, got {shown(most)}: pass an integer")
        self.orders, self.most = sorted(set(orders)), most
        super().__init__()

    def attention(self, call: Call) -> None:
        name = call.layer, f"K={self.orders[0]}"
        count = self.samples[name].count if name in self.samples else 0  # reading alone would make an entry
        for matrix in islice(call.each(call.attention), max(0, self.most - count)):
            if matrix.shape[-1]:
                for order, error in errors(matrix, self.orders).items():
                    self.samples[call.layer, f"K={order}"].add(error.mean())


def taylor_error(
    model: nn.Module,
    batches: Iterable[Any],
    orders: Sequence[int] = (2, 3, 4, 5, 10),
    *,
    most: int = 64,
    **options: Any,
) -> TaylorError:
    """Measure the error of GFSA's first-order approximation of ``A^K``, by layer and order.

    The error is ``E_K = |A^K - (A + (K-1)(A^2 - A))|`` (GFSA, Eq. 7), the largest row sum of magnitudes. Its bound is
    2K (Eq. 8). Errors are means over heads and texts, without padding.

    Args:
        model: model of transformers or timm, with or without filters; it is left as it was.
        batches: dicts of the model's arguments, or tensors; any number.
        orders: values of K, 2 or more. For K = 2 the approximation is exact. Default: 2, 3, 4, 5 and 10.
        most: largest number of texts to measure; these are the first ones. Default: 64.
        options: ``progress``, a function that wraps the batches, as a progress bar does.

    Raises:
        GraphFilterError: one of the errors of ``smoothing``, there is no order or one below 2, or ``most`` is no
            integer from 1 on.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(num_hidden_layers=1))
        >>> measured = taylor_error(model, [{"input_ids": torch.arange(16).view(2, 8)}], orders=[3])
        >>> measured[0, "K=3"].mean < 6
        tensor(True)
    """
    reader = TaylorReader(orders, most)
    observe(model, batches, [reader], **options)
    return reader.result(model)


def errors(matrix: Tensor, orders: Sequence[int]) -> dict[int, Tensor]:
    """Return the error per head, (heads,), for each order, for matrices (heads, tokens, tokens)."""
    square = matrix @ matrix
    power, by_order = matrix, {}
    for order in range(2, max(orders) + 1):
        power = power @ matrix
        if order in orders:
            difference = power - torch.lerp(matrix, square, float(order - 1))
            by_order[order] = difference.abs().sum(-1).amax(-1)
    return by_order
