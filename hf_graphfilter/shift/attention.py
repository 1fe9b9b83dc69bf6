"""The attention of a model as a shift operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UNSEEN, GraphFilterError
from ..ops.combine import Coefficients
from ..ops.explicit import matrix_of
from ..ops.heads import HeadPart, repeat_heads
from ..ops.visibility import average, average_of_seen, seen_by_mask
from .earlier_layers import EarlierLayers
from .operator import DenseShift, PastRows, ShiftOperator


class AttentionCall(NamedTuple):
    """The fixed facts about one call of a model's attention.

    ``AttentionShift`` holds the state that changes during the call.

    Attributes:
        attend: ``attend(key, value) -> (output, weights)``, the attention function with query, mask, scale and
            dropout bound; output (batch, query tokens, heads, features), weights (batch, heads, query, key) or None.
        query: (batch, heads, query tokens, features).
        key: (batch, key heads, key tokens, features).

    For filters that replace ``S`` rather than apply it:

    Attributes:
        hidden: (batch, tokens, hidden size), the input of the attention module; None unless the filter asks
            for it (``GraphFilter.reads_hidden``).
        scaling: factor of the scores ``query @ key^T``.
        mask: the mask of the attention function, for ``AttentionShift.mean``; None where only ``visible`` hides
            tokens.
        bias: (batch or 1, heads, query tokens, key tokens), added to the scores through a separate argument (T5);
            None where there is none.
        visible: ``visible() -> (causal, keys)``: the tokens that the mask leaves, see ``ops.visibility``. None: all.

    Faster forms, each None if it does not exist:

    Attributes:
        polynomial: ``polynomial(value, coefficients, exact) -> (sum, [S(value), ...])``, the sum as in
            ``ShiftOperator.polynomial`` and all powers but the last. It returns None for inputs that it cannot take.
        few_rows: ``few_rows() -> matrix``, (batch, heads, query, key): the rows of ``A`` at the query tokens. They are
            computed once and applied as often as the filter asks, unless ``exact``. None where calls are faster.
        part: ``part(heads) -> call``: the same call for some of the heads, each key head with its query heads.
        weights_again: whether the weights that ``attend`` returns are ``A`` for all applications (no dropout).
    """

    attend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    query: Tensor
    key: Tensor
    hidden: Tensor | None = None
    scaling: float = 1.0
    mask: Tensor | None = None
    bias: Tensor | None = None
    visible: Callable[[], tuple[bool, Tensor | None]] | None = None
    polynomial: Callable[[Tensor, Coefficients, bool], tuple[Tensor, list[Tensor]] | None] | None = None
    few_rows: Callable[[], Tensor | None] | None = None
    part: Callable[[HeadPart], AttentionCall] | None = None
    weights_again: bool = False


class AttentionShift(ShiftOperator):
    """The shift operator ``S`` of a model, computed by the model's own attention function.

    It needs O(n d) memory if the attention function itself does.

    The first application takes the full value tensor, (batch, key heads, key tokens, features), and makes exactly the
    call that the model itself would make. Later applications take signals at the query tokens with one entry per head.
    For them, keys are repeated for grouped-query attention, and ``past_rows`` adds the earlier rows when decoding with
    a cache.

    Args:
        call: the facts of the call. The shift has its ``query``, ``key``, ``hidden``, ``scaling`` and ``bias`` too.
        past_rows: the earlier rows of signals, if the model decodes with a cache.
        state: a dict of tensors, batch first, that the filter may fill when decoding; None without a cache.
        earlier: the tensors that filters of earlier layers left, if this one asks (``GraphFilter.reads_earlier``).

    Attributes:
        applications: how often ``S`` was applied so far.
        weights: (batch, heads, query, key), the weights of the first application, if the attention function returns
            them.
    """

    def __init__(
        self,
        call: AttentionCall,
        past_rows: PastRows | None = None,
        state: dict[str, Tensor] | None = None,
        earlier: EarlierLayers | None = None,
    ):
        if not isinstance(call, AttentionCall):
            raise GraphFilterError(
                f"AttentionShift takes an AttentionCall, and got a {type(call).__name__}: write "
                "AttentionShift(AttentionCall(attend, query, key, ...))"
            )
        self.call, self.past_rows, self.state, self._earlier = call, past_rows, state, earlier
        self.applications = 0
        self.weights: Tensor | None = None
        self._dense: DenseShift | None = None
        self._visible: tuple[bool, Tensor | None] | None = None

    @property
    def attend(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        return self.call.attend

    @property
    def query(self) -> Tensor:
        return self.call.query

    @property
    def key(self) -> Tensor:
        return self.call.key

    @property
    def hidden(self) -> Tensor | None:
        return self.call.hidden

    @property
    def scaling(self) -> float:
        return self.call.scaling

    @property
    def bias(self) -> Tensor | None:
        return self.call.bias

    @property
    def rows(self) -> tuple[int, int]:
        _, heads, tokens, _ = self.call.query.shape
        return heads, tokens

    def __call__(self, signal: Tensor) -> Tensor:
        call = self.call
        if self.applications:
            signal = self._all_rows(signal)
        elif call.few_rows is not None and not self.exact and (matrix := call.few_rows()) is not None:
            self._dense = DenseShift(matrix)
        elif not self.exact and (result := self._apply_polynomial(signal, None)) is not None:
            return result
        self.applications += 1
        if self._dense is not None:
            return self._dense(signal)
        if self.applications > 1:
            return call.attend(repeat_heads(call.key, signal.shape[1]), signal)[0].transpose(1, 2)
        output, self.weights = call.attend(call.key, signal)
        if call.weights_again and self.weights is not None:
            self._dense = DenseShift(self.weights)
        return output.transpose(1, 2)

    def polynomial(self, value: Tensor, coefficients: Coefficients) -> Tensor:
        result = self._apply_polynomial(value, coefficients)
        return super().polynomial(value, coefficients) if result is None else result

    def _apply_polynomial(self, value: Tensor, coefficients: Coefficients | None) -> Tensor | None:
        if self.applications or self.call.polynomial is None:
            return None
        coefficients = coefficients or [None, value.new_ones(self.rows[0])]
        if (result := self.call.polynomial(value, coefficients, self.exact)) is None:
            return None
        total, powers = result
        if self.past_rows is not None:
            for application, power in enumerate(powers, 1):
                self.past_rows.extend(application, power)
        self.applications = len(coefficients) - 1
        return total

    def identity(self, value: Tensor) -> Tensor:
        tokens = self.query.shape[2]
        if value.shape[2] != tokens:
            value = self._check_past(value.shape[2]).newest(value, tokens)
        return repeat_heads(value, self.query.shape[1])

    def mean(self, signal: Tensor) -> Tensor:
        structure, tokens, keys = self._structure(), self.query.shape[2], signal.shape[2]
        if structure is None:
            return average_of_seen(signal, seen_by_mask(self.call.mask, signal.shape[0]))
        means = average(signal, *structure)
        if not structure[0]:
            return means.expand(-1, -1, tokens, -1)
        return means if keys == tokens else self._check_past(keys).newest(means, tokens)

    def seen(self) -> tuple[Tensor | None, bool]:
        """Return what each query sees as SDPA takes it: (keys, causal).

        ``keys`` is bool (batch or 1, 1, queries or 1, keys), or None if all are visible. ``causal`` is True if, in
        addition, no query sees a later token; otherwise ``keys`` alone says what is visible.
        """
        structure, tokens, keys = self._structure(), self.query.shape[2], self.key.shape[2]
        if structure is None:
            return seen_by_mask(self.call.mask, self.query.shape[0]), False
        causal, visible_keys = structure
        visible = None if visible_keys is None else visible_keys[:, None, None]
        if not causal or (visible is None and keys == tokens):
            return visible, causal
        places = torch.arange(keys, device=self.key.device).view(1, 1, -1, 1)
        causal_mask = places.mT <= (places if keys == tokens else self._check_past(keys).newest(places, tokens))
        return (causal_mask if visible is None else causal_mask & visible), False

    def _structure(self) -> tuple[bool, Tensor | None] | None:
        """Return ``visible()``, or None if the mask must be applied as a matrix.

        That is the case in a compiled or traced graph, which cannot read the values of the mask.
        """
        by_queries = self.call.mask is not None and self.call.mask.dim() > 2
        if by_queries and (torch.compiler.is_compiling() or torch.jit.is_tracing()):
            return None
        try:
            return self.visible()
        except GraphFilterError:
            if not by_queries:
                raise
            return None

    def all_rows(self, signal: Tensor) -> Tensor:
        rows = self._all_rows(signal)
        self.applications += 1  # the cache keeps the rows under this number
        return rows

    def visible(self) -> tuple[bool, Tensor | None]:
        """Return (causal, keys): which tokens the mask leaves visible, see ``ops.visibility``.

        The mask is read once, as it may be n x n.
        """
        if self._visible is None:
            causal, keys = (False, None) if self.call.visible is None else self.call.visible()
            self._visible = causal, None if keys is None else keys.expand(self.query.shape[0], -1)
        return self._visible

    @property
    def earlier(self) -> EarlierLayers:
        """The tensors that filters of earlier layers left; empty if there are none."""
        if self._earlier is None:
            self._earlier = EarlierLayers()
        return self._earlier

    def restart(self, earlier: EarlierLayers | None = None) -> AttentionShift:
        """Return the same operator without a cache and as before its first application, to apply it again.

        ``earlier`` holds the tensors that the filters of earlier layers left. The new operator applies ``S`` only by
        calls of the attention function, so that it gives the same numbers each time.
        """
        return AttentionShift(self.call._replace(polynomial=None, few_rows=None), earlier=earlier)

    def part(self, heads: HeadPart) -> AttentionShift:
        """Return the operator for some of the heads; it computes nothing for other heads, and shares the state."""
        if self.call.part is None or self.key.shape[1] % heads.groups:
            found = f"attention with {self.key.shape[1]} key heads"
            raise GraphFilterError(f"{found} cannot be computed for some of {heads.groups} heads: leave out keep=")
        call = self.call.part(heads)._replace(visible=None if self.call.visible is None else self.visible)
        return AttentionShift(call, state=self.state, earlier=self._earlier)

    def dense(self) -> DenseShift:
        """Return the same operator as an explicit matrix, for tests and analysis.

        The matrix is found by applying the operator to the unit vectors.
        """
        return DenseShift(matrix_of(self.restart(), self.key))

    def _all_rows(self, signal: Tensor) -> Tensor:
        if self.past_rows is not None:
            signal = self.past_rows.extend(self.applications, signal)
        if signal.shape[2] != self.key.shape[2]:
            self._check_past(self.key.shape[2])
            prefix = f"the key/value cache holds {self.key.shape[2]} tokens but the filter has seen"
            raise GraphFilterError(f"{prefix} {signal.shape[2]} of them: {UNSEEN}")
        return signal

    def _check_past(self, keys: int) -> PastRows:
        if self.past_rows is None:
            raise GraphFilterError(
                f"attention of {self.query.shape[2]} query tokens over {keys} key tokens has no square matrix to "
                "filter: for decoding use a DynamicCache (the default) or use_cache=False; exclude a module that "
                "attends to other tokens than its own with layers="
            )
        return self.past_rows
