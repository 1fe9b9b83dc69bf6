"""The memory of a filter that works by blocks: sinks, the newest blocks, means of far tokens, and exact far tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.block_attention import FarMeans, Sinks, find_sinks, leading_sinks, past_sinks
from ...ops.exact_memory import ExactTokens


class BlockMemory(NamedTuple):
    """A view of ``AttentionShift.state``, a dict of tensors, batch first.

    ``key`` and ``value`` hold, in this order, the sinks, the far tokens that stay exact, and the newest blocks. The
    sinks are stored separately once they have left the newest blocks or there is a mask. ``mass``, ``mean`` and
    ``log_count`` describe the far field, once there is one. ``is_token``, ``sink_present`` and ``sink_at`` exist once
    there is a mask: which keys are tokens, which sinks exist, and where. ``exact_present`` and ``exact_logits`` belong
    to the exact tokens.

    Attributes:
        state: the dict, which changes.
        sinks: number of first tokens to keep.
        window: number of tokens in a block.
    """

    state: dict[str, Tensor]
    sinks: int
    window: int

    @property
    def first(self) -> int:
        """The number of sinks before the other keys."""
        return self.sinks if "mass" in self.state or "is_token" in self.state else 0

    @property
    def front(self) -> int:
        """The number of sinks and of places for exact tokens, before the newest blocks."""
        return self.first + (self.state["exact_present"].shape[1] if "exact_present" in self.state else 0)

    @property
    def exact(self) -> ExactTokens | None:
        """The far tokens that stay exact."""
        if "exact_present" not in self.state:
            return None
        key, value = (self.state[name][:, :, self.first : self.front] for name in ("key", "value"))
        is_present = self.state["exact_present"] if "is_token" in self.state else self.state["exact_present"][:1]
        return ExactTokens(is_present, key, value, self.state["exact_logits"])

    @property
    def newest(self) -> int:
        """The number of tokens in the newest blocks."""
        return self.state["key"].shape[2] - self.front if self.state else 0

    def find_sinks(self, key: Tensor, value: Tensor, is_token: Tensor | None) -> Sinks:
        """Return the first tokens of the text, from the memory and this call; no ``is_token`` means no padding."""
        state = self.state
        if not state:
            if is_token is None:
                return leading_sinks(self.sinks, key, value)
            return find_sinks(self.sinks, key, value, is_token, 0)
        if is_token is None and not self.first:
            key, value = (torch.cat([state[n], x[:, :, : self.sinks]], 2) for n, x in (("key", key), ("value", value)))
            return leading_sinks(self.sinks, key, value)
        first_key, first_value = (state[name][:, :, : self.first] for name in ("key", "value"))
        if is_token is None:
            return past_sinks(first_key, first_value, self.window)
        earlier = Sinks(state["sink_present"], state["sink_at"], first_key, first_value)
        return find_sinks(self.sinks, key, value, is_token, self.newest, earlier)

    def join(self, key: Tensor, value: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the newest blocks with the tokens of this call behind them."""
        if not self.state:
            return key, value, is_token
        key, value = (torch.cat([self.state[n][:, :, self.front :], x], 2) for n, x in (("key", key), ("value", value)))
        past_is_token = self.state.get("is_token", is_token.new_ones(1, self.newest).expand(is_token.shape[0], -1))
        return key, value, torch.cat([past_is_token, is_token], 1)

    def add_mask(self, tokens: int) -> Tensor:
        """Add a mask in which all past keys are tokens, if there is none; return one for ``tokens`` new tokens."""
        state, (batch, _, _, _) = self.state, self.state["key"].shape
        if "is_token" not in state:
            sinks = self.find_sinks(state["key"][:, :, :0], state["value"][:, :, :0], None)
            key, value = (state[name][:, :, self.front :] for name in ("key", "value"))
            state.update(sinks.flags(batch), is_token=sinks.is_present.new_ones(batch, self.newest))
            self._write(sinks, self.exact, key, value)
        return state["is_token"].new_ones(batch, tokens)

    def add_token(self, sinks: Sinks, keys: Tensor, values: Tensor, is_token: Tensor) -> None:
        """Keep ``keys``, which are those of the state and a new one; ``is_token`` is the mask of the new one."""
        self.state.update(sinks.flags(), is_token=torch.cat([self.state["is_token"], is_token], 1))
        self._write(sinks, self.exact, keys[:, :, self.front :], values[:, :, self.front :])

    def keep(
        self,
        key: Tensor,
        value: Tensor,
        is_token: Tensor | None,
        sinks: Sinks,
        means: FarMeans,
        count: Tensor,
        exact: ExactTokens | None = None,
    ) -> None:
        """Keep the last whole block and what follows it, the sinks, and the summary of all earlier blocks.

        Args:
            key, value, is_token: rows of the newest blocks and of all tokens of this call.
            sinks: the result of ``find_sinks``.
            means, count: the far field of each block, up to the block of the next token.
            exact: the exact far tokens of each block; the blocks lie along the dimension before the tokens.
        """
        batch, _, total, _ = key.shape
        next_block = total // self.window
        begin = max(0, next_block - 1) * self.window  # so many tokens have become far
        if begin and exact is not None:
            places = exact.is_present.shape[2]
            if is_token is None:  # a step would have to hide free ones
                places = min(places, self.front - self.first + begin - (0 if self.first else self.sinks))
            is_present, *rows = (x.select(x.dim() // 2, next_block) for x in exact)
            exact = ExactTokens(is_present[:, :places], *(x[:, :, :places] for x in rows))
        else:
            exact = self.exact
        if begin:
            self.state.update((n, x[:, :, next_block : next_block + 1].clone()) for n, x in means._asdict().items())
            self.state["log_count"] = count[:, next_block : next_block + 1].log().expand(batch, 1)[..., None].clone()
        if is_token is not None:
            self.state.update(
                sinks._replace(at=sinks.at - begin).flags(batch), is_token=is_token[:, begin:total].clone()
            )
        self._write(sinks, exact, key[:, :, begin:], value[:, :, begin:])

    def _write(self, sinks: Sinks, exact: ExactTokens | None, key: Tensor, value: Tensor) -> None:
        for name, sink_rows, newest_rows in (("key", sinks.key, key), ("value", sinks.value, value)):
            exact_rows = [] if exact is None else [getattr(exact, name)]
            self.state[name] = torch.cat([sink_rows[:, :, : self.first], *exact_rows, newest_rows], 2)
        if exact is not None:
            self.state.update(
                exact_present=exact.is_present.expand(len(key), -1).clone(), exact_logits=exact.logits.clone()
            )
