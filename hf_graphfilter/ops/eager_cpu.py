"""A check whether code may read the values of a tensor and choose the form of a computation by them."""

from __future__ import annotations

import torch
from torch import Tensor


def on_plain_cpu(x: Tensor) -> bool:
    """Return whether code may branch on the values of ``x`` and choose another form for it than the model's.

    On the CPU that costs no synchronisation. No compiler, tracer or transform may be active.
    """
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )
