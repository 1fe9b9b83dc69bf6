"""The facts of a transformers model for its model card."""

from __future__ import annotations

import os
from typing import Any

import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ...filters.core.attached import class_of
from ...models import OWN
from ...text import quoted
from .auto_classes import auto_class_of


def model_type(model: Any) -> str | None:
    """Return the ``model_type`` of the config, or None."""
    return getattr(model.config, "model_type", None)


def usage(model: Any, source: str) -> str:
    """Return Python code that loads a patched checkpoint, for its card."""
    model_class = class_of(model)
    package, loader = "transformers", auto_class_of(model_class, model.config)
    if loader is None:
        package, loader = model_class.__module__, model_class.__name__
        if getattr(transformers, loader, None) is model_class:
            package = "transformers"
        elif loader in OWN:
            package = "hf_graphfilter"
        elif package.partition(".")[0] in ("__main__", "transformers_modules"):  # which cannot be imported from
            package, loader = "transformers", "AutoModel"
    return f"""import hf_graphfilter  # pip install hf-graphfilter
from {package} import {loader}

model = {loader}.from_pretrained({quoted(source)})"""


def pipeline_tag(model: Any) -> str | None:
    """Return the task of the model as the Hub names it, or None."""
    from transformers.modelcard import TASK_MAPPING, _get_mapping_values
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_MAPPING_NAMES, MODEL_MAPPING_NAMES

    base_models = {"image-feature-extraction": MODEL_FOR_IMAGE_MAPPING_NAMES, "feature-extraction": MODEL_MAPPING_NAMES}
    generating = "text2text-generation"  # before fill-mask, which Bart's class does as well
    tasks = {generating: TASK_MAPPING[generating], **TASK_MAPPING, **base_models}.items()
    return next((task for task, classes in tasks if class_of(model).__name__ in _get_mapping_values(classes)), None)


def base_model(model: Any) -> str | None:
    """Return the id of the Hub repository that the model was loaded from, or None.

    A name counts only if its files are in the cache of the Hub; any other name may be a folder.
    """
    name = model.config._name_or_path
    try:
        cached_path = not os.path.exists(name) and try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return name if isinstance(cached_path, str) else None
