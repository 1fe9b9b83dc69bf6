"""The tables of the documents, a module a subject; benchmarks/tables.py says which stands where."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # recipes
