"""Filtering in the singular value domain: ``U Sigma V^T x`` in linear time, over all tokens or causally.

``U`` is a softmax over features, ``V`` a softmax over tokens, ``Sigma`` a polynomial of singular values in (0, 1), one
set a token (AGF paper, Eq. 7-10). The causal form, which the paper does not have, takes the softmax over the tokens so
far.

Everything goes block by block along the tokens, forward and backward: the working set stays in the CPU's cache, and
nothing but the inputs is kept for the backward pass. Inner arithmetic is float32 or wider, whatever the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GraphFilterError
from .polynomials import Recurrence, expand, expand_with_derivatives

CHUNK = 64  # tokens that the causal form takes together
PIECE = 1 << 15  # numbers that elementwise work on the CPU takes at once
BLOCK = 1 << 18  # and matrix products
_NEVER = -1e30  # logit of a token that is not there; finite, so that no inf - inf can arise
_TINY = 1e-30  # smallest running mass, relative to its chunk's, that the fast causal form divides by
_STEEP = 68.0  # e^-68 is above it


class CausalState(NamedTuple):
    """All that the causal filter remembers of the past: constant size, whatever the number of tokens.

    Attributes:
        mass: (batch, heads, features), logarithm of the running denominators of ``V``; float32 or wider.
        mean: (batch, heads, features, value features), ``V^T x`` over the past; of the same dtype.
    """

    mass: Tensor
    mean: Tensor


def no_past(v: Tensor, value: Tensor) -> CausalState:
    """The state before the first token."""
    batch, heads, _, features = v.shape
    mass = torch.full((batch, heads, features), _NEVER, dtype=_wide(v).dtype, device=v.device)
    return CausalState(mass, mass.new_zeros(batch, heads, features, value.shape[-1]))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _blocks(x: Tensor, size: int, multiple: int = 1) -> list[slice]:
    """Parts of the tokens of x (batch, heads, tokens, features) with about ``size`` numbers; a GPU takes all, and so
    does a compiler, whose graph would be bound to their number."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    count = x.shape[2]
    step = count if x.device.type != "cpu" else size * count // max(1, x.numel())
    step = max(step // multiple, 1) * multiple
    return [slice(i, i + step) for i in range(0, count, step)]


# ------------------------------------------------------------------------------------- left side: U times Sigma


def left_vectors(u: Tensor, sigma: Tensor | None, theta: Tensor, steps: Recurrence) -> Tensor:
    """``softmax(u) * sum_k theta_k T_k(sigmoid(sigma))``: the rows of ``U Sigma`` (Eq. 8 and 9).

    Args:
        u, sigma: (batch, heads, tokens, features); ``sigma`` None where ``theta`` has order 0.
        theta: (K+1,) or (heads, K+1), float32 or wider.
        steps: from ``recurrence``.

    Returns:
        (batch, heads, tokens, features), dtype of ``u``.
    """
    if sigma is None:
        return (_wide(u).softmax(-1) * theta.reshape(-1, 1, 1)).to(u.dtype)
    return _LeftVectors.apply(u, sigma, theta, steps)  # type: ignore[no-any-return]


class _LeftVectors(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, sigma: Tensor, theta: Tensor, steps: Recurrence) -> Tensor:  # type: ignore[override]
        out = torch.empty_like(u, memory_format=torch.contiguous_format)
        for part in _blocks(u, PIECE):
            U, x = _wide(u[:, :, part]).softmax(-1), _wide(sigma[:, :, part]).sigmoid()
            out[:, :, part] = U.mul_(expand(x, theta, steps))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.steps = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        u, sigma, theta = ctx.saved_tensors
        grad_u, grad_sigma, grad_theta = torch.empty_like(u), torch.empty_like(sigma), torch.zeros_like(theta)
        for part in _blocks(u, PIECE):
            U, x, g = (_wide(t[:, :, part]) for t in (u, sigma, grad))
            U, x = U.softmax(-1), x.sigmoid()
            p, slope, basis = expand_with_derivatives(x, theta, ctx.steps)
            toward_p = g * U
            for k, t in enumerate(basis):
                by_head = torch.linalg.vecdot(toward_p, t).sum((0, 2))
                grad_theta[..., k] += by_head if theta.dim() == 2 else by_head.sum()
            grad_sigma[:, :, part] = toward_p.mul_(slope).mul_(x).mul_(1 - x)
            toward_u = p.mul_(g)
            grad_u[:, :, part] = U * (toward_u - torch.linalg.vecdot(U, toward_u).unsqueeze(-1))
        return grad_u, grad_sigma, grad_theta, None


# -------------------------------------------------------------------------------------- every token sees every token


def filter_all(w: Tensor, v: Tensor, value: Tensor, keys: Tensor | None) -> Tensor:
    """``w (V^T value)``, every token seeing every token: O(n d^2) time, O(n d + d^2) memory.

    Args:
        w: rows of ``U Sigma``, (batch, heads, tokens, features).
        v: (batch, heads, tokens, features), before the softmax.
        value: (batch, heads, tokens, value features).
        keys: bool (batch, tokens), or None.

    Returns:
        (batch, heads, tokens, value features), dtype of ``value``.
    """
    v, value = _hide(v, value, keys)
    return _All.apply(w, v, value)[0]  # type: ignore[no-any-return]


def _hide(v: Tensor, value: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without the tokens that are not there: no weight, and no value should none be there at all."""
    if keys is None:
        return v, value
    gone = ~keys[:, None, :, None]
    return v.masked_fill(gone, _absent(v.dtype)), value.masked_fill(gone, 0.0)


def _absent(dtype: torch.dtype) -> float:
    """The logit of a token that is not there, in the range of ``dtype``."""
    return max(_NEVER, torch.finfo(dtype).min / 2)


class _All(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, v: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        mass, mean = no_past(v, value)
        for part in _blocks(v, BLOCK):
            logits = _wide(v[:, :, part])
            total = torch.logaddexp(mass, logits.logsumexp(-2))
            weights = (logits - total[:, :, None]).exp_().to(value.dtype)
            mean = mean * (mass - total).exp_()[..., None] + weights.mT @ value[:, :, part]
            mass = total
        return w.to(value.dtype) @ mean.to(value.dtype), mass, mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        w, v, value, mass, mean = ctx.saved_tensors
        toward = torch.zeros_like(mean)
        for part in _blocks(w, BLOCK):
            toward += w[:, :, part].to(grad.dtype).mT @ grad[:, :, part]
        taken = (toward * mean).sum(-1)[:, :, None]
        grad_v, grad_value = torch.empty_like(v), torch.empty_like(value)
        across = toward.to(value.dtype)
        for part in _blocks(v, BLOCK):
            weights = (_wide(v[:, :, part]) - mass[:, :, None]).exp_()
            grad_value[:, :, part] = weights.to(value.dtype) @ across
            grad_v[:, :, part] = weights.mul_(value[:, :, part] @ across.mT - taken)
        return (grad @ mean.to(grad.dtype).mT).to(w.dtype), grad_v, grad_value


# ------------------------------------------------------------------------------------------------- orthogonality


def left_basis(u: Tensor, keys: Tensor | None) -> Tensor:
    """``U``: the softmax of ``u`` (batch, heads, tokens, features) over the features, zero where ``keys`` is False."""
    U = _wide(u).softmax(-1)
    return U if keys is None else U * keys[:, None, :, None]


def right_basis(v: Tensor, keys: Tensor | None) -> Tensor:
    """``V``: the softmax of ``v`` (batch, heads, tokens, features) over the tokens, zero where ``keys`` is False."""
    v = _wide(v)
    if keys is None:
        return v.softmax(-2)
    # a row of the batch without any token comes out as zeros
    return v.masked_fill(~keys[:, None, :, None], _NEVER).softmax(-2) * keys[:, None, :, None]


def gram_deviation(x: Tensor) -> Tensor:
    """``x^T x - I``, (..., features, features); its backward pass is one product, as the result is symmetric."""
    return _Gram.apply(x) - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)  # type: ignore[no-any-return]


class _Gram(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.mT @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x @ (grad + grad.mT)


# ------------------------------------------------------------------------------------------------- causal form


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
    v, value = _hide(v, value, keys)
    if state is None:
        state = no_past(v, value)
    with torch.autocast(v.device.type, enabled=False):
        if v.shape[2] == 1:
            out, state = _one_token(_wide(w), _wide(v)[:, :, 0], _wide(value), state)
            return out.to(value.dtype), state
        if torch.compiler.is_exporting():
            raise GraphFilterError(
                "a causal filter in the singular value domain chooses between two forms by its input, which an "
                "exported graph cannot: export models without causal attention, or patch with 'gfsa'"
            )
        if _underflows(v.detach(), keys):
            out, state = _stable_causal(_wide(w), _wide(v), _wide(value), state)
            return out.to(value.dtype), state
        out, mass, mean, *_ = _Causal.apply(w, v, value, *state)
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
    chunks = _split(_wide(v), _NEVER)
    present = chunks > _absent(v.dtype) / 2
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
    def forward(  # type: ignore[override]
        w: Tensor, v: Tensor, value: Tensor, mass: Tensor, mean: Tensor
    ) -> tuple[Tensor, ...]:
        """The result, the last state, and for the backward pass those before every block but the first."""
        out, states = torch.empty_like(value), []
        for part in _blocks(v, BLOCK, CHUNK):
            states += [mass, mean]
            queries, signal = _split(_wide(w[:, :, part])), _split(_wide(value[:, :, part]))
            c = _chunks(_split(_wide(v[:, :, part]), _NEVER), mass)
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
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        w, v, value, *states = ctx.saved_tensors
        grads = torch.empty_like(w), torch.empty_like(v), torch.empty_like(value)
        batch, heads, features, value_features = states[1].shape
        # what later tokens ask of the earlier ones, relative to the mass in between; last column: of the mass itself
        asked = states[1].new_zeros(batch, heads, features, value_features + 1)
        for i, part in reversed(list(enumerate(_blocks(v, BLOCK, CHUNK)))):
            rows, signal, toward = (_split(_wide(x[:, :, part])) for x in (w, value, grad))
            found = _causal_backward(
                rows,
                signal,
                toward,
                _chunks(_split(_wide(v[:, :, part]), _NEVER), states[2 * i]),
                states[2 * i + 1],
                asked,
            )
            asked = found[-1]
            for whole, gradient in zip(grads, found, strict=False):
                whole[:, :, part] = gradient.flatten(2, 3)[:, :, : w[:, :, part].shape[2]]
        return *grads, None, None


def _causal_backward(
    w: Tensor, value: Tensor, grad: Tensor, c: _Chunks, mean: Tensor, asked: Tensor
) -> tuple[Tensor, ...]:
    """Gradients toward w, v and value of one block, and what it asks of the tokens before it."""
    queries = w * c.inverse
    before, _ = _scan(c.decay.mT, (c.weights * c.after).mT @ value, mean)
    pairs = (grad @ value.mT).tril_()
    grad_w = (pairs @ c.weights).add_((grad @ before.mT).mul_(c.past)).mul_(c.inverse)
    returned = (w * grad_w).mul_(c.inverse)  # what the running mass takes back
    adding = torch.cat([(queries * c.past).mT @ grad, (returned * c.past).sum(-2).unsqueeze(-1)], -1)
    later, asked = _scan(c.decay.mT.flip(2), adding.flip(2), asked)
    later, later_returned = later.flip(2)[..., :-1], later.flip(2)[..., -1:].mT
    scores = (queries @ c.weights.mT).tril_()
    grad_value = (scores.mT @ grad).add_((c.weights * c.after) @ later)
    grad_v = (pairs.mT @ queries).add_((value @ later.mT).sub_(later_returned).mul_(c.after))
    # from the end: earlier terms can be larger by many orders of magnitude
    grad_v.sub_(returned.flip(-2).cumsum(-2).flip(-2)).mul_(c.weights)
    return grad_w, grad_v, grad_value, asked


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
