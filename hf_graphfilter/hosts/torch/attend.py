"""``GraphFilterAttention``: a filter for models that call ``scaled_dot_product_attention`` themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...errors import GraphFilterError, shown
from ...filters import AttentionSite, FilterConfig, as_config
from ...filters.core.attached import CHILD
from ...filters.core.build import build_filter
from ...shift.attention import AttentionShift
from .sdpa_call import SDPACall


class GraphFilterAttention(nn.Module):
    """Self-attention with a graph filter, to be used instead of ``scaled_dot_product_attention``.

    It has no projections: the model makes query, key and value as before. The filter is the child ``graph_filter``, so
    the state dict of the model holds it. A model with such modules counts as patched: ``filter_status``,
    ``filter_optimizer``, ``save_filter``, ``unpatch_model`` and so on accept it.

    Args:
        filter: the name of a registered filter, or its config object. None stands for softmax attention, to which
            ``patch_model`` can add a filter later.
        heads: number of query heads.
        head_dim: number of features per head.
        key_heads: number of key and value heads; 0 stands for ``heads``.
        hidden_size: number of features of the argument ``hidden`` of ``forward``, for filters that read it. None if
            calls do not pass it.
        **options: options of the filter, if ``filter`` is a name.

    Raises:
        GraphFilterError: an unknown filter or option, numbers of heads that do not fit each other, or a filter that
            needs something that this module does not have.

    Example:
        >>> import torch
        >>> attend = GraphFilterAttention("gfsa", heads=4, head_dim=8, K=3)
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> attend(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 10, 8])
    """

    def __init__(
        self,
        filter: str | FilterConfig | None,
        heads: int,
        head_dim: int,
        *,
        key_heads: int = 0,
        hidden_size: int | None = None,
        **options: Any,
    ):
        super().__init__()
        self.heads, self.head_dim, self.key_heads = heads, head_dim, key_heads or heads
        self.hidden_size = hidden_size
        for name, size in (("heads", heads), ("head_dim", head_dim), ("key_heads", self.key_heads)):
            if type(size) is not int or size < 1:
                raise GraphFilterError(f"GraphFilterAttention: {name} must be a positive integer, got {size!r}")
        if heads % self.key_heads:
            raise GraphFilterError(f"GraphFilterAttention: {heads} heads cannot share {self.key_heads} key heads")
        if filter is not None:
            config = as_config(filter, **options)
            site = AttentionSite("GraphFilterAttention", self, stack="encoder", group="", index=0, **self.describe())
            self.add_module(CHILD, build_filter(config, site))

    def describe(self) -> dict[str, Any]:
        """Return the fields of ``AttentionSite`` that this module knows."""
        return {
            **{"heads": self.heads, "key_heads": self.key_heads, "head_dim": self.head_dim, "causal": False},
            "hidden_size": self.hidden_size,
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the filtered attention, (batch, heads, tokens, features).

        Args:
            query: (batch, heads, tokens, features).
            key: (batch, key heads, tokens, features).
            value: (batch, key heads, tokens, features).
            attn_mask: as for ``scaled_dot_product_attention``: bool (True: may attend) or additive.
            is_causal: whether a token sees only itself and earlier tokens. ``attn_mask`` must then be None.
            dropout_p: as for ``scaled_dot_product_attention``; pass 0 in evaluation.
            scale: factor of the scores. Default: 1 / sqrt(features).
            hidden: (batch, tokens, hidden size), the input of the attention, for filters that read it.
        """
        self._check(query, key, value, attn_mask, is_causal)
        mask = None if attn_mask is None else _to_four_dims(attn_mask)
        call = SDPACall(query, key, hidden, mask=mask, causal=is_causal, dropout=dropout_p, scale=scale)
        graph_filter = self._modules.get(CHILD)
        if graph_filter is None:
            return call.attend(key, value)[0].transpose(1, 2)
        return graph_filter(AttentionShift(call.to_call()), value)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}"

    def _check(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
        if query.dim() != 4 or query.shape[1] != self.heads or query.shape[-1] != self.head_dim:
            raise GraphFilterError(
                f"GraphFilterAttention takes queries (batch, {self.heads} heads, tokens, {self.head_dim} features), "
                f"got {tuple(query.shape)}"
            )
        tokens, shape = query.shape[2], (query.shape[0], self.key_heads)
        for name, x in (("keys", key), ("values", value)):
            if x.dim() != 4 or x.shape[:2] != shape or x.shape[2] != tokens:
                raise GraphFilterError(
                    f"GraphFilterAttention takes {name} (batch, {self.key_heads} key heads, tokens, features) at the "
                    f"same {tokens} tokens as the queries, got {tuple(x.shape)}: cross-attention and a cache of keys "
                    "have no square matrix to filter"
                )
        if not isinstance(causal, bool):  # PyTorch has the dropout at this place
            raise GraphFilterError(
                f"GraphFilterAttention takes is_causal=True or False, got {shown(causal)}: pass what follows the value "
                "by name, as the order is not PyTorch's"
            )
        if causal and mask is not None:
            raise GraphFilterError("GraphFilterAttention takes is_causal=True or an attn_mask, and got both")


def _to_four_dims(mask: Tensor) -> Tensor:
    """Return a mask with dimensions for batch and heads in front, as broadcasting adds them."""
    return mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
