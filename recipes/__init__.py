"""Trainer scripts with a graph filter in the attention."""

import sys
from importlib.util import find_spec
from pathlib import Path

EXTRAS = {"recipes": ("datasets", "evaluate", "scipy", "sklearn"), "vision": ("timm", "torchvision")}
EXTRAS["speech"] = ("jiwer", "soundfile")
# the names of the recipes, which records and results keep, and their files
SCRIPTS = {name: name for name in ("glue", "language_modeling", "sequences", "imagenet", "graphs", "speech")} | {
    "code": "source_code"
}


def check_extras(*extras: str) -> None:
    """End the program with one sentence where a library is missing, before any of them is imported."""
    for extra in extras:
        for module in EXTRAS[extra]:
            if find_spec(module) is None:
                program = Path(sys.argv[0]).name
                sys.exit(f"{program}: this recipe needs {module}: pip install 'hf-graphfilter[{extra}]'")
