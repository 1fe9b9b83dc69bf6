"""Whole models, which ``import hf_graphfilter`` registers with the auto classes of transformers."""

from __future__ import annotations

import importlib

OWN = {  # the classes that a checkpoint may name, and their files
    "ConverterForMaskedLM": "converter",
    "ConverterForSequenceClassification": "converter",
    "ConverterModel": "converter",
    "GraphormerForGraphPrediction": "graphormer",
    "GraphormerModel": "graphormer",
}


def find_class(name: str) -> type | None:
    """Return the class of this package with a name that a checkpoint gives, or None.

    Example:
        >>> find_class("GraphormerModel").__name__
        'GraphormerModel'
    """
    if name not in OWN:
        return None
    model_class: type = getattr(importlib.import_module(f"{__name__}.{OWN[name]}.modeling"), name)
    return model_class
