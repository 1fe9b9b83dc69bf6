"""Train or fine-tune an image classifier of timm or transformers, with a graph filter in its attention.

    python recipes/imagenet.py --config imagenet/deit-s-12.yaml --data IMAGENET --seeds 1
    accelerate launch recipes/imagenet.py --config imagenet/deit-s-12.yaml --data IMAGENET --precision bf16 --compile
    python recipes/imagenet.py --model deit_tiny_patch16_224 --pretrained --task folder --data my/images --epochs 5
    python recipes/imagenet.py --model facebook/deit-tiny-patch16-224 --pretrained --drop_path 0 --task folder --data X

Tasks: imagenet-1k, imagenet-100, cifar10, tiny-imagenet, and folder. Data comes from --data, a folder with one folder
of images a class in train and in val (or validation, test), or for the first two from the Hub. Models are timm's by
their names, and those of transformers by a folder or an id with a slash. Augmentation, schedule and mixing are timm's;
accelerate runs it on one or many devices. The score is the top-1 accuracy on the validation part.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes", "vision")

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from tqdm import tqdm

from hf_graphfilter import collect_penalties, filter_status
from hf_graphfilter.training.callbacks import coefficient_values
from recipes import image_models, runs
from recipes.arguments import ImageArguments
from recipes.image_data import cut, load, loaders
from recipes.image_training import accelerator_of, evaluate, logits_of, optimizer_of, resume, save_state
from recipes.settings import Recipe
from recipes.training import outcome

TASKS = ("imagenet-1k", "imagenet-100", "cifar10", "tiny-imagenet", "folder")


def run(args: ImageArguments) -> dict[str, Any]:
    """One training run."""
    train_data, val_data, classes = load(args)
    model, config = image_models.build(args, classes)
    accelerator = accelerator_of(args)
    train_data, val_data = cut(train_data, args.max_train_samples), cut(val_data, args.max_eval_samples)
    train, val = loaders(args, accelerator, config, train_data, val_data)
    mixing = {"mixup_alpha": args.mixup, "cutmix_alpha": args.cutmix, "label_smoothing": args.smoothing}
    mix = Mixup(**mixing, num_classes=len(classes)) if args.mixup or args.cutmix else None
    loss_of = SoftTargetCrossEntropy() if mix else nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    accumulate = max(1, args.batch_size // (args.device_batch_size * accelerator.num_processes))
    per_epoch = max(1, len(train) // accumulate)
    epochs = math.ceil(args.max_steps / per_epoch) if args.max_steps else math.ceil(args.epochs)
    total = args.max_steps or round(args.epochs * per_epoch)

    optimizer = optimizer_of(args, model)
    start = filter_status(model)
    average = ModelEmaV3(model, decay=args.ema_decay, use_warmup=True) if args.ema_decay else None
    schedule, _ = create_scheduler_v2(
        optimizer,
        num_epochs=epochs,
        min_lr=args.min_lr,
        warmup_lr=args.warmup_lr,
        warmup_epochs=round(args.warmup_epochs),
        step_on_epochs=False,
        updates_per_epoch=per_epoch,
    )
    plain, (model, optimizer, val) = model, accelerator.prepare(model, optimizer, val)
    if average is not None:
        average.to(accelerator.device)
    running = torch.compile(model) if args.compile else model
    folder = Path(args.output_dir or "runs/imagenet")
    step = resume(accelerator, folder, average)
    begun, penalised = time.perf_counter(), any(any(row.filter.penalties.values()) for row in start)

    with tqdm(total=total, initial=step, disable=args.disable_tqdm or not accelerator.is_main_process) as bar:
        for epoch in range(step // per_epoch, epochs):
            if hasattr(train.sampler, "set_epoch"):
                train.sampler.set_epoch(epoch)
            set_seed(args.seed + 1000 * epoch + accelerator.process_index)
            model.train()
            schedule.step_update(step)
            for number, (images, target) in enumerate(train):
                if step >= total or number >= per_epoch * accumulate:
                    break
                complete = (number + 1) % accumulate == 0
                images, target = images.to(accelerator.device), target.to(accelerator.device)
                if mix is not None:
                    images, target = mix(images, target) if len(images) % 2 == 0 else mix(images[:-1], target[:-1])
                with nullcontext() if complete else accelerator.no_sync(model):
                    asked = collect_penalties(plain) if penalised else nullcontext()
                    with accelerator.autocast(), asked as penalties:
                        loss = loss_of(logits_of(running, images), target)
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
                    average.update(plain, step=step)
                bar.update()
                if step % args.logging_steps == 0 and args.report_to != "none":
                    accelerator.log({"loss": loss.item(), **coefficient_values(plain)}, step=step)
            if args.save_strategy == "epoch":
                save_state(accelerator, folder, average, step)

    seconds = time.perf_counter() - begun
    metrics = {f"validation/{k}": v for k, v in evaluate(accelerator, model, val).items()}
    if average is not None:
        metrics |= {f"validation/ema_{k}": v for k, v in evaluate(accelerator, average.module, val).items()}
    if args.save_strategy != "no" and accelerator.is_main_process:
        image_models.save(args, average.module if average is not None else plain, folder)
    accelerator.end_training()
    skipped = [getattr(getattr(d, "dataset", d), "skipped", None) for d in (train_data, val_data)]
    return {**outcome(plain, start, metrics, seconds, step), "skipped_images": sum(n.value for n in skipped if n)}


RECIPE = Recipe(
    name="imagenet",
    metrics=dict.fromkeys(TASKS, "validation/accuracy"),
    run=run,
    defaults={},
    description=__doc__,
    arguments=(ImageArguments,),
    smoke={"batch_size": 16, "device_batch_size": 16, "warmup_epochs": 0, "workers": 0},
    load=image_models.load,
    task_type="image-classification",
)

if __name__ == "__main__":
    runs.main(RECIPE)
