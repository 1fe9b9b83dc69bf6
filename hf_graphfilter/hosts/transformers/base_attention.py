"""The attention that a patched module would compute without its filter: the operator ``S`` of that filter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from ...errors import GraphFilterError
from ...ops.combine import Coefficients
from ...ops.few_rows import can_form_rows, form_rows
from ...ops.heads import HeadPart
from ...ops.polynomial_form import can_have_form, polynomial_form
from ...ops.visibility import visibility
from ...shift.attention import AttentionCall
from ..base import describe_site
from ..stand_ins import ModuleView
from ..watching import has_other_hooks
from .implementation import BASE_CONFIG, CHOSEN, ENGINES, IMPLEMENTATION, PAGED, SERVING, read_fields
from .interface import attention_function, honours_softcap, is_textbook

_UNFILTERED = (*ENGINES, IMPLEMENTATION)
_MASKED = ("sdpa", "eager")  # whose mask alone says which tokens a query sees
_SELECTED = {"indices", "block_indices"}  # options by which a module selects a few keys per query
_UNHONOURED = {"s_aux", "sinks", "softcap", "cache"}


class BaseAttention:
    """One call of the attention function that the user chose, with all arguments but keys and values.

    Args:
        module: the patched attention module.
        query: (batch, heads, query tokens, features).
        key: (batch, key heads, key tokens, features).
        mask: what the model made for this function: a tensor, another kind of mask or None.
        options: the keyword arguments of the call.

    Raises:
        GraphFilterError: the function or an option cannot be filtered.
    """

    def __init__(self, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]):
        self.module, self.query, self.key = module, query, key
        self.mask, self.options = mask, options
        self.implementation = read_fields(module.config, BASE_CONFIG, CHOSEN) or "eager"
        self.function = attention_function(type(module), self.implementation)
        if self.implementation in _UNFILTERED:
            self._refuse_implementation()
        if not _UNHONOURED.isdisjoint(options):
            self._refuse_options()
        if self.implementation in _MASKED and not _SELECTED.isdisjoint(options):
            self.mask = self._mask_selected()

    def to_call(self, hidden: Tensor | None) -> AttentionCall:
        """Return the call as the shift operator takes it, ``hidden`` being the input of the module."""
        is_sdpa = self.function is sdpa_attention_forward and not _is_split()  # or only its own calls are whole
        has_form = (is_sdpa or self._is_unread_eager()) and can_have_form(self.query)
        scaling = self.options.get("scaling")
        return AttentionCall(
            self.attend,
            self.query,
            self.key,
            hidden=hidden,
            scaling=self.query.shape[-1] ** -0.5 if scaling is None else scaling,
            mask=self.mask if isinstance(self.mask, Tensor) else None,
            bias=self.options.get("position_bias"),
            visible=self.read_mask,
            polynomial=self.apply_polynomial if has_form else None,
            few_rows=self.form_few_rows if is_sdpa else None,
            part=partial(self.to_part, hidden),
            weights_again=self.implementation == "eager" and self._drops_nothing(),
        )

    def _is_unread_eager(self) -> bool:
        """Return whether this is eager attention in training whose weights nobody reads, so another form may do.

        A hook on a module around this one is not seen, and gets None.
        """
        if self.implementation != "eager" or torch.compiler.is_compiling():
            return False
        is_unread = not has_other_hooks(self.module) and not asks_for_weights(self.options)
        return self.module.training and is_unread and is_textbook(self.function)

    def _drops_nothing(self) -> bool:
        return not self.module.training or self.options.get("dropout") == 0  # which a function may leave to its module

    def to_part(self, hidden: Tensor | None, heads: HeadPart) -> AttentionCall:
        """Return the call for some heads, with their part of the mask and of a learned bias."""

        def take(x: Any) -> Any:
            return heads.take(x) if isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] > 1 else x

        options = {name: take(x) if name == "position_bias" else x for name, x in self.options.items()}
        query, key = heads.take(self.query), heads.take(self.key)
        return BaseAttention(self.module, query, key, take(self.mask), options).to_call(hidden)

    def attend(self, key: Tensor, signal: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the attention function that the user chose.

        If ``key`` has another number of heads than the module's keys, it was repeated to one key head per query head.
        """
        is_repeated = key is not self.key and key.shape[1] != self.key.shape[1]
        module: Any = _SingleGroup(self.module) if is_repeated else self.module
        if self.function is flash_attention_forward:  # which reads its own name from the config
            module = _OwnConfig(module)
        return self.function(module, self.query, key, signal, self.mask, **self.options)  # type: ignore[no-any-return]

    def _mask_selected(self) -> Any:
        """Return the mask, in which keys that the module has not selected are hidden too.

        The module itself does this only if its backend is called "sdpa" or "eager", and ours has another name.
        """
        mask, keys = self.mask, self.key.shape[2]
        if (indices := self.options.pop("indices", None)) is not None:  # (batch, query tokens, selected)
            shape = (*indices.shape[:2], keys)
            hidden = indices.new_ones(shape, dtype=torch.bool).scatter(-1, indices.long(), False).unsqueeze(1)
            lowest = torch.finfo(self.query.dtype).min
            mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, lowest)
        if (blocks := self.options.pop("block_indices", None)) is not None:
            tokens, places = self.query.shape[2], self.options.get("position_ids")
            if places is None:
                places = torch.arange(keys - tokens, keys, device=self.query.device)
            places = (places if places.ndim > 1 else places.unsqueeze(0)).expand(len(self.query), -1)
            dtype_and_device = self.query.dtype, self.query.device
            mask = self.module.indexer.build_block_mask(blocks, mask, keys, *dtype_and_device, places)  # type: ignore[union-attr, operator]
        return mask

    def read_mask(self) -> tuple[bool, Tensor | None]:
        """Return (causal, keys): which tokens the mask leaves, see ``ops.visibility``."""
        if self.implementation not in _MASKED:
            self._refuse_unmasked()
        if _is_split():
            raise GraphFilterError(
                f"{describe_site(self.module)}: context parallelism gives each process a part of the text, and "
                f"{self.module.graph_filter.config.filter!r} reads all of it: use 'gfsa' or another parallelism"  # type: ignore[union-attr]
            )
        biased = self.module.graph_filter.position_bias  # type: ignore[union-attr]
        causal, declared_causal = self._is_causal(), declares_causal(self.module)
        return visibility(self.mask, causal, self.query.shape[2], biased, declared_causal)  # type: ignore[arg-type]

    def apply_polynomial(
        self, value: Tensor, coefficients: Coefficients, exact: bool
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the result of a joint form of several calls, or None if there is no faster one.

        Options are read as transformers does.
        """
        if self.options.get("position_bias") is not None:
            return None
        scale, dropout = self.options.get("scaling"), self.options.get("dropout", 0.0)
        causal = self.mask is None and self.query.shape[2] > 1 and self._is_causal()
        options: dict[str, Any] = {"scale": scale, "causal": causal, "dropout": dropout, "exact": exact}
        return polynomial_form(self.query, self.key, value, self.mask, coefficients, **options)

    def form_few_rows(self) -> Tensor | None:
        """Return the attention matrix of a few query tokens, or None if calls of SDPA are faster.

        Options are read as transformers does.
        """
        if self.options.get("dropout") or self.options.get("position_bias") is not None:
            return None
        if not can_form_rows(self.query, self.key, self.mask):
            return None
        return form_rows(self.query, self.key, self.mask, scale=self.options.get("scaling"))

    def _is_causal(self) -> bool:
        """Return whether attention without a mask is causal; the eager functions never are."""
        is_causal = self.options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(self.module, "is_causal", True)
        return bool(is_causal) and self.implementation != "eager"

    def _refuse_implementation(self) -> None:
        site = describe_site(self.module)
        if self.implementation in ENGINES:
            raise GraphFilterError(f"{site}: attention by {self.implementation!r} cannot be filtered; {SERVING}")
        raise GraphFilterError(
            f"{IMPLEMENTATION!r} was written into the config of {site} as its attention backend: choose a backend "
            "with model.set_attn_implementation('sdpa')"
        )

    def _refuse_options(self) -> None:
        """Raise for options that bypass the filter, break linearity or row sums, or are ignored by the backend."""
        site, options = describe_site(self.module), self.options
        for sink in ("s_aux", "sinks"):
            if options.get(sink) is not None:
                raise GraphFilterError(f"{site} uses attention sinks ({sink}): rows of A then sum to less than 1")
        if options.get("softcap") is not None and not honours_softcap(self.function):
            raise GraphFilterError(
                f"{site} caps its scores (softcap={options['softcap']}) and {self.implementation!r} attention drops "
                "that; load the model with attn_implementation='eager'"
            )
        if options.get("cache") is not None:
            raise GraphFilterError(f"{site}: {PAGED}")

    def _refuse_unmasked(self) -> None:
        """Raise for masks that FlashAttention receives through other arguments."""
        packed = self._is_packed()
        window = self.options.get("sliding_window")
        if packed or (window is not None and window < self.key.shape[2]):
            feature = "packed sequences" if packed else f"a sliding window of {window} tokens"
            graph_filter: Any = self.module.graph_filter
            raise GraphFilterError(
                f"{describe_site(self.module)}: {self.implementation!r} attention receives {feature} without a mask, "
                f"and {graph_filter.config.filter!r} reads the mask: load the model with "
                "attn_implementation='sdpa', or exclude these modules with layers="
            )

    def _is_packed(self) -> bool:
        """Return whether a row holds several sequences. A graph cannot branch on that and asserts that it does not."""
        packed = self.options.get("cu_seq_lens_q") is not None
        positions = self.options.get("position_ids")
        if self.mask is not None or positions is None or positions.dim() != 2 or len(positions) != 1:
            return packed
        increasing = (positions.diff() > 0).all()  # by which FlashAttention itself knows packed sequences
        if torch.compiler.is_compiling():
            torch._assert_async(increasing, "packed sequences in a graph whose filter sees no mask of them")
            return packed
        return packed or not increasing


def asks_for_weights(options: dict[str, Any]) -> bool:
    """Return whether a model was called with ``output_attentions``; ``options`` are those of the attention function."""
    collecting = None if torch.compiler.is_compiling() else _active_collector.get()
    return bool(options.get("output_attentions")) or "attentions" in (collecting or ())


class _SingleGroup(ModuleView):
    """An attention module whose keys have been repeated to one group per head."""

    num_key_value_groups = 1


class _OwnConfig(ModuleView):
    """An attention module with the config that names the backend which the user chose."""

    @property
    def config(self) -> Any:
        return getattr(self._module.config, BASE_CONFIG)


def _is_split() -> bool:
    """Return whether PyTorch's context parallelism is active, which replaces ``F.scaled_dot_product_attention``."""
    compiling = torch.compiler.is_compiling()  # which cannot read the name
    return not compiling and F.scaled_dot_product_attention.__module__.startswith("torch.distributed.")


def declares_causal(module: nn.Module) -> bool:
    """Return whether a module declares that a token sees only itself and earlier tokens."""
    return bool(getattr(module, "is_causal", False))
