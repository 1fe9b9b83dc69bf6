"""The models of the image recipe, of timm and of transformers: made, described to the loaders, saved and loaded."""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel, set_seed

from hf_graphfilter import GraphFilterError, load_timm_model
from hf_graphfilter.console import parse_options
from hf_graphfilter.errors import nearest
from recipes.arguments import ImageArguments
from recipes.errors import line
from recipes.models import load_model, loading_errors, patch

INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def build(args: ImageArguments, classes: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Return (the model, the same for every filter with the same seed, patched; timm's description of its input)."""
    set_seed(args.seed)
    make = _build_transformers if is_of_transformers(args.model) else _build_timm
    model, config = make(args, classes)
    patch(args, model)
    return model, config


def is_of_transformers(name: str) -> bool:
    """Return whether it is a folder or an id of the Hub; timm's names have neither a slash nor a config.json."""
    return Path(name, "config.json").is_file() or ("/" in name and ":" not in name)


def _build_timm(args: ImageArguments, classes: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    fields = parse_options(args.model_options)
    if "img_size" in fields:
        raise GraphFilterError(f"--model_options img_size={fields['img_size']}: use --img_size, the data follow it too")
    options = {"num_classes": len(classes), "drop_path_rate": args.drop_path}
    options |= dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), args.drop) if args.drop else {}
    options |= ({"img_size": args.img_size} if args.img_size else {}) | fields
    try:
        weights = {"pretrained": args.pretrained, "checkpoint_path": args.checkpoint or ""}
        model = timm.create_model(args.model, **weights, **options)
    except (RuntimeError, TypeError, ValueError, AssertionError, OSError) as error:
        hint = nearest(args.model, timm.list_models())
        raise GraphFilterError(f"timm cannot make {args.model}{hint} with {options}: {line(error)}") from error
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", (1, 1))
    if args.img_size and any(args.img_size % side for side in patch_size):
        raise GraphFilterError(
            f"--img_size {args.img_size}: {args.model} cuts images into patches of {patch_size[0]} pixels"
        )
    return model, resolve_data_config({"img_size": args.img_size}, model=model)


def _build_transformers(args: ImageArguments, classes: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    for name in ("checkpoint", "layer_decay"):
        if getattr(args, name) is not None:
            raise GraphFilterError(f"--{name} is for models of timm; {args.model} is one of transformers")
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    fields = {"drop_path_rate": args.drop_path, "hidden_dropout_prob": args.drop, **parse_options(args.model_options)}
    fields |= {"image_size": args.img_size} if args.img_size else {}
    with loading_errors(args.model):
        config = AutoConfig.from_pretrained(args.model, **names, dtype=torch.float32)  # as in models.py
        for name, value in fields.items():
            if not hasattr(config, name) and value:
                hint = "; use --drop_path 0" if name == "drop_path_rate" else ""
                raise GraphFilterError(f"the {config.model_type} config of {args.model} has no {name} ({value}){hint}")
            if args.pretrained and name == "image_size" and value != config.image_size:
                raise GraphFilterError(
                    f"--img_size {value}: the weights of {args.model} are for {config.image_size} pixels; leave it out"
                )
            setattr(config, name, value)
        if args.pretrained:
            model, report = AutoModelForImageClassification.from_pretrained(
                args.model, config=config, ignore_mismatched_sizes=True, output_loading_info=True
            )
            misfits = [n for n, old, new in report["mismatched_keys"] if new[0] != len(classes) or old[1:] != new[1:]]
            misfits += [n for n in report["missing_keys"] if n.startswith(f"{model.base_model_prefix}.")]
            if misfits:  # beyond the head, which is made for these classes
                raise GraphFilterError(
                    f"the weights of {args.model} do not fit --model_options {' '.join(args.model_options)}: "
                    f"{len(misfits)} of them would be random ({sorted(misfits)[0]} ...)"
                )
        else:
            model = AutoModelForImageClassification.from_config(config)
    processor = _load_processor(args.model)
    data_config = {
        "input_size": (3, config.image_size, config.image_size),
        "crop_pct": 1.0,
        "interpolation": INTERPOLATION.get(getattr(processor, "resample", None), "bicubic"),
        "mean": getattr(processor, "image_mean", None),
        "std": getattr(processor, "image_std", None),
    }
    return model, resolve_data_config(data_config)


def _load_processor(source: str) -> Any:
    """Return the image processor of a model, None if it has none."""
    try:
        return AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError):
        return None


def save(args: ImageArguments, model: nn.Module, folder: Path) -> None:
    """Write the checkpoint in the form of its library, the filter with it."""
    if not isinstance(model, PreTrainedModel):
        sizes = {**parse_options(args.model_options), **({"img_size": args.img_size} if args.img_size else {})}
        timm.models.save_for_hf(model, folder, safe_serialization=True, model_args=sizes or None)
        return
    model.save_pretrained(folder)
    if (processor := _load_processor(args.model)) is not None:
        side = model.config.image_size
        processor.size = {"height": side, "width": side}
        if getattr(processor, "crop_size", None):
            processor.crop_size = {"height": side, "width": side}
        processor.save_pretrained(folder)


def load(folder: Path) -> nn.Module:
    """Load a saved checkpoint, patched or not."""
    config = json.loads((folder / "config.json").read_text())
    if "architecture" not in config:
        return load_model(folder)
    if "hf_graphfilter" in config.get("pretrained_cfg", {}):
        return load_timm_model(folder)
    return timm.create_model(f"local-dir:{folder}", pretrained=True)
