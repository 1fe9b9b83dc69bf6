"""The inputs of a classifier: tokens of one or two texts, pixels or series, and batches of them."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import DatasetDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling

from hf_graphfilter import GraphFilterError
from hf_graphfilter.analysis.model_inputs import count_places, position_table
from recipes.data import TOKENS, encode, iterate_texts, report_truncation
from recipes.models import load_tokenizer, make_symbol_tokenizer, train_symbols

SERIES = "inputs_embeds"  # the name of a model's argument, which the Trainer keeps
PADDED_TO = 8  # batches of tokens, to a multiple
SHORTEST = 3  # tokens of a text


def check_length(args: Any) -> None:
    """Raise if texts would be cut to nothing."""
    if args.max_length < SHORTEST:
        raise GraphFilterError(f"--max_length {args.max_length}: at least {SHORTEST}, a token between <s> and </s>")


def tokenizer_of(kind: str, args: Any, data: DatasetDict) -> Any | None:
    """Of a task's kind, made of the training part; None of series. Pretrained weights keep their symbols."""
    if kind == "series":
        return None
    if kind == "pixels":
        return make_symbol_tokenizer(map(str, range(256)), ends=False)
    if kind == "symbols" and args.from_scratch:
        return train_symbols(iterate_texts(data["train"]))
    try:
        return load_tokenizer(args, lambda: iterate_texts(data["train"]))
    except GraphFilterError as error:
        if not args.train_tokenizer and (args.from_scratch or args.tokenizer == "words"):
            raise GraphFilterError(f"--train_tokenizer N trains a tokenizer, and without: {error}") from error
        raise


def encode_inputs(data: DatasetDict, tokenizer: Any | None, max_length: int, apart: bool) -> DatasetDict:
    """Return the columns that a model takes, and the label; the texts of pairs are tokens ``apart`` or together."""
    columns = data["train"].column_names
    if tokenizer is None:
        data = data.rename_column("series", SERIES)
        lengths = {part: [len(row) for row in rows[SERIES]] for part, rows in data.items()}  # to be grouped by
        return DatasetDict({part: rows.add_column("length", lengths[part]) for part, rows in data.items()})
    if "input_ids" in columns:
        return data
    if not apart or "text_b" not in columns:
        return encode(data, tokenizer, max_length)

    texts = ["text_a", "text_b"]

    def tokenize_pairs(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = (tokenizer(batch[name], truncation=True, max_length=max_length)["input_ids"] for name in texts)
        return dict(zip(TOKENS, ids, strict=True))

    return report_truncation(data.map(tokenize_pairs, batched=True, remove_columns=texts), max_length)


def longest_of(data: DatasetDict) -> int:
    """Return the tokens of the longest sequence, as batches are padded, or steps of the longest series."""
    columns = data["train"].column_names
    if SERIES in columns:
        return max(length for rows in data.values() for length in rows["length"])
    longest = max(len(row) for rows in data.values() for name in TOKENS if name in columns for row in rows[name])
    return longest + -longest % PADDED_TO


def check_room(model: Any, tokenizer: Any | None, longest: int) -> None:
    """Raise unless the model has an embedding of each token and place."""
    if tokenizer is not None and len(tokenizer) > (entries := model.get_input_embeddings().num_embeddings):
        raise GraphFilterError(f"the tokenizer has {len(tokenizer)} entries, and {model.name_or_path} has {entries}")
    if (table := position_table(model)) is None:
        return
    if longest > (room := count_places(table)):
        raise GraphFilterError(
            f"sequences of {longest} tokens (a multiple of {PADDED_TO} that texts are padded to) or steps, and the "
            f"model has places for {room}: lower --max_length, or raise max_position_embeddings with --from_scratch"
        )


def statistics(series: list[list[list[float]]]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, over all steps."""
    steps = torch.cat([torch.tensor(row, dtype=torch.float64) for row in series])
    return steps.mean(0), steps.std(0, correction=0)


@dataclass
class Batches:
    """Rows of ``encoded`` to a batch, padded to the longest."""

    tokenizer: Any | None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {"labels": torch.tensor([row["label"] for row in rows])}
        if self.tokenizer is None:
            return batch | pad_series([row[SERIES] for row in rows])
        for name in TOKENS:
            if name in rows[0]:
                ids = {"input_ids": [row[name] for row in rows]}
                tokens = self.tokenizer.pad(ids, pad_to_multiple_of=PADDED_TO, return_tensors="pt")
                batch |= {f"{key}{name.removeprefix('input_ids')}": value for key, value in tokens.items()}
        return batch


@dataclass
class HiddenBatches:
    """The same for ``Denoiser``: without the labels of the task, and with a part of each sequence hidden."""

    tokenizer: Any | None
    ratio: float

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.tokenizer is not None:
            options = {"mlm_probability": self.ratio, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
            hide = DataCollatorForLanguageModeling(self.tokenizer, pad_to_multiple_of=PADDED_TO, **options)
            return dict(hide([{"input_ids": row[name]} for name in TOKENS if name in rows[0] for row in rows]))
        batch = pad_series([row[SERIES] for row in rows])
        mask = batch["attention_mask"].bool()
        order = torch.rand(mask.shape).masked_fill(~mask, 2.0).argsort(1).argsort(1)
        return batch | {"hidden_steps": order < (mask.sum(1, keepdim=True) * self.ratio).ceil()}  # one at least


def pad_series(series: list[list[list[float]]]) -> dict[str, Tensor]:
    steps = [torch.tensor(row, dtype=torch.float32) for row in series]
    masks = [torch.ones(len(row), dtype=torch.long) for row in steps]
    return {SERIES: pad_sequence(steps, batch_first=True), "attention_mask": pad_sequence(masks, batch_first=True)}
