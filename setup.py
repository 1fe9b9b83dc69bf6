"""What pyproject.toml cannot say: the long description is README.md with links that work on a package index."""

import runpy
from pathlib import Path

from setuptools import setup

links = runpy.run_path(str(Path(__file__).parent / "docs" / "links.py"))

setup(long_description=links["long_description"](), long_description_content_type="text/markdown")
