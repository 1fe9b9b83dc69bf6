"""One fine-tuning run of the demo, and the checkpoint that it saves."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ..checkpoints.card import create_model_card
from ..devices import default_device
from ..errors import GraphFilterError
from ..patching.patch import patch_model
from .snippets import Snippets

LR = 2e-4


def build_model(source: str, variant: str, seed: int, K: int) -> PreTrainedModel:
    """Return the encoder with a new head, which is the same for every variant of a seed."""
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    return patch_model(model, "gfsa", K=K) if variant == "gfsa" else model


def quiet_arguments(folder: Path, seed: int, **options: Any) -> TrainingArguments:
    """Return arguments of one epoch that saves, logs and reports nothing."""
    settings: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "learning_rate": LR,
        "warmup_steps": 0.1,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": default_device().type == "cuda",
        "use_cpu": default_device().type == "cpu",
    }
    return TrainingArguments(output_dir=str(folder), seed=seed, **{**settings, **options})


class StepCallback(TrainerCallback):
    """Call ``advance`` after each step and each batch of the evaluation, and end the training where ``stop(step)``."""

    def __init__(self, advance: Callable[[], None], stop: Callable[[int], bool] = lambda step: False):
        self.advance, self.stop = advance, stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.advance()
        if self.stop(state.global_step):
            control.should_training_stop = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.advance()


def count_batches(args: TrainingArguments, train: Snippets, test: Snippets) -> int:
    """Return the number of batches of the training (at most one epoch) and of the evaluation after it, together."""
    steps = args.max_steps if args.max_steps > 0 else math.ceil(len(train) / args.train_batch_size)
    return steps + math.ceil(len(test) / args.eval_batch_size)


def fine_tune(
    model: PreTrainedModel,
    args: TrainingArguments,
    train: Snippets,
    test: Snippets,
    tokenizer: Any,
    optimizer: Any,
    callback: StepCallback,
) -> dict[str, float]:
    """Fine-tune, and return Pearson's r and accuracy on the held-out snippets, the training time and the steps."""
    collator = DataCollatorWithPadding(tokenizer)
    options = {"train_dataset": train, "data_collator": collator, "optimizer_cls_and_kwargs": optimizer}
    trainer: Any = Trainer(model, args, callbacks=[callback], **options)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    predictions = torch.as_tensor(trainer.predict(test).predictions).flatten()
    with contextlib.suppress(OSError):  # where it holds files of the user's
        Path(str(args.output_dir)).rmdir()  # the Trainer makes this folder, also to write nothing
    ratings = torch.tensor(test.ratings)
    return {
        "pearson": torch.corrcoef(torch.stack([predictions, ratings]))[0, 1].item(),
        "accuracy": ((predictions > 0) == (ratings > 0)).float().mean().item(),
        "seconds": seconds,
        "steps": trainer.state.global_step,
    }


@torch.no_grad()
def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: Any,
    checkpoint: Path,
    scores: dict[str, Any],
    test: Snippets,
    description: str,
) -> Path:
    """Save the model with a card, and raise an error if the loaded model gives other outputs.

    Args:
        model: the fine-tuned model.
        tokenizer: its tokenizer, saved beside it.
        checkpoint: folder to write.
        scores: what ``fine_tune`` returned for the model.
        test: the snippets that gave the scores; the first 32 are compared.
        description: Markdown for the card, about the training.
    """
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    common: dict[str, Any] = {
        "task_type": "text-classification",
        "dataset_type": "movie-snippets",
        "dataset_name": "movie-review snippets (vaderSentiment)",
        "dataset_split": f"{len(test)} held out",
    }
    evaluation = [
        EvalResult(**common, metric_type="pearsonr", metric_name="Pearson r", metric_value=scores["pearson"]),
        EvalResult(**common, metric_type="accuracy", metric_name="sign accuracy", metric_value=scores["accuracy"]),
    ]
    card = create_model_card(
        model,
        repo_id=str(checkpoint),
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        results=evaluation,
        language="en",
        license="apache-2.0",
        description=f"## Training\n\n{description}",
    )
    card.save(checkpoint / "README.md")
    reloaded = AutoModelForSequenceClassification.from_pretrained(checkpoint).to(model.device)
    batch: Any = DataCollatorWithPadding(tokenizer)(list(test[:32]))
    batch.to(model.device)
    # copies, as kernels round differently by alignment, and tensors from different files may be aligned differently
    if not torch.equal(*(copy.deepcopy(each)(**batch).logits for each in (model.eval(), reloaded))):
        raise GraphFilterError(f"{checkpoint} loads with other outputs than were saved")
    return checkpoint
