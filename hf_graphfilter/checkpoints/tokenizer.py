"""The tokenizer of a checkpoint."""

from __future__ import annotations

from typing import Any


def knows_words(tokenizer: Any) -> bool:
    """Return whether a tokenizer knows more than special tokens.

    transformers makes a tokenizer of special tokens alone for a checkpoint that has none. All texts would then look the
    same to the model.
    """
    return len(tokenizer) > len(set(tokenizer.all_special_ids)) + 1  # the mark of a space
