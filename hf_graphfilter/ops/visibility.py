"""What an attention mask says to a linear-time filter: which tokens exist, and whether time has a direction."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphFilterError

_FORBIDDEN = -1e4  # additive masks hold 0 and the lowest number of their dtype, at least -65504
_FORBIDDEN_BY_BIAS = -50.0  # where a bias was added to the mask: that of shifted windows holds -100
_last: tuple[Any, Any, Any] = (lambda: None, 0, None)  # all layers of a model share one mask


def visibility(mask: Tensor | None, causal: bool, queries: int, biased: bool = False) -> tuple[bool, Tensor | None]:
    """Reduce a mask to (causal, keys): every query sees the keys that are True, of these only earlier ones if causal.

    Args:
        mask: None; (batch, keys), True or 1 for a token; or (batch or 1, heads or 1, queries, keys), bool with True
            for visible, or additive. A causal mask counts the queries as the last of the keys.
        causal: what holds where the mask is None or (batch, keys).
        queries: number of query tokens.
        biased: the mask holds a bias of positions, to be left out.

    Returns:
        causal, and keys: bool (batch or 1, keys), or None where all are visible.

    Raises:
        GraphFilterError: a mask of another structure (a window, blocks, a position bias), named.
    """
    global _last
    if mask is None:
        return causal, None
    if not isinstance(mask, Tensor):
        raise GraphFilterError(
            f"a {type(mask).__name__} cannot be read by a linear-time filter; load the model with "
            "attn_implementation='sdpa'"
        )
    if mask.dim() == 2:
        return causal, mask.bool()
    remembered, version, found = _last
    if remembered() is not mask or version != (mask._version, biased):
        found = _reduce(mask, queries, biased)
        _last = weakref.ref(mask), (mask._version, biased), found
    return found


def _reduce(mask: Tensor, queries: int, biased: bool) -> tuple[bool, Tensor | None]:
    if mask.dtype == torch.bool:
        allowed = mask
    else:
        allowed = mask > (_FORBIDDEN_BY_BIAS if biased else _FORBIDDEN)
        if not biased and not ((mask == 0) == allowed).all():
            raise GraphFilterError(
                "the attention mask carries a bias (numbers other than 0 and -inf), which a linear-time filter cannot "
                "add to scores that it never forms; leave these modules out with layers="
            )
    keys = allowed.any(-2)[:, 0]
    found = None if keys.all() else keys
    everything = keys[:, None, None, :].expand_as(allowed)
    if torch.equal(allowed, everything):
        return False, found
    count = mask.shape[-1]
    earlier = torch.ones(queries, count, dtype=torch.bool, device=mask.device).tril(count - queries)
    if torch.equal(allowed, everything & earlier):
        return True, found
    raise GraphFilterError(
        f"an attention mask of shape {tuple(mask.shape)} is neither padding nor causal (a sliding window, shifted "
        "windows, packed sequences, a prefix?), and a linear-time filter knows no other; leave these modules out with "
        "layers="
    )
