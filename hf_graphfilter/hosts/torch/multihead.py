"""The forward of a patched ``nn.MultiheadAttention``: its projections and masks, with the filter between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import GraphFilterError
from ...shift.attention import AttentionShift
from ..base import describe_site
from ..watching import note_filter_runs
from .sdpa_call import SDPACall

Masks = tuple[Tensor | None, Tensor | None]


def filtered_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute what ``nn.MultiheadAttention.forward`` does, with the filter of ``module`` in place of ``A``.

    Args:
        module: the patched module.
        query: (batch, tokens, features), or (tokens, batch, features), or (tokens, features), as for the original.
        key: the same tensor as ``query``.
        value: the same tensor, or another signal at the same tokens.
        key_padding_mask: as for the original.
        need_weights: as for the original. The weights are those of the first application of ``A``; they are None if the
            filter forms none.
        attn_mask: as for the original.
        average_attn_weights: as for the original.
        is_causal: as for the original.
    """
    note_filter_runs(module)
    _check_same_tokens(module, query, key, value)
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as PyTorch does
    nested = query if query.is_nested else None
    if nested is not None:
        value = query if value is query else value.to_padded_tensor(0.0)
        query, key_padding_mask = _pad(query)
        value = query if value is nested else value
    is_unbatched = query.dim() == 2
    if is_unbatched:
        query, value = (x.unsqueeze(0) for x in (query, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        same = value is query
        query = query.transpose(0, 1)
        value = query if same else value.transpose(0, 1)
    mask, keys = _read_masks(module, query, attn_mask, key_padding_mask)
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in _project(module, query, value))
    merged = key_padding_mask is not None and keys is None  # into a mask that is no longer the causal one
    call = SDPACall(
        *(q, k, query),
        mask=mask,
        keys=keys,
        causal=is_causal and not merged,
        declared_causal=is_causal,
        dropout=module.dropout if module.training else 0.0,
        need_weights=need_weights,
    )
    shift = AttentionShift(call.to_call())
    out = module.graph_filter(shift, v).transpose(1, 2).flatten(2)
    out = F.linear(out, module.out_proj.weight, module.out_proj.bias)
    weights = shift.weights
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if is_unbatched:
        return out[0], None if weights is None else weights[0]
    if nested is not None:
        return _unpad(out, key_padding_mask), weights
    return out if module.batch_first else out.transpose(0, 1), weights


def _check_same_tokens(module: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless this is self-attention: queries and keys of the same tensor, and values at the same tokens."""
    if _is_same(query, key) and (value is query or value.is_nested or value.shape[:-1] == query.shape[:-1]):
        return
    names = ("query", "key") if not _is_same(query, key) else ("key", "value")
    raise GraphFilterError(
        f"{describe_site(module)} was called with a {names[0]} and a {names[1]} that are not of the same tokens, and a "
        "graph filter needs self-attention: exclude this module with layers=, as in layers=lambda index, name: name "
        f"!= {module.graph_filter.site_name!r}, or pass one tensor as both if they are equal"
    )


def _is_same(query: Tensor, key: Tensor) -> bool:
    """Return whether two tensors are one, or two views of the same memory."""
    if query is key:
        return True
    if torch.compiler.is_compiling() or query.is_nested or key.is_nested or query.shape != key.shape:
        return False
    return (query.data_ptr(), query.stride(), query.dtype) == (key.data_ptr(), key.stride(), key.dtype)


def _project(module: Any, x: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value, (batch, tokens, hidden size)."""
    size, bias = module.embed_dim, module.in_proj_bias
    if module._qkv_same_embed_dim:
        if value is x:
            return F.linear(x, module.in_proj_weight, bias).chunk(3, -1)
        weights = [module.in_proj_weight[: 2 * size], module.in_proj_weight[2 * size :]]
        biases = [None, None] if bias is None else [bias[: 2 * size], bias[2 * size :]]
        return (*F.linear(x, weights[0], biases[0]).chunk(2, -1), F.linear(value, weights[1], biases[1]))
    weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(s, w, b) for s, w, b in zip((x, x, value), weights, biases, strict=True))


def _read_masks(module: Any, x: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Masks:
    """Return (mask, keys) as ``SDPACall`` takes them: where PyTorch's bool masks are True, ours are False."""
    (batch, tokens, _), heads = x.shape, module.num_heads
    shapes = (tokens, tokens), (batch * heads, tokens, tokens)
    for name, argument in (("attn_mask", attn_mask), ("key_padding_mask", padding)):
        if argument is not None and not (argument.dtype == torch.bool or argument.is_floating_point()):
            raise GraphFilterError(
                f"{describe_site(module)}: {name} must be bool, True where attention is not allowed, or of floating "
                f"point, to be added to the scores; got {argument.dtype}"
            )
    if attn_mask is not None and attn_mask.shape not in shapes:
        raise GraphFilterError(
            f"{describe_site(module)}: attn_mask must be of shape {shapes[0]} or {shapes[1]}, got "
            f"{tuple(attn_mask.shape)}"
        )
    if padding is not None and padding.shape != (batch, tokens):
        raise GraphFilterError(
            f"{describe_site(module)}: key_padding_mask must be of shape {(batch, tokens)}, got {tuple(padding.shape)}"
        )
    mask = attn_mask
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else mask.to(x.dtype)
        mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
    if padding is None or padding.dtype == torch.bool:
        return mask, None if padding is None else ~padding
    bias = padding.to(x.dtype)[:, None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, -torch.inf)
    return bias if mask is None else mask + bias, None


def _pad(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return the padded tensor (batch, tokens, features) of a nested one, and its padding mask."""
    lengths = torch.tensor([len(part) for part in nested.unbind()], device=nested.device)
    padded = nested.to_padded_tensor(0.0)
    return padded, torch.arange(padded.shape[1], device=nested.device) >= lengths[:, None]


def _unpad(padded: Tensor, padding: Tensor | None) -> Tensor:
    assert padding is not None
    rows = zip(padded, (~padding).sum(1).tolist(), strict=True)
    return torch.nested.as_nested_tensor([row[:length] for row, length in rows])
