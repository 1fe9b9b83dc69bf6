"""What settings cannot be, said before any data is read."""

import math
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from hf_graphfilter import GraphFilterError

SMALLEST = 1e-12  # of what must be above 0
Ranges = dict[str, tuple[float, float]]
_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_AMOUNTS = ("num_train_epochs", "learning_rate", "weight_decay", "max_grad_norm", "dataloader_num_workers")
_RANGES: Ranges = dict.fromkeys(_COUNTS, (1, math.inf)) | dict.fromkeys(_AMOUNTS, (0, math.inf))
# With another value the Trainer does not pass all predictions to the function that computes the metrics.
_FIXED = {"batch_eval_metrics": False, "prediction_loss_only": False, "eval_do_concat_batches": True}


def check_ranges(settings: Any, ranges: Ranges) -> None:
    """Raise for a number outside its range (least, most)."""
    for name, (least, most) in ranges.items():
        if (value := getattr(settings, name)) is not None and not least <= value <= most:
            lower_bound = "above 0" if least == SMALLEST else f"at least {least:g}"
            limits = lower_bound if most == math.inf else f"from {least:g} to {most:g}"
            raise GraphFilterError(f"--{name} {value:g}: a number {limits} is needed")


def check_values(values: dict[str, Any]) -> None:
    """Raise for settings that do not go with each other."""
    seeds = values.get("seeds", [1])
    if not seeds or len(set(seeds)) < len(seeds):
        raise GraphFilterError(f"--seeds {seeds}: name each seed once, at least one")
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise GraphFilterError(f"--seeds {seeds}: a seed is from 0 to {2**32 - 1}")
    if values.get("seed") is not None and seeds != [values["seed"]]:
        raise GraphFilterError(f"--seed {values['seed']}: name seeds with --seeds {values['seed']}, a run for each")
    if values.get("push_to_hub") and len(seeds) > 1:
        raise GraphFilterError("--push_to_hub pushes one checkpoint: name one seed with --seeds")
    if values.get("push_to_hub") and values.get("save_strategy") == "no":
        raise GraphFilterError("--push_to_hub needs a saved checkpoint, but save_strategy is 'no'")
    if values.get("resume_from_checkpoint") is not None:
        raise GraphFilterError("a run resumes from its own last checkpoint: leave out --resume_from_checkpoint")
    if values.get("early_stopping_patience") is not None:
        if values.get("eval_strategy") == "no":
            raise GraphFilterError("--early_stopping_patience needs --eval_strategy epoch or steps")
        if not values.get("metric_for_best_model") and not values.get("load_best_model_at_end"):
            raise GraphFilterError("--early_stopping_patience needs --metric_for_best_model, loss or another")


def check_training(training: TrainingArguments) -> None:
    """Raise for what would otherwise end a run in a traceback of the Trainer, in some cases after all steps."""
    check_ranges(training, _RANGES)
    for name, value in _FIXED.items():
        if getattr(training, name) != value:
            raise GraphFilterError(f"--{name} {not value}: the recipes compute their metrics from all predictions")
    optimizer = torch.optim.SGD([torch.zeros(1)], training.learning_rate)
    schedule = {"num_warmup_steps": 0, "num_training_steps": 1}
    try:
        kwargs: Any = training.lr_scheduler_kwargs
        get_scheduler(training.lr_scheduler_type, optimizer, **schedule, scheduler_specific_kwargs=kwargs)
    except (TypeError, ValueError) as error:
        name = getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)
        raise GraphFilterError(f"--lr_scheduler_type {name}, --lr_scheduler_kwargs {kwargs}: {error}") from error
