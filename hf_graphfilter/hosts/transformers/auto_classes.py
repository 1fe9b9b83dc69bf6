"""The auto classes of transformers that load a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

from transformers.models.auto import auto_factory, modeling_auto

# general auto classes; another one often names the task better (Bart is in the first two)
GENERAL = ("AutoModelForPreTraining", "AutoModelForMaskedLM", "AutoModelForMultimodalLM")


def auto_classes(config: Any) -> dict[str, Any]:
    """Return (name of the auto class -> model class) for all auto classes that load models of this config."""
    named = {name: getattr(value, "_model_mapping", None) for name, value in vars(modeling_auto).items()}
    return {
        name: auto_factory._get_model_class(config, mapping)
        for name, mapping in named.items()
        if name.startswith("AutoModel") and mapping is not None and type(config) in mapping
    }


def auto_class_of(model_class: type, config: Any) -> str | None:
    """Return the name of the auto class that makes this class of a checkpoint of this config, or None."""
    config = copy.copy(config)
    config.architectures = [model_class.__name__]
    names = [name for name, candidate in auto_classes(config).items() if candidate is model_class]
    code = {name: str(path) for name, path in (getattr(config, "auto_map", None) or {}).items()}
    names += [name for name, path in code.items() if path.rpartition(".")[2] == model_class.__name__]
    return min(names, key=lambda name: (name in GENERAL, name), default=None)
