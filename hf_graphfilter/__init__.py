"""Graph filters in place of self-attention, for pretrained Hugging Face models.

    from hf_graphfilter import patch_model
    patch_model(model, "gfsa", K=3)        # in place; starts as the original attention

Importing the package is cheap (no torch) and changes nothing for models without a filter; it lets ``from_pretrained``
load patched checkpoints. What it exports is listed in ``__init__.pyi`` and imported when it is first asked for.
"""

import importlib
import os
from functools import partial

import lazy_loader

from ._on_import import when_imported

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _install() -> None:
    importlib.import_module(".checkpoints.transformers", __name__)
    if modules := os.environ.get("HF_GRAPHFILTER_IMPORT"):  # hf-graphfilter run --import
        from .filters import import_filters

        import_filters(modules.split(os.pathsep))


when_imported("transformers.modeling_utils", _install)
when_imported("accelerate.accelerator", lambda: importlib.import_module(".training.learning_rate", __name__))
when_imported("transformers.trainer", lambda: importlib.import_module(".training.callbacks", __name__))
when_imported("sentence_transformers", lambda: importlib.import_module(".checkpoints.readme", __name__).install())
when_imported("peft", lambda: importlib.import_module(".checkpoints.adapters", __name__).install())
for _model in ("converter", "graphormer"):
    when_imported(
        "transformers.models.auto.configuration_auto",
        partial(importlib.import_module, f".models.{_model}.configuration", __name__),
    )
    # our models import modeling_layers, which may itself be importing modeling_auto
    when_imported(
        "transformers.modeling_layers", partial(importlib.import_module, f".models.{_model}.modeling", __name__)
    )
when_imported("transformers.models.auto.modeling_auto", lambda: importlib.import_module("transformers.modeling_layers"))
