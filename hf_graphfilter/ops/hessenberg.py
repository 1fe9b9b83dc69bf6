"""Unitary Hessenberg matrices, products of Givens rotations of neighbouring tokens, applied in linear time.

``H_l = G_{N-1} ... G_1`` and ``H_u = G_1 ... G_{N-1}`` are first-order linear recurrences along the tokens. Their
coefficients, one number per token, are the same for all features. Between two phases per token (``ops.givens``) they
are real, so real and imaginary part of a signal are further features. The rotations of a block of tokens make one small
matrix. All blocks are multiplied at once, and a recurrence over the blocks gives what each passes to the next. All is
unitary, so the backward pass computes every intermediate signal again from the result, the only one that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .givens import BLOCK, lower_factor, unit, upper_factor
from .gradients import first_order

PART = 1 << 18  # numbers that matrix products on the CPU take at once


def transform(x: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, *, forward: bool, back: bool) -> Tensor:
    """Apply ``H_l H_u`` and ``scale``, or their inverse, or both one after the other.

    The result is ``scale * (H_l H_u x)`` if ``forward``, ``(H_l H_u)^-1 (scale * x)`` if ``back``, and ``(H_l H_u)^-1
    (scale * (H_l H_u x))`` if both.

    Args:
        x: (batch, tokens, features), real or complex.
        lower, upper: angles alpha, beta and gamma of H_l and H_u, (batch, 3, tokens - 1), real.
        scale: (batch, tokens), of absolute value 1.

    Returns:
        Shape of ``x``, dtype of ``scale``. O(n d) time and memory.
    """
    r_upper, first, between = upper_factor(upper)
    r_lower, before, after = lower_factor(lower)
    first, between, last = (unit(phase)[:, : x.shape[1]].to(scale) for phase in (first, between + before, after))
    if forward != back:
        scale = scale * (last if forward else last.conj_physical())
    run = _transform if torch.jit.is_tracing() else _Transform.apply  # a trace keeps operators
    return run(x, r_lower, r_upper, first, between, scale, forward, back)


TENSORS = "Tensor lower, Tensor upper, Tensor first, Tensor between, Tensor scale"


@torch.library.custom_op(
    "hf_graphfilter::unitary", mutates_args=(), schema=f"(Tensor x, {TENSORS}, bool forward, bool back) -> Tensor"
)
def _transform(
    x: Tensor, lower: Tensor, upper: Tensor, first: Tensor, between: Tensor, scale: Tensor, forward: bool, back: bool
) -> Tensor:
    """Run the transform as a custom operator, which compiled and exported graphs hold whole, for any number of tokens.

    It must not use ``conj``, which only marks a tensor: the mark is lost when a compiled graph calls the operator.
    """
    signal = _Signal([x], lower, scale.dtype)
    signal.through(*_path(lower, upper, first, between, scale, forward, back))
    return signal.tokens


def _path(
    lower: Tensor, upper: Tensor, first: Tensor, between: Tensor, scale: Tensor, forward: bool, back: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the phases and the blocks that act on a signal in turn; it begins and ends with a phase."""
    steps, phases = ([upper, lower], [first, between]) if forward else ([], [])
    if not back:
        return [*phases, scale], steps
    inverse = [blocks.mT.contiguous() for blocks in (lower, upper)]
    return [*phases, scale, between.conj_physical(), first.conj_physical()], [*steps, *inverse]


@torch.library.custom_op(
    "hf_graphfilter::unitary_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {TENSORS}, Tensor out, bool real, bool forward, bool back) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    lower: Tensor,
    upper: Tensor,
    first: Tensor,
    between: Tensor,
    scale: Tensor,
    out: Tensor,
    real: bool,
    forward: bool,
    back: bool,
) -> tuple[Tensor, ...]:
    """Undo every step of the signal and, by the same matrices, of its gradient."""
    signal = _Signal([out, grad], lower, scale.dtype)
    zero = torch.zeros_like
    grad_lower, grad_upper, grad_first, grad_between = zero(lower), zero(upper), zero(first.real), zero(between.real)
    undone = [(grad_upper, True), (grad_lower, True)] if back else []
    undone += [(grad_lower, False), (grad_upper, False)] if forward else []
    path = _path(lower, upper, first, between, scale.conj_physical(), back, forward)
    angle_grads = signal.through(*path, undone)
    if back:  # there the phases were conjugated
        grad_first -= angle_grads.pop(0)
        grad_between -= angle_grads.pop(0)
    grad_scale = angle_grads.pop(0)
    if forward:
        grad_between += angle_grads.pop(0)
        grad_first += angle_grads.pop(0)
    angles = ((first, grad_first), (between, grad_between), (scale, grad_scale))
    grad_phases = (phase * torch.complex(zero(g), g) for phase, g in angles)  # along the unit circle
    grad = signal.tokens.tensor_split(2, -1)[1]
    return (grad.real if real else grad).contiguous(), grad_lower, grad_upper, *grad_phases


@_transform.register_fake
def _(x: Tensor, lower: Tensor, *others: Any) -> Tensor:
    return _Signal([x], lower, others[3].dtype).tokens


@_backward.register_fake
def _(grad: Tensor, *others: Any) -> tuple[Tensor, ...]:
    tensors, out, real = others[:5], others[5], others[6]
    dtype = out.dtype.to_real() if real else out.dtype
    shaped = torch.empty(out.shape, dtype=dtype, device=out.device)
    return shaped, *(torch.empty_like(t) for t in tensors)


class _Transform(torch.autograd.Function):
    @staticmethod  # without ``*inputs``: Dynamo counts the parameters to see that there is no context
    def forward(
        x: Tensor,
        lower: Tensor,
        upper: Tensor,
        first: Tensor,
        between: Tensor,
        scale: Tensor,
        forward: bool,
        back: bool,
    ) -> Tensor:
        return _transform(x, lower, upper, first, between, scale, forward, back)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *tensors, forward, back = inputs
        ctx.save_for_backward(*tensors, output)
        ctx.flags = not x.is_complex(), forward, back

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*first_order(_backward, grad, *ctx.saved_tensors, *ctx.flags), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Make the dimension of ``torch.func.vmap`` a part of the batch."""
        tensors = [
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(inputs[:6], in_dims[:6], strict=True)
        ]
        out = _Transform.apply(*tensors, *inputs[6:])
        return out.view(info.batch_size, out.shape[0] // info.batch_size, *out.shape[1:]), 0


_transform.register_autograd(_Transform.backward, setup_context=_Transform.setup_context)  # where it is called itself


class _Signal:
    """Complex signals in the middle of a transform, stored as twice as many real features.

    A step up leaves token t at place t, a step down at t + 1, where a step up expects it.
    """

    def __init__(self, parts: list[Tensor], blocks: Tensor, dtype: torch.dtype) -> None:
        self.batch, self.blocks, self.size = *blocks.shape[:2], blocks.shape[2] - 1
        self.count, features = parts[0].shape[1], sum(part.shape[2] for part in parts)
        self.signal = blocks.new_empty(self.batch, self.blocks * self.size, features, dtype=dtype)
        self.signal[:, 0] = 0
        self.signal[:, self.count + 1 :] = 0
        for part, target in zip(parts, self.tokens.tensor_split(len(parts), -1), strict=True):
            target.copy_(part)

    @property
    def tokens(self) -> Tensor:
        """The signals, (batch, tokens, features), complex."""
        return self.signal[:, 1 : self.count + 1]

    def through(
        self, phases: list[Tensor], steps: list[Tensor], undone: Sequence[tuple[Tensor, bool]] = ()
    ) -> list[Tensor]:
        """Apply the phases and between them the blocks, in place; steps go upwards and downwards in turn.

        As much as possible is done with a part of the blocks while it lies in the processor's cache: a step, the phases
        that follow, and what it passes on in the next step.

        Args:
            phases: (batch, tokens) each, one more than steps.
            steps: blocks.
            undone: for the backward pass, where the features hold a signal and its gradient, and each step undoes a
                forward step: the tensor to which the gradient of the forward step's blocks is added, and whether that
                step applied the inverse of its blocks.

        Returns:
            In the backward pass, the gradients of the angles that the phases undo, (batch, tokens) each.
        """
        with torch.autocast(self.signal.device.type, enabled=False):
            return self._through(phases, steps, undone)

    def _through(
        self, phases: list[Tensor], steps: list[Tensor], undone: Sequence[tuple[Tensor, bool]]
    ) -> list[Tensor]:
        places = self.signal.view(self.batch * self.blocks, self.size, self.signal.shape[-1])
        features = 2 * places.shape[-1]
        carries = torch.view_as_real(self.signal).new_empty(self.batch, self.blocks, features)
        angle_grads = []
        for i, phase in enumerate(phases):
            before, after = i % 2, 1 - i % 2  # places before the first token, ahead of the step that led here and now
            factor = pad(phase, (after, self.blocks * self.size - self.count - after)).view(len(places), self.size, 1)
            angle_grad = torch.empty_like(factor.real)
            if i:
                rows, columns, out_row, in_column = _parts(self.size, bool(before))
                inner, column = (steps[i - 1].flatten(0, 1)[:, rows, x] for x in (columns, in_column))
                inflow, outflow = self._carry(steps[i - 1][:, :, out_row, in_column].flatten(1), carries, bool(before))
            if i < len(steps):
                _, next_columns, next_row, _ = _parts(self.size, not before)
                next_rows = steps[i].flatten(0, 1)[:, next_row, next_columns]
            for part in self._pieces(features):
                signal = places[part]
                if i:
                    old = torch.view_as_real(signal).flatten(2)
                    new = torch.bmm(inner[part], old)
                    new.baddbmm_(column[part], inflow[part])
                    if undone:
                        grads, inverse = undone[i - 1]
                        slices = (rows, out_row), (columns, in_column)
                        factors = (new, outflow[part]), (old, inflow[part])
                        _add_outer(grads.flatten(0, 1)[part], *factors, *slices, inverse)
                    signal = torch.view_as_complex(new.unflatten(2, (-1, 2)))
                signal = torch.mul(signal, factor[part], out=places[part])
                if undone:
                    values, grad = signal.tensor_split(2, -1)
                    angle_grad[part, :, 0] = (values.real * grad.imag - values.imag * grad.real).sum(-1)
                if i < len(steps):
                    out = carries.flatten(0, 1)[part].unsqueeze(1)
                    torch.bmm(next_rows[part], torch.view_as_real(signal).flatten(2), out=out)
            angle_grads.append(angle_grad.view(self.batch, self.blocks * self.size)[:, after : after + self.count])
        return angle_grads

    def _pieces(self, features: int) -> Iterator[slice]:
        """Return slices of the blocks that fit into the cache."""
        count = self.batch * self.blocks
        per_piece = max(PART // max(self.size * features, 1), 1) if self.signal.device.type == "cpu" else count
        return (slice(start, start + per_piece) for start in range(0, count, per_piece))

    def _carry(self, decay: Tensor, carries: Tensor, up: bool) -> tuple[Tensor, Tensor]:
        """Return what every block takes and what it passes on, each (batch * blocks, 1, features)."""
        if up:
            outflow = _scan(decay.flip(1), carries.flip(1)).flip(1)
            inflow = pad(outflow[:, 1:], (0, 0, 0, 1))
        else:
            outflow = _scan(decay, carries)
            inflow = pad(outflow[:, :-1], (0, 0, 1, 0))
        return inflow.flatten(0, 1).unsqueeze(1), outflow.flatten(0, 1).unsqueeze(1)


def _add_outer(
    grads: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    new_at: tuple[slice, slice],
    old_at: tuple[slice, slice],
    inverse: bool,
) -> None:
    """Add the outer products of signal and gradient to the gradients of the blocks.

    The factors are the signal after the step and its gradient before, at the tokens and at what passes between blocks.
    """
    signal, grad = [x.tensor_split(2, -1)[0] for x in new], [x.tensor_split(2, -1)[1] for x in old]
    left, right, rows, columns = (signal, grad, new_at, old_at) if inverse else (grad, signal, old_at, new_at)
    for a, i in zip(left, rows, strict=True):
        for b, j in zip(right, columns, strict=True):
            grads[:, i, j] += a @ b.mT


def _parts(size: int, up: bool) -> tuple[slice, slice, slice, slice]:
    """Return the slices of a block: its tokens' rows and columns, the row it passes on, the column it takes."""
    start, end, first, final = slice(0, size), slice(1, None), slice(0, 1), slice(size, None)
    return (end, start, first, final) if up else (start, end, final, first)


def _scan(decay: Tensor, added: Tensor) -> Tensor:
    """Return the states ``s_t = decay_t s_{t-1} + added_t`` for (batch, n) and (batch, n, features)."""
    count = added.shape[1]
    decay, added = pad(decay, (0, -count % BLOCK)), pad(added, (0, 0, 0, -count % BLOCK))
    decay, added = decay.unflatten(1, (-1, BLOCK)), added.unflatten(1, (-1, BLOCK))
    is_later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=decay.device).tril(-1)
    weights = torch.where(is_later, decay.unsqueeze(-1), 1).cumprod(-2).tril()
    states, decay = weights @ added, decay.cumprod(-1).unsqueeze(-1)
    for i in range(1, states.shape[1]):
        states[:, i].addcmul_(decay[:, i], states[:, i - 1, -1:])
    return states.flatten(1, 2)[:, :count]
