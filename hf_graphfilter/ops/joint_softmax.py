"""Softmax attention to near keys with all far tokens as one more key, whose score and value are given.

On the CPU it takes PyTorch's fused kernel, forward and backward. Elsewhere, and for compilers, exports and transforms,
it is made of plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .eager_cpu import on_plain_cpu
from .gradients import first_order
from .spectral.blocks import NEVER

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FUSED = (torch.float32, torch.float64, torch.bfloat16)  # float16 does not hold NEVER


def attend_fields(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float, estimate: Tensor, far: Tensor
) -> Tensor:
    """Return softmax attention to the near keys, with all far tokens as one more key.

    The score of that key is ``estimate``, and its value is ``far``: near and far field are parts of one softmax.

    Args:
        query: (batch, key heads, blocks, heads per key head, block, features).
        key, value: (batch, key heads, blocks, keys, features).
        seen: bool (batch or 1, blocks, block, keys).
        scaling: of the scores.
        estimate: (batch, key heads, blocks, heads per key head, block), float32 or wider; -inf where nothing is far.
        far: of the shape of ``query``, with value features.

    Returns:
        The shape and dtype of ``far``; zero for a query that sees nothing, near or far.
    """
    is_uniform = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    if is_uniform and query.dtype in FUSED and query.numel() and on_plain_cpu(query):
        return _attend_fused(query, key, value, seen, scaling, estimate, far)
    # one more key, of zeros, makes room for the far field's score without a copy of the scores
    key, value = (functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    hidden = functional.pad(~seen, (0, 1))[:, None, :, None]
    scores = (query * scaling).flatten(3, 4) @ key.mT  # float16 ends at 65,504
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).unflatten(3, query.shape[3:5])
    scores = scores.masked_fill_(hidden, NEVER)
    scores[..., -1] = estimate
    weights = scores.softmax(-1)
    near = (weights.to(value.dtype).flatten(3, 4) @ value).unflatten(3, query.shape[3:5])
    out = torch.addcmul(near.to(far.dtype), weights[..., -1:].to(far.dtype), far)
    sees_nothing = ~seen.any(-1)[:, None, :, None] & estimate.isneginf()
    return out.masked_fill(sees_nothing[..., None], 0.0)


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float, estimate: Tensor, far: Tensor
) -> Tensor:
    batch, _, blocks, heads = query.shape[:4]
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, NEVER)
    mask = mask.expand(batch, -1, -1, -1).flatten(0, 1)[:, None, None]  # for the rows of all heads of a key head
    mask = mask.expand(-1, -1, heads, -1, -1).flatten(2, 3)

    def fold(x: Tensor) -> Tensor:
        """Bring blocks to the dimension of sequences: (batch * blocks, key heads, ...)."""
        return x.transpose(1, 2).flatten(0, 1)

    inputs = (_in_rows(fold(x)) for x in (query.flatten(3, 4), key, value))
    out = _Fields.apply(*inputs, mask, scaling, *(fold(x.flatten(3, 4)) for x in (estimate, far)))
    return out.unflatten(2, query.shape[3:5]).unflatten(0, (batch, blocks)).transpose(1, 2)  # type: ignore[no-any-return]


def _in_rows(x: Tensor) -> Tensor:
    """Return a tensor whose features lie side by side, which the kernel expects without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Fields(torch.autograd.Function):
    """The fused kernel, with one more key per query joined to its result and log-sum-exp.

    The backward pass is the kernel's own. It receives the result and the log-sum-exp over all keys, from which it forms
    the weights of the joint softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, score: Tensor, far: Tensor
    ) -> Tensor:
        near, mass = _attend(query, key, value, attn_mask=mask, scale=scaling)
        near.masked_fill_((mass < NEVER / 2)[..., None], 0.0)  # no near key is seen
        share = torch.sigmoid(score - mass).unsqueeze(-1).to(far.dtype)
        out = near.to(far.dtype).lerp(far, share)
        ctx.scaling = scaling
        ctx.save_for_backward(query, key, value, mask, far, share, out, score, mass)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return first_order(_backward, grad, ctx.scaling, ctx.needs_input_grad, *ctx.saved_tensors)


def _backward(grad: Tensor, scaling: float, needs: tuple[bool, ...], *saved: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, far, share, out, score, mass = saved
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs[:3]):
        grad_out, result = (_in_rows(x.to(query.dtype)) for x in (grad, out))
        total_mass = torch.logaddexp(score, mass).to(mass.dtype)
        # a query that sees nothing: exp(NEVER - 0) is zero, and exp(NEVER - NEVER) would be one
        total_mass.masked_fill_(total_mass < NEVER / 2, 0.0)
        inputs = (grad_out, query, key, value, result, total_mass)
        grads = _differentiate(*inputs, dropout_p=0.0, is_causal=False, attn_mask=mask, scale=scaling)
    grad_far = share * grad
    grad_score = (grad_far * (far - out)).sum(-1).to(score.dtype)
    return *grads, None, None, grad_score, grad_far
