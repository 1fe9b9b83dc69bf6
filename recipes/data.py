"""Data sets with the columns that the recipes use, from rows of a file or from the Hub, and their tokens."""

import math
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from datasets import Dataset, DatasetDict

from hf_graphfilter import GraphFilterError
from recipes.arguments import FilterArguments
from recipes.errors import is_main_process, line

TOKENS = "input_ids", "input_ids_2"  # the second of pairs that are encoded apart
Columns = dict[str, Sequence[str]]  # new name to the names that a source may use


def make_table(rows: list[dict[str, Any]], columns: Columns, source: object, read_label: Any = lambda x: x) -> Dataset:
    """Return a data set with the columns ``{new name: names that the source may use}``; others are dropped."""
    if not rows:
        raise GraphFilterError(f"{source} holds no rows")
    check_rows(rows, source)
    chosen = choose(columns, list(rows[0]), source)
    for number, row in enumerate(rows, 1):
        if any(row.get(c) is None for c in chosen.values()):
            cells = sum(value is not None for value in row.values())
            raise GraphFilterError(f"{source}: row {number} has {cells} columns, {len(rows[0])} were expected")
        if "label" in chosen and is_blank(row[chosen["label"]]):
            raise GraphFilterError(f"{source}: row {number} has no label")
        for name, c in chosen.items():
            if name.startswith("text") and not is_text(row[c]):
                raise GraphFilterError(f"{source}: row {number} has {row[c]!r} as {c}, a text was expected")
            if name == "label" and isinstance(row[c], list | dict):
                raise GraphFilterError(f"{source}: row {number} has {row[c]!r} as {c}, a text or a number was expected")
    cells = {name: [row[c] for row in rows] for name, c in chosen.items()}
    if "label" in cells:
        cells["label"] = [*map(read_label, cells["label"])]
    return Dataset.from_dict(cells)


def is_text(value: Any) -> bool:
    """Return whether a value is a text of whole characters, which one that was cut within an emoji is not."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def check_rows(rows: Any, source: object) -> None:
    """Raise unless what a file holds is a list of rows."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise GraphFilterError(f"{source} is no list of rows with named columns")


def choose(columns: Columns, there: list[str], source: object) -> dict[str, str]:
    """Return which of the names that the source may use it does use."""
    chosen = {}
    for name, candidates in columns.items():
        chosen[name] = next((c for c in candidates if c in there), "")
        if not chosen[name]:
            raise GraphFilterError(
                f"{source} has no column {' or '.join(map(repr, candidates))}; its columns are {str(there)[1:-1]}"
            )
    return chosen


def is_blank(value: Any) -> bool:
    """Return whether a cell is empty, or the NaN that stands for an empty one."""
    return not value.strip() if isinstance(value, str) else isinstance(value, float) and math.isnan(value)


def is_whole(value: Any) -> bool:
    """Return whether a class is written as true, false or 1.0, which stand for numbers."""
    return isinstance(value, bool) or (isinstance(value, float) and value.is_integer())


def encode_labels(data: Dataset, labels: Sequence[str] | None, source: object, by_number: bool = True) -> Dataset:
    """Return the column ``label`` as class numbers, from names or numbers; as floats where ``labels`` is None.

    ``by_number``: a number may stand for the name at its place, as in official files.
    """
    numbers: list[float] = []
    for number, value in enumerate(data["label"], 1):
        try:
            if labels is None:
                numbers.append(float(value))
                if not math.isfinite(numbers[-1]):
                    raise ValueError
            elif str(value) in labels:
                numbers.append(labels.index(str(value)))
            elif is_whole(value) and str(int(value)) in labels:
                numbers.append(labels.index(str(int(value))))
            elif isinstance(value, float) and not is_whole(value):
                raise ValueError  # between two classes
            elif not by_number or any(label.lstrip("-").isdigit() for label in labels):
                raise ValueError  # a number that is no name is no class
            else:
                numbers.append(range(len(labels)).index(int(value)))
        except (TypeError, ValueError) as error:
            expected = "a number" if labels is None else " or ".join(labels)
            raise GraphFilterError(f"{source}: row {number} has the label {value!r}, expected {expected}") from error
    return data.remove_columns("label").add_column("label", numbers)


def load_dataset(name: str, config: str | None = None, **options: Any) -> DatasetDict:
    """Return the parts of a data set of the Hub, or fail in one line."""
    try:
        return datasets.load_dataset(name, config, **options)
    except Exception as error:  # whatever the library or the network raises, the way out is the same
        raise GraphFilterError(
            f"the data set {name} cannot be loaded ({type(error).__name__}: {line(error)}); check the connection, or "
            "name a folder of local files with --data"
        ) from error


def load_from_hub(name: str, columns: Columns, config: str | None = None, **options: Any) -> dict[str, Dataset]:
    """Return the parts of a data set of the Hub with these columns, as in ``make_table``."""
    data = load_dataset(name, config, **options)
    chosen = choose(columns, next(iter(data.values())).column_names, name)
    new_names = {official: name for name, official in chosen.items() if official != name}
    return {part: rows.select_columns([*chosen.values()]).rename_columns(new_names) for part, rows in data.items()}


def iterate_texts(data: Dataset) -> Iterator[str]:
    """Return all texts, column after column."""
    return (text for name in data.column_names if name != "label" for text in data[name])


def cut(data: Any, args: FilterArguments) -> Any:
    """Return at most as many rows of each part as asked for; with --held_out those of the training part alone."""
    if args.held_out:
        train, validation = split_holdout(len(data["train"]), args.held_out)
        data = type(data)(train=data["train"].select(train), validation=data["train"].select(validation))
    parts = {}
    for name, part in data.items():
        if not len(part):
            raise GraphFilterError(f"the part {name!r} of {args.task} is empty")
        limit = getattr(args, flag := f"max_{'train' if name == 'train' else 'eval'}_samples")
        if limit is not None and limit < 1:
            raise GraphFilterError(f"--{flag} {limit}: at least one row is needed")
        if name == "train" and limit is not None and limit < len(part):
            part = part.shuffle(seed=0)
        parts[name] = part if limit is None else part.select(range(min(limit, len(part))))
    return type(data)(parts)


def split_holdout(rows: int, share: float) -> tuple[list[int], list[int]]:
    """Return (training rows, rows to evaluate on), the same whatever the seed."""
    if not 0 < share < 1 or not 0 < (count := round(rows * share)) < rows:
        raise GraphFilterError(f"--held_out {share}: of {rows} training rows it must leave some on both sides")
    order = random.Random(0).sample(range(rows), rows)
    return sorted(order[count:]), sorted(order[:count])


def encode(data: DatasetDict, tokenizer: Any, max_length: int) -> DatasetDict:
    """Return the texts in all columns but ``label`` as tokens, together."""
    texts = [name for name in data["train"].column_names if name != "label"]
    if max_length <= (num_special := tokenizer.num_special_tokens_to_add(pair=len(texts) > 1)):
        raise GraphFilterError(f"--max_length {max_length}: the tokenizer alone adds {num_special} tokens to each row")

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_length)

    return report_truncation(data.map(tokenize, batched=True, remove_columns=texts), max_length)


def report_truncation(data: DatasetDict, max_length: int) -> DatasetDict:
    """Print how many of the training texts are cut, and return ``data``."""
    train = data["train"]
    columns = (train[name] for name in TOKENS if name in train.column_names)
    num_long = sum(any(len(ids) >= max_length for ids in row) for row in zip(*columns, strict=True))
    if num_long and is_main_process():
        share = f"{num_long:,} of {len(train):,} training texts have {max_length} tokens or more"
        print(f"{share}: what is beyond --max_length {max_length} is cut", file=sys.stderr)
    return data
