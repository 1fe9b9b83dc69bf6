"""The Converter's filter for a batch of tokens: rotations per head, orders, permutations, padding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import hessenberg
from .givens import unit

DIGITS = 31  # binary ones of the place of a token
Permutation = Literal["identity", "stride", "bit_reversal"]


def precision(*tensors: Tensor) -> torch.dtype:
    """Return the real dtype to compute in: float64 where any tensor has double precision, else float32."""
    dtypes = [tensor.dtype for tensor in tensors]
    return torch.float64 if torch.float64 in dtypes or torch.complex128 in dtypes else torch.float32


def filter_tokens(
    value: Tensor,
    response: Tensor,
    angles: Tensor,
    *,
    is_present: Tensor | None = None,
    permutation: Permutation = "identity",
) -> Tensor:
    """Return ``Phi^-1 [exp(i response) * (Phi value)]``, ``Phi = H_l^1 H_u^1 P ... H_l^L H_u^L P``, in O(L n d) time.

    Absent tokens (padding) are moved behind the present ones, which keep their order, and take part in no rotation. So
    the present tokens get the same result as without the absent ones, wherever those stand.

    Args:
        value: (batch, heads, tokens, features), real or complex.
        response: (batch, sets, tokens), radians; one set for all heads, or one per head.
        angles: (batch, sets, orders, 6 or more, tokens), radians: alpha, beta and gamma of the lower rotations, then of
            the upper. The angles of a token belong to its rotation with the next present token.
        is_present: bool (batch or 1, tokens), True for present tokens; None if all are present.
        permutation: order P of the present tokens. ``"stride"`` puts every second one behind the others,
            ``"bit_reversal"`` orders them by the reversed binary digits of their places.

    Returns:
        Shape of ``value``; complex128 where any input has double precision, else complex64.
    """
    batch, heads, tokens, features = value.shape
    sets = angles.shape[1]
    real = precision(value, response, angles)
    signal = value.transpose(1, 2).flatten(2) if sets == 1 else value.flatten(0, 1)
    response, angles = response.to(real), angles.to(real)

    def in_order(x: Tensor, order: Tensor | None) -> Tensor:
        """(batch * sets, tokens, features) with the tokens in the order (1 or batch, tokens)."""
        if order is None:
            return x
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        places = order.expand(batch, tokens)[:, None].expand(batch, sets, tokens).flatten(0, 1) + tokens * rows
        return x.flatten(0, 1).index_select(0, places.flatten()).view(x.shape)

    pack_order = unpack_order = None
    if is_present is not None:
        is_present = is_present.expand(batch, tokens)
        pack_order = (~is_present).byte().argsort(dim=-1, stable=True)
        unpack_order = pack_order.argsort(-1)
        is_present = is_present.gather(1, pack_order)
        response = response.gather(-1, pack_order[:, None].expand_as(response))
        angles = angles.gather(-1, pack_order[:, None, None, None].expand_as(angles))
        signal = in_order(signal, pack_order)
    # the last token rotates by 0: with one rotation fewer, an exported graph would accept only more than two tokens
    is_token = torch.ones_like(response[:, 0], dtype=torch.bool) if is_present is None else is_present
    angles = angles.where(pad(is_token, (0, 1))[:, None, None, None, 1:], 0)
    new_order = _order(permutation, tokens, is_present, angles.device)
    old_order = None if new_order is None else new_order.argsort(-1)
    scale = unit(response).flatten(0, 1)
    factors = [(rows[:, :3], rows[:, 3:6]) for rows in angles.flatten(0, 1).unbind(1)]
    for lower, upper in factors[:0:-1]:
        signal = in_order(signal, new_order)
        signal = hessenberg.transform(signal, lower, upper, torch.ones_like(scale), forward=True, back=False)
    signal = hessenberg.transform(in_order(signal, new_order), *factors[0], scale, forward=True, back=True)
    for lower, upper in factors[1:]:
        signal = in_order(signal, old_order)
        signal = hessenberg.transform(signal, lower, upper, torch.ones_like(scale), forward=False, back=True)
    signal = in_order(in_order(signal, old_order), unpack_order)
    if sets == 1:
        return signal.unflatten(2, (heads, features)).transpose(1, 2)
    return signal.unflatten(0, (batch, heads))


def _order(permutation: Permutation, tokens: int, is_token: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the places of the tokens in their new order, (1 or batch, tokens); absent tokens stay last."""
    places = torch.arange(tokens, device=device)
    if permutation == "identity":
        return None
    if permutation == "stride":
        key = places % 2
    else:
        key = torch.stack([(places >> i & 1) << (DIGITS - 1 - i) for i in range(DIGITS)]).sum(0)
    keys = key[None] if is_token is None else key.where(is_token, 1 << DIGITS)
    return keys.argsort(dim=-1, stable=True)
