"""The versions of packages."""

from __future__ import annotations

import importlib
from importlib import metadata


def version_of(package: str) -> str:
    """Return the version of a package; of one that runs without being installed, from a checkout, what it says itself.

    Example:
        >>> version_of("hf_graphfilter").count(".")
        2
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(importlib.import_module(package).__version__)
