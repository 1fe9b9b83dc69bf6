"""Fine-tune a model of code: defect detection in C (Devign) and clone detection in Java, with a graph filter.

    python recipes/source_code.py --config code/codebert.yaml --task defect
    python recipes/source_code.py --config code/codet5-small.yaml --task defect --seeds 1 2 3

Tasks: defect and clone. Encoder models classify. Encoder-decoder models (CodeT5, PLBART) generate the label of a
defect, the word true or false, as in the paper. For clones --pairs apart encodes each function alone and classifies the
two vectors, as in the paper and the code that it follows; --pairs together has both in one sequence. Data comes
from the Hub (CodeXGLUE), or with --data from a folder with the official files: train.jsonl, valid.jsonl and
test.jsonl for defects; data.jsonl with train.txt, valid.txt and test.txt for clones. If the folder has only a test
file, this file is cut into parts (defects 70/10/20 by row; clones 60/10/30 by function, without pairs across parts).
The record says so, since such results are not comparable with those of the official split.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Value
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_graphfilter import GraphFilterError
from recipes import metrics, runs
from recipes.arguments import CodeArguments
from recipes.data import cut, encode_labels, iterate_texts, load_from_hub, make_table, report_truncation
from recipes.files import FILES, first_file, read_rows
from recipes.glue import classify, label_fields
from recipes.inputs import Batches, check_length, check_room, encode_inputs, longest_of
from recipes.models import build_model, load_model, load_tokenizer, model_config
from recipes.pairs import PairClassifier
from recipes.settings import Recipe
from recipes.training import fit

HUB = {
    "defect": "google/code_x_glue_cc_defect_detection",
    "clone": "google/code_x_glue_cc_clone_detection_big_clone_bench",
}
COLUMNS = {
    "defect": {"text_a": ("func",), "label": ("target",)},
    "clone": {"text_a": ("func1",), "text_b": ("func2",), "label": ("label",)},
}
MEASURES = {"defect": ("accuracy", "f1"), "clone": ("f1", "accuracy")}
WORDS = ("false", "true")
PAIRS = ("together", "apart")


@lru_cache(maxsize=1)
def load(task: str, folder: str | None) -> tuple[DatasetDict, str]:
    """Return (parts with text_a, for clones text_b, and label 0 or 1; how they were split).

    Functions have single spaces between their words, as in the code of Wang et al. (2021).
    """
    if folder is None:
        data = load_from_hub(HUB[task], COLUMNS[task])
        parts, split = DatasetDict({k: data[k].cast_column("label", Value("int64")) for k in FILES}), "official"
    else:
        parts, split = defects(Path(folder)) if task == "defect" else clones(Path(folder))
    texts = [name for name in COLUMNS[task] if name != "label"]
    return parts.map(lambda row: {name: " ".join(row[name].split()) for name in texts}), split


def defects(root: Path) -> tuple[DatasetDict, str]:
    """Return the JSON-lines files, or parts cut from the test file."""
    official = (root / "train.jsonl").is_file()
    files = {k: first_file(root, [f"{v}.jsonl"]) for k, v in FILES.items() if official or k == "test"}
    parts = {k: encode_labels(make_table(read_rows(f), COLUMNS["defect"], f), ("0", "1"), f) for k, f in files.items()}
    if official:
        return DatasetDict(parts), "official"
    rows = parts["test"].shuffle(seed=0)
    a, b = round(0.7 * len(rows)), round(0.8 * len(rows))
    ranges = {"train": range(a), "validation": range(a, b), "test": range(b, len(rows))}
    return DatasetDict({k: rows.select(v) for k, v in ranges.items()}), "70/10/20 of the official test part"


def clones(root: Path) -> tuple[DatasetDict, str]:
    """Return pairs of functions, by the official lists or cut by function from the test list."""
    file = first_file(root, ["data.jsonl"])
    rows = read_rows(file)
    make_table(rows, {"func": ("func",), "idx": ("idx",)}, file)
    functions = {str(row["idx"]): row["func"] for row in rows}
    official = (root / "train.txt").is_file()
    lists = {k: first_file(root, [f"{v}.txt"]) for k, v in FILES.items() if official or k == "test"}
    pairs = {}
    for part, list_file in lists.items():
        pairs[part] = [line["text"].split() for line in read_rows(list_file) if line["text"].strip()]
        for number, line in enumerate(pairs[part], 1):
            if len(line) != 3 or line[0] not in functions or line[1] not in functions or line[2] not in ("0", "1"):
                raise GraphFilterError(
                    f"{list_file}: line {number} is not two functions of {file.name} and 0 or 1: {line}"
                )
    split = "official"
    if not official:
        texts = {name: " ".join(functions[name].split()) for name in sorted(functions)}  # some have several names
        names = [*dict.fromkeys(texts.values())]
        random.Random(0).shuffle(names)
        place = {text: (i >= 0.6 * len(names)) + (i >= 0.7 * len(names)) for i, text in enumerate(names)}
        home = {name: place[text] for name, text in texts.items()}
        pairs_by_part = [[p for p in pairs["test"] if home[p[0]] == home[p[1]] == k] for k in range(3)]
        pairs = dict(zip(FILES, pairs_by_part, strict=True))
        split = "60/10/30 of the functions of the official test part, equal ones together"
    parts = {}
    for part, lines in pairs.items():
        rows = [{"text_a": functions[a], "text_b": functions[b], "label": int(y)} for a, b, y in lines]
        parts[part] = Dataset.from_list(rows)
    return DatasetDict(parts), split


def run(args, training):
    """Do one fine-tuning run."""
    data, split = load(args.task, args.data)
    tokenizer = load_tokenizer(args, lambda: iterate_texts(data["train"]))
    data = cut(data, args)
    if args.task == "defect" and model_config(args).is_encoder_decoder:
        outcome = write_labels(args, training, tokenizer, data)
    elif args.task == "clone" and args.pairs == "apart":
        outcome = compare_functions(args, training, tokenizer, data)
    else:
        outcome = classify(args, training, tokenizer, data, MEASURES[args.task], num_labels=2)
    return {**outcome, "split": split, "rows": {k: len(v) for k, v in data.items()}}


def write_labels(args, training, tokenizer, data):
    """Train an encoder-decoder that writes the label of a function as a word."""
    model = build_model(args, training, AutoModelForSeq2SeqLM, tokenizer)
    words = tokenizer(list(WORDS), padding=True)["input_ids"]
    if read_words(tokenizer, np.array(words)) != [0, 1]:
        raise GraphFilterError(f"the tokenizer of {args.tokenizer or args.model} cannot write the words false and true")

    def encode(batch):
        encoded = tokenizer(batch["text_a"], truncation=True, max_length=args.max_length)
        return {**encoded, "labels": [words[y] for y in batch["label"]]}

    def compute(prediction):
        predictions = prediction.predictions
        ids = predictions[0] if isinstance(predictions, tuple) else predictions
        predicted, labels = (read_words(tokenizer, x) for x in (ids, prediction.label_ids))
        return metrics.score(MEASURES["defect"], predicted, labels)

    if model.generation_config.decoder_start_token_id is None:  # PLBART begins with the token that it shifts in front
        shifted = model.prepare_decoder_input_ids_from_labels(torch.tensor(words))
        model.generation_config.decoder_start_token_id = shifted[0, 0].item()
    encoded = report_truncation(data.map(encode, batched=True, remove_columns=["text_a", "label"]), args.max_length)
    check_room(model, tokenizer if args.tokenizer else None, longest_of(encoded))
    training.predict_with_generate = True
    training.generation_max_length = training.generation_max_length or max(map(len, words)) + 2
    collator = DataCollatorForSeq2Seq(tokenizer, model, pad_to_multiple_of=8)
    options = {"data_collator": collator, "trainer_class": Seq2SeqTrainer, "mean_loss": True}
    return fit(args, training, model, tokenizer, encoded, compute_metrics=compute, **options)


def read_words(tokenizer, ids) -> list[int]:
    """Return 1 where the generated label is the word true, else 0."""
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    return [int(text.strip().lower() == WORDS[1]) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def compare_functions(args, training, tokenizer, data):
    """Train a model that encodes each function of a pair alone."""
    model = build_model(args, training, PairClassifier, tokenizer, **label_fields(("0", "1")))
    training.average_tokens_across_devices = False  # as in glue.py
    encoded = encode_inputs(data, tokenizer, args.max_length, apart=True)
    check_room(model, tokenizer if args.tokenizer else None, longest_of(encoded))
    options = {"data_collator": Batches(tokenizer), "compute_metrics": metrics.classification(MEASURES["clone"], 2)}
    return fit(args, training, model, tokenizer, encoded, mean_loss=True, **options)


def check(args, training):
    """Raise for what can be known to be wrong before any data is read."""
    if args.pairs not in PAIRS:
        raise GraphFilterError(f"--pairs {args.pairs}: it is one of {', '.join(PAIRS)}")
    check_length(args)


def load_pairs(folder: Path):
    """Load a saved run: the model of pairs, or one of transformers."""
    is_pair_model = AutoConfig.from_pretrained(folder).architectures == [PairClassifier.__name__]
    return PairClassifier.from_pretrained(folder) if is_pair_model else load_model(folder)


RECIPE = Recipe(
    name="code",
    metrics={"defect": "test/accuracy", "clone": "test/f1"},
    run=run,
    defaults={
        "num_train_epochs": 10,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 32,
        "learning_rate": 2e-5,
        "max_length": 512,
    },
    description=__doc__,
    arguments=(CodeArguments, Seq2SeqTrainingArguments),
    load=load_pairs,
    check=check,
)

if __name__ == "__main__":
    runs.main(RECIPE)
