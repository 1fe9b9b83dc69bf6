"""Train an encoder from scratch on the classification of texts, with a graph filter in the place of its attention.

    python recipes/sequences.py --config sequences/singularformer.yaml --task bbc --data DATA/bbc-news --seeds 1 2 3 4 5
    python recipes/sequences.py --config sequences/small.yaml --task bbc --data DATA/bbc-news --filter agf --smoke

Tasks: bbc, 20newsgroups-4cat (four groups of 20newsgroups) and imdb. --data is a folder that holds a folder a class,
full of documents; or two such folders whose names end in train and test. imdb comes from the Hub without.

Without a test part, 30 % of the documents are cut off as one. Of the training part a fifth is there to validate, the
Nth for seed N: five seeds are a cross-validation in five folds. Both cuts keep the share of the classes and are alike
for every model. The score is that of the test part; with load_best_model_at_end, of the epoch that validated best.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from datasets import DatasetDict
from sklearn.model_selection import StratifiedKFold, train_test_split
from transformers import AutoConfig, AutoModelForSequenceClassification, Seq2SeqTrainingArguments

from hf_graphfilter import GraphFilterError
from recipes import metrics, runs
from recipes.arguments import SequenceArguments
from recipes.classifier import POOLINGS, PooledClassifier
from recipes.data import cut, from_hub, texts_in, texts_of
from recipes.glue import classify, named
from recipes.models import load_tokenizer
from recipes.settings import Recipe

FOLDS = 5
UNLABELLED = "unsup"  # a folder of the official IMDb


@dataclass(frozen=True)
class Task:
    """The folder's usual name, and where the Hub has the task, with which labels."""

    folder: str
    hub: str | None = None
    labels: tuple[str, ...] = ()


TASKS = {
    "bbc": Task("bbc-news"),
    "20newsgroups-4cat": Task("20newsgroups-4cat"),
    "imdb": Task("imdb", "stanfordnlp/imdb", ("neg", "pos")),
}


@lru_cache(maxsize=1)
def load(name: str, folder: str | None) -> tuple[DatasetDict, tuple[str, ...], str]:
    """(train and test with text_a and label, in no order, the names of the labels, how they were split)."""
    task = TASKS[name]
    if folder is None:
        if task.hub is None:
            raise GraphFilterError(f"--task {name} needs --data, a folder that holds a folder of documents a class")
        data = from_hub(task.hub, {"text_a": ("text",), "label": ("label",)})
        return DatasetDict(train=data["train"], test=data["test"]).shuffle(seed=0), task.labels, "official"
    root = Path(folder, task.folder) if Path(folder, task.folder).is_dir() else Path(folder)
    if not root.is_dir():
        raise GraphFilterError(f"--data: there is no folder {root}")
    parts = {part: sub for part in ("train", "test") for sub in subfolders(root) if sub.name.endswith(part)}
    split = len(parts) == 2
    labels = tuple(sub.name for sub in subfolders(parts["train"] if split else root) if sub.name != UNLABELLED)
    if len(labels) < 2:
        raise GraphFilterError(f"--data: {root} must hold a folder of documents for each of two classes at least")
    if split:
        for label in labels:
            if not (parts["test"] / label).is_dir():
                raise GraphFilterError(f"--data: {parts['test']} has no folder {label}, which the training part has")
        data = {part: texts_in(sub, labels) for part, sub in parts.items()}
        return DatasetDict(data).shuffle(seed=0), labels, "official"
    rows = texts_in(root, labels)
    enough(rows, labels, 2 * FOLDS)
    train, test = train_test_split(range(len(rows)), test_size=0.3, random_state=0, stratify=rows["label"])
    return DatasetDict(train=rows.select(train), test=rows.select(test)), labels, "70/30 of the documents"


def subfolders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def enough(rows, labels: tuple[str, ...], needed: int) -> None:
    """Whether each class can be cut into parts."""
    counts = Counter(rows["label"])
    for number, label in enumerate(labels):
        if counts[number] < needed:
            raise GraphFilterError(f"the class {label} has {counts[number]} documents to be split, {needed} are needed")


def validated(data: DatasetDict, labels: tuple[str, ...], fold: int) -> DatasetDict:
    """With one of the folds of the training part to validate on."""
    train = data["train"]
    enough(train, labels, FOLDS)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(train["label"], train["label"])
    kept, out = list(folds)[fold]
    return DatasetDict(train=train.select(kept), validation=train.select(out), test=data["test"])


def run(args, training):
    """One training run."""
    if args.pooling not in (None, *POOLINGS):
        raise GraphFilterError(f"--pooling {args.pooling}: it is one of {', '.join(POOLINGS)}")
    data, labels, split = load(args.task, args.data)
    data = validated(data, labels, (training.seed - 1) % FOLDS)
    tokenizer = load_tokenizer(args, lambda: texts_of(data["train"]))
    data = cut(data, args)
    config = named(labels)
    if args.pooling is not None:
        config |= {"model_class": PooledClassifier, "pooling": args.pooling}
    outcome = classify(args, training, tokenizer, data, (metrics.Accuracy,), **config)
    split = f"{split}, a fifth of the training part validates, another one with each seed"
    return {**outcome, "split": split, "rows": {part: len(rows) for part, rows in data.items()}}


def load_model(folder: Path):
    """A saved run: the pooling head, or the model's own."""
    pooled = AutoConfig.from_pretrained(folder).architectures == [PooledClassifier.__name__]
    return (PooledClassifier if pooled else AutoModelForSequenceClassification).from_pretrained(folder)


RECIPE = Recipe(
    name="sequences",
    metrics=dict.fromkeys(TASKS, "test/accuracy"),
    run=run,
    defaults={
        "num_train_epochs": 10,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "learning_rate": 1e-3,
        "max_length": 512,
    },
    description=__doc__,
    arguments=(SequenceArguments, Seq2SeqTrainingArguments),
    load=load_model,
)

if __name__ == "__main__":
    runs.main(RECIPE)
