"""Self-pretraining: an encoder learns to restore hidden parts of the training inputs before it learns the task."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, Seq2SeqTrainingArguments

from hf_graphfilter import GraphFilterError
from hf_graphfilter.filters.core.attached import gather
from recipes.arguments import SequenceArguments
from recipes.checkpoints import last_checkpoint
from recipes.errors import is_main_process
from recipes.inputs import HiddenBatches
from recipes.records import RECORD, try_read, write_json
from recipes.training import make_trainer, train

OBJECTIVES = ("denoise",)
FOLDER = "pretrained"


def check(args: SequenceArguments, training: Seq2SeqTrainingArguments) -> None:
    if args.pretrain not in (None, *OBJECTIVES):
        raise GraphFilterError(f"--pretrain {args.pretrain}: it is one of {', '.join(OBJECTIVES)}")
    if not 0 < args.mask_ratio < 1:
        raise GraphFilterError(f"--mask_ratio {args.mask_ratio}: it is a part of the input, between 0 and 1")
    for name in ("pretrain_epochs", "pretrain_lr"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise GraphFilterError(f"--{name} {value}: it is more than 0")
    if args.pretrain:
        pretraining_settings(args, training)


def pretraining_settings(args: SequenceArguments, training: Seq2SeqTrainingArguments) -> Seq2SeqTrainingArguments:
    """Return the settings of ``training`` but for those of the task and of its length."""
    options: dict[str, Any] = {"output_dir": str(Path(training.output_dir, FOLDER))}
    options |= {"num_train_epochs": args.pretrain_epochs, "max_steps": training.max_steps if args.smoke else -1}
    options |= {"eval_strategy": "no", "load_best_model_at_end": False, "metric_for_best_model": None}
    options |= {"remove_unused_columns": False}  # the second text of a pair, which its collator makes a row of
    options |= {"label_smoothing_factor": 0.0, "learning_rate": args.pretrain_lr or training.learning_rate}
    if training.max_steps > 0 and training.warmup_steps >= 1:  # of another number of steps than these
        options["warmup_steps"] = min(training.warmup_steps / training.max_steps, 0.5)
    if training.save_strategy == "best":
        options["save_strategy"] = "epoch"
    try:
        return replace(training, **options)
    except ValueError as error:
        raise GraphFilterError(f"--pretrain cannot have these settings of the training: {error}") from error


def pretrain(
    args: SequenceArguments,
    training: Seq2SeqTrainingArguments,
    denoiser: PreTrainedModel,
    tokenizer: Any | None,
    rows: Dataset,
    model: PreTrainedModel,
) -> dict[str, Any]:
    """Train ``denoiser`` from its last checkpoint, if there is one, and copy the weights that it shares to ``model``.

    The denoiser is kept in a folder of the run, with its record written last. If it is already finished there, it is
    not trained again. Return the record.
    """
    folder = Path(training.output_dir, FOLDER)
    if (record := try_read(folder / RECORD, objective=str)) is not None:
        denoiser = type(denoiser).from_pretrained(folder)
    else:
        collator = HiddenBatches(tokenizer, args.mask_ratio)
        options = {"train_dataset": rows, "data_collator": collator, "processing_class": tokenizer}
        trainer = make_trainer(args, pretraining_settings(args, training), denoiser, **options)
        checkpoint = last_checkpoint(folder)
        output = train(trainer, checkpoint)
        trainer.save_model()
        record = {"objective": args.pretrain, "mask_ratio": args.mask_ratio, "epochs": round(trainer.state.epoch, 2)}
        record |= {"seconds": round(output.metrics["train_runtime"], 1)}
        record |= {} if checkpoint else {"loss": round(output.training_loss, 4)}  # else of the steps since then alone
        if is_main_process():
            write_json(folder / RECORD, record)
    weights = model.state_dict()
    learned = {name: gather(value) for name, value in denoiser.state_dict().items() if name in weights}
    model.load_state_dict(weights | learned)
    return record
