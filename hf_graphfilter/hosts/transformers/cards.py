"""The facts of a transformers model for its model card."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ...models import OWN
from ...text import quoted

_AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForImageClassification": "AutoModelForImageClassification",
}
_WITH_AUTO_CLASSES = ("transformers", "transformers_modules", "hf_graphfilter", "__main__")


def model_type(model: Any) -> str | None:
    """Return the ``model_type`` of the config, or None."""
    return getattr(model.config, "model_type", None)


def usage(model: Any, source: str) -> str:
    """Return Python code that loads a patched checkpoint, for its card."""
    name, module = type(model).__name__, type(model).__module__
    auto_class = next((a for suffix, a in _AUTO_CLASSES.items() if name.endswith(suffix)), None)
    # a class of one's own is not what AutoModel makes of the checkpoint
    is_custom = auto_class is None and module.partition(".")[0] not in _WITH_AUTO_CLASSES
    package, loader = (module, name) if is_custom else ("transformers", auto_class or "AutoModel")
    if auto_class is None and name in OWN and not name.endswith("Model"):  # no auto class has this head
        package, loader = "hf_graphfilter", name
    return f"""import hf_graphfilter  # pip install hf-graphfilter
from {package} import {loader}

model = {loader}.from_pretrained({quoted(source)})"""


def pipeline_tag(model: Any) -> str | None:
    """Return the task of the model as the Hub names it, or None."""
    from transformers.modelcard import TASK_MAPPING, _get_mapping_values
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_MAPPING_NAMES, MODEL_MAPPING_NAMES

    bare = {"image-feature-extraction": MODEL_FOR_IMAGE_MAPPING_NAMES, "feature-extraction": MODEL_MAPPING_NAMES}
    generating = "text2text-generation"  # before fill-mask, which Bart's class does as well
    tasks = {generating: TASK_MAPPING[generating], **TASK_MAPPING, **bare}.items()
    return next((task for task, classes in tasks if type(model).__name__ in _get_mapping_values(classes)), None)


def base_model(model: Any) -> str | None:
    """Return the id of the Hub repository that the model was loaded from, or None.

    A name counts only if its files are in the cache of the Hub; any other name may be a folder.
    """
    name = model.config._name_or_path
    try:
        cached = not os.path.exists(name) and try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return name if isinstance(cached, str) else None
