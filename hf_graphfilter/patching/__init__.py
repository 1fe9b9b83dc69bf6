"""Patch a model with a filter, undo it, and list what is patched."""

from .patch import patch_model, unpatch_model
from .restore import apply_record
from .status import FilterRow, FilterStatus, filter_parameters, filter_status

__all__ = [
    "FilterRow",
    "FilterStatus",
    "apply_record",
    "filter_parameters",
    "filter_status",
    "patch_model",
    "unpatch_model",
]
