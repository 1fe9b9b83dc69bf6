"""Train or fine-tune an image classifier of timm or transformers, with a graph filter in its attention.

    python recipes/imagenet.py --config imagenet/deit-s-12.yaml --data IMAGENET --seeds 1
    accelerate launch recipes/imagenet.py --config imagenet/deit-s-12.yaml --data IMAGENET --precision bf16 --compile
    python recipes/imagenet.py --model deit_tiny_patch16_224 --pretrained --task folder --data IMAGES \
        --epochs 5 --warmup_epochs 1 --batch_size 128
    python recipes/imagenet.py --model facebook/deit-tiny-patch16-224 --pretrained --drop_path 0 --task folder \
        --data IMAGES

Tasks: imagenet-1k, imagenet-100, cifar10, tiny-imagenet, and folder. Data comes from --data, a folder whose parts train
and val (or validation, test) have one folder of images per class; the first two tasks can also come from the Hub. A
name without a slash is a model of timm; a folder or an id with a slash is one of transformers. Augmentation, schedule
and mixing are timm's; accelerate runs the training on one or many devices. The score is the top-1 accuracy on the
validation part.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes", "vision")

import math
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from huggingface_hub.utils import tqdm
from safetensors.torch import load_model, save_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_graphfilter import GraphFilterError, collect_penalties, filter_status
from hf_graphfilter.training import BlendSchedule, set_blend
from hf_graphfilter.training.callbacks import coefficient_values
from hf_graphfilter.training.optimizer import coefficient_ids
from recipes import image_models, runs
from recipes.arguments import ImageArguments
from recipes.checkpoints import last_checkpoint
from recipes.errors import line, mark_refusals
from recipes.image_data import check, cut, hold_out, load, loaders
from recipes.records import write_json
from recipes.settings import Recipe
from recipes.training import has_blend, has_penalties, measure_outcome

TASKS = ("imagenet-1k", "imagenet-100", "cifar10", "tiny-imagenet", "folder")
# of transformers' models, besides biases and norms; timm's name their own
UNDECAYED = ("position_embeddings", "position_bias_table", "cls_token", "distillation_token", "mask_token")
PROGRESS = "progress.json"


def accelerator_of(args: ImageArguments) -> Accelerator:
    tracking = {"log_with": None if args.report_to == "none" else args.report_to, "project_dir": args.output_dir}
    AcceleratorState._reset_state()  # as the Trainer does: a run before may have had another precision
    try:
        accelerator = Accelerator(mixed_precision=args.precision, cpu=args.use_cpu, **tracking)
    except ValueError as error:
        raise GraphFilterError(f"--report_to {args.report_to}, --precision {args.precision}: {line(error)}") from error
    if tracking["log_with"]:
        accelerator.init_trackers("hf_graphfilter")
    return accelerator


def optimizer_of(args: ImageArguments, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with timm's groups and one for the filter's coefficients.

    Biases, norms, positions and tokens have no decay. The learning rate goes by layer if that is asked for.
    """
    if isinstance(model, PreTrainedModel):
        undecayed = {n for n, _ in model.named_parameters() if any(part in n for part in UNDECAYED)}
    else:
        undecayed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    options = {"weight_decay": args.weight_decay, "no_weight_decay_list": undecayed}
    if args.layer_decay is None:
        groups = param_groups_weight_decay(model, **options)
    else:
        groups = param_groups_layer_decay(model, **options, layer_decay=args.layer_decay)
    ids = coefficient_ids(model)
    coefficients = [p for group in groups for p in group["params"] if id(p) in ids]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in ids]
    groups = [group for group in groups if group["params"]]
    if coefficients:
        groups.append({"params": coefficients, "weight_decay": 0.0, "lr": args.filter_lr})
    return create_optimizer_v2(groups, opt="adamw", lr=args.learning_rate, weight_decay=args.weight_decay)


def logits_of(model: Any, images: Tensor) -> Tensor:
    """Return the logits: a model of timm returns them, one of transformers has them among its outputs."""
    with mark_refusals():
        output = model(images)
    return getattr(output, "logits", output)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    """Top-1 and top-5 accuracy, and the cross-entropy."""
    model.eval()
    batches = []
    for images, target in loader:
        with accelerator.autocast():
            logits = logits_of(model, images.to(accelerator.device)).float()
        target = target.to(accelerator.device)
        valid = target >= 0  # an image that cannot be read counts for nothing
        nll = nn.functional.cross_entropy(logits, target.clamp(min=0), reduction="none")
        hits = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
        batches.append(accelerator.gather_for_metrics(torch.stack([valid, hits[:, 0], hits.any(1), nll], 1).float()))
    rows = torch.cat(batches).double()
    top1, top5, loss = rows[rows[:, 0] > 0, 1:].mean(0).tolist()
    return {"accuracy": top1, "top5": top5, "loss": loss}


def save_state(accelerator: Accelerator, folder: Path, average: ModelEmaV3 | None, step: int) -> None:
    """Write a checkpoint to resume from; its progress file is written last."""
    accelerator.wait_for_everyone()
    target = folder / f"checkpoint-{step}"
    accelerator.save_state(str(target))
    if accelerator.is_main_process:
        if average is not None:
            save_model(average.module, str(target / "average.safetensors"))
        write_json(target / PROGRESS, {"step": step})
        for old in {*folder.glob("checkpoint-*")} - {target}:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, folder: Path, average: ModelEmaV3 | None) -> int:
    """Load the last whole checkpoint and return its step; 0 without one."""
    checkpoint = last_checkpoint(folder, PROGRESS, "step")
    if checkpoint is None:
        return 0
    accelerator.load_state(checkpoint)
    if average is not None:
        load_model(average.module, str(Path(checkpoint) / "average.safetensors"))
    return int(Path(checkpoint).name.partition("-")[2])


def run(args: ImageArguments) -> dict[str, Any]:
    """One training run."""
    train_data, val_data, classes = load(args)
    if args.held_out:
        train_data, val_data = hold_out(train_data, args.held_out)
    model, config = image_models.build(args, classes)
    accelerator = accelerator_of(args)
    train_data, val_data = cut(train_data, args.max_train_samples), cut(val_data, args.max_eval_samples)
    train, val = loaders(args, accelerator, config, train_data, val_data)
    mixing = {"mixup_alpha": args.mixup, "cutmix_alpha": args.cutmix, "label_smoothing": args.smoothing}
    mix = Mixup(**mixing, num_classes=len(classes)) if args.mixup or args.cutmix else None
    loss_of = SoftTargetCrossEntropy() if mix else nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    accumulate = args.batch_size // (train.batch_size * accelerator.num_processes)
    if len(train) < accumulate:  # the sampler of repeated augmentation rounds the number of images down
        raise GraphFilterError(
            f"the {len(train)} batches per epoch make no step: give --repeated_augmentation 0 or a smaller --batch_size"
        )
    per_epoch = len(train) // accumulate
    epochs = math.ceil(args.max_steps / per_epoch) if args.max_steps else math.ceil(args.epochs)
    warm_up, total = round(args.warmup_epochs * per_epoch), args.max_steps or round(args.epochs * per_epoch) or 1
    if total <= warm_up > 0:
        raise GraphFilterError(
            f"--warmup_epochs {args.warmup_epochs:g} leaves the learning rate rising to the end, after {epochs} epochs"
        )

    optimizer = optimizer_of(args, model)
    start = filter_status(model)
    average = ModelEmaV3(model, decay=args.ema_decay, use_warmup=True) if args.ema_decay else None
    schedule, _ = create_scheduler_v2(
        optimizer,
        num_epochs=total,  # of one step each: a run may end within an epoch
        min_lr=args.min_lr,
        warmup_lr=args.warmup_lr,
        warmup_epochs=warm_up,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    blend = BlendSchedule() if has_blend(start) else None
    unwrapped, (model, optimizer, val) = model, accelerator.prepare(model, optimizer, val)
    if average is not None:
        average.to(accelerator.device)
    forward_model = torch.compile(model) if args.compile else model
    folder = Path(args.output_dir or "runs/imagenet")
    step = resume(accelerator, folder, average)
    start_time = time.perf_counter()

    with tqdm(total=total, initial=step, disable=args.disable_tqdm or not accelerator.is_main_process) as bar:
        for epoch in range(step // per_epoch, epochs):
            if hasattr(train.sampler, "set_epoch"):
                train.sampler.set_epoch(100_000 * args.seed + epoch)  # of several processes: the seed of their order
            set_seed(args.seed + 1000 * epoch + accelerator.process_index)
            model.train()
            schedule.step_update(step)
            for number, (images, target) in enumerate(train):
                if step >= total or number >= per_epoch * accumulate:
                    break
                if blend is not None:
                    set_blend(unwrapped, blend.gate_at(step / total))
                complete = (number + 1) % accumulate == 0
                images, target = images.to(accelerator.device), target.to(accelerator.device)
                if mix is not None:
                    images, target = mix(images, target)
                with nullcontext() if complete else accelerator.no_sync(model):
                    collector = collect_penalties(unwrapped) if has_penalties(start) else nullcontext()
                    with accelerator.autocast(), collector as penalties:
                        loss = loss_of(logits_of(forward_model, images), target)
                    total_loss = loss + penalties.total() if penalties else loss
                    accelerator.backward(total_loss / accumulate)
                if not complete:
                    continue
                if args.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                schedule.step_update(step)
                if average is not None:
                    average.update(unwrapped, step=step)
                bar.update()
                if step % args.logging_steps == 0 and args.report_to != "none":
                    accelerator.log({"loss": loss.item(), **coefficient_values(unwrapped)}, step=step)
            if args.save_strategy == "epoch":
                save_state(accelerator, folder, average, step)

    seconds = time.perf_counter() - start_time
    saved_model, evaluated = (unwrapped, model) if average is None else (average.module, average.module)
    for trained in (unwrapped, saved_model) if blend is not None else ():
        set_blend(trained, blend.gate_at(step / total))  # an average of the gates lags behind
    metrics = {f"validation/{k}": v for k, v in evaluate(accelerator, evaluated, val).items()}
    if average is not None:
        metrics |= {f"validation/last_{k}": v for k, v in evaluate(accelerator, model, val).items()}
    if args.save_strategy != "no" and accelerator.is_main_process:
        image_models.save(args, saved_model, folder)
    accelerator.end_training()
    bad = [getattr(getattr(d, "dataset", d), "bad", None) for d in (train_data, val_data)]
    skipped = {id(n): int(n.sum()) for n in bad if n is not None}  # held out images are counted with the others
    return {**measure_outcome(unwrapped, start, metrics, seconds, step), "skipped_images": sum(skipped.values())}


RECIPE = Recipe(
    name="imagenet",
    metrics=dict.fromkeys(TASKS, "validation/accuracy"),
    run=run,
    defaults={},
    description=__doc__,
    arguments=(ImageArguments,),
    smoke={"batch_size": 16, "device_batch_size": 16, "warmup_epochs": 0, "workers": 0},
    load=image_models.load,
    check=check,
)

if __name__ == "__main__":
    runs.main(RECIPE)
