"""The choice between a kernel and the operations of PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from ...logs import logger
from .interpreter import interpreted

Kernel = Literal["combine", "gfsa", "agf"]
SWITCH = "HF_GRAPHFILTER_KERNELS"
OLDEST = (8, 0)  # compute capability that the kernels are compiled for
# The size from which a kernel was faster, forward and backward, by the least compute capability of the GPU. The size is
# the number of tokens; for combinations, the number of entries of a signal. Combinations read and write a tenth of what
# PyTorch's operations do, which is faster on any GPU unless it waits for launches. The size for AGF was measured on a
# GPU of capability 9.0 (H200).
FASTER: dict[Kernel, dict[tuple[int, int], int]] = {"combine": {OLDEST: 1 << 21}, "agf": {(9, 0): 512}}


def chosen(kernel: Kernel, x: Tensor) -> bool:
    """Return whether to use ``kernel`` for x (batch, heads, tokens, features), which it must be able to take."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not (x.is_cuda or interpreted()):
        return False
    switch = os.environ.get(SWITCH, "")
    if switch != "1" and (switch or kernel not in FASTER):
        return False
    if not _installed() or _is_watched():
        return False
    if not x.is_cuda:
        return switch == "1"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < OLDEST or torch.version.hip:
        return False
    if switch == "1":
        return True
    fewest = min((size for least, size in FASTER.get(kernel, {}).items() if capability >= least), default=1 << 62)
    return (x.numel() if kernel == "combine" else x.shape[2]) >= fewest and _launches(x.device.index)


def _is_watched() -> bool:
    """Return whether something intercepts PyTorch's operations (transforms, dispatch modes), which misses kernels."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch.autograd.forward_ad._current_level >= 0
    )


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _launches(device: int) -> bool:
    """Return whether a kernel can be launched. Triton needs a C compiler, which some images of PyTorch do not have."""
    from . import combine_kernel

    probe = torch.ones(1, 1, 1, 1, device=f"cuda:{device}")
    try:
        combine_kernel.combine([probe.view(1)], [probe])
    except Exception as error:  # of many kinds, of Triton's
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        logger.warning("No kernel of Triton can be launched, so filters take longer on this GPU: %s", reason)
        return False
    return True
