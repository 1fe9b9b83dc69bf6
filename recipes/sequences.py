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

from pathlib import Path

from transformers import AutoConfig, AutoModelForSequenceClassification, Seq2SeqTrainingArguments

from hf_graphfilter import GraphFilterError
from recipes import metrics, runs
from recipes.arguments import SequenceArguments
from recipes.classifier import POOLINGS, PooledClassifier
from recipes.data import cut, texts_of
from recipes.glue import classify, named
from recipes.models import load_tokenizer
from recipes.sequence_tasks import TASKS, load
from recipes.settings import Recipe


def run(args, training):
    """One training run."""
    if args.pooling not in (None, *POOLINGS):
        raise GraphFilterError(f"--pooling {args.pooling}: it is one of {', '.join(POOLINGS)}")
    loaded = load(args.task, args.data, fold=training.seed - 1)
    tokenizer = load_tokenizer(args, lambda: texts_of(loaded.parts["train"]))
    data = cut(loaded.parts, args)
    config = named(loaded.labels)
    if args.pooling is not None:
        config |= {"model_class": PooledClassifier, "pooling": args.pooling}
    outcome = classify(args, training, tokenizer, data, (metrics.Accuracy,), **config)
    return {**outcome, "split": loaded.split, "rows": {part: len(rows) for part, rows in data.items()}}


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
