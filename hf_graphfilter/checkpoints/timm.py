"""Patched checkpoints of timm. Its own functions save them; loading is here, since timm has no hook for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from ..base_weights import remember_weights
from ..errors import GraphFilterError, needs, shown
from ..filters.attached import CHILD
from ..hosts import host_of
from ..hosts.base import check_values
from ..hosts.timm import RECORD, write_record
from ..patching import apply_record

WEIGHTS = "model.safetensors"


def load_timm_model(source: str | Path, **options: Any) -> nn.Module:
    """A patched timm model, from what ``timm.models.save_for_hf`` or ``push_to_hf_hub`` saved.

    Args:
        source: a folder, or the id of a Hub repository.
        **options: further arguments of ``timm.create_model`` (``drop_path_rate``, ``img_size`` ...).

    Returns:
        The model, patched, with its weights, in evaluation mode. An unpatched checkpoint is an error.

    Raises:
        GraphFilterError: nothing to load, no record of a filter, or weights that do not fit.

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
    except Exception as error:  # whatever a damaged or foreign file makes of the reading
        raise GraphFilterError(f"{source} cannot be loaded as a timm checkpoint: {shown(error)}") from error
    record = pretrained_cfg.pop(RECORD, None)
    if record is None:
        raise GraphFilterError(f"{source} holds no graph filter; load it with timm.create_model")
    options = {"num_classes": pretrained_cfg.get("num_classes"), **(args or {}), **options}
    try:
        model: Any = timm.create_model(name, pretrained=False, **options)
    except Exception as error:
        raise GraphFilterError(f"{source}: timm cannot build {shown(name)}: {shown(error)}") from error
    model.pretrained_cfg = {**model.pretrained_cfg, **{k: v for k, v in pretrained_cfg.items() if k != "source"}}
    write_record(model, record)
    apply_record(model, whole=True)
    own = model.state_dict()
    check_values({key: x for key, x in state.items() if f".{CHILD}." in key}, own, source)
    misfits = [key for key in state if key in own and state[key].shape != own[key].shape]
    if misfits:
        raise GraphFilterError(f"{source}: {len(misfits)} weights have another shape in {name} ({misfits[0]} ...)")
    misses = model.load_state_dict(state, strict=False)
    if wrong := [*misses.missing_keys, *misses.unexpected_keys]:
        raise GraphFilterError(f"{source}: {len(wrong)} weights do not fit {name} ({wrong[0]} ...); save it again")
    remember_weights(host_of(model), model, again=True)
    return model.eval()  # type: ignore[no-any-return]
