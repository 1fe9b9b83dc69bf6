"""Your own texts, or those of any data set of the Hub: one text or two a row, with a class or a number."""

from pathlib import Path
from typing import Any

from datasets import DatasetDict

from hf_graphfilter import GraphFilterError
from recipes.data import check_rows, encode_labels, load_dataset, make_table, split_holdout
from recipes.errors import note
from recipes.files import read_rows

FORMATS = (".csv", ".tsv", ".json", ".jsonl")
PARTS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
TEXT = ("text", "sentence", "content", "document", "text_a")
PAIRS = (("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"))
PAIRS += (("question1", "question2"), ("question", "answer"), ("query", "passage"))
LABEL = ("label", "class", "category", "target", "score")
VALIDATION = 0.2  # of the training part, where there is nothing else to evaluate on

Rows = dict[str, tuple[Any, list[dict[str, Any]]]]  # part to its source, for errors, and its rows


def with_capitals(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *map(str.capitalize, names))


def find_tables(root: Path) -> dict[str, Path]:
    """Return the files of the parts; of a file, or a folder with one, that as "all"; nothing if there is no table."""
    if not root.is_dir():
        if root.suffix not in FORMATS:
            raise GraphFilterError(f"--data: {root} is not one of {', '.join(FORMATS)}")
        return {"all": root}
    tables = sorted(file for file in root.iterdir() if file.suffix in FORMATS)
    files = {part: file for part, names in PARTS.items() for file in tables if file.stem in names}
    if "train" in files and len(files) > 1:
        return files
    if len(tables) > 1:
        raise GraphFilterError(f"--data: {root} has {len(tables)} files and no two that are called train and test")
    return {"all": tables[0]} if tables else {}


def read_files(root: Path) -> Rows:
    """Return the rows of a file, or of the files of a folder."""
    if not root.exists():
        raise GraphFilterError(f"--data: there is no file or folder {root}")
    files = find_tables(root)
    if not files:
        raise GraphFilterError(f"--data: {root} has no file of {', '.join(FORMATS)}")
    rows = {part: (file, read_rows(file)) for part, file in files.items()}
    for file, part_rows in rows.values():
        check_rows(part_rows or None, file)
    return rows


def read_hub(name: str, config: str | None, numbers: bool) -> Rows:
    """Return the rows of a data set of the Hub, its classes by name; no part without labels, which are all -1."""
    parts = load_dataset(name, config)
    rows: Rows = {}
    for part, data in parts.items():
        part_name = next((p for p, names in PARTS.items() if part in names), "all" if len(parts) == 1 else None)
        label = next((column for column in with_capitals(LABEL) if column in data.column_names), None)
        if part_name is None:
            continue
        missing = 0 if label is None or numbers else sum(value == -1 for value in data[label])
        if missing and missing == len(data):
            note(f"{name}: the part {part!r} has no labels and is left out")  # benchmarks keep those of tests secret
            continue
        names = getattr(data.features[label], "names", None) if label else None  # of a ClassLabel
        if missing and names:
            raise GraphFilterError(f"{name}: {missing} of {len(data)} rows of the part {part!r} have no label")
        rows[part_name] = name, [{**row, label: names[row[label]]} if names else row for row in data]
    if not {"train", "all"} & {*rows}:
        raise GraphFilterError(f"the data set {name} has no training part; its parts are {', '.join(parts)}")
    return rows


def load_own(numbers: bool, data: str | None, name: str | None, config: str | None) -> tuple[DatasetDict, list[str]]:
    """Return the parts with text_a, text_b of pairs, and label; and the names of the classes.

    Args:
        numbers: whether labels are numbers to predict, not classes.
        data: a file, or a folder of files for the parts.
        name: of a data set of the Hub, instead.
        config: of the data set.

    Raises:
        GraphFilterError: there is nothing to read, a column is missing, a text is empty, or there is one class.
    """
    rows = read_files(Path(data)) if data else read_hub(str(name), config, numbers)
    source, first_rows = rows.get("train") or rows["all"]
    columns = choose_columns([*first_rows[0]])
    read_label = str if numbers else name_class  # of one type, as a table needs them
    parts = {part: make_table(part_rows, columns, source, read_label) for part, (source, part_rows) in rows.items()}
    for part, table in parts.items():
        texts = [table[column] for column in columns if column != "label"]
        for row, pair in enumerate(zip(*texts, strict=True), 1):
            if not all(map(str.strip, pair)):
                raise GraphFilterError(f"{rows[part][0]}: row {row} has an empty text")
    classes = None if numbers else sorted({*(parts.get("train") or parts["all"])["label"]})
    if classes is not None and len(classes) < 2:
        raise GraphFilterError(f"{source} must hold two classes at least")
    parts = {part: encode_labels(table, classes, rows[part][0], by_number=False) for part, table in parts.items()}
    if "validation" not in parts:
        full_table = parts.pop("all", None) or parts["train"]
        if len(full_table) < 3:
            raise GraphFilterError(f"{source} has {len(full_table)} rows: training and evaluation need three")
        train, validation = split_holdout(len(full_table), VALIDATION)
        parts |= {"train": full_table.select(train), "validation": full_table.select(validation)}
    # a source may be sorted by class, and --max_eval_samples takes the first rows
    parts = {part: table if part == "train" else table.shuffle(seed=0) for part, table in parts.items()}
    return DatasetDict(parts), classes or []


def name_class(label: Any) -> str:
    """Return the name of a class: 1.0, which pandas writes where a column had gaps, is 1."""
    name = str(label).strip()
    integer, _, decimals = name.partition(".")
    return integer if integer.lstrip("-").isdigit() and not decimals.strip("0") else name


def choose_columns(there: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the names that the columns of texts and label may have.

    There are two texts where both of a pair are there, and no column ``text``.
    """
    names = {name.lower() for name in there}
    pair = next((pair for pair in PAIRS if names.issuperset(pair) and "text" not in names), None)
    texts = {"text_a": (pair[0],), "text_b": (pair[1],)} if pair else {"text_a": TEXT}
    return {name: with_capitals(candidates) for name, candidates in {**texts, "label": LABEL}.items()}
