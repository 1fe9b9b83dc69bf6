"""Products of Givens rotations of neighbouring tokens, unitary Hessenberg matrices, applied to signals in linear time.

``H_l = G_{N-1} ... G_1`` and ``H_u = G_1 ... G_{N-1}`` are first-order linear recurrences along the tokens, their
coefficients one number a token, shared by all features: real ones between two phases a token, see ``ops.givens``. So
real and imaginary part of a signal are only more features. The rotations of a block of tokens make one small matrix,
all blocks are multiplied at once, and what a block hands to the next follows from a recurrence over the blocks. All is
unitary, so the backward pass finds every intermediate signal again from the result, which alone is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .givens import BLOCK, lower_factor, unit, upper_factor

PART = 1 << 18  # numbers that matrix products on the CPU take at once


def transform(x: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, *, forward: bool, back: bool) -> Tensor:
    """``scale * (H_l H_u x)`` if ``forward``, ``(H_l H_u)^-1 (scale * x)`` if ``back``; one after the other if both.

    Args:
        x: (batch, tokens, features), real or complex.
        lower, upper: angles alpha, beta and gamma of H_l and H_u, (batch, 3, tokens - 1), real.
        scale: (batch, tokens), of absolute value 1.

    Returns:
        Shape of ``x``, dtype of ``scale``. O(n d) time and memory.
    """
    r_upper, first, between = upper_factor(upper)
    r_lower, before, after = lower_factor(lower)
    first, between, last = (unit(phase)[:, : x.shape[1]].to(scale.dtype) for phase in (first, between + before, after))
    if forward != back:
        scale = scale * (last if forward else last.conj_physical())
    return _Transform.apply(x, r_lower, r_upper, first, between, scale, forward, back)


TENSORS = "Tensor lower, Tensor upper, Tensor first, Tensor between, Tensor scale"


@torch.library.custom_op(
    "hf_graphfilter::unitary", mutates_args=(), schema=f"(Tensor x, {TENSORS}, bool forward, bool back) -> Tensor"
)
def _transform(
    x: Tensor, lower: Tensor, upper: Tensor, first: Tensor, between: Tensor, scale: Tensor, forward: bool, back: bool
) -> Tensor:
    """An operator of its own: compiled and exported graphs hold it whole, for any number of tokens.

    Within it ``conj``, which only marks a tensor, would be without effect where a compiled graph calls it.
    """
    z = _Signal([x], lower, scale.dtype)
    if forward:
        z.turn(first)
        z.step(upper, up=True)
        z.turn(between)
        z.step(lower, up=False)
    z.turn(scale)
    if back:
        z.step(_inverse(lower), up=True)
        z.turn(between.conj_physical())
        z.step(_inverse(upper), up=False)
        z.turn(first.conj_physical())
    return z.tokens


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
    """Every step undone, of the signal and, by the same matrices, of its gradient."""
    z = _Signal([out, grad], lower, scale.dtype)
    grad_lower, grad_upper = torch.zeros_like(lower), torch.zeros_like(upper)
    grad_first, grad_between = torch.zeros_like(first), torch.zeros_like(between)
    if back:
        grad_first += z.turned_back(first.conj_physical()).conj_physical()
        z.step(upper, up=True, grads=grad_upper, inverse=True)
        grad_between += z.turned_back(between.conj_physical()).conj_physical()
        z.step(lower, up=False, grads=grad_lower, inverse=True)
    grad_scale = z.turned_back(scale)
    if forward:
        z.step(_inverse(lower), up=True, grads=grad_lower)
        grad_between += z.turned_back(between)
        z.step(_inverse(upper), up=False, grads=grad_upper)
        grad_first += z.turned_back(first)
    grad = z.tokens.tensor_split(2, -1)[1]
    return (grad.real if real else grad).contiguous(), grad_lower, grad_upper, grad_first, grad_between, grad_scale


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
    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return _transform(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *tensors, forward, back = inputs
        ctx.save_for_backward(*tensors, output)
        ctx.flags = not x.is_complex(), forward, back

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*_Gradients.apply(grad, *ctx.saved_tensors, *ctx.flags), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """``torch.func.vmap``: its dimension is a part of the batch."""
        tensors = [
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(inputs[:6], in_dims[:6], strict=True)
        ]
        out = _Transform.apply(*tensors, *inputs[6:])
        return out.view(info.batch_size, out.shape[0] // info.batch_size, *out.shape[1:]), 0


class _Gradients(torch.autograd.Function):
    """For ``torch.func``, in whose eyes the gradients need gradients."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        raise RuntimeError("a product of Givens rotations has no second derivatives here")


def _inverse(blocks: Tensor) -> Tensor:
    return blocks.mT.contiguous()


class _Signal:
    """Complex signals on their way, as twice as many real features.

    A step up leaves token t at place t, a step down at t + 1, where a step up expects it.
    """

    def __init__(self, parts: list[Tensor], blocks: Tensor, dtype: torch.dtype) -> None:
        self.batch, self.blocks, self.size, self.up = *blocks.shape[:2], blocks.shape[2] - 1, False
        self.count, features = parts[0].shape[1], sum(part.shape[2] for part in parts)
        self.signal = blocks.new_empty(self.batch, self.blocks * self.size, features, dtype=dtype)
        self.places, self.features = torch.view_as_real(self.signal).flatten(2), 2 * features
        self.places[:, 0] = 0
        self.places[:, self.count + 1 :] = 0
        for part, own in zip(parts, self.tokens.tensor_split(len(parts), -1), strict=True):
            own.copy_(part)

    @property
    def tokens(self) -> Tensor:
        """(batch, tokens, features), complex."""
        start = 0 if self.up else 1
        return self.signal[:, start : start + self.count]

    def turn(self, phase: Tensor) -> None:
        self.tokens.mul_(phase.unsqueeze(-1))

    def turned_back(self, phase: Tensor) -> Tensor:
        """Undo ``turn`` of a signal and of its gradient; the gradient of ``phase``, along the unit circle."""
        back, turns = phase.conj_physical().unsqueeze(-1), torch.empty_like(phase.real)
        together = PART // max(self.batch * self.features, 1) + 1 if phase.device.type == "cpu" else self.count
        for start in range(0, self.count, together):
            part = slice(start, start + together)
            signal, grad = self.tokens[:, part].mul_(back[:, part]).tensor_split(2, -1)
            turns[:, part] = (signal.real * grad.imag - signal.imag * grad.real).sum(-1)
        return phase * torch.complex(torch.zeros_like(turns), turns)

    def by_block(self, places: Tensor) -> Tensor:
        return places.reshape(self.batch * self.blocks, places.shape[1] // self.blocks, self.features)

    def step(self, blocks: Tensor, *, up: bool, grads: Tensor | None = None, inverse: bool = False) -> None:
        """The blocks on their tokens, in place.

        ``grads``: the step undoes another, the features being those of a signal and of its gradient, and to ``grads``
        is added what the blocks of that one get, which were these if it applied their ``inverse``.
        """
        with torch.autocast(self.places.device.type, enabled=False):
            self._step(blocks, up, grads, inverse)
        self.up = up

    def _step(self, blocks: Tensor, up: bool, grads: Tensor | None, inverse: bool) -> None:
        size, batch = self.size, self.batch
        rows, columns, hands, takes = _parts(size, up)
        matrices, signal = blocks.flatten(0, 1), self.by_block(self.places)
        own = (matrices[:, hands, columns] @ signal).view(batch, self.blocks, self.features)
        passing = blocks[:, :, hands, takes].flatten(1)
        if up:
            handed = _scan(passing.flip(1), own.flip(1)).flip(1)
            taken = pad(handed[:, 1:], (0, 0, 0, 1))
        else:
            handed = _scan(passing, own)
            taken = pad(handed[:, :-1], (0, 0, 1, 0))
        taken, handed = self.by_block(taken), self.by_block(handed)
        together = max(PART // max(size * self.features, 1), 1) if signal.device.type == "cpu" else len(signal)
        for start in range(0, len(signal), together):
            part = slice(start, start + together)
            after = torch.bmm(matrices[part, rows, columns], signal[part])
            after.baddbmm_(matrices[part, rows, takes], taken[part])
            if grads is not None:
                new, old = (after, handed[part]), (signal[part], taken[part])
                at = (rows, hands), (columns, takes)
                _add_outer(grads.flatten(0, 1)[part], new, old, *at, inverse)
            signal[part] = after


def _add_outer(
    grads: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    new_at: tuple[slice, slice],
    old_at: tuple[slice, slice],
    inverse: bool,
) -> None:
    """Tokens and what passes between blocks: the signal after the step and its gradient before, row by column."""
    signal, grad = [x.tensor_split(2, -1)[0] for x in new], [x.tensor_split(2, -1)[1] for x in old]
    left, right, at, along = (signal, grad, new_at, old_at) if inverse else (grad, signal, old_at, new_at)
    for a, i in zip(left, at, strict=True):
        for b, j in zip(right, along, strict=True):
            grads[:, i, j] += a @ b.mT


def _parts(size: int, up: bool) -> tuple[slice, slice, slice, slice]:
    """Of a block: the rows and columns of its tokens, the row that it hands on, the column that it takes."""
    start, end, first, final = slice(0, size), slice(1, None), slice(0, 1), slice(size, None)
    return (end, start, first, final) if up else (start, end, final, first)


def _scan(decay: Tensor, added: Tensor) -> Tensor:
    """``s_t = decay_t s_{t-1} + added_t``: (batch, n) and (batch, n, features)."""
    count = added.shape[1]
    decay, added = pad(decay, (0, -count % BLOCK)), pad(added, (0, 0, 0, -count % BLOCK))
    decay, added = decay.unflatten(1, (-1, BLOCK)), added.unflatten(1, (-1, BLOCK))
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=decay.device).tril(-1)
    within = torch.where(later, decay.unsqueeze(-1), 1).cumprod(-2).tril()
    states, decay = within @ added, decay.cumprod(-1).unsqueeze(-1)
    for i in range(1, states.shape[1]):
        states[:, i].addcmul_(decay[:, i], states[:, i - 1, -1:])
    return states.flatten(1, 2)[:, :count]
