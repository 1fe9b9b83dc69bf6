"""The causal filter: a scan over chunks of tokens, and a step of decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import GraphFilterError
from ..triton import filter_causal as by_kernel
from .bidirectional import BLOCK, NEVER, CausalState, absent, blocks, hide, no_past, wide

CHUNK = 64  # tokens that are taken together
_TINY = 1e-30  # smallest running mass, relative to its chunk's, that the fast form divides by
_STEEP = 68.0  # e^-68 is above it


def filter_causal(
    w: Tensor, v: Tensor, value: Tensor, keys: Tensor | None, state: CausalState | None = None
) -> tuple[Tensor, CausalState]:
    """``out_t = w_t (sum_{s<=t} e^{v_s} value_s^T / sum_{s<=t} e^{v_s})``: O(n d (d + CHUNK)) time, O(n d) memory.

    Args:
        w, v, value, keys: as in ``filter_all``.
        state: of the tokens before these; nothing is differentiated through it.

    Returns:
        (batch, heads, tokens, value features), dtype of ``value``, and the state after the last token.

    Within a chunk every factor is taken relative to the largest logit so far, which no realistic input leaves; where
    one does (a logit that rises by about 70 within ``CHUNK`` tokens), a form that is stable for all inputs takes over,
    in linear time too but slower.
    """
    v, value = hide(v, value, keys)
    state = state or no_past(v, value)
    with torch.autocast(v.device.type, enabled=False):
        if v.shape[2] == 1:
            out, state = _one_token(wide(w), wide(v)[:, :, 0], wide(value), state)
            return out.to(value.dtype), state
        if torch.compiler.is_exporting():
            raise GraphFilterError(
                "a causal filter in the singular value domain chooses between two forms by its input, which an "
                "exported graph cannot: export models without causal attention, or patch with 'gfsa'"
            )
        if _underflows(v.detach(), keys):
            out, state = _stable_causal(wide(w), wide(v), wide(value), state)
            return out.to(value.dtype), state
        out, mass, mean, *_ = by_kernel(w, v, value, *state, _TINY) or _Causal.apply(w, v, value, *state)
    return out, CausalState(mass, mean)


def _one_token(w: Tensor, v: Tensor, value: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
    """A step of decoding; ``v`` (batch, heads, features), the others with one token."""
    mass = torch.logaddexp(state.mass, v)
    kept, added = (state.mass - mass).exp().unsqueeze(-1), (v - mass).exp().unsqueeze(-1)
    mean = torch.addcmul(kept * state.mean, added, value)
    return w @ mean, CausalState(mass.detach(), mean.detach())


def _underflows(v: Tensor, keys: Tensor | None) -> bool:
    """Whether a running mass can be too small a part of its chunk's to be divided by.

    Its logarithm is at least the smallest logit of the chunk, and the chunk's at most the largest plus log(CHUNK).
    """
    if keys is None:
        chunks = v[:, :, : v.shape[2] // CHUNK * CHUNK].unflatten(2, (-1, CHUNK))
        parts = [chunks] if chunks.numel() else []
        parts += [v[:, :, None, chunks.shape[2] * CHUNK :]] if v.shape[2] % CHUNK else []
        return any(bool((part.amax(-2).float() - part.amin(-2).float()).max() > _STEEP) for part in parts)
    chunks = _split(wide(v), NEVER)
    present = chunks > absent(v.dtype) / 2
    rise = chunks.amax(-2) - torch.where(present, chunks, torch.inf).amin(-2)
    return bool(rise.max() > _STEEP)


class _Chunks(NamedTuple):
    """By chunk: (batch, heads, chunks, CHUNK or 1, features). L_t is the logarithm of the mass up to t."""

    weights: Tensor  # e^{v_s - reference}
    inverse: Tensor  # e^{reference - L_t}
    past: Tensor  # e^{L before the chunk - reference}
    after: Tensor  # e^{reference - L at its end}
    decay: Tensor  # e^{L before - L at the end}
    mass: Tensor  # L at the end of the last chunk, (batch, heads, features)


def _split(x: Tensor, fill: float = 0.0) -> Tensor:
    missing = -x.shape[2] % CHUNK
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=fill)
    return x.unflatten(2, (-1, CHUNK))


def _chunks(v: Tensor, before: Tensor) -> _Chunks:
    top = v.amax(-2, keepdim=True)
    weights = (v - top).exp_()
    mass = weights.cumsum(-2)
    ends = torch.cat([before[:, :, None, None], mass[:, :, :, -1:].log() + top], 2).logcumsumexp(2)
    start, end = ends[:, :, :-1], ends[:, :, 1:]
    reference = torch.maximum(top, start)
    past, scale = (start - reference).exp_(), (top - reference).exp_()
    mass.mul_(scale).add_(past)
    inverse = torch.where(mass < _TINY, 0.0, mass.reciprocal())  # only before the first token that is there
    return _Chunks(weights.mul_(scale), inverse, past, (reference - end).exp_(), (start - end).exp_(), end[:, :, -1, 0])


def _scan(decay: Tensor, added: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """States before every chunk, (batch, heads, chunks, ...), and the last: ``s_{c+1} = decay_c s_c + added_c``."""
    states = torch.empty_like(added)
    state = first
    for c in range(added.shape[2]):
        states[:, :, c] = state
        state = torch.addcmul(added[:, :, c], decay[:, :, c], state)
    return states, state


class _Causal(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, v: Tensor, value: Tensor, mass: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
        """The result, the last state, and for the backward pass those before every block but the first."""
        out, states = torch.empty_like(value), []
        for part in blocks(v, BLOCK, CHUNK):
            states += [mass, mean]
            queries, signal = _split(wide(w[:, :, part])), _split(wide(value[:, :, part]))
            c = _chunks(_split(wide(v[:, :, part]), NEVER), mass)
            queries = queries * c.inverse
            before, mean = _scan(c.decay.mT, (c.weights * c.after).mT @ signal, mean)
            mass = c.mass
            scores = (queries @ c.weights.mT).tril_()
            rows = (scores @ signal).add_(queries.mul_(c.past) @ before)
            out[:, :, part] = rows.flatten(2, 3)[:, :, : w[:, :, part].shape[2]]
        return out, mass, mean, *states[2:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[3:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        w, v, value, *states = ctx.saved_tensors
        grads = torch.empty_like(w), torch.empty_like(v), torch.empty_like(value)
        batch, heads, features, value_features = states[1].shape
        # what later tokens ask of the earlier ones, relative to the mass in between; last column: of the mass itself
        asked = states[1].new_zeros(batch, heads, features, value_features + 1)
        for i, part in reversed(list(enumerate(blocks(v, BLOCK, CHUNK)))):
            rows, signal, toward = (_split(wide(x[:, :, part])) for x in (w, value, grad))
            c = _chunks(_split(wide(v[:, :, part]), NEVER), states[2 * i])
            queries = rows * c.inverse
            before = _scan(c.decay.mT, (c.weights * c.after).mT @ signal, states[2 * i + 1])[0]
            pairs = (toward @ signal.mT).tril_()
            grad_w = (pairs @ c.weights).add_((toward @ before.mT).mul_(c.past)).mul_(c.inverse)
            returned = (rows * grad_w).mul_(c.inverse)  # what the running mass takes back
            adding = torch.cat([(queries * c.past).mT @ toward, (returned * c.past).sum(-2).unsqueeze(-1)], -1)
            later, asked = _scan(c.decay.mT.flip(2), adding.flip(2), asked)
            later, later_returned = later.flip(2)[..., :-1], later.flip(2)[..., -1:].mT
            scores = (queries @ c.weights.mT).tril_()
            grad_value = (scores.mT @ toward).add_((c.weights * c.after) @ later)
            grad_v = (pairs.mT @ queries).add_((signal @ later.mT).sub_(later_returned).mul_(c.after))
            # from the end: earlier terms can be larger by many orders of magnitude
            grad_v.sub_(returned.flip(-2).cumsum(-2).flip(-2)).mul_(c.weights)
            for whole, gradient in zip(grads, (grad_w, grad_v, grad_value), strict=True):
                whole[:, :, part] = gradient.flatten(2, 3)[:, :, : w[:, :, part].shape[2]]
        return *grads, None, None


def _stable_causal(w: Tensor, v: Tensor, value: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
    """The same for any logits: every exponent is a difference <= 0, formed before it is exponentiated."""
    mass = torch.cat([state.mass[:, :, None], v], 2).logcumsumexp(2)
    start, mean, out, step = mass[:, :, 0], state.mean, [], 16
    mass = mass[:, :, 1:]
    earlier = torch.ones(step, step, dtype=torch.bool, device=v.device).tril()
    for i in range(0, v.shape[2], step):
        part = slice(i, i + step)
        size = v[:, :, part].shape[2]
        gap = v[:, :, None, part] - mass[:, :, part, None]
        weights = gap.masked_fill(~earlier[:size, :size, None], -torch.inf).exp()
        scores = torch.einsum("bhtd,bhtsd->bhts", w[:, :, part], weights)
        carried = w[:, :, part] * (start[:, :, None] - mass[:, :, part]).exp()
        out.append(scores @ value[:, :, part] + carried @ mean)
        end = mass[:, :, part][:, :, -1]
        mean = (start - end).exp()[..., None] * mean + weights[:, :, -1].mT @ value[:, :, part]
        start = end
    return torch.cat(out, 2), CausalState(start.detach(), mean.detach())
