"""Triton's interpreter, which runs kernels on the CPU."""

from __future__ import annotations

import functools
import os


@functools.cache
def interpreted() -> bool:
    """Return whether Triton interprets kernels; it is read once, as Triton does."""
    return os.environ.get("TRITON_INTERPRET") == "1"
