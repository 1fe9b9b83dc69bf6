"""What the loop of the image recipe is made of: devices, optimizer, evaluation and checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_model, save_model
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from hf_graphfilter import GraphFilterError
from hf_graphfilter.training.optimizer import coefficient_ids
from recipes import image_models
from recipes.arguments import ImageArguments
from recipes.records import write_json
from recipes.training import last_checkpoint

PROGRESS = "progress.json"


def accelerator_of(args: ImageArguments) -> Accelerator:
    if args.precision not in ("no", "bf16", "fp16"):
        raise GraphFilterError(f"--precision {args.precision!r}: use no, bf16 or fp16")
    tracking = {"log_with": None if args.report_to == "none" else args.report_to, "project_dir": args.output_dir}
    accelerator = Accelerator(mixed_precision=args.precision, cpu=args.use_cpu, **tracking)
    if tracking["log_with"]:
        accelerator.init_trackers("hf_graphfilter")
    return accelerator


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


def logits_of(model: Any, images: Tensor) -> Tensor:
    """A model of timm returns them, one of transformers has them among its outputs."""
    output = model(images)
    return getattr(output, "logits", output)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    """Top-1 and top-5 accuracy, and the cross-entropy."""
    model.eval()
    measured = []
    for images, target in loader:
        with accelerator.autocast():
            logits = logits_of(model, images.to(accelerator.device)).float()
        target = target.to(accelerator.device)
        nll = nn.functional.cross_entropy(logits, target, reduction="none")
        hits = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
        measured.append(accelerator.gather_for_metrics(torch.stack([hits[:, 0], hits.any(1), nll], 1).float()))
    top1, top5, loss = torch.cat(measured).double().mean(0).tolist()
    return {"accuracy": top1, "top5": top5, "loss": loss}


def save_state(accelerator: Accelerator, folder: Path, average: ModelEmaV3 | None, step: int) -> None:
    """A checkpoint to go on from; its progress file is written last."""
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
    """The step of the last whole checkpoint, loaded; 0 without one."""
    checkpoint = last_checkpoint(folder, PROGRESS)
    if checkpoint is None:
        return 0
    accelerator.load_state(checkpoint)
    if average is not None:
        load_model(average.module, str(Path(checkpoint) / "average.safetensors"))
    return int(json.loads((Path(checkpoint) / PROGRESS).read_text())["step"])
