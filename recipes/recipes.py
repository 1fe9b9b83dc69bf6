"""Stands for the package where a recipe is run as a file: Python's path begins with this folder, not the one above."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.modules[__name__]
import recipes  # noqa: E402, F401  (the package: what was asked for)
