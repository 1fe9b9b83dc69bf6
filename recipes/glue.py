"""Fine-tune an encoder on a GLUE task, or on movie-review snippets, with a graph filter in its attention.

    python recipes/glue.py --config glue/bert.yaml --task cola --seeds 1 2 3 4 5
    python recipes/glue.py --model bert-base-uncased --task rte --filter gfsa --filter_options K=4 --smoke

Tasks: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, and movie-snippets (ratings, shipped with the package). Data comes
from the Hub (nyu-mll/glue), or with --data from a folder that holds the official TSV files, or JSON files with text_a,
text_b and label. Scores are those of the validation part, as in the paper: the labels of the test parts are not public.

Data of your own: --task texts (classes) or ratings (numbers), with --data (a CSV, TSV, JSON or JSON-lines file, or a
folder with train and validation files), or with --dataset_name OWNER/NAME of the Hub. Columns: text, or sentence1 and
sentence2 and the like; label. Without a validation part, a fifth of the training part is held out, the same always.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from datasets import Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Seq2SeqTrainingArguments

from hf_graphfilter import GraphFilterError
from recipes import metrics, runs
from recipes.arguments import GlueArguments
from recipes.data import cut, encode, encode_labels, iterate_texts, load_from_hub, make_table
from recipes.errors import note
from recipes.files import first_file, read_rows
from recipes.inputs import PADDED_TO, check_room, longest_of
from recipes.models import build_model, load_tokenizer
from recipes.own_texts import load_own
from recipes.settings import Recipe
from recipes.training import fit


@dataclass(frozen=True)
class Task:
    """Where the files are (``folder``), their columns, their labels (None: a number), and what is measured."""

    folder: str
    columns: dict[str, tuple[str, ...]]
    labels: tuple[str, ...] | None
    measures: tuple[str, ...] = ("accuracy",)
    header: tuple[str, ...] | None = None
    parts: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"train": ("train.tsv", "train.json"), "validation": ("dev.tsv", "dev.json")}
    )


def pair(first: str, second: str, label: str = "label") -> dict[str, tuple[str, ...]]:
    """Return the columns of two texts: the official names, those on the Hub, and those of the JSON files."""
    names = {
        "text_a": (first, "sentence1", "premise", "text_a"),
        "text_b": (second, "sentence2", "hypothesis", "text_b"),
        "label": (label, "label"),
    }
    return {name: tuple(dict.fromkeys(candidates)) for name, candidates in names.items()}


SINGLE = {"text_a": ("sentence", "text_a"), "label": ("label",)}
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "cola": Task("CoLA", SINGLE, ("0", "1"), ("matthews_correlation",), header=("source", "label", "star", "sentence")),
    "sst2": Task("SST-2", SINGLE, ("0", "1")),
    "mrpc": Task("MRPC", pair("#1 String", "#2 String", "Quality"), ("0", "1"), ("f1", "accuracy")),
    "qqp": Task("QQP", pair("question1", "question2", "is_duplicate"), ("0", "1"), ("f1", "accuracy")),
    "stsb": Task("STS-B", pair("sentence1", "sentence2", "score"), None, ("spearmanr", "pearson")),
    "mnli": Task(
        "MNLI",
        pair("sentence1", "sentence2", "gold_label"),
        ("entailment", "neutral", "contradiction"),
        parts={
            "train": ("train.tsv", "train.json"),
            "validation": ("dev_matched.tsv", "dev.json"),
            "validation_mismatched": ("dev_mismatched.tsv",),
        },
    ),
    "qnli": Task("QNLI", pair("question", "sentence"), ENTAILMENT),
    "rte": Task("RTE", pair("sentence1", "sentence2"), ENTAILMENT),
    "movie-snippets": Task("", {"text_a": ("text",), "label": ("label",)}, None, ("spearmanr", "pearson")),
    "texts": Task("", {}, (), ("accuracy", "f1_macro")),
    "ratings": Task("", {}, None, ("spearmanr", "pearson")),
}
OWN = "texts", "ratings"
COMPARED = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "spearmanr", "movie-snippets": "pearson"}
COMPARED["ratings"] = "pearson"


@lru_cache(maxsize=1)
def load(name: str, folder: str | None) -> DatasetDict:
    """Return the parts of a task with text_a, text_b and label."""
    task = TASKS[name]
    if name == "movie-snippets":
        return movie_snippets()
    if folder is None:
        data = load_from_hub("nyu-mll/glue", task.columns, name)
        return DatasetDict({k.removesuffix("_matched"): v for k, v in data.items() if not k.startswith("test")})
    root = Path(folder)
    root = root / task.folder if (root / task.folder).is_dir() else root
    parts = {}
    for part, names in task.parts.items():
        if part == "validation_mismatched" and not (root / names[0]).is_file():
            continue  # the subsets have none
        file = first_file(root, names)
        rows = read_rows(file, task.header)
        rows = drop_broken(rows, file) if name == "qqp" else rows
        parts[part] = encode_labels(make_table(rows, task.columns, file), task.labels, file)
    return DatasetDict(parts)


def drop_broken(rows: list[dict], file: Path) -> list[dict]:
    """Return the rows that have all columns: in the official training part of QQP, line breaks cut a few."""
    whole = [row for row in rows if None not in row.values()]
    if len(whole) < len(rows):
        note(f"{file}: {len(rows) - len(whole)} of {len(rows)} rows are broken and left out")
    return whole


def movie_snippets() -> DatasetDict:
    """Return 2,000 snippets to validate on and the others to train on, cut by a fixed seed."""
    from hf_graphfilter.demo import load_snippets

    rows = [{"text_a": text, "label": rating} for rating, text in load_snippets()]
    random.Random(0).shuffle(rows)
    return DatasetDict(train=Dataset.from_list(rows[2000:]), validation=Dataset.from_list(rows[:2000]))


def run(args, training):
    """Do one fine-tuning run."""
    task = TASKS[args.task]
    if args.task in OWN:
        data, labels = load_own(args.task == "ratings", args.data, args.dataset_name, args.dataset_config_name)
    else:
        data, labels = load(args.task, args.data), task.labels
    data = cut(data, args)
    tokenizer = load_tokenizer(args, lambda: iterate_texts(data["train"]))
    config = {"num_labels": 1}
    if labels:
        config = label_fields(labels)
    return classify(args, training, tokenizer, data, task.measures, **config)


def label_fields(labels) -> dict:
    """Return the fields of a model's config for these labels."""
    names = dict(enumerate(labels))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: i for i, name in names.items()}}


def classify(args, training, tokenizer, data, measures, num_labels, **config):
    """Fine-tune a classifier of the texts in all columns but ``label``; a regression where there is one label."""
    model = build_model(args, training, AutoModelForSequenceClassification, tokenizer, num_labels=num_labels, **config)
    training.average_tokens_across_devices = False
    encoded = encode(data, tokenizer, args.max_length)
    check_room(model, tokenizer if args.tokenizer else None, longest_of(encoded))  # its own one fits
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=PADDED_TO)
    compute = metrics.classification(measures, num_labels)
    options = {"data_collator": collator, "compute_metrics": compute, "mean_loss": True}
    return fit(args, training, model, tokenizer, encoded, **options)


def check(args, training):
    """Refuse data that do not go with the task, before anything is read."""
    if args.task in OWN and (args.data is None) == (args.dataset_name is None):
        raise GraphFilterError(
            f"--task {args.task} needs either --data (a file or a folder), or --dataset_name, a data set of the Hub"
        )
    if args.task == "movie-snippets" and args.data is not None:
        raise GraphFilterError("movie-snippets come with the package: leave out --data, or use --task ratings")
    if args.task not in OWN and (args.dataset_name or args.dataset_config_name):
        raise GraphFilterError(
            f"--dataset_name goes with --task texts (classes) or ratings (numbers); {args.task} has data of its own"
        )


RECIPE = Recipe(
    name="glue",
    metrics={name: f"validation/{COMPARED.get(name, 'accuracy')}" for name in TASKS},
    run=run,
    defaults={
        "num_train_epochs": 5,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "learning_rate": 2e-5,
        "max_length": 128,
    },
    description=__doc__,
    arguments=(GlueArguments, Seq2SeqTrainingArguments),
    check=check,
    places={name: (task.folder,) for name, task in TASKS.items()},
)

if __name__ == "__main__":
    runs.main(RECIPE)
