"""Make batches of text to fit with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..checkpoints.tokenizer import knows_words
from ..errors import GraphFilterError, shown

POOL = 64  # batches whose texts are sorted by length together
Batches = list[dict[str, torch.Tensor]]


def text_batches(
    tokenizer: Any,
    texts: Iterable[str],
    *,
    length: int = 512,
    tokens: int | None = None,
    packed: bool = False,
    seed: int = 0,
    at_most: int | None = None,
) -> Batches:
    """Return batches of about as many tokens each, in random order.

    Args:
        tokenizer: the tokenizer of the model.
        texts: any number of texts. With ``at_most`` they may be a stream without end.
        length: maximum number of tokens per text; longer texts are cut.
        tokens: number of tokens per batch, padding included. The default is ``length``: for one budget, many small
            steps fit better than few large ones.
        packed: whether to join all texts, with the tokenizer's end of text between them, and cut windows of exactly
            ``length`` tokens, as decoders are trained. Otherwise texts of similar length form a padded batch.
        seed: determines the order.
        at_most: number of tokens after which no more texts are read, such as the budget plus the tokens of the
            held-out batches. The default reads all texts.

    Raises:
        GraphFilterError: there is no text, or too little for one window; an element of ``texts`` is no string; or the
            tokenizer knows no words.

    Example:
        >>> from hf_graphfilter.demo import load_snippets, pretrained_path
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(pretrained_path())
        >>> batches = text_batches(tokenizer, [text for _, text in load_snippets()[:100]], tokens=1024)
        >>> max(batch["input_ids"].numel() for batch in batches) <= 1024
        True
    """
    if isinstance(texts, str) or not hasattr(texts, "__iter__"):
        raise GraphFilterError(f"texts are a list of strings, got {shown(texts)}")
    if not hasattr(tokenizer, "all_special_ids"):
        raise GraphFilterError(f"the first argument is the tokenizer itself (AutoTokenizer...), got {shown(tokenizer)}")
    texts = _check_texts(texts)
    tokens = length if tokens is None else tokens
    if type(length) is not int or type(tokens) is not int or length < 2 or tokens < length:
        raise GraphFilterError(
            "a text has at least 2 tokens, and a batch as many as one: "
            f"got length {shown(length)} and {shown(tokens)} tokens"
        )
    if not knows_words(tokenizer):
        raise GraphFilterError(
            f"the tokenizer knows {len(tokenizer)} special tokens and no words, as where a checkpoint has none: load "
            "that of the original model"
        )
    generator = random.Random(seed)
    if packed:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        encoded = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end for text in texts)
        stream = torch.tensor([i for sequence in _read(encoded, at_most) for i in sequence], dtype=torch.long)
        windows = list(stream[: len(stream) // length * length].view(-1, length))
        if not windows:
            raise GraphFilterError(
                f"the texts have {len(stream)} tokens, and a window has {length}: more text, or shorter"
            )
        generator.shuffle(windows)
        rows = tokens // length
        return [{"input_ids": torch.stack(windows[i : i + rows])} for i in range(0, len(windows), rows)]
    encoded = (tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts)
    sequences = [sequence for sequence in _read(encoded, at_most) if len(sequence) > 1]
    if not sequences:
        raise GraphFilterError("there is no text of two tokens or more")
    generator.shuffle(sequences)
    batches: Batches = []
    pool = POOL * max(1, tokens // length)
    for start in range(0, len(sequences), pool):
        batch: list[list[int]] = []
        for ids in sorted(sequences[start : start + pool], key=len):
            if (len(batch) + 1) * len(ids) > tokens:
                batches.append(_pad_batch(tokenizer, batch))
                batch = []
            batch.append(ids)
        batches.append(_pad_batch(tokenizer, batch))
    generator.shuffle(batches)
    return batches


def _check_texts(texts: Iterable[Any]) -> Iterator[str]:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            hint = ': give a column, such as dataset["text"]' if isinstance(text, Mapping) else ""
            raise GraphFilterError(f"text {number} is no string but {shown(text)}{hint}")
        yield text


def _read(texts: Iterable[list[int]], at_most: int | None) -> Iterator[list[int]]:
    """Yield encoded texts until they have ``at_most`` tokens in total; no further text is read."""
    count = 0
    for ids in texts:
        yield ids
        count += len(ids)
        if at_most is not None and count >= at_most:
            return


def _pad_batch(tokenizer: Any, batch: list[list[int]]) -> dict[str, torch.Tensor]:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is None:
        raise GraphFilterError("the tokenizer has no pad_token: set one, or use packed=True")
    padding_options = {"batch_first": True, "padding_side": tokenizer.padding_side}
    texts = [torch.tensor(ids) for ids in batch]
    masks = [torch.ones_like(ids) for ids in texts]
    return {
        "input_ids": pad_sequence(texts, padding_value=pad, **padding_options),
        "attention_mask": pad_sequence(masks, **padding_options),
    }
