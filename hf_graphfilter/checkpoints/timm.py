"""Patched checkpoints of timm. Its own functions save them; this file loads them, since timm has no hook for that."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from ..errors import GraphFilterError, needs, shown
from ..filters.core.attached import CHILD, filters_of
from ..hosts import host_of
from ..hosts.timm import RECORD, write_record
from ..logs import log_filters
from ..patching.base_weights import remember_weights
from ..patching.restore import apply_record
from .values import check_values

WEIGHTS = "model.safetensors"
# arguments that make timm read or fetch other files, or that the caller chooses; model classes do not need them
_NEVER = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "device", "dtype"}
# entries of a pretrained_cfg that say where timm gets weights from, which may be pickles
_SOURCES = {"source", "url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "custom_load"}


def load_timm_model(source: str | Path, **options: Any) -> nn.Module:
    """Load a patched timm model that ``timm.models.save_for_hf`` or ``push_to_hf_hub`` saved.

    Args:
        source: a folder, or the id of a Hub repository.
        **options: further arguments of ``timm.create_model`` (``drop_path_rate``, ``img_size`` ...). They take
            precedence over those of the checkpoint, which may only hold arguments of the model's class.

    Returns:
        The patched model with its weights, in evaluation mode. An unpatched checkpoint is an error.

    Raises:
        GraphFilterError: there is nothing to load or no record of a filter, the architecture or its arguments are not
            those of a timm model, or the weights do not fit.

    Example:
        ``load_timm_model("me/deit-small-gfsa")``
    """
    with needs("vision", "a model of timm"):
        import timm
        from timm.models import load_model_config_from_hf

    try:
        folder = Path(source)
        if folder.is_dir():
            config = json.loads((folder / "config.json").read_text())
            pretrained_cfg, name, args = (
                config["pretrained_cfg"],
                config["architecture"],
                config.get("model_args") or {},
            )
            pretrained_cfg["num_classes"] = config.get("num_classes", pretrained_cfg.get("num_classes"))
            weights = folder / WEIGHTS
        else:
            from huggingface_hub import hf_hub_download

            pretrained_cfg, name, args = load_model_config_from_hf(str(source))
            weights = Path(hf_hub_download(str(source), WEIGHTS))
        state = load_file(weights)
    except Exception as error:  # a damaged or foreign file can raise anything
        raise GraphFilterError(f"{source} cannot be loaded as a timm checkpoint: {shown(error)}") from error
    record = pretrained_cfg.pop(RECORD, None)
    if record is None:
        raise GraphFilterError(f"{source} holds no graph filter; load it with timm.create_model")
    _check_arguments(source, name, args or {})
    options = {"num_classes": pretrained_cfg.get("num_classes"), **(args or {}), **options}
    try:
        model: Any = timm.create_model(name, pretrained=False, **options)
    except Exception as error:
        raise GraphFilterError(f"{source}: timm cannot build {shown(name)}: {shown(error)}") from error
    model.pretrained_cfg = {**model.pretrained_cfg, **{k: v for k, v in pretrained_cfg.items() if k not in _SOURCES}}
    write_record(model, record)
    apply_record(model, complete=True)
    model_state = model.state_dict()
    check_values({key: x for key, x in state.items() if f".{CHILD}." in key}, model_state, source)
    misfits = [key for key in state if key in model_state and state[key].shape != model_state[key].shape]
    if misfits:
        raise GraphFilterError(f"{source}: {len(misfits)} weights have another shape in {name} ({misfits[0]} ...)")
    incompatible_keys = model.load_state_dict(state, strict=False)
    if wrong := [*incompatible_keys.missing_keys, *incompatible_keys.unexpected_keys]:
        raise GraphFilterError(f"{source}: {len(wrong)} weights do not fit {name} ({wrong[0]} ...); save it again")
    remember_weights(host_of(model), model, again=True)
    log_filters("loaded", model, filters_of(model), source)
    return model.eval()  # type: ignore[no-any-return]


def _check_arguments(source: str | Path, name: object, args: object) -> None:
    """Raise an error unless a checkpoint names a timm model and arguments of its class; others may load pickles."""
    from timm.models import is_model, model_entrypoint

    if not isinstance(name, str) or not is_model(name) or set(name) & set(":/\\"):
        raise GraphFilterError(f"{source}: its config.json names {shown(name)}, which is no architecture of timm")
    module = sys.modules[model_entrypoint(name).__module__]
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    inits = {base.__dict__.get("__init__", object.__init__) for c in classes for base in c.__mro__}
    known = {argument for init in inits for argument in inspect.signature(init).parameters} - _NEVER
    if not isinstance(args, dict) or (unknown := [key for key in args if key not in known]):
        wrong_argument = shown(unknown[0] if isinstance(args, dict) else args)
        raise GraphFilterError(
            f"{source}: model_args of its config.json holds {wrong_argument}, which the class of {name} does not take: "
            "remove it, or pass it to load_timm_model if you trust it"
        )
