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

if __name__ == "__main__":  # run as a file: the repository, not this folder, whose code.py would hide Python's own
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from recipes import check_extras

    check_extras("recipes", "vision")

import json
import math
import multiprocessing
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image
from safetensors.torch import load_model, save_model
from timm.data import ImageDataset, Mixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Subset
from tqdm import tqdm

from hf_graphfilter import GraphFilterError, filter_parameters, filter_status, orthogonality_loss
from hf_graphfilter.training.callbacks import coefficient_values
from hf_graphfilter.training.optimizer import coefficient_ids
from recipes import common, image_models

TASKS = ("imagenet-1k", "imagenet-100", "cifar10", "tiny-imagenet", "folder")
PROGRESS = "progress.json"
HUB = {"imagenet-1k": "hfds/ILSVRC/imagenet-1k", "imagenet-100": "hfds/clane9/imagenet-100"}


@dataclass
class ImageArguments(common.FilterArguments):
    """The flags; the defaults are those of DeiT, which GFSA's DeiT models keep."""

    output_dir: str | None = None
    seed: int = 1
    pretrained: bool = field(default=False, metadata={"help": "Start from the pretrained weights."})
    checkpoint: str | None = field(default=None, metadata={"help": "Start from this file of weights (timm)."})
    model_options: list[str] = field(
        default_factory=list, metadata={"help": "Of timm.create_model (depth=24 ...) or the config of transformers."}
    )
    img_size: int | None = field(default=None, metadata={"help": "Pixels; the model's own if not given."})
    epochs: float = 300.0
    max_steps: int | None = field(default=None, metadata={"help": "Optimizer steps; instead of --epochs."})
    batch_size: int = field(default=1024, metadata={"help": "Images a step, over all devices."})
    device_batch_size: int = field(
        default=128, metadata={"help": "Images at a time on one device; the rest accumulates."}
    )
    eval_batch_size: int = 128
    learning_rate: float = 1e-3
    min_lr: float = 1e-5
    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    weight_decay: float = 0.05
    layer_decay: float | None = field(
        default=None, metadata={"help": "Factor of the learning rate from layer to layer."}
    )
    max_grad_norm: float | None = None
    drop_path: float = 0.1
    drop: float = 0.0
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.3
    random_erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    repeated_augmentation: int = field(default=3, metadata={"help": "Times an image is seen in an epoch; 0 for off."})
    crop_scale: float = field(
        default=0.08, metadata={"help": "Smallest part of an image that a crop keeps; 1: no crops and flips."}
    )
    interpolation: str = "bicubic"
    ema_decay: float = field(
        default=0.0, metadata={"help": "Of an average of the weights that is evaluated too; 0: none."}
    )
    precision: str = field(default="no", metadata={"help": "no, bf16 or fp16."})
    compile: bool = False
    workers: int = 8
    bad_images: str = field(default="skip", metadata={"help": "skip (and count) images that cannot be read, or error."})
    use_cpu: bool = False
    report_to: str = "none"
    logging_steps: int = 50
    save_strategy: str = field(default="epoch", metadata={"help": "epoch, or no: only the numbers."})
    disable_tqdm: bool = False
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_token: str | None = None
    hub_private_repo: bool | None = None


# ----------------------------------------------------------------------------------------------------------- data


class Images(ImageDataset):
    """A folder of images in which files that cannot be read are skipped and counted, or are an error."""

    def __init__(self, root: Path, bad_images: str, class_map: Any = ""):
        super().__init__(str(root), class_map=class_map)
        self.bad_images = bad_images
        self.skipped = multiprocessing.Value("i", 0)  # over the processes of the loader

    def __getitem__(self, index: int) -> Any:
        file, target, *_ = self.reader[index]
        try:
            with file, Image.open(file) as opened:
                image = opened.convert("RGB")
        except OSError as error:
            name = self.filename(index, absolute=True)
            if self.bad_images == "error":
                raise GraphFilterError(
                    f"{name} cannot be read as an image; --bad_images skip leaves such out"
                ) from error
            with self.skipped.get_lock():
                self.skipped.value += 1
                if self.skipped.value > max(10, len(self) // 10):
                    raise GraphFilterError(
                        f"more than a tenth of the images cannot be read, {name} the last"
                    ) from error
            return self[(index + 1) % len(self)]
        return (image if self.transform is None else self.transform(image)), target


def load(args: ImageArguments) -> tuple[Any, Any, list[str]]:
    """(training images, validation images, names of the classes)."""
    if args.data is None:
        if args.task not in HUB:
            raise GraphFilterError(f"--task {args.task} needs --data, a folder with train and val")
        try:
            parts = [create_dataset(HUB[args.task], split=split) for split in ("train", "validation")]
        except Exception as error:  # whatever the library or the network raises, the way out is the same
            raise GraphFilterError(
                f"{HUB[args.task]} cannot be loaded ({type(error).__name__}: {error}); check the connection, or name a "
                "folder with --data"
            ) from error
        return *parts, [str(i) for i in range({"imagenet-1k": 1000, "imagenet-100": 100}[args.task])]
    root = Path(args.data)
    if not root.is_dir():
        raise GraphFilterError(f"--data: there is no folder {root}")
    found = [
        next((root / n for n in names if (root / n).is_dir()), None)
        for names in (("train",), ("val", "validation", "test"))
    ]
    if None in found:
        there = ", ".join(sorted(p.name for p in root.iterdir())[:12])
        raise GraphFilterError(f"--data: {root} needs folders train and val (or validation, test); it holds: {there}")
    classes = [sorted(p.name for p in part.iterdir() if p.is_dir()) for part in found]  # type: ignore[union-attr]
    if classes[0] != classes[1]:
        odd = sorted(set(classes[0]) ^ set(classes[1]))
        raise GraphFilterError(
            f"--data: {found[0]} has {len(classes[0])} classes, {found[1]} {len(classes[1])}; {odd[0]} is in one only"
        )
    if not classes[0]:
        raise GraphFilterError(f"--data: {found[0]} holds no class folders")
    class_map = {name: i for i, name in enumerate(classes[0])}
    try:
        return *(Images(part, args.bad_images, class_map) for part in found), classes[0]  # type: ignore[return-value]
    except RuntimeError as error:
        raise GraphFilterError(f"--data: {root}: {error}") from error


class Part(Subset):  # type: ignore[type-arg]
    """Some of the images; the loader hands it the transform of all."""

    @property
    def transform(self) -> Any:
        return self.dataset.transform  # type: ignore[attr-defined]

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform  # type: ignore[attr-defined]


def cut(data: Any, limit: int | None) -> Any:
    """At most as many images as asked for, of all classes."""
    if limit is None or limit >= len(data):
        return data
    return Part(data, torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:limit].tolist())


# ------------------------------------------------------------------------------------------------------- training


def run(args: ImageArguments) -> dict[str, Any]:
    """One training run."""
    train_data, val_data, classes = load(args)
    model, config = image_models.build(args, classes)
    accelerator = accelerator_of(args)
    train_data = cut(train_data, args.max_train_samples)
    val_data = cut(val_data, args.max_eval_samples)
    train, val = loaders(args, accelerator, config, train_data, val_data)
    mix = None
    if args.mixup or args.cutmix:
        mix = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=len(classes))
    loss_of = SoftTargetCrossEntropy() if mix else nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    accumulate = max(1, args.batch_size // (args.device_batch_size * accelerator.num_processes))
    per_epoch = max(1, len(train) // accumulate)
    epochs = math.ceil(args.max_steps / per_epoch) if args.max_steps else math.ceil(args.epochs)
    total = args.max_steps or round(args.epochs * per_epoch)

    optimizer = optimizer_of(args, model)
    start = filter_status(model)
    added = sum(p.numel() for p in filter_parameters(model))
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
    begun, gamma = time.perf_counter(), [getattr(row.filter, "gamma", 0.0) for row in start]

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
                last = (number + 1) % accumulate == 0
                images, target = images.to(accelerator.device), target.to(accelerator.device)
                if mix is not None:
                    images, target = mix(images, target) if len(images) % 2 == 0 else mix(images[:-1], target[:-1])
                with nullcontext() if last else accelerator.no_sync(model):
                    with accelerator.autocast():
                        loss = loss_of(logits_of(running, images), target)
                    further = gamma[0] * orthogonality_loss(plain) if any(gamma) else 0.0
                    accelerator.backward((loss + further) / accumulate)
                if not last:
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
    coefficients, moved = common.movement(start, filter_status(plain))
    skipped = [getattr(getattr(d, "dataset", d), "skipped", None) for d in (train_data, val_data)]
    return {
        "metrics": metrics,
        "train_seconds": round(seconds, 1),
        "steps": step,
        "skipped_images": sum(s.value for s in skipped if s is not None),
        "filter_parameters": added,
        "coefficients": coefficients,
        "moved": moved,
    }


def optimizer_of(args: ImageArguments, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with timm's groups, and the filter's coefficients in one of their own."""
    own = coefficient_ids(model)
    groups = image_models.parameter_groups(args, model)
    coefficients = [p for group in groups for p in group["params"] if id(p) in own]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in own]
    groups = [group for group in groups if group["params"]]
    if coefficients:
        groups.append({"params": coefficients, "weight_decay": 0.0, "lr": args.filter_lr})
    return create_optimizer_v2(groups, opt="adamw", lr=args.learning_rate, weight_decay=args.weight_decay)


def accelerator_of(args: ImageArguments) -> Accelerator:
    if args.precision not in ("no", "bf16", "fp16"):
        raise GraphFilterError(f"--precision {args.precision!r}: use no, bf16 or fp16")
    log_with = None if args.report_to == "none" else args.report_to
    accelerator = Accelerator(
        mixed_precision=args.precision, cpu=args.use_cpu, log_with=log_with, project_dir=args.output_dir
    )
    if log_with:
        accelerator.init_trackers("hf_graphfilter")
    return accelerator


def loaders(
    args: ImageArguments, accelerator: Accelerator, config: dict[str, Any], train: Any, val: Any
) -> tuple[Any, Any]:
    """timm's loaders; the images are moved to the device in the loop."""
    several = accelerator.num_processes > 1
    common_options = {
        "input_size": config["input_size"],
        "mean": config["mean"],
        "std": config["std"],
        "num_workers": args.workers,
        "use_prefetcher": False,
        "pin_memory": accelerator.device.type == "cuda",
        "persistent_workers": args.workers > 0,
    }
    if len(train) < args.device_batch_size:
        raise GraphFilterError(
            f"{len(train)} training images are less than --device_batch_size {args.device_batch_size}"
        )
    training = create_loader(
        train,
        batch_size=args.device_batch_size,
        is_training=True,
        no_aug=args.crop_scale == 1,
        scale=(args.crop_scale, 1.0),
        auto_augment=args.auto_augment or None,
        color_jitter=args.color_jitter,
        re_prob=args.random_erasing,
        re_mode="pixel",
        num_aug_repeats=args.repeated_augmentation if several else 0,  # its sampler needs several devices
        interpolation=args.interpolation,
        distributed=several,
        **common_options,
    )
    crop = {"crop_pct": config["crop_pct"], "interpolation": config["interpolation"]}
    return training, create_loader(val, batch_size=args.eval_batch_size, **crop, **common_options)


def logits_of(model: Any, images: Tensor) -> Tensor:
    """A model of timm returns them, one of transformers has them among its outputs."""
    output = model(images)
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    """Top-1 and top-5 accuracy, and the cross-entropy."""
    model.eval()
    found = []
    for images, target in loader:
        with accelerator.autocast():
            logits = logits_of(model, images.to(accelerator.device)).float()
        target = target.to(accelerator.device)
        nll = nn.functional.cross_entropy(logits, target, reduction="none")
        hits = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
        found.append(accelerator.gather_for_metrics(torch.stack([hits[:, 0], hits.any(1), nll], 1).float()))
    top1, top5, loss = torch.cat(found).double().mean(0).tolist()
    return {"accuracy": top1, "top5": top5, "loss": loss}


def save_state(accelerator: Accelerator, folder: Path, average: ModelEmaV3 | None, step: int) -> None:
    """A checkpoint to go on from; its progress file is written last."""
    accelerator.wait_for_everyone()
    target = folder / f"checkpoint-{step}"
    accelerator.save_state(str(target))
    if accelerator.is_main_process:
        if average is not None:
            save_model(average.module, str(target / "average.safetensors"))
        common.write_json(target / PROGRESS, {"step": step})
        for old in folder.glob("checkpoint-*"):
            if old != target:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, folder: Path, average: ModelEmaV3 | None) -> int:
    """The step of the last whole checkpoint, loaded; 0 without one."""
    last = common.last_checkpoint(folder, PROGRESS)
    if last is None:
        return 0
    accelerator.load_state(last)
    if average is not None:
        load_model(average.module, str(Path(last) / "average.safetensors"))
    return int(json.loads((Path(last) / PROGRESS).read_text())["step"])


RECIPE = common.Recipe(
    name="imagenet",
    metrics=dict.fromkeys(TASKS, "validation/accuracy"),
    run=run,
    defaults={},
    description=__doc__,
    arguments=(ImageArguments,),
    smoke={
        **{"max_train_samples": 64, "max_eval_samples": 64, "max_steps": 4, "batch_size": 16, "device_batch_size": 16},
        **{"warmup_epochs": 0, "workers": 0, "save_strategy": "no", "logging_steps": 1},
    },
    load=image_models.load,
    task_type="image-classification",
)

if __name__ == "__main__":
    common.main(RECIPE)
