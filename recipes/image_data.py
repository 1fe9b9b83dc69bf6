"""The images of the image recipe: folders or the Hub, and timm's loaders."""

import bisect
import copy
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_loader
from torch.utils.data import Subset

from hf_graphfilter import GraphFilterError
from recipes.arguments import ImageArguments
from recipes.checks import SMALLEST, check_ranges
from recipes.data import split_holdout
from recipes.errors import line, note

HUB = {"imagenet-1k": ("hfds/ILSVRC/imagenet-1k", 1000), "imagenet-100": ("hfds/clane9/imagenet-100", 100)}

SKIPPED = -1
CHOICES = {
    "bad_images": ("skip", "error"),
    "save_strategy": ("epoch", "no"),
    "precision": ("no", "bf16", "fp16"),
    "interpolation": ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming", "random"),
}
COUNTS = ("max_train_samples", "max_eval_samples", "max_steps", "batch_size", "device_batch_size", "eval_batch_size")
RATES = ("learning_rate", "filter_lr", "min_lr", "warmup_lr")
AMOUNTS = (*RATES, "workers", "warmup_epochs", "weight_decay", "color_jitter", "mixup", "cutmix")
SHARES = ("smoothing", "random_erasing", "drop_path", "drop", "crop_scale", "ema_decay", "layer_decay")
RANGES = (
    dict.fromkeys((*COUNTS, "logging_steps"), (1, math.inf))
    | {"epochs": (SMALLEST, math.inf)}
    | dict.fromkeys((*AMOUNTS, "repeated_augmentation", "max_grad_norm"), (0, math.inf))
    | dict.fromkeys(SHARES, (0, 1))
)
FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class Images(ImageDataset):
    """A folder of images in which files that cannot be read are an error, or skipped and counted.

    In training, the next image that is ``among`` stands for a skipped one. In evaluations it has the class ``SKIPPED``.
    """

    def __init__(self, root: Path, bad_images: str, class_map: Any = "", evaluated: bool = False):
        super().__init__(str(root), class_map=class_map, input_key=";".join(FORMATS))
        self.bad_images, self.evaluated = bad_images, evaluated
        self.bad = torch.zeros(len(self), dtype=torch.bool).share_memory_()  # over the processes of the loader
        self.among: Sequence[int] = range(len(self))

    def __getitem__(self, index: int) -> Any:
        file, target, *_ = self.reader[index]
        try:
            with file, Image.open(file) as opened:
                image = opened.convert("RGB")
        except Exception as error:  # whatever a damaged file leads to, or one with too many pixels
            name = self.filename(index, absolute=True)
            if self.bad_images == "error":
                raise GraphFilterError(
                    f"{name} cannot be read as an image; --bad_images skip leaves such out"
                ) from error
            self.bad[index] = True
            if self.bad.sum() > min(max(10, len(self) // 10), len(self.among) - 1):
                raise GraphFilterError(f"more than a tenth of the images cannot be read, {name} the last") from error
            if self.evaluated:
                image, target = Image.new("RGB", (8, 8)), SKIPPED
            else:
                return self[self.among[bisect.bisect(self.among, index) % len(self.among)]]
        return (image if self.transform is None else self.transform(image)), target


def check(args: ImageArguments) -> None:
    """Raise for settings that cannot be, before any data is read."""
    for name, choices in CHOICES.items():
        if (value := getattr(args, name)) not in choices:
            raise GraphFilterError(f"--{name} {value!r}: it is one of {', '.join(choices)}")
    check_ranges(args, RANGES)


def load(args: ImageArguments) -> tuple[Any, Any, list[str]]:
    """(training images, validation images, names of the classes)."""
    if args.data is None:
        if args.task not in HUB:
            raise GraphFilterError(f"--task {args.task} needs --data, a folder with train and val")
        source, classes = HUB[args.task]
        try:
            parts = [create_dataset(source, split=split) for split in ("train", "validation")]
        except Exception as error:  # whatever the library or the network raises, the way out is the same
            raise GraphFilterError(
                f"{source} cannot be loaded ({type(error).__name__}: {error}); check the connection, or name a folder "
                "with --data"
            ) from error
        return *parts, [str(i) for i in range(classes)]
    root = Path(args.data)
    if not root.is_dir():
        raise GraphFilterError(f"--data: there is no folder {root}")
    train = root / "train"
    val = next((root / name for name in ("val", "validation", "test") if (root / name).is_dir()), None)
    if not train.is_dir() or val is None:
        files = ", ".join(sorted(p.name for p in root.iterdir())[:12])
        raise GraphFilterError(f"--data: {root} needs folders train and val (or validation, test); it holds: {files}")
    classes, val_classes = (sorted(p.name for p in folder.iterdir() if p.is_dir()) for folder in (train, val))
    if unmatched := sorted(set(classes) ^ set(val_classes)):
        raise GraphFilterError(
            f"--data: {train} has {len(classes)} classes, {val} {len(val_classes)}; {unmatched[0]} is in one only"
        )
    if len(classes) < 2:
        raise GraphFilterError(f"--data: {train} needs two class folders at least, and has {len(classes)}")
    class_map = {name: i for i, name in enumerate(classes)}
    try:
        parts = Images(train, args.bad_images, class_map), Images(val, args.bad_images, class_map, evaluated=True)
    except RuntimeError as error:
        raise GraphFilterError(f"--data: {root}: {error}") from error
    for folder, images in zip((train, val), parts, strict=True):
        if empty := sorted({*range(len(classes))} - {target for _, target in images.reader.samples}):
            raise GraphFilterError(f"--data: {folder / classes[empty[0]]} holds no images")
        names = (name for _, _, file_names in os.walk(folder, followlinks=True) for name in file_names)
        if num_ignored := sum(name.lower().endswith(FORMATS) for name in names) - len(images):
            note(f"{folder}: {num_ignored} images lie in no class folder, or in folders below one, and are left out")
    return *parts, classes


class Part(Subset[Any]):
    """Some of the images; the loader hands it the transform of all."""

    transform = property(lambda self: self.dataset.transform, lambda self, to: setattr(self.dataset, "transform", to))


def hold_out(train: Any, share: float) -> tuple[Any, Any]:
    """Return (the rest of the training images, the share of them to evaluate on), each with a transform of its own."""
    train_indices, held_out_indices = split_holdout(len(train), share)
    evaluation = copy.copy(train)
    evaluation.evaluated = True
    train.among, evaluation.among = train_indices, held_out_indices
    return Part(train, train_indices), Part(evaluation, held_out_indices)


def cut(data: Any, limit: int | None) -> Any:
    """At most as many images as asked for, of all classes."""
    if limit is None or limit >= len(data):
        return data
    return Part(data, torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:limit].tolist())


def batch_of_device(args: ImageArguments, devices: int) -> int:
    """Return how many images one device takes at a time, so that a step has exactly as many as asked for."""
    size = max(1, min(args.device_batch_size, args.batch_size // devices))
    if args.batch_size % (size * devices):
        raise GraphFilterError(
            f"--batch_size {args.batch_size} cannot be made of {size} images at a time on {devices} "
            f"device{'s' if devices > 1 else ''}: give a --device_batch_size that divides it"
        )
    return size


def _keep_a_bit(transform: Any) -> None:
    """Let timm's posterising keep at least one bit: at its strongest it keeps none, an error in Pillow 13."""
    for part in getattr(transform, "transforms", ()):
        for op in itertools.chain(getattr(part, "ops", ()), *getattr(part, "policy", ())):
            if op.name.startswith("Posterize"):
                op.level_fn = functools.partial(_limit_bits, op.level_fn)


def _limit_bits(level_fn: Callable[..., tuple[int]], level: float, params: Any) -> tuple[int]:
    return (max(1, *level_fn(level, params)),)


def loaders(
    args: ImageArguments, accelerator: Accelerator, config: dict[str, Any], train: Any, val: Any
) -> tuple[Any, Any]:
    """Return timm's loaders; the training loop moves the images to the device."""
    distributed = accelerator.num_processes > 1
    shared_options = {name: config[name] for name in ("input_size", "mean", "std")}
    shared_options |= {"num_workers": args.workers, "use_prefetcher": False}
    shared_options["pin_memory"] = accelerator.device.type == "cuda"
    size = batch_of_device(args, accelerator.num_processes)
    if len(train) < args.batch_size:
        raise GraphFilterError(f"{len(train)} training images are less than a step's: give a smaller --batch_size")
    if (args.mixup or args.cutmix) and size % 2:
        raise GraphFilterError(
            f"--mixup and --cutmix take images by pairs, and {size} at a time are odd: give an even --device_batch_size"
        )
    try:
        training = create_loader(
            train,
            batch_size=size,
            is_training=True,
            no_aug=args.crop_scale == 1,
            scale=(args.crop_scale, 1.0),
            auto_augment=args.auto_augment or None,
            color_jitter=args.color_jitter,
            re_prob=args.random_erasing,
            re_mode="pixel",
            num_aug_repeats=args.repeated_augmentation if distributed else 0,  # its sampler needs several devices
            interpolation=args.interpolation,
            distributed=distributed,
            persistent_workers=False,  # new ones draw by the epoch's seed, also where a run resumes
            **shared_options,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise GraphFilterError(
            f"--auto_augment {args.auto_augment}: timm cannot make these transforms ({line(error)})"
        ) from error
    _keep_a_bit(training.dataset.transform)
    crop = {name: config[name] for name in ("crop_pct", "crop_mode", "interpolation") if name in config}
    shared_options["persistent_workers"] = args.workers > 0
    return training, create_loader(val, batch_size=args.eval_batch_size, **crop, **shared_options)
