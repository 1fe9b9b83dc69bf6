"""Train an encoder from scratch on the classification of sequences, with a graph filter in the place of its attention.

    python recipes/sequences.py --config sequences/singularformer.yaml --task bbc --data DATA/bbc-news --seeds 1 2 3 4 5
    python recipes/sequences.py --config sequences/agf-uea.yaml --task JapaneseVowels --smoke

Tasks: of the Long Range Arena listops, imdb (its Text), image, retrieval and pathfinder; multivariate time series of
the UEA archive by their names; documents, long ones, DNA, and texts for any folder or table: recipes/README.md lists
them, with what --data must hold. recipes/generate.py makes listops, and images like those of pathfinder.

Parts that a data set lacks are cut by fixed rules, alike for every model: --validation. The score is that of the test
part; with load_best_model_at_end, of the epoch that validated best. --pretrain denoise lets the encoder restore hidden
parts of the training inputs before.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSequenceClassification, Seq2SeqTrainingArguments

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import parse_options
from recipes import metrics, pretraining, runs
from recipes.arguments import SequenceArguments
from recipes.classifier import POOLINGS, POSITIONS, Denoiser, PooledClassifier
from recipes.data import cut
from recipes.glue import named
from recipes.inputs import PADDED_TO, SERIES, TOKENS, Batches, encoded, statistics, tokenizer_of
from recipes.models import build_model
from recipes.sequence_tasks import FOLDS, TASKS, load
from recipes.settings import Recipe
from recipes.training import fit

TASK_TYPES = {"pixels": "image-classification", "series": "time-series-classification"}  # for the Hub


def run(args, training):
    """One training run."""
    check(args, training)
    task = TASKS[args.task]
    loaded = load(args.task, args.data, args.validation, (training.seed - 1) % FOLDS)
    data = cut(loaded.parts, args)
    tokenizer = tokenizer_of(task.kind, args, data)
    data = encoded(data, tokenizer, args.max_length, apart=args.pooling is not None or args.model == "converter")
    config = named(loaded.labels) | fields(args, tokenizer, data)

    def built(kind):
        model = build_model(args, training, kind, tokenizer, **config)
        if tokenizer is None:
            model.normalise_by(*statistics(data["train"][SERIES]))
        return model

    model = built(PooledClassifier if args.pooling else AutoModelForSequenceClassification)
    record = {"split": loaded.split, "rows": {part: len(rows) for part, rows in data.items()}}
    record["task_type"] = TASK_TYPES.get(task.kind, "text-classification")
    if args.pretrain:
        rows = data["train"].remove_columns("label")
        record["pretraining"] = pretraining.pretrain(args, training, built(Denoiser), tokenizer, rows, model)
    compute = metrics.classification((metrics.Accuracy,), len(loaded.labels))
    options = {"data_collator": Batches(tokenizer), "compute_metrics": compute}
    return {**fit(args, training, model, tokenizer, data, **options), **record}


def check(args, training):
    """What can be known to be wrong before any data is read."""
    if args.pooling not in (None, *POOLINGS):
        raise GraphFilterError(f"--pooling {args.pooling}: it is one of {', '.join(POOLINGS)}")
    if args.positions not in (None, *POSITIONS):
        raise GraphFilterError(f"--positions {args.positions}: it is one of {', '.join(POSITIONS)}")
    if args.model == "converter" and (args.pooling or args.positions or TASKS[args.task].kind == "series"):
        raise GraphFilterError(
            "converter reads tokens and has a head and positions of its own: leave out --pooling and --positions, set "
            "its pooling and position_embedding by --from_scratch; for series take --filter kernelution"
        )
    if not args.pooling and (args.positions or TASKS[args.task].kind == "series"):
        raise GraphFilterError(f"--positions and series need --pooling, one of {', '.join(POOLINGS)}")
    if args.validation == "none" and training.eval_strategy != "no":
        raise GraphFilterError("--validation none leaves nothing to evaluate while training: add --eval_strategy no")
    pretraining.check(args)


def fields(args, tokenizer, data):
    """Of the model's config: what the head and the positions need to know of the data."""
    columns = data["train"].column_names
    longest = max(
        len(row) for rows in data.values() for name in (SERIES, *TOKENS) if name in columns for row in rows[name]
    )
    own = {"num_sequences": 2} if TOKENS[1] in columns else {}
    if args.pooling:
        own |= {"pooling": args.pooling, "positions": args.positions}
    if args.pooling == "flatten":
        own["flattened"] = longest
    if SERIES in columns:
        own["channels"] = len(data["train"][0][SERIES][0])
    table = "max_position_embeddings"
    known = args.from_scratch and args.model in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[args.model](), table)
    if known and table not in parse_options(args.from_scratch):
        longest += -longest % PADDED_TO
        own[table] = longest + 1 + (tokenizer.pad_token_id if tokenizer else 0)  # where RoBERTa's places begin
    return own


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
