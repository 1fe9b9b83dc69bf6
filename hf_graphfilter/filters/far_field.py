"""Far field: exact attention to the near tokens, linear attention to the far ones.

Source: Zhang et al., "LoLCATs: On Low-Rank Linearizing of Large Language Models" (ICLR 2025), Eq. 7, from which it
departs as ``FarFieldConfig`` says. Wi et al. (IJCAI 2025), Eq. 7 and 8, normalise features in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import GraphFilterError
from ..ops import block_attention, spectral
from ..ops.block_attention import FarMeans, group_queries, list_neighbours, pad_tokens, split_blocks
from ..ops.exact_memory import remember_blocks
from ..ops.exporting import is_exporting
from ..ops.heads import repeat_heads
from ..ops.joint_softmax import attend_fields
from ..shift.attention import AttentionShift
from .core.block_memory import BlockMemory
from .core.build import register_filter
from .core.fields import check_limits
from .core.head_map import HeadMap
from .core.kept_heads import KeepingConfig, KeepingFilter
from .core.site import AttentionSite
from .core.window import in_dtype_of

MOST_EXACT = 65_536  # memory
CITATION = """@inproceedings{zhang2025lolcats,
  title     = {LoLCATs: On Low-Rank Linearizing of Large Language Models},
  author    = {Michael Zhang and Simran Arora and Rahul Chalamala and Alan Wu and Benjamin Spector and Aaryan Singhal
               and Krithik Ramesh and Christopher R{\\'e}},
  booktitle = {International Conference on Learning Representations},
  year      = {2025}
}"""


class FarField(KeepingFilter):
    """Softmax attention to near tokens with one more key, which stands for all far ones; O(n d (window + d)) time.

    Tokens form blocks of ``window``. A token attends exactly to its own block, the one before it (in encoders also the
    one after it) and the sinks. All other tokens are far: block by block, each feature ``a`` keeps the mean of their
    values, weighted by ``exp(a(key))``. A query reads ``softmax(a(query))`` times these means. The learned estimate
    ``outside(X)`` of the mean far score, plus the logarithm of the number of far tokens, is the score of this key.

    Keys and values keep their own number of heads. Decoding changes the means at the ends of blocks only.
    """

    config: FarFieldConfig

    def __init__(self, config: FarFieldConfig, site: AttentionSite):
        super().__init__(config, site)
        self.causal = site.causal
        if config.memory:
            self._check_order(site.causal)
        self.map_query = HeadMap(site.heads, site.head_dim)
        self.map_key = HeadMap(site.key_heads, site.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.map_query.reset_parameters()
        self.map_key.reset_parameters()

    @property
    def span(self) -> int:
        return 2 * self.config.window

    @property
    def exact_span(self) -> int:
        exact_blocks = (self.config.sinks + self.config.memory) // self.config.window if self.causal else 0
        return self.span + exact_blocks * self.config.window

    def add_window(self, out: Tensor, shift: AttentionShift, hidden: Tensor, value: Tensor) -> Tensor:
        return out

    def filter_part(self, shift: AttentionShift, value: Tensor) -> Tensor:
        state, tokens = shift.state, shift.query.shape[2]
        if shift.query.shape[-1] != self.map_query.weight.shape[-1]:
            raise GraphFilterError(
                f"{self.site_name}: far_field was made for {self.map_query.weight.shape[-1]} features per head, but "
                f"the query has {shift.query.shape[-1]} (shape {tuple(shift.query.shape)})"
            )
        key, heads = shift.key, len(self.part.chosen)
        if key.shape[2] > tokens:
            key, value = key[:, :, -tokens:], value[:, :, -tokens:]
        key, value = (repeat_heads(x, max(x.shape[1], heads)) for x in (key, value))
        causal, is_token = shift.visible()
        is_token = None if is_token is None else is_token[:, -tokens:]
        memory = BlockMemory({} if state is None else state, self.config.sinks, self.config.window)
        if state and (is_token is not None or "is_token" in state):
            new_ones = memory.add_mask(tokens)
            is_token = new_ones if is_token is None else is_token
        if tokens == 1 and state and memory.newest + 1 < 2 * self.config.window:
            return self._step(shift, key, value, memory, is_token)
        return self._attend(shift, key, value, memory, is_token, causal or state is not None)

    def _attend(
        self,
        shift: AttentionShift,
        key: Tensor,
        value: Tensor,
        memory: BlockMemory,
        is_token: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Filter any number of tokens, after those of the memory."""
        block, state, has_mask, begin = self.config.window, memory.state, is_token is not None, memory.newest
        sinks = memory.find_sinks(key, value, is_token)
        is_token = key.new_ones(1, key.shape[2], dtype=torch.bool) if is_token is None else is_token
        key, value, is_token = memory.join(key, value, is_token)
        total = key.shape[2]
        missing = -total % block if shift.state is None else block - total % block  # with the next token's block
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # some padding: the same graph for any length
            missing = 2 * block - total % block
        keys, values = (split_blocks(pad_tokens(x, 0, missing), block) for x in (key, value))
        is_token = functional.pad(is_token, (0, missing))
        positions = torch.arange(is_token.shape[1], device=key.device)
        is_far = (is_token & ~(sinks.at[..., None] == positions).any(1)).unflatten(1, (-1, block))
        past_means = FarMeans(state["mass"], state["mean"]) if "mass" in state else None
        logits = split_blocks(self.map_key(keys.flatten(2, 3), self.part), block)
        count, exact = block_attention.count_far(is_far, causal).to(logits.dtype), None
        if self.config.memory:
            self._check_order(causal)
            means, exact = remember_blocks(self.config.memory, keys, values, logits, is_far, past_means, memory.exact)
            count = count - exact.is_present.sum(-1)
            count = count if memory.exact is None else count + memory.exact.is_present.sum(-1, keepdim=True)
        else:
            logits = logits.masked_fill(~is_far[:, None, ..., None], block_attention.NEVER)
            means = block_attention.far_of_blocks(block_attention.summarize_blocks(logits, values), past_means, causal)
        count = count + state["log_count"][..., 0].exp() if "mass" in state else count

        by_block = partial(group_queries, groups=key.shape[1], before=begin, after=missing, block=block)
        query_weights = by_block(self.map_query(shift.query, self.part).softmax(-1))
        out = (query_weights.flatten(3, 4) @ means.mean.to(query_weights.dtype)).unflatten(3, query_weights.shape[3:5])
        if self.switched_off != "window":
            assert shift.hidden is not None
            assert self.outside is not None
            estimate = self.part.take(self.outside(in_dtype_of(self.outside, shift.hidden)), 2).mT.unsqueeze(-1)
            estimate = by_block(spectral.to_float32(estimate))[..., 0] + count.log()[:, None, :, None, None]
            estimate = torch.full_like(estimate, -torch.inf) if self.switched_off == "far" else estimate
            token_blocks = is_token.unflatten(1, (-1, block))
            sees_extra = [sinks.seen(token_blocks.shape[1], block, causal)]
            extra = [[x[:, :, None].expand(-1, -1, token_blocks.shape[1], -1, -1)] for x in (sinks.key, sinks.value)]
            if exact is not None:
                sees_extra.append(exact.is_present)
                extra = [[*x, y] for x, y in zip(extra, (exact.key, exact.value), strict=True)]
            visible = block_attention.see_neighbours(token_blocks, torch.cat(sees_extra, -1), causal)
            near_key, near_value = (
                torch.cat([*x, *list_neighbours(y, 2, causal)], 3) for x, y in zip(extra, (keys, values), strict=True)
            )
            out = attend_fields(by_block(shift.query), near_key, near_value, visible, shift.scaling, estimate, out)
        if shift.state is not None:
            memory.keep(key, value, is_token if has_mask else None, sinks, means, count, exact)
        out = out.permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2, 3)[:, begin:total]  # as projections read it
        return out.transpose(1, 2).to(value.dtype)

    def _check_order(self, causal: bool) -> None:
        """Raise if ``memory`` cannot be used: in a module that is not causal, or in an export."""
        if not causal:
            raise GraphFilterError(
                f"{self.site_name}: far_field with memory= needs a causal module, as a memory holds earlier tokens; "
                "use memory=0"
            )
        if is_exporting() or torch.jit.is_tracing():
            raise GraphFilterError(
                f"{self.site_name}: far_field with memory= cannot be exported, as its graph would be bound to one "
                "number of tokens; use memory=0"
            )

    def _step(
        self, shift: AttentionShift, key: Tensor, value: Tensor, memory: BlockMemory, is_token: Tensor | None
    ) -> Tensor:
        """Filter one token with few operations; the means of the far field stay as they are."""
        (batch, groups, _, features), state = key.shape, memory.state
        keys, values = torch.cat([state["key"], key], 2), torch.cat([state["value"], value], 2)
        query = shift.query.reshape(batch * groups, -1, features) * shift.scaling
        scores = spectral.to_float32(torch.bmm(query, keys.flatten(0, 1).mT))
        if is_token is None:
            state.update(key=keys, value=values)
        else:
            places = [state["exact_present"]] if "exact_present" in state else []
            visible = torch.cat(
                [state["sink_present"] & (state["sink_at"] < 0), *places, state["is_token"], is_token], 1
            )
            scores = scores.masked_fill(~visible.repeat_interleave(groups, 0)[:, None], block_attention.NEVER)
            memory.add_token(memory.find_sinks(key, value, is_token), keys, values, is_token)
        values = values.flatten(0, 1)
        if "mass" not in state or self.switched_off == "far":
            return torch.bmm(scores.softmax(-1).to(values.dtype), values).view(batch, -1, 1, values.shape[-1])
        query_weights = self.map_query(shift.query, self.part).softmax(-1).reshape(*query.shape[:2], -1)
        out = torch.bmm(query_weights, state["mean"].flatten(0, 2).to(query_weights.dtype))
        if self.switched_off != "window":
            assert shift.hidden is not None
            assert self.outside is not None
            estimate = self.part.take(self.outside(in_dtype_of(self.outside, shift.hidden)), 2) + state["log_count"]
            weights = torch.cat([scores, estimate.view(*query.shape[:2], 1)], -1).softmax(-1)
            near = torch.bmm(weights[..., :-1].to(values.dtype), values)
            out = torch.addcmul(near.to(out.dtype), weights[..., -1:].to(out.dtype), out)
        return out.to(value.dtype).view(batch, -1, 1, values.shape[-1])


@register_filter("far_field")
@dataclass(frozen=True)
class FarFieldConfig(KeepingConfig):
    """Exact attention to near tokens and linear attention to far ones, made for converting pretrained models.

    A token attends exactly to its block of ``window`` tokens, to the neighbouring block and to the first tokens. All
    tokens beyond are summarised by means of their values, one per learned feature, and enter the same softmax as one
    more key. Time and memory are linear in the number of tokens. A text of at most two blocks gets exactly the original
    attention. Padding counts as part of a block. So with padding on the left, a token may attend exactly to fewer
    tokens than in the same text without padding, by up to one block.

    Right after patching, a longer text is far from the original, except with ``init="blend"``; ``linearize`` or
    ``transfer_attention`` fits it.

    It follows LoLCATs (Zhang et al., ICLR 2025). Departures from it:

    - The far tokens have one score per head and query, learned from the layer's input, instead of one per token.
    - A feature is a mean of values over all far tokens, and a query chooses among features, as in AGF.
    - It has sinks, its window moves by whole blocks, and the map of the keys is per key head.
    - It works in encoders, where a token attends to the blocks on both sides.

    With ``memory``, each key head keeps the far tokens that the far part reproduces worst, and later tokens attend to
    them exactly. This is the sparse cache of LoLA (McDermott et al., arXiv 2505.23666), which needs no training. When a
    block becomes far, its tokens and the kept ones are compared with the average of the means. The values that are
    furthest from it stay, and all other tokens enter the means. Departures from LoLA: it compares a value with the
    answer to the token's own key, which found fewer needles (numbers hidden in long texts) here, and it moves its
    window token by token.

    Args:
        window (int, default 64): Number of tokens in a block. A token attends exactly to its own block and the one
            before it, in encoders also to the one after it.
        sinks (int, default 4): Number of first tokens of the text to which all others attend exactly, at most
            ``window``.
        far (str, default "beyond"): Only ``"beyond"`` is possible: near tokens and sinks are left to exact attention.
        memory (int, default 0): Number of far tokens per key head to which later tokens attend exactly, at most 65,536;
            decoders only. The filter can be fitted with 0 and used with another number.
        keep (dict or None, default None): Key heads that keep their attention to all tokens, by layer, as in
            ``{4: [0, 2]}``; decoders only. Layers are counted as in ``patch_model(layers=)``. The cache holds the keys
            and values of these heads. The filter can be fitted without ``keep``.
        init, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> FarFieldConfig(window=128).sinks
        4
    """

    module = FarField
    citation = CITATION
    untrained = ("memory", "keep")
    formula = "softmax over [near scores, far score] of [V, softmax(a(Q)) M], M = means of V by exp(a(K))"
    cost = "linear in the tokens"

    window: int = 64
    sinks: int = 4
    far: Literal["all", "beyond"] = "beyond"
    memory: int = 0

    @classmethod
    def for_conversion(cls, **options: Any) -> Self:
        window = options.get("window", 64)
        sinks = min(4, window) if isinstance(window, int) else 4
        return super().for_conversion(**{"sinks": sinks, **options})

    def validate(self) -> None:
        check_limits(self, "window", least=1)
        check_limits(self, "memory", least=0, most=MOST_EXACT)
        super().validate()
        if self.sinks > self.window:
            raise GraphFilterError(f"FarFieldConfig: sinks must be at most window={self.window}, got {self.sinks}")
        if self.far != "beyond":
            raise GraphFilterError("FarFieldConfig: far must be 'beyond', as near tokens are never in the far field")
        if self.position_bias == "window":
            raise GraphFilterError("FarFieldConfig: position_bias='window' is not supported: use 'drop' or 'refuse'")
