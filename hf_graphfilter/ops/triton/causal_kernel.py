"""The causal filter in the singular value domain: all chunks of tokens at once, and a scan over their states.

The algorithm is that of ``ops.spectral.causal``, whose scan is a loop in Python. Here ``_added`` forms what every chunk
adds to the state, ``_scan`` carries the state from chunk to chunk, and ``_rows`` applies it. The backward pass does the
same from the end. There the running denominator is one more column of the state.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gradients import first_order
from .tiles import dot, fits, like, load, options, power, precision, store, strided

CHUNK = 32  # tokens that are taken together; registers suffice for no more
SCANNED = 16  # features that a program of the scan carries


@triton.jit
def _chunk(V, Mass, Tiny, batch, head, heads, chunks, tokens, count, F: tl.constexpr, BF: tl.constexpr):
    """Return (weights, inverse, past, after), the factors of a chunk of keys as in ``ops.spectral.causal``.

    Mass (batch, heads, chunks + 1, F) holds the logarithms of the running denominators before every chunk.
    """
    is_token = (tokens < count)[:, None]
    v = load(V, batch, head, tokens, count, F, BF).to(tl.float32)
    top = tl.max(tl.where(is_token, v, float("-inf")), 0)
    features = tl.arange(0, BF)
    pointers = Mass + ((batch * heads + head).to(tl.int64) * (chunks + 1) + tl.program_id(0)) * F + features
    start = tl.load(pointers, mask=features < F, other=0.0)
    end = tl.load(pointers + F, mask=features < F, other=0.0)
    reference = tl.maximum(top, start)
    weights = tl.where(is_token, tl.exp(v - reference[None, :]), 0.0)
    past = tl.exp(start - reference)
    mass = tl.cumsum(weights, 0) + past[None, :]
    inverse = tl.where(mass < Tiny, 0.0, 1 / tl.maximum(mass, Tiny))  # only before the first token that is there
    return weights, inverse, past[None, :], tl.exp(reference - end)[None, :]


@triton.jit
def _masses(V, Mass, heads, chunks, count, F: tl.constexpr, BF: tl.constexpr, C: tl.constexpr):
    """Write the logarithm of the sum of e^v over every chunk into the place after it."""
    chunk, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    tokens, features = chunk * C + tl.arange(0, C), tl.arange(0, BF)
    is_token = (tokens < count)[:, None]
    v = tl.where(is_token, load(V, batch, head, tokens, count, F, BF).to(tl.float32), float("-inf"))
    top = tl.max(v, 0)
    mass = top + tl.log(tl.sum(tl.exp(v - top[None, :]), 0))
    pointers = Mass + (tl.program_id(1).to(tl.int64) * (chunks + 1) + chunk + 1) * F + features
    tl.store(pointers, mass, mask=features < F)


@triton.jit
def _added(
    V, X, Mass, States, Tiny, heads, chunks, count,
    F: tl.constexpr, BF: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a chunk adds to the state, F x E, into States."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    tokens = tl.program_id(0) * C + tl.arange(0, C)
    weights, _, _, after = _chunk(V, Mass, Tiny, batch, head, heads, chunks, tokens, count, F, BF)
    x = load(X, batch, head, tokens, count, E, BE).to(tl.float32)
    _put(States, tl.program_id(1), chunks, F, BF, E, BE, dot(tl.trans(weights * after), x, PRECISION))


@triton.jit
def _state(States, row, chunks, F: tl.constexpr, BF: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    features, columns = tl.arange(0, BF)[:, None], tl.arange(0, BE)[None, :]
    places = States + (row.to(tl.int64) * chunks + tl.program_id(0)) * (F * E) + features * E + columns
    return places, (features < F) & (columns < E)


@triton.jit
def _get(States, row, chunks, F: tl.constexpr, BF: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    places, mask = _state(States, row, chunks, F, BF, E, BE)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def _put(States, row, chunks, F: tl.constexpr, BF: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, numbers):
    places, mask = _state(States, row, chunks, F, BF, E, BE)
    tl.store(places, numbers, mask=mask)


@triton.jit
def _scan(
    States, Decay, Carried, chunks,
    F: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace what each chunk adds to States (rows, chunks, F, E) by what is carried to it.

    Carried holds the first state before, and the last one after.
    """
    row = tl.program_id(0).to(tl.int64)
    features, columns = tl.program_id(1) * BF + tl.arange(0, BF), tl.arange(0, BE)
    mask = (features < F)[:, None] & (columns < E)[None, :]
    places = features[:, None] * E + columns[None, :]
    carried = tl.load(Carried + row * (F * E) + places, mask=mask, other=0.0)
    for i in tl.range(0, chunks, num_stages=4):
        chunk = row * chunks + (chunks - 1 - i if REVERSE else i)
        added = tl.load(States + chunk * (F * E) + places, mask=mask, other=0.0)
        tl.store(States + chunk * (F * E) + places, carried, mask=mask)
        decay = tl.load(Decay + chunk * F + features, mask=features < F, other=0.0)
        carried = added + decay[:, None] * carried
    tl.store(Carried + row * (F * E) + places, carried, mask=mask)


@triton.jit
def _rows(
    W, V, X, Out, Mass, States, Tiny, heads, chunks, count,
    F: tl.constexpr, BF: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the results of a chunk."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    tokens, order = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, C)
    weights, inverse, past, _ = _chunk(V, Mass, Tiny, batch, head, heads, chunks, tokens, count, F, BF)
    queries = load(W, batch, head, tokens, count, F, BF).to(tl.float32) * inverse
    scores = dot(queries, tl.trans(weights), PRECISION)
    scores = tl.where(order[:, None] >= order[None, :], scores, 0.0)
    x = load(X, batch, head, tokens, count, E, BE).to(tl.float32)
    before = _get(States, tl.program_id(1), chunks, F, BF, E, BE)
    out = dot(scores, x, PRECISION, dot(queries * past, before, PRECISION))
    store(Out, batch, head, tokens, count, E, BE, out)


@triton.jit
def _gradients(
    W, V, X, Dout, Dw, Dv, Dx, Mass, States, Later, LaterMass, Tiny, heads, chunks, count, ASKING: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk in two passes.

    With ASKING, it writes dw, and into Later what the chunk asks of the tokens before it. Without ASKING, it writes dv
    and dx, given what later chunks ask.

    LaterMass is the column of Later for the running denominator.
    """
    batch, head, row = tl.program_id(1) // heads, tl.program_id(1) % heads, tl.program_id(1)
    tokens, order = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, C)
    earlier = order[:, None] >= order[None, :]
    weights, inverse, past, after = _chunk(V, Mass, Tiny, batch, head, heads, chunks, tokens, count, F, BF)
    queries = load(W, batch, head, tokens, count, F, BF).to(tl.float32) * inverse
    x = load(X, batch, head, tokens, count, E, BE).to(tl.float32)
    dout = load(Dout, batch, head, tokens, count, E, BE).to(tl.float32)
    before = _get(States, row, chunks, F, BF, E, BE)
    pairs = tl.where(earlier, dot(dout, tl.trans(x), PRECISION), 0.0)
    dw = dot(dout, tl.trans(before), PRECISION) * past
    dw = dot(pairs, weights, PRECISION, dw) * inverse
    returned = queries * dw  # what the running mass takes back
    features = tl.arange(0, BF)
    mass_pointers = LaterMass + (row.to(tl.int64) * chunks + tl.program_id(0)) * F + features
    if ASKING:
        store(Dw, batch, head, tokens, count, F, BF, dw)
        _put(Later, row, chunks, F, BF, E, BE, dot(tl.trans(queries * past), dout, PRECISION))
        tl.store(mass_pointers, tl.sum(returned * past, 0), mask=features < F)
    else:
        later = _get(Later, row, chunks, F, BF, E, BE)
        scores = tl.where(earlier, dot(queries, tl.trans(weights), PRECISION), 0.0)
        dx = dot(tl.trans(scores), dout, PRECISION, dot(weights * after, later, PRECISION))
        store(Dx, batch, head, tokens, count, E, BE, dx)
        dv = dot(x, tl.trans(later), PRECISION) - tl.load(mass_pointers, mask=features < F, other=0.0)[None, :]
        dv = dot(tl.trans(pairs), queries, PRECISION, dv * after)
        # from the end: earlier terms can be larger by many orders of magnitude
        store(Dv, batch, head, tokens, count, F, BF, (dv - tl.cumsum(returned, 0, reverse=True)) * weights)


# ---------------------------------------------------------------------------------------------------- the whole filter


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, w: Tensor, v: Tensor, value: Tensor, mass: Tensor, mean: Tensor, tiny: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, v, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (w, v, value))
        ctx.tiny = tiny
        chunks, grid, sizes, settings = _launch(v, value)
        masses = torch.cat([mass[:, :, None], mass.new_empty(*v.shape[:2], chunks, v.shape[3])], 2)
        _masses[grid](strided(v), masses, v.shape[1], chunks, v.shape[2], v.shape[3], sizes["BF"], CHUNK, **options(4))
        masses = masses.logcumsumexp(2)
        states, last_mean = _states(v, value, masses, mean, tiny)
        out = like(value, value.dtype)
        counts = tiny, v.shape[1], chunks, v.shape[2]
        _rows[grid](*map(strided, (w, v, value, out)), masses, states, *counts, **sizes, **settings)
        ctx.save_for_backward(w, v, value, masses, mean, last_mean)
        return out, masses[:, :, -1].clone(), last_mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_mass: Tensor, grad_mean: Tensor) -> tuple[Tensor | None, ...]:
        return *first_order(_backward, grad, grad_mass, grad_mean, ctx.tiny, *ctx.saved_tensors), None


def _backward(
    grad: Tensor, grad_mass: Tensor, grad_mean: Tensor, tiny: float, *saved: Tensor
) -> tuple[Tensor | None, ...]:
    w, v, value, masses, mean, last_mean = saved
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    chunks, grid, sizes, settings = _launch(v, value)
    states = _states(v, value, masses, mean, tiny)[0]
    later, later_mass = torch.empty_like(states), torch.empty_like(states[..., :1])
    grads = like(w, w.dtype), like(v, v.dtype), like(value, value.dtype)
    arguments = *map(strided, (w, v, value, grad, *grads)), masses, states, later, later_mass
    counts = tiny, v.shape[1], chunks, v.shape[2]
    for asking in (True, False):
        _gradients[grid](*arguments, *counts, asking, **sizes, **settings)
        if asking:
            grad_mean, returned = grad_mean.contiguous(), (grad_mean * last_mean).sum(-1) - grad_mass
            grad_mean = _carry(later, masses, grad_mean.clone(), reverse=True)
            returned = _carry(later_mass, masses, returned.unsqueeze(-1), reverse=True).squeeze(-1)
    return *grads, (grad_mean * mean).sum(-1) - returned, grad_mean


def filter_causal(
    w: Tensor, v: Tensor, value: Tensor, mass: Tensor, mean: Tensor, tiny: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Filter causally on the GPU; see ``ops.triton.filter_causal``."""
    with torch.cuda.device_of(w):
        return _Causal.apply(w, v, value, mass, mean, tiny)


def can_filter(w: Tensor, v: Tensor, value: Tensor) -> bool:
    """Return whether the kernels take these tensors."""
    tensors = w, v, value
    return fits(v) and all(x.is_floating_point() and x.element_size() in (2, 4) and x.shape[-1] <= 64 for x in tensors)


def _launch(v: Tensor, value: Tensor) -> tuple[int, tuple[int, int], dict[str, int], dict[str, Any]]:
    chunks, (features, columns) = triton.cdiv(v.shape[2], CHUNK), (v.shape[3], value.shape[3])
    sizes = {"F": features, "BF": power(features), "E": columns, "BE": power(columns), "C": CHUNK}
    settings = {"PRECISION": precision(v), **options(8)}
    return chunks, (chunks, v.shape[0] * v.shape[1]), sizes, settings


def _states(v: Tensor, value: Tensor, masses: Tensor, mean: Tensor, tiny: float) -> tuple[Tensor, Tensor]:
    """Return the states before every chunk, (batch, heads, chunks, features, value features), and after the last."""
    chunks, grid, sizes, settings = _launch(v, value)
    states = mean.new_empty(*v.shape[:2], chunks, v.shape[3], value.shape[3])
    _added[grid](*map(strided, (v, value)), masses, states, tiny, v.shape[1], chunks, v.shape[2], **sizes, **settings)
    return states, _carry(states, masses, mean.clone(memory_format=torch.contiguous_format))


def _carry(added: Tensor, masses: Tensor, carried: Tensor, reverse: bool = False) -> Tensor:
    """Replace ``added`` by what is carried to every chunk, and ``carried`` by what remains."""
    batch, heads, chunks, features, columns = added.shape
    decay = (masses[:, :, :-1] - masses[:, :, 1:]).exp_()
    grid = batch * heads, triton.cdiv(features, SCANNED)
    width = triton.next_power_of_2(columns)
    _scan[grid](added, decay, carried, chunks, features, columns, width, SCANNED, reverse, **options(1))
    return carried
