"""The tokenizer beside a checkpoint."""

from __future__ import annotations

from typing import Any


def knows_words(tokenizer: Any) -> bool:
    """Or special tokens alone, as the tokenizer that transformers makes of a checkpoint that has none: every text would
    be the same to the model."""
    return len(tokenizer) > len(set(tokenizer.all_special_ids)) + 1  # the mark of a space
