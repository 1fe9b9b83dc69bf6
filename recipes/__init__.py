"""Trainer scripts with a graph filter in the attention."""

import sys
from pathlib import Path

from hf_graphfilter.errors import GraphFilterError, require

EXTRAS = {"recipes": ("datasets", "evaluate", "rich", "scipy", "sklearn", "yaml"), "vision": ("timm", "torchvision")}


def check_extras(*extras: str) -> None:
    """End the program with one sentence where a library is missing, before any of them is imported."""
    try:
        for extra in extras:
            for module in EXTRAS[extra]:
                require(module, extra, "this recipe")
    except GraphFilterError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
