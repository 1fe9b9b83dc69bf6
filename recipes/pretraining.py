"""Self-pretraining: an encoder learns to restore hidden parts of the training inputs before it learns the task."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, Seq2SeqTrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_graphfilter import GraphFilterError
from recipes.arguments import SequenceArguments
from recipes.classifier import Denoiser
from recipes.inputs import HiddenBatches
from recipes.training import last_checkpoint, make_trainer

OBJECTIVES = ("denoise",)
FOLDER = "pretrained"


def check(args: SequenceArguments) -> None:
    if args.pretrain not in (None, *OBJECTIVES):
        raise GraphFilterError(f"--pretrain {args.pretrain}: it is one of {', '.join(OBJECTIVES)}")
    if not 0 < args.mask_ratio < 1:
        raise GraphFilterError(f"--mask_ratio {args.mask_ratio}: it is a part of the input, between 0 and 1")


def pretrain(
    args: SequenceArguments,
    training: Seq2SeqTrainingArguments,
    denoiser: Denoiser,
    tokenizer: Any | None,
    rows: Dataset,
    model: PreTrainedModel,
) -> dict[str, Any]:
    """Train ``denoiser``, going on from its last checkpoint, and give ``model`` all that they share.

    It is kept in a folder of the run; found there finished, it is not trained again. Returns what is recorded.
    """
    folder = Path(training.output_dir, FOLDER)
    options: dict[str, Any] = {"output_dir": str(folder), "num_train_epochs": args.pretrain_epochs}
    options |= {"eval_strategy": "no", "load_best_model_at_end": False, "metric_for_best_model": None}
    options |= {"learning_rate": args.pretrain_lr or training.learning_rate}
    record: dict[str, Any] = {"objective": args.pretrain, "mask_ratio": args.mask_ratio, "epochs": args.pretrain_epochs}
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        denoiser = Denoiser.from_pretrained(folder)
    else:
        collator = HiddenBatches(tokenizer, args.mask_ratio)
        given = {"train_dataset": rows, "data_collator": collator, "processing_class": tokenizer}
        trainer = make_trainer(args, replace(training, **options), denoiser, **given)
        trained = trainer.train(resume_from_checkpoint=last_checkpoint(folder))
        record |= {"loss": round(trained.training_loss, 4), "seconds": round(trained.metrics["train_runtime"], 1)}
        trainer.save_model()
    own = model.state_dict()
    model.load_state_dict(own | {name: value for name, value in denoiser.state_dict().items() if name in own})
    return record
