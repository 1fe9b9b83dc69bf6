"""The transcripts of the speech recipe: normal forms, vocabularies and targets."""

import inspect
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import ParakeetTokenizer

from hf_graphfilter import GraphFilterError
from recipes.errors import note
from recipes.models import SPACES, SPECIAL, load_tokenizer, with_special_tokens

NORMALIZE = ("none", "lower", "words")


def normalize(text: str, how: str) -> str:
    """Return a transcript with single spaces; ``lower`` in small letters; ``words`` without punctuation too."""
    if how != "none":
        text = text.lower()
    if how == "words":
        text = "".join(c if c == "'" or unicodedata.category(c)[0] not in "PS" else " " for c in text)
    return " ".join(text.split())


def make_tokenizer(args: Any, texts: Callable[[], Iterator[str]], ctc: bool) -> Any:
    """Return the model's tokenizer, or one trained on ``texts()``: of characters, words, or byte-level pieces."""
    if args.tokenizer == "characters" or (args.from_scratch and not args.tokenizer and not args.train_tokenizer):
        tokenizer = train_characters(texts())
    elif args.tokenizer == "words" and not args.train_tokenizer:
        raise GraphFilterError("--tokenizer words needs --train_tokenizer N, the number of words at most")
    else:
        tokenizer = load_tokenizer(args, texts, SPACES)  # "don't" must come back as it was
        if not args.train_tokenizer:
            return tokenizer
    if not ctc:
        return tokenizer
    # its decode merges repetitions and drops blanks
    options = {f"{name}_token": token for name, token in SPECIAL.items()}
    return ParakeetTokenizer(tokenizer_object=tokenizer._tokenizer, **options)


def train_characters(texts: Iterator[str]) -> Any:
    """Return a tokenizer of the characters that ``texts`` have, spaces too."""
    symbols = sorted({character for text in texts for character in text})
    vocabulary = {symbol: number for number, symbol in enumerate([*SPECIAL.values(), *symbols])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return with_special_tokens(tokenizer)


def encode(data: dict[str, Dataset], tokenizer: Any, ctc: bool, start: int | None) -> dict[str, Dataset]:
    """Return the parts with ``labels``; models that write get the end of the text too, but not its beginning."""

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = tokenizer(batch["text"], add_special_tokens=not ctc)["input_ids"]
        skip = (start, tokenizer.bos_token_id)
        return {"labels": [row[1:] if not ctc and row and row[0] in skip else row for row in rows]}

    encoded = {part: rows.map(encode_batch, batched=True, input_columns=None) for part, rows in data.items()}
    if (unknown := tokenizer.unk_token_id) is not None and unknown != tokenizer.eos_token_id:
        for part, rows in encoded.items():
            if count := sum(unknown in row for row in rows["labels"]):
                note(f"{part} part: {count} of {len(rows)} transcripts have characters or words outside the vocabulary")
    return encoded


def decode(tokenizer: Any, ids: Any) -> list[str]:
    """Return the texts of rows of tokens. In those of CTC, repetitions are merged already."""
    # a tokenizer for CTC would merge what is equal once more, after it has dropped the blanks between
    groups = "group_tokens" in inspect.signature(tokenizer._decode).parameters
    options = {"group_tokens": False} if groups else {}
    return tokenizer.batch_decode(ids, skip_special_tokens=True, **options)  # type: ignore[no-any-return]


def drop_long_targets(train: Dataset, positions: Tensor, special: set[int]) -> tuple[Dataset, int]:
    """Return (rows whose CTC targets fit into the encoder's ``positions``, how many do not); their loss is infinite."""
    room = positions.tolist()
    fits = []
    for i, row in enumerate(train["labels"]):
        ids = [token for token in row if token not in special]
        if len(ids) + sum(a == b for a, b in pairwise(ids)) <= room[i]:
            fits.append(i)
    if left_out := len(train) - len(fits):
        note(f"train part: {left_out} of {len(train)} transcripts are longer than the encoder's output: left out")
    return train.select(fits), left_out


def drop_long_texts(data: dict[str, Dataset], limit: int) -> tuple[Dataset, int]:
    """Return (training rows whose text has at most ``limit`` tokens, the most that the decoder takes; how many do not).

    Raises:
        GraphFilterError: a longer text in another part, whose loss could not be computed, or in all training rows.
    """
    for part, rows in data.items():
        fits = [i for i, row in enumerate(rows["labels"]) if len(row) <= limit]
        if (count := len(rows) - len(fits)) and (part != "train" or not fits):
            raise GraphFilterError(
                f"{part} part: {count} of {len(rows)} transcripts have more than {limit} tokens, the most that the "
                "decoder takes: leave these recordings out, or cut them into shorter ones"
            )
        if count:
            note(f"train part: {count} of {len(rows)} transcripts have more than {limit} tokens: left out")
        if part == "train":
            result = rows.select(fits), count
    return result
