"""The graph shift operator: attention as a linear map over tokens.

A graph filter is a function of the shift operator ``S : x -> A x``, where ``A`` is the attention matrix after mask and
softmax. Attention is linear in its value argument, so any attention function *is* such an operator, and ``A^2 V`` is
``S(S(V))``: no n x n matrix is formed. Filters see only this object, never an architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from ..errors import GraphFilterError
from ..ops.combine import Coefficients, combine
from ..ops.heads import repeat_heads
from ..ops.visibility import average_of_seen


class PastRows(Protocol):
    """The memory of incremental decoding: the earlier rows of every signal that ``S`` was applied to."""

    def extend(self, application: int, signal: Tensor) -> Tensor:
        """Append rows (batch, heads, new tokens, features) of application number ``application``; return all rows."""

    def newest(self, value: Tensor, tokens: int) -> Tensor:
        """Return the rows of ``value`` at the newest tokens; ``value`` has one row for every token of the cache."""


class ShiftOperator(ABC):
    """The shift operator ``S``, which maps signals (batch, heads, tokens, features) to signals.

    Attributes:
        exact: whether ``S(value)`` must equal the result of the model's own call bit for bit. A filter needs this if it
            must not change the model at its start. Otherwise it may set ``exact`` to False before it applies ``S``: on
            a CPU this allows faster forms with other rounding.
    """

    exact: bool = True

    @property
    @abstractmethod
    def rows(self) -> tuple[int, int]:
        """The pair (heads, query tokens): the middle dimensions of the signals that ``S`` returns."""

    @abstractmethod
    def __call__(self, signal: Tensor) -> Tensor:
        """Return ``S(signal)``, of shape (batch, heads, query tokens, features) and the dtype of the signal."""

    def powers(self, value: Tensor, count: int) -> list[Tensor]:
        """Return ``[S(value), S(S(value)), ...]``: ``count`` signals (batch, heads, query tokens, features)."""
        signals = [self(value)]
        while len(signals) < count:
            signals.append(self(signals[-1]))
        return signals

    def polynomial(self, value: Tensor, coefficients: Coefficients) -> Tensor:
        """Return ``sum_k c_k S^k(value)``, computed by a faster form if there is one.

        Args:
            value: (batch, key heads, key tokens, features).
            coefficients: ``c_0 ... c_K`` with K >= 1, each (heads,), or None to leave out the term; ``c_K`` must not be
                None.

        Returns:
            (batch, heads, query tokens, features), dtype of ``value``.
        """
        constant, *others = coefficients
        signals = zip(others, self.powers(value, len(others)), strict=True)
        terms = [] if constant is None else [(constant, self.identity(value))]
        return combine([*terms, *((c, x) for c, x in signals if c is not None)])

    @abstractmethod
    def identity(self, value: Tensor) -> Tensor:
        """Return the rows of ``value`` at the query tokens, one copy per head: the identity that belongs to ``S``."""

    def mean(self, signal: Tensor) -> Tensor:
        """Return the mean of a signal over the tokens that each query sees, as a uniform ``A`` would compute it.

        Args:
            signal: a signal at the key tokens: ``value``, or the result of ``all_rows`` for another signal.

        Returns:
            Shape (batch, heads of the signal, or of the mask if it has several, query tokens, features).
        """
        raise GraphFilterError(f"{type(self).__name__} does not know which tokens a query sees")

    def all_rows(self, signal: Tensor) -> Tensor:
        """Return a signal (batch, heads, query tokens, features); when decoding, add its rows at the earlier tokens."""
        return signal


class DenseShift(ShiftOperator):
    """The reference implementation: ``S`` given by an explicit matrix, with O(n^2) memory.

    Args:
        matrix: (batch, heads, query tokens, key tokens), rows sum to 1.

    Example:
        >>> import torch
        >>> shift = DenseShift(torch.full((1, 2, 3, 3), 1 / 3))
        >>> shift(torch.arange(6.0).view(1, 1, 3, 2))[0, 1, 0]
        tensor([2., 3.])
    """

    def __init__(self, matrix: Tensor):
        self.matrix = matrix

    @property
    def rows(self) -> tuple[int, int]:
        return self.matrix.shape[1], self.matrix.shape[2]

    def __call__(self, signal: Tensor) -> Tensor:
        heads, rows, keys = self.matrix.shape[1:]
        groups, features = signal.shape[1], signal.shape[-1]
        out = self.matrix.reshape(-1, groups, heads // groups * rows, keys) @ signal  # grouped heads share one signal
        return out.reshape(-1, heads, rows, features)

    def identity(self, value: Tensor) -> Tensor:
        return repeat_heads(value, self.matrix.shape[1])[:, :, -self.matrix.shape[2] :]

    def mean(self, signal: Tensor) -> Tensor:
        return average_of_seen(signal, self.matrix[:, :1] > 0)
