"""Train an encoder from scratch on the classification of sequences, with a graph filter that replaces its attention.

    python recipes/sequences.py --config sequences/singularformer.yaml --task bbc --data DATA/bbc-news --seeds 1 2 3 4 5
    python recipes/sequences.py --config sequences/agf-uea.yaml --task JapaneseVowels --smoke

Tasks: listops, imdb (Text), image, retrieval and pathfinder of the Long Range Arena; multivariate time series of the
UEA archive by their names; long and short documents, DNA, and texts in any folder or table. recipes/README.md lists
them, with what --data must hold. recipes/generate.py makes listops, and images like those of pathfinder.

Parts that a data set lacks are cut by fixed rules, the same for every model (see --validation). The score is that of
the test part; with load_best_model_at_end, it is that of the epoch with the best validation. With --pretrain denoise,
the encoder first learns to restore hidden parts of the training inputs.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

import math
from pathlib import Path

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Seq2SeqTrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import parse_options
from recipes import metrics, pretraining, runs
from recipes.arguments import SequenceArguments
from recipes.classifier import POOLINGS, POSITIONS, Denoiser, PooledClassifier
from recipes.data import TOKENS, cut
from recipes.glue import label_fields
from recipes.inputs import (
    PADDED_TO,
    SERIES,
    Batches,
    check_length,
    check_room,
    encode_inputs,
    longest_of,
    statistics,
    tokenizer_of,
)
from recipes.models import build_model, loading_errors
from recipes.sequence_tasks import FOLDS, TASKS, load
from recipes.settings import Recipe
from recipes.training import fit

PICTURES = ("cifar100",)  # that are series here
TASK_TYPES = {"pixels": "image-classification", "series": "time-series-classification"}  # for the Hub


def run(args, training):
    """One training run."""
    task = TASKS[args.task]
    kind = model_type(args)
    loaded = load(args.task, args.data, args.validation, (training.seed - 1) % FOLDS)
    data = cut(loaded.parts, args)
    tokenizer = tokenizer_of(task.kind, args, data)
    if tokenizer is None:
        training.remove_unused_columns = False  # the Trainer groups series by the column of their lengths
    data = encode_inputs(data, tokenizer, args.max_length, apart=args.pooling is not None or kind == "converter")
    longest = longest_of(data)
    config = label_fields(loaded.labels) | fields(args, tokenizer, data, longest)
    is_multilabel = isinstance(data["train"][0]["label"], list)
    if is_multilabel:
        config["problem_type"] = "multi_label_classification"

    def build(model_class):
        model = build_model(args, training, model_class, tokenizer, **config)
        check_room(model, tokenizer, longest)
        if tokenizer is None:
            model.normalise_by(*statistics(data["train"][SERIES]))
        return model

    model = build(PooledClassifier if args.pooling else AutoModelForSequenceClassification)
    record = {"split": loaded.split, "rows": {part: len(rows) for part, rows in data.items()}}
    record["task_type"] = TASK_TYPES.get("pixels" if args.task in PICTURES else task.kind, "text-classification")
    if args.pretrain:
        rows = data["train"].remove_columns("label")
        denoiser = build(AutoModelForMaskedLM if kind == "converter" else Denoiser)
        record["pretraining"] = pretraining.pretrain(args, training, denoiser, tokenizer, rows, model)
    training.average_tokens_across_devices = False  # as in glue.py
    compute = metrics.several_labels if is_multilabel else metrics.classification(["accuracy"], len(loaded.labels))
    options = {"data_collator": Batches(tokenizer), "compute_metrics": compute}
    return {**fit(args, training, model, tokenizer, data, mean_loss=True, **options), **record}


def model_type(args):
    if args.from_scratch and args.model in CONFIG_MAPPING:
        return args.model
    with loading_errors(args.model):
        return AutoConfig.from_pretrained(args.model).model_type


def check(args, training):
    """Raise for what can be known to be wrong before any data is read."""
    if args.pooling not in (None, *POOLINGS):
        raise GraphFilterError(f"--pooling {args.pooling}: it is one of {', '.join(POOLINGS)}")
    if args.positions not in (None, *POSITIONS):
        raise GraphFilterError(f"--positions {args.positions}: it is one of {', '.join(POSITIONS)}")
    if model_type(args) == "converter" and (args.pooling or args.positions or TASKS[args.task].kind == "series"):
        raise GraphFilterError(
            "converter reads tokens and has a head and positions of its own: leave out --pooling and --positions, set "
            "its pooling and position_embedding by --from_scratch; for series take --filter kernelution"
        )
    if (args.pretrain or args.positions) and is_deepspeed_zero3_enabled():
        raise GraphFilterError(
            "--pretrain and --positions set weights, which ZeRO-3 has spread over processes: use "
            "recipes/accelerate/ddp.yaml"
        )
    if args.embedding_dropout is not None and not (args.pooling and 0 <= args.embedding_dropout < 1):
        raise GraphFilterError(
            f"--embedding_dropout {args.embedding_dropout} needs --pooling, and is from 0 to below 1"
        )
    if not args.pooling and (args.positions or TASKS[args.task].kind == "series"):
        raise GraphFilterError(f"--positions and series need --pooling, one of {', '.join(POOLINGS)}")
    if args.validation == "none" and training.eval_strategy != "no":
        raise GraphFilterError("--validation none leaves nothing to evaluate while training: add --eval_strategy no")
    if TASKS[args.task].kind in ("text", "symbols"):
        check_length(args)
    pretraining.check(args, training)


def landmarks_of(config, longest):
    """Return the fields of a Nystromformer, which takes one length: a number of segments of equal lengths."""
    padded_length = longest + -longest % config.num_landmarks
    return {"segment_means_seq_len": padded_length, "padded_to": padded_length}


def chunks_of(config, longest):
    """Return the fields of a Reformer, which takes whole chunks of tokens in training."""
    return {"padded_to": math.lcm(config.lsh_attn_chunk_length, config.local_attn_chunk_length)}


LENGTHS = {"nystromformer": landmarks_of, "reformer": chunks_of}


def fields(args, tokenizer, data, longest):
    """Return the fields of the model's config that the head and the positions need from the data."""
    columns = data["train"].column_names
    config = {"num_sequences": 2} if TOKENS[1] in columns else {}
    if args.pooling:
        config["pooling"] = args.pooling
    if args.positions:
        config["positions"] = args.positions
    if args.embedding_dropout is not None:
        config["embedding_dropout"] = args.embedding_dropout
    if args.pooling == "flatten":
        config["flattened"] = longest
    if SERIES in columns:
        config["channels"] = len(data["train"][0][SERIES][0])
    table = "max_position_embeddings"
    default = CONFIG_MAPPING[args.model]() if args.from_scratch and args.model in CONFIG_MAPPING else None
    if default is not None and args.model in LENGTHS:
        default.update(parse_options(args.from_scratch))
        config |= LENGTHS[args.model](default, longest)
        longest += -longest % config["padded_to"]
    has_positions = default is not None and default.attribute_map.get(table, table) in default.to_dict()
    if has_positions and table not in parse_options(args.from_scratch):
        longest += -longest % PADDED_TO
        config[table] = longest + 1 + (tokenizer.pad_token_id if tokenizer else 0)  # where RoBERTa's places begin
    return config


def load_model(folder: Path):
    """Load a saved run: the pooling head, or the model's own."""
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
    places={name: (task.folder,) for name, task in TASKS.items()},
    arguments=(SequenceArguments, Seq2SeqTrainingArguments),
    load=load_model,
    check=check,
)

if __name__ == "__main__":
    runs.main(RECIPE)
