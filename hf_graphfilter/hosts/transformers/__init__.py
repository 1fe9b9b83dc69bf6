"""The host for transformers: it works through the attention interface.

Nearly every modelling file computes attention through ``ALL_ATTENTION_FUNCTIONS.get_interface(
self.config._attn_implementation, eager)``. A patched module gets a shallow copy of its config, whose implementation
names our function. That function calls the implementation that the user chose, which the model's own config still
names. So masks, ``set_attn_implementation`` and the model's code stay as they are.

``checkpoints.transformers`` extends the saving and loading of ``PreTrainedModel``.
"""

import transformers.modeling_utils  # noqa: F401  # imports checkpoints.transformers, which needs the modules below whole

from .cards import base_model, model_type, pipeline_tag, usage
from .implementation import backend, kind
from .interface import leads_to_filter
from .records import read_record, write_record
from .routing import attach, detach
from .sites import find, relative_name, saved_names

LIBRARY = "transformers"

__all__ = [
    "LIBRARY",
    "attach",
    "backend",
    "kind",
    "base_model",
    "detach",
    "find",
    "leads_to_filter",
    "model_type",
    "pipeline_tag",
    "read_record",
    "relative_name",
    "saved_names",
    "usage",
    "write_record",
]
