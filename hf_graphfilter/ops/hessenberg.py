"""Products of Givens rotations of neighbouring tokens, unitary Hessenberg matrices, applied to signals in linear time.

``H_l = G_{N-1} ... G_1`` and ``H_u = G_1 ... G_{N-1}`` are first-order linear recurrences along the tokens, their
coefficients one number a token, shared by all features. The rotations of a block of tokens make one small matrix, all
blocks are multiplied at once, and what a block hands to the next follows from a recurrence over the blocks. All is
unitary, so the backward pass finds every intermediate signal again from the result, which alone is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16  # rotations that are taken together, and blocks
PART = 1 << 16  # numbers that matrix products on the CPU take at once


def rotations(angles: Tensor) -> Tensor:
    """Eq. 6 of the Converter paper.

    Args:
        angles: (batch, 3, n), float32 or float64: alpha, beta, gamma.

    Returns:
        (batch, n, 2, 2), complex: ``[[conj(c), -s], [conj(s), c]]``.
    """
    alpha, beta, gamma = (angles / 2).unbind(1)
    c, s = _polar(gamma.cos(), alpha + beta), _polar(gamma.sin(), alpha - beta)
    return torch.stack([c.conj(), -s, s.conj(), c], -1).unflatten(-1, (2, 2))


def _polar(radius: Tensor, angle: Tensor) -> Tensor:
    """Unlike ``torch.polar`` right, with its gradient, where the radius is zero or negative."""
    return torch.complex(radius * angle.cos(), radius * angle.sin())


def lower_blocks(angles: Tensor) -> Tensor:
    """The factors of H_l: (batch, 3, n) to (batch, blocks, m+1, m+1), ``G_m ... G_1`` of every m rotations."""
    return _products(rotations(angles))


def upper_blocks(angles: Tensor) -> Tensor:
    """The factors of H_u, ``G_1 ... G_m``."""
    return _products(rotations(angles).mT).mT


def _products(cells: Tensor) -> Tensor:
    """By doubling, without any division. One rotation by nothing comes first, one at least last."""
    batch, n = cells.shape[:2]
    nothing = torch.eye(2, dtype=cells.dtype, device=cells.device).expand(batch, 1, 2, 2)
    products = torch.cat([nothing, cells, nothing.expand(-1, 1 + -(n + 2) % BLOCK, -1, -1)], 1).unflatten(
        1, (-1, BLOCK)
    )
    while products.shape[2] > 1:
        first, second = products[:, :, ::2], products[:, :, 1::2]
        above = pad(first[..., :-1, :], (0, first.shape[-1] - 1))
        below = torch.cat([second[..., :1] * first[..., -1:, :], second[..., 1:]], -1)
        products = torch.cat([above, below], -2)
    return products.squeeze(2)


def transform(x: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, *, forward: bool, back: bool) -> Tensor:
    """``scale * (H_l H_u x)`` if ``forward``, ``(H_l H_u)^-1 (scale * x)`` if ``back``; one after the other if both.

    Args:
        x: (batch, tokens, features), real or complex.
        lower, upper: from ``lower_blocks`` and ``upper_blocks``.
        scale: (batch, tokens), of absolute value 1.

    Returns:
        Shape of ``x``, dtype of ``scale``. O(n d) time and memory.
    """
    return _Transform.apply(x, lower, upper, scale, forward, back)


@torch.library.custom_op(
    "hf_graphfilter::unitary",
    mutates_args=(),
    schema="(Tensor x, Tensor lower, Tensor upper, Tensor scale, bool forward, bool back) -> Tensor",
)
def _transform(x: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, forward: bool, back: bool) -> Tensor:
    """An operator of its own: compiled and exported graphs hold it whole, for any number of tokens."""
    z = _Signal([x], lower, scale.dtype)
    if forward:
        z.step(upper, up=True)
        z.step(lower, up=False)
    z.tokens.mul_(scale.unsqueeze(-1))
    if back:
        z.step(_inverse(lower), up=True)
        z.step(_inverse(upper), up=False)
    return z.tokens


@torch.library.custom_op(
    "hf_graphfilter::unitary_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor lower, Tensor upper, Tensor scale, Tensor out, bool real, bool forward, bool back) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, out: Tensor, real: bool, forward: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every step undone, of the signal and, by the same matrices, of its gradient."""
    z = _Signal([out, grad], lower, scale.dtype)
    grad_lower, grad_upper = torch.zeros_like(lower), torch.zeros_like(upper)
    if back:
        z.step(upper, up=True, grads=grad_upper, inverse=True)
        z.step(lower, up=False, grads=grad_lower, inverse=True)
    z.tokens.mul_(scale.conj().unsqueeze(-1))
    signal, grad = z.tokens.tensor_split(2, -1)
    grad_scale = scale * (signal.conj() * grad).sum(-1)
    if forward:
        z.step(_inverse(lower), up=True, grads=grad_lower)
        z.step(_inverse(upper), up=False, grads=grad_upper)
    grad = z.tokens.tensor_split(2, -1)[1]
    return (grad.real if real else grad).contiguous(), grad_lower, grad_upper, grad_scale


@_transform.register_fake
def _(x: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, forward: bool, back: bool) -> Tensor:
    return _Signal([x], lower, scale.dtype).tokens


@_backward.register_fake
def _(
    grad: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, out: Tensor, real: bool, forward: bool, back: bool
) -> tuple[Tensor, ...]:
    dtype = scale.dtype.to_real() if real else scale.dtype
    shaped = torch.empty(out.shape, dtype=dtype, device=out.device)
    return shaped, torch.empty_like(lower), torch.empty_like(upper), torch.empty_like(scale)


class _Transform(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, lower: Tensor, upper: Tensor, scale: Tensor, forward: bool, back: bool) -> Tensor:
        return _transform(x, lower, upper, scale, forward, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, lower, upper, scale, *ctx.directions = inputs
        ctx.save_for_backward(lower, upper, scale, output)
        ctx.real = not x.is_complex()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*_Gradients.apply(grad, *ctx.saved_tensors, ctx.real, *ctx.directions), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """``torch.func.vmap``: its dimension is a part of the batch."""
        tensors = [
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(inputs[:4], in_dims[:4], strict=True)
        ]
        out = _Transform.apply(*tensors, *inputs[4:])
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
    return blocks.mH.resolve_conj().contiguous()


class _Signal:
    """A signal on its way: a step up leaves token t at place t, a step down at t + 1, where a step up expects it."""

    def __init__(self, parts: list[Tensor], blocks: Tensor, dtype: torch.dtype) -> None:
        self.batch, self.blocks, self.size = *blocks.shape[:2], blocks.shape[2] - 1
        self.count, self.features = parts[0].shape[1], sum(part.shape[2] for part in parts)
        self.places = parts[0].new_empty(self.batch, self.blocks * self.size, self.features, dtype=dtype)
        self.places[:, 0] = 0
        self.places[:, self.count + 1 :] = 0
        torch.cat(parts, -1, out=self.tokens) if len(parts) > 1 else self.tokens.copy_(parts[0])

    @property
    def tokens(self) -> Tensor:
        """After a step down: (batch, tokens, features)."""
        return self.places[:, 1 : self.count + 1]

    def by_block(self, places: Tensor) -> Tensor:
        return places.reshape(self.batch * self.blocks, places.shape[1] // self.blocks, self.features)

    def step(self, blocks: Tensor, *, up: bool, grads: Tensor | None = None, inverse: bool = False) -> None:
        """The blocks on their tokens, in place.

        ``grads``: the step undoes another, the features being those of a signal and of its gradient, and to ``grads``
        is added what the blocks of that one get, which were these if it applied their ``inverse``.
        """
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
            grads[:, i, j] += a @ b.mH


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
