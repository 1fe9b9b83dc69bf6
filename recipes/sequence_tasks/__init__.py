"""The tasks of sequences, and how each is cut into parts to train on, to validate and to test.

A data set without a test part is cut by a fixed seed: texts 70/30, long documents and DNA 60/20/20 as in Converter's
paper, Pathfinder 80/10/10 as in the Long Range Arena. Where there is no part to validate on, a fifth of the training
part is there for it. All cuts keep the share of the classes and are alike for every model.
"""

import warnings
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from datasets import Dataset, DatasetDict, concatenate_datasets
from sklearn.model_selection import StratifiedKFold, train_test_split

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import nearest
from recipes.sequence_tasks import fasta, lra, series, texts
from recipes.sequence_tasks.task import Loaded, Task

FOLDS = 5
VALIDATIONS = ("auto", "fold", "test", "none")

DOCUMENTS = "a folder that holds a folder of documents a class"
FASTA = "a folder with a FASTA file a class, or with one FASTA file and labels.tsv"
IMAGES = "a folder with train and test, each with a folder of PNG files a class"
SCOPE = ("scope40", "scope95")
LONG = (60, 20, 20)
PATHS = {"kind": "pixels", "labels": ("apart", "joined"), "shares": (80, 10, 10)}
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARXIV = ("cs.AI", "cs.NE", "math.AC", "math.GR")
AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")

TASKS = {
    "bbc": Task("bbc-news", DOCUMENTS, texts.documents),
    "20newsgroups-4cat": Task("20newsgroups-4cat", DOCUMENTS, texts.documents),
    "20newsgroups": Task("20newsgroups", DOCUMENTS, texts.documents),
    "r8": Task("r8", "a folder with r8-train-all-terms.txt and r8-test-all-terms.txt", texts.r8),
    "imdb": Task("imdb", DOCUMENTS, texts.documents, online="stanfordnlp/imdb", labels=("neg", "pos")),
    "ag-news": Task(
        "ag_news", "a folder with train.csv and test.csv", texts.ag_news, online="fancyzhx/ag_news", labels=AG_NEWS
    ),
    "texts": Task("", "a CSV, TSV or JSON file, or a folder of such files or of documents", texts.tables, file=True),
    "mimic-iii-50": Task("mimic-iii-50", "a folder with {train,dev,test}_50.csv", texts.mimic),
    "longdoc": Task("longdoc", DOCUMENTS, partial(texts.documents, labels=ARXIV), shares=LONG),
    "dna": Task("dna", FASTA, fasta.fasta, shares=LONG),
    "ensembl-bs": Task("ensembl-bs", FASTA, fasta.fasta, shares=LONG),
    "ensembl-mr": Task("ensembl-mr", FASTA, fasta.fasta, shares=LONG),
    "proteins": Task("proteins", FASTA, partial(fasta.fasta, alphabet=fasta.AMINO_ACIDS), "symbols"),
    **{name: Task(name, "a folder with the FASTA file of SCOPe", fasta.scope, "symbols") for name in SCOPE},
    "listops": Task("listops-1000", "a folder with basic_{train,val,test}.tsv", lra.listops, "symbols"),
    "listops-short": Task("listops", "a folder with test_d20s.tsv", lra.listops_short, "symbols", shares=(70, 10, 20)),
    "image": Task(
        "cifar10",
        IMAGES,
        lra.image,
        "pixels",
        online="uoft-cs/cifar10",
        labels=CIFAR10,
    ),
    "cifar100": Task("cifar100", IMAGES, partial(lra.image, patch=2), "series", online="uoft-cs/cifar100"),
    "retrieval": Task(
        "tsv_data", "a folder with new_aan_pairs.{train,eval,test}.tsv", lra.retrieval, labels=("apart", "cited")
    ),
    "pathfinder": Task("pathfinder32", "the folder pathfinder32 of the release", lra.pathfinder, **PATHS),
    "dashed-paths": Task(
        "dashed-paths", "what recipes/generate.py dashed-paths wrote", partial(lra.pathfinder, side=None), **PATHS
    ),
} | {
    name: Task(name, f"a folder with {name}_{{TRAIN,TEST}}.ts", series.series, "series", online=series.ARCHIVE)
    for name in series.NAMES
}


@lru_cache(maxsize=1)
def read(name: str, folder: str | None) -> Loaded:
    """Read a task as its files have it, in no order; what is one part alone is cut."""
    if name not in TASKS:
        raise GraphFilterError(f"there is no task {name}{nearest(name, TASKS)}; tasks: {', '.join(TASKS)}")
    task = TASKS[name]
    root = None
    if folder is None:
        if task.online is None:
            raise GraphFilterError(f"--task {name} needs --data, {task.layout}")
    else:
        root = Path(folder, task.folder) if Path(folder, task.folder).is_dir() else Path(folder)
        if not root.is_dir() and not (task.file and root.is_file()):
            raise GraphFilterError(f"--data: there is no folder {root}")
    loaded = task.read(root, task)
    if "all" in loaded.parts:
        return divide(loaded, task)
    return replace(loaded, parts=loaded.parts.shuffle(seed=0))


def divide(loaded: Loaded, task: Task) -> Loaded:
    """Cut the one part of a data set by a fixed seed, with the same share of each class in all parts."""
    rows = loaded.parts["all"]
    check_counts(rows, loaded.labels, 2 * FOLDS, task)
    train, test = stratify(rows, range(len(rows)), task.shares[-1] / 100)
    parts = {"train": train, "test": test}
    if len(task.shares) == 3:
        train_rows, validation = stratify(rows, train, task.shares[1] / (task.shares[0] + task.shares[1]))
        parts = {"train": train_rows, "validation": validation, "test": test}
    cut = DatasetDict({part: rows.select(indices) for part, indices in parts.items()})
    return Loaded(cut, loaded.labels, f"{'/'.join(map(str, task.shares))} of the {examples(task)}")


def stratify(rows: Dataset, chosen, share: float):
    """Return the chosen rows without a share of each class, and that share."""
    labels = rows["label"][:]
    return train_test_split(chosen, test_size=share, random_state=0, stratify=[labels[row] for row in chosen])


def examples(task: Task) -> str:
    return "documents" if task.kind == "text" else "examples"


def check_counts(rows: Dataset, labels: tuple[str, ...], needed: int, task: Task) -> None:
    """Whether each class can be cut into parts."""
    counts = Counter(rows["label"])
    for number, label in enumerate(labels):
        if counts[number] < needed:
            raise GraphFilterError(
                f"the class {label} has {counts[number]} {examples(task)} to be split, {needed} are needed"
            )


def load(name: str, folder: str | None, validation: str = "auto", fold: int = 0) -> Loaded:
    """Return the training, validation and test part of a task.

    Args:
        validation: the part to validate on. "auto": the part of the data set, or else a fold. "fold": one of five folds
            of the training part, with the data set's validation part added to it first. "test": the test part. "none":
            no part, so the whole training part is trained on.
    """
    if validation not in VALIDATIONS:
        raise GraphFilterError(f"--validation {validation}: it is one of {', '.join(VALIDATIONS)}")
    loaded = read(name, folder)
    parts, split = dict(loaded.parts), loaded.split
    if validation == "none":
        unused = ", its validation part is not used" if parts.pop("validation", None) else ""
        return replace(loaded, parts=DatasetDict(parts), split=f"{split}{unused}, no part validates")
    if validation == "test":
        parts["validation"] = parts["test"]
        split += ", the test part validates too: what is chosen by it is chosen on the test part"
    elif validation == "fold" or "validation" not in parts:
        if isinstance(parts["train"][0]["label"], list):
            raise GraphFilterError(
                f"{name} has several labels per text and cannot be cut into folds: --validation auto"
            )
        if validation_part := parts.pop("validation", None):
            parts["train"] = concatenate_datasets([parts["train"], validation_part])
            split += ", training and validation part together"
        check_counts(parts["train"], loaded.labels, 2, TASKS[name])
        labels = parts["train"]["label"][:]
        if (largest := max(Counter(labels).values())) < FOLDS:
            raise GraphFilterError(
                f"no class has more than {largest} {examples(TASKS[name])}, a fold needs {FOLDS} of one"
            )
        with warnings.catch_warnings():  # a class of less than five examples is not in all folds
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)
            folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(labels, labels))
        train_indices, fold_indices = folds[fold % FOLDS]
        parts |= {"train": parts["train"].select(train_indices), "validation": parts["train"].select(fold_indices)}
        split += ", a fifth of the training part validates, another one with each seed"
    ordered = {part: parts[part] for part in ("train", "validation", "test")}
    return replace(loaded, parts=DatasetDict(ordered), split=split)
