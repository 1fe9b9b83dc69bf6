"""The causal filter: a scan over chunks of tokens, and a step of decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import GraphFilterError
from ..eager_cpu import on_plain_cpu
from ..exporting import is_exporting
from ..gradients import first_order, one_by_one, under_vmap
from ..polynomials import Recurrence
from ..triton import filter_causal as by_kernel
from .blocks import NEVER, Block, CausalState, absent, blocks, hide, no_past, to_float32
from .factors import Left
from .one_chunk import TINY, OneChunk

CHUNK = 64  # tokens that are taken together
_STEEP = 68.0  # e^-68 is above TINY


def filter_causal(
    left: Left,
    v: Tensor,
    value: Tensor,
    keys: Tensor | None,
    state: CausalState | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, CausalState | None]:
    """Filter causally: ``out_t = w_t (sum_{s<=t} e^{v_s} value_s^T / sum_{s<=t} e^{v_s})``, w the rows of ``U Sigma``.

    It takes O(n d (d + CHUNK)) time and O(n d) memory.

    Args:
        left, v, value, keys: as in ``filter_all``.
        state: memory of the tokens before these; gradients flow through it.
        needs_state: whether the state after the last token is needed.

    Returns:
        (batch, heads, tokens, value features), dtype of ``value``, and the state after the last token, or None.

    Within a chunk every factor is relative to the largest logit so far. That is in range for all realistic inputs. If a
    logit rises by about 70 within ``CHUNK`` tokens, a form that is stable for all inputs takes over. It also takes
    linear time, but is slower.
    """
    v, value = hide(v, value, keys)
    is_one_chunk = state is None and not needs_state and 1 < v.shape[2] <= CHUNK and on_plain_cpu(v)
    state = state or no_past(v, value)
    with torch.autocast(v.device.type, enabled=False):
        is_traced = torch.jit.is_tracing()  # into a graph that would run with any number of tokens, wrongly
        if v.shape[2] == 1 and not is_traced:
            out, state = _one_token(left.rows(), to_float32(v)[:, :, 0], to_float32(value), state)
            return out.to(value.dtype), state
        if is_exporting() or is_traced:
            raise GraphFilterError(
                "a causal filter in the singular value domain chooses between two forms by its input, which an "
                "exported graph cannot: export models without causal attention, or patch with 'gfsa' or 'far_field'"
            )
        if _underflows(v.detach(), keys):
            out, state = _stable_causal(left.rows(), to_float32(v), to_float32(value), state)
            return out.to(value.dtype), state
        if is_one_chunk:
            return OneChunk.apply(*left, v, value), None
        result = by_kernel(left.rows, v, value, *state, TINY) or _Causal.apply(*left, v, value, *state)
        out, mass, mean, *_ = result
    return out, CausalState(mass, mean)


def running_mass(v: Tensor) -> Tensor:
    """Return ``log sum_{s<=t} e^{v_s}`` for every token and feature, (batch, heads, tokens, features).

    The sum of exponentials is many times as fast as PyTorch's logcumsumexp. It is used unless a logit is so far below
    the largest that its exponential would vanish.
    """
    if on_plain_cpu(v) and v.numel():
        top = v.detach().amax(2, keepdim=True)
        if (top - v.detach().amin(2, keepdim=True)).max() < _STEEP:
            return (v - top).exp().cumsum(2).log() + top
    return v.logcumsumexp(2)


def _one_token(w: Tensor, v: Tensor, value: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
    """Decode one step; ``v`` is (batch, heads, features), the others have one token."""
    mass = torch.logaddexp(state.mass, v)
    decay, weight = (state.mass - mass).exp().unsqueeze(-1), (v - mass).exp().unsqueeze(-1)
    mean = torch.addcmul(decay * state.mean, weight, value)
    return w @ mean, CausalState(mass, mean)


def _underflows(v: Tensor, keys: Tensor | None) -> bool:
    """Return whether a running mass can be too small a part of its chunk's mass to divide by.

    The logarithm of the running mass is at least the smallest logit of the chunk. The logarithm of the chunk's mass is
    at most the largest logit plus log(CHUNK).
    """
    if not v.numel():
        return False
    if not torch.compiler.is_compiling() and under_vmap():
        return True  # the stable form, for whatever values
    if keys is None:
        chunks = v[:, :, : v.shape[2] // CHUNK * CHUNK].unflatten(2, (-1, CHUNK))
        parts = [chunks] if chunks.numel() else []
        parts += [v[:, :, None, chunks.shape[2] * CHUNK :]] if v.shape[2] % CHUNK else []
        return any(bool((part.amax(-2).float() - part.amin(-2).float()).max() > _STEEP) for part in parts)
    chunks = _split(to_float32(v), NEVER)
    present = chunks > absent(v.dtype) / 2
    rise = chunks.amax(-2) - torch.where(present, chunks, torch.inf).amin(-2)
    return bool(rise.max() > _STEEP)


class _Chunks(NamedTuple):
    """Factors per chunk, (batch, heads, chunks, CHUNK or 1, features). L_t is the logarithm of the mass up to t."""

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


def _chunks(v: Tensor, past_mass: Tensor) -> _Chunks:
    top = v.amax(-2, keepdim=True)
    weights = (v - top).exp_()
    mass = weights.cumsum(-2)
    ends = torch.cat([past_mass[:, :, None, None], mass[:, :, :, -1:].log() + top], 2).logcumsumexp(2)
    start, end = ends[:, :, :-1], ends[:, :, 1:]
    reference = torch.maximum(top, start)
    past, scale = (start - reference).exp_(), (top - reference).exp_()
    mass.mul_(scale).add_(past)
    inverse = torch.where(mass < TINY, 0.0, mass.reciprocal())  # only before the first token that is there
    return _Chunks(weights.mul_(scale), inverse, past, (reference - end).exp_(), (start - end).exp_(), end[:, :, -1, 0])


def _scan(decay: Tensor, added: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before every chunk, (batch, heads, chunks, ...), and the last one.

    The recurrence is ``s_{c+1} = decay_c s_c + added_c``.
    """
    states = torch.empty_like(added)
    state = first
    for c in range(added.shape[2]):
        states[:, :, c] = state
        state = torch.addcmul(added[:, :, c], decay[:, :, c], state)
    return states, state


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        u: Tensor,
        sigma: Tensor | None,
        theta: Tensor,
        steps: Recurrence,
        v: Tensor,
        value: Tensor,
        mass: Tensor,
        mean: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the result, the last state, and the states before every block but the first of a group.

        The backward pass needs the latter.
        """
        left, out, states = Left(u, sigma, theta, steps), torch.empty_like(value), []
        last_mass, last_mean = mass.clone(), mean.clone()
        for group in blocks(v, CHUNK):
            group_mass, group_mean = mass[group[0][:2]], mean[group[0][:2]]
            for block in group:
                if block is not group[0]:
                    states += [group_mass, group_mean]
                queries, signal = _split(left.rows(block)), _split(to_float32(value[block]))
                c = _chunks(_split(to_float32(v[block]), NEVER), group_mass)
                queries = queries * c.inverse
                chunk_states, group_mean = _scan(c.decay.mT, (c.weights * c.after).mT @ signal, group_mean)
                group_mass = c.mass
                scores = (queries @ c.weights.mT).tril_()
                rows = (scores @ signal).add_(queries.mul_(c.past) @ chunk_states)
                out[block] = rows.flatten(2, 3)[:, :, : v[block].shape[2]]
            last_mass[group[0][:2]], last_mean[group[0][:2]] = group_mass, group_mean
        return out, last_mass, last_mean, *states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        u, sigma, theta, ctx.steps, *others = inputs
        ctx.groups = blocks(others[0], CHUNK)  # the number of threads may change
        ctx.save_for_backward(u, sigma, theta, *others, *output[2:])
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        return one_by_one(_Causal, info.batch_size, in_dims, inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_mass: Tensor, grad_mean: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = first_order(_gradients, grad, grad_mass, grad_mean, ctx.steps, ctx.groups, *ctx.saved_tensors)
        return *grads[:3], None, *grads[3:]


def _gradients(
    grad: Tensor,
    grad_mass: Tensor,
    grad_mean: Tensor,
    steps: Recurrence,
    groups: list[list[Block]],
    u: Tensor,
    sigma: Tensor | None,
    theta: Tensor,
    v: Tensor,
    value: Tensor,
    mass: Tensor,
    mean: Tensor,
    last_mean: Tensor,
    *saved_states: Tensor,
) -> tuple[Tensor | None, ...]:
    states = list(saved_states)
    left = Left(u, sigma, theta, steps)
    grads, grad_v, grad_value = left.room(), torch.empty_like(v), torch.empty_like(value)
    # what later tokens ask of earlier ones, relative to the mass in between; last column: of the mass itself
    grad_states = torch.cat([grad_mean, ((grad_mean * last_mean).sum(-1) - grad_mass).unsqueeze(-1)], -1)
    for group in reversed(groups):
        grad_state = grad_states[group[0][:2]]
        for block in reversed(group):
            first = block is group[0]
            block_mean = mean[block[:2]] if first else states.pop()
            block_mass = mass[block[:2]] if first else states.pop()
            signal, grad_out = _split(to_float32(value[block])), _split(to_float32(grad[block]))
            c = _chunks(_split(to_float32(v[block]), NEVER), block_mass)
            chunk_states = _scan(c.decay.mT, (c.weights * c.after).mT @ signal, block_mean)[0]
            pairs = (grad_out @ signal.mT).tril_()
            grad_w = (pairs @ c.weights).add_((grad_out @ chunk_states.mT).mul_(c.past)).mul_(c.inverse)
            rows = _split(left.backward(block, grad_w.flatten(2, 3)[:, :, : v[block].shape[2]], grads))
            queries = rows * c.inverse
            returned = (rows * grad_w).mul_(c.inverse)  # what the running mass takes back
            additions = torch.cat([(queries * c.past).mT @ grad_out, (returned * c.past).sum(-2).unsqueeze(-1)], -1)
            later, grad_state = _scan(c.decay.mT.flip(2), additions.flip(2), grad_state)
            later, later_returned = later.flip(2)[..., :-1], later.flip(2)[..., -1:].mT
            scores = (queries @ c.weights.mT).tril_()
            by_value = (scores.mT @ grad_out).add_((c.weights * c.after) @ later)
            by_v = (pairs.mT @ queries).add_((signal @ later.mT).sub_(later_returned).mul_(c.after))
            # from the end: earlier terms can be larger by many orders of magnitude
            by_v.sub_(returned.flip(-2).cumsum(-2).flip(-2)).mul_(c.weights)
            for target, gradient in ((grad_v, by_v), (grad_value, by_value)):
                target[block] = gradient.flatten(2, 3)[:, :, : v[block].shape[2]]
        grad_states[group[0][:2]] = grad_state
    grad_mean, returned = grad_states[..., :-1], grad_states[..., -1]
    return *grads[:3], grad_v, grad_value, (grad_mean * mean).sum(-1) - returned, grad_mean.contiguous()


def _stable_causal(w: Tensor, v: Tensor, value: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
    """Filter causally for any logits: every exponent is a difference <= 0, formed before it is exponentiated."""
    mass = torch.cat([state.mass[:, :, None], v], 2).logcumsumexp(2)
    start, mean, out, step = mass[:, :, 0], state.mean, [], 16
    mass = mass[:, :, 1:]
    causal_mask = torch.ones(step, step, dtype=torch.bool, device=v.device).tril()
    for i in range(0, v.shape[2], step):
        part = slice(i, i + step)
        size = v[:, :, part].shape[2]
        gap = v[:, :, None, part] - mass[:, :, part, None]
        weights = gap.masked_fill(~causal_mask[:size, :size, None], -torch.inf).exp()
        scores = torch.einsum("bhtd,bhtsd->bhts", w[:, :, part], weights)
        state_weights = w[:, :, part] * (start[:, :, None] - mass[:, :, part]).exp()
        out.append(scores @ value[:, :, part] + state_weights @ mean)
        end = mass[:, :, part][:, :, -1]
        mean = (start - end).exp()[..., None] * mean + weights[:, :, -1].mT @ value[:, :, part]
        start = end
    return torch.cat(out, 2), CausalState(start, mean)
