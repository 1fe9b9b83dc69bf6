"""The tokenizer of a checkpoint."""

from __future__ import annotations

from typing import Any


def knows_words(tokenizer: Any) -> bool:
    """Return whether a tokenizer knows more than special tokens.

    For a checkpoint without a tokenizer, transformers makes one that knows only special tokens. All texts would then
    look the same to the model.
    """
    return len(tokenizer) > len(set(tokenizer.all_special_ids)) + 1  # + 1: the symbol for a space
