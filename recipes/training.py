"""Training with the Trainer: the filter's own learning rate, what is measured, and how far the filter moved."""

import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import DatasetDict
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_graphfilter import (
    CoefficientCallback,
    GraphFilterError,
    RegularizerCallback,
    filter_optimizer,
    filter_parameters,
    filter_status,
)
from hf_graphfilter.filters import ReplacingConfig
from hf_graphfilter.fitting.memory import begin_peak_memory, peak_memory
from hf_graphfilter.patching.status import FilterStatus
from hf_graphfilter.training import BlendSchedule
from recipes.arguments import RecipeArguments
from recipes.checkpoints import has_ended, last_checkpoint
from recipes.errors import mark_refusals, name_missing_packages, note


class Clock(TrainerCallback):
    """Seconds of the training steps of each epoch, without the loading of data and evaluations."""

    def __init__(self) -> None:
        self.epochs: list[list[float]] = []
        self.whole = 0  # steps of an epoch

    def on_train_begin(self, args: Any, *rest: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self.whole = -(-len(train_dataloader) // args.gradient_accumulation_steps)

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.epochs.append([])

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs[-1].append(time.perf_counter() - self.begun)

    def costs(self) -> dict[str, float]:
        """Return the median of the whole epochs, not of those resumed or broken off; nothing if there are none."""
        complete = [sum(steps) for steps in self.epochs if steps and len(steps) == self.whole]
        return {"epoch_seconds": round(median(complete), 2)} if complete else {}


def fit(
    args: RecipeArguments,
    training: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    tokenizer: Any,
    data: DatasetDict,
    trainer_class: type[Trainer] = Trainer,
    mean_loss: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train from the last checkpoint in the folder, if there is one, evaluate the other parts of ``data``, and save.

    ``mean_loss``: whether the loss is the mean over the rows of one batch, not over those of a whole step. For a model
    with ``**kwargs`` the Trainer assumes the latter, and would scale the loss.
    """
    start = filter_status(model)
    options |= {"train_dataset": data["train"], "eval_dataset": data.get("validation"), "processing_class": tokenizer}
    kind, outputs = (getattr(model.config, name, None) for name in ("problem_type", "num_labels"))
    if training.label_smoothing_factor and (kind in ("regression", "multi_label_classification") or outputs == 1):
        raise GraphFilterError("--label_smoothing_factor is for classes, and the labels of this task are numbers")
    with name_missing_packages():
        trainer = make_trainer(args, training, model, trainer_class, **options)
    if mean_loss:
        trainer.model_accepts_loss_kwargs = False
    if args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
    clock = Clock()
    trainer.add_callback(clock)
    begin_peak_memory(training.device)
    start_time = time.perf_counter()
    try:
        with mark_refusals(), name_missing_packages():
            train(trainer, last_checkpoint(Path(training.output_dir)))
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise GraphFilterError(f"--metric_for_best_model: {error.args[0]}") from error
    except ZeroDivisionError as error:
        if training.lr_scheduler_type != "polynomial":
            raise
        raise GraphFilterError(
            f"--warmup_steps {training.warmup_steps:g} leaves no step after the warm-up: give --warmup_steps 0, or "
            "train for more steps"
        ) from error
    seconds = time.perf_counter() - start_time
    trainer.remove_callback(EarlyStoppingCallback)  # which would miss its metric in the evaluations of other parts
    training.logging_nan_inf_filter = False  # or evaluations would leave out the batches in which a model diverged
    costs = {"peak_mb": round(peak_memory(training.device)), **clock.costs()}
    metrics = {}
    for part in [name for name in data if name != "train"]:
        for key, value in trainer.evaluate(data[part], metric_key_prefix=part).items():
            name = key.removeprefix(f"{part}_")
            if name not in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch"):
                metrics[f"{part}/{name}"] = value
    if trainer.state.best_metric is not None and not training.load_best_model_at_end:
        metrics[f"validation/best_{training.metric_for_best_model}"] = trainer.state.best_metric
    if training.save_strategy != "no":
        trainer.save_model()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {**measure_outcome(model, start, metrics, seconds, trainer.state.global_step), **costs}


def make_trainer(
    args: RecipeArguments,
    training: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    trainer_class: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """Return an ordinary Trainer with an optimizer group for the filter, whose coefficients and losses are logged."""
    if training.n_gpu > 1:  # as DataParallel, which no record would show
        raise GraphFilterError(
            f"{training.n_gpu} GPUs in one process multiply the rows of a step: set CUDA_VISIBLE_DEVICES=0, or start "
            f"torchrun --nproc-per-node {training.n_gpu}"
        )
    trainer = trainer_class(model=model, args=training, **options)
    get_sampler, trainer_ref = (
        type(trainer)._get_train_sampler,
        weakref.ref(trainer),
    )  # no cycle: its model is freed with the trainer
    trainer._get_train_sampler = lambda *rows: seed_sampler(get_sampler(trainer_ref(), *rows), training, trainer_ref())
    if any(True for _ in filter_parameters(model)):
        trainer.add_callback(CoefficientCallback())
        # an attribute, since Seq2SeqTrainer does not take the argument
        trainer.optimizer_cls_and_kwargs = filter_optimizer(training, args.filter_lr)
    if has_penalties(filter_status(model)):
        trainer.add_callback(RegularizerCallback())
    if has_blend(filter_status(model)):
        trainer.add_callback(BlendSchedule())
    if training.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
    return trainer


class Order(LengthGroupedSampler):
    """Rows of similar length together in the batches of a step, and the steps in random order.

    transformers' sampler runs from long to short rows, again and again. A model whose target depends on the length
    follows it back and forth, and its errors are larger.

    The order depends on the seed and the epoch alone. With the common generator a model with more dropout would have
    another order from its second epoch on.
    """

    def __init__(self, like: LengthGroupedSampler, seed: int, processes: int = 1):
        # Processes take turns at the batches: those of one step must stay together, or short ones wait for long ones.
        super().__init__(like.batch_size * processes, lengths=like.lengths, generator=torch.Generator())
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(self.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        rows = list(super().__iter__())
        batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        num_full = len(rows) // self.batch_size
        # The batch with the longest row stays first, so that memory runs out at once; a smaller batch stays last.
        order = sorted(torch.randperm(num_full, generator=self.generator).tolist(), key=bool)
        return (row for i in [*order, *range(num_full, len(batches))] for row in batches[i])


class SetOrder(TrainerCallback):
    """Tells a sampler its epoch; accelerate does not where several processes resume within an epoch."""

    def __init__(self, sampler: Order):
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


def seed_sampler(sampler: Any, training: Seq2SeqTrainingArguments, trainer: Trainer) -> Any:
    """Return the Trainer's sampler, with a generator for itself where it has none."""
    if not isinstance(sampler, LengthGroupedSampler):
        return sampler
    seed = training.seed if training.data_seed is None else training.data_seed
    sampler = Order(sampler, seed, training.world_size)
    trainer.add_callback(SetOrder(sampler))
    return sampler


def has_penalties(status: FilterStatus) -> bool:
    """Return whether a filter declares a loss of its own with a weight."""
    return any(any(row.filter.penalties.values()) for row in status)


def has_blend(status: FilterStatus) -> bool:
    """Return whether a filter starts beside the attention, with a gate at 0 that training must carry to 1."""
    return any(isinstance(row.filter, ReplacingConfig) and row.filter.init == "blend" for row in status)


def measure_outcome(
    model: Any, start: FilterStatus, metrics: dict[str, float], seconds: float, steps: int
) -> dict[str, Any]:
    """Return what is recorded of a run that began at ``start``.

    Returns:
        ``metrics`` (``split/name`` to value), ``train_seconds`` (of a run that resumed, since then), ``steps``,
        ``filter_parameters``, ``coefficients`` (mean over heads, by patched layer) and ``moved`` (mean distance of each
        kind from its start).
    """
    coefficients: dict[str, list[float]] = {}
    distances: dict[str, list[float]] = {}
    for before, after in zip(start, filter_status(model), strict=True):
        for name, value in after.coefficients.items():
            coefficients.setdefault(name, []).append(round(value.mean().item(), 6))
            distances.setdefault(name, []).append((value - before.coefficients[name]).abs().mean().item())
    return {
        "metrics": metrics,
        "train_seconds": round(seconds, 1),
        "steps": steps,
        "filter_parameters": sum(p.numel() for p in filter_parameters(model)),
        "coefficients": coefficients,
        "moved": {name: round(sum(v) / len(v), 6) for name, v in distances.items()},
    }


def train(trainer: Trainer, checkpoint: str | None) -> Any:
    """Train from a checkpoint, if there is one. Where the run had come to its end, no step is added."""
    if checkpoint is not None and has_ended(Path(checkpoint)):
        trainer._run_epoch = lambda **kwargs: None  # the Trainer would do at least one step of an epoch that it begins
    elif checkpoint is not None and trainer.args.save_only_model:
        note(f"{checkpoint} holds no optimizer (--save_only_model): the run begins again")
        checkpoint = None
    return trainer.train(resume_from_checkpoint=checkpoint)
