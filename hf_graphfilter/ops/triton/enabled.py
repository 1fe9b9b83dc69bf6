"""The choice between a kernel and the operations of PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["gfsa", "agf"]
SWITCH = "HF_GRAPHFILTER_KERNELS"
# (kernel, device as torch.cuda.get_device_name says it): the fewest tokens from which it won, forward and backward
FASTER: dict[tuple[Kernel, str], int] = {}


def chosen(kernel: Kernel, x: Tensor) -> bool:
    """Return whether to use ``kernel`` for x (batch, heads, tokens, features), which it must be able to take."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not (x.is_cuda or interpreted()):
        return False
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "1") or not _installed() or torch._C._are_functorch_transforms_active():
        return False
    if not x.is_cuda:
        return switch == "1"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return switch == "1" or x.shape[2] >= FASTER.get((kernel, torch.cuda.get_device_name(x.device)), 1 << 62)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def interpreted() -> bool:
    """Return whether Triton interprets kernels; it is read once, as Triton does."""
    return os.environ.get("TRITON_INTERPRET") == "1"
