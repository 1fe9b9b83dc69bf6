"""Which precision this machine computes in without losing time."""

import torch
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available


def has_accelerator() -> bool:
    """Return whether the Trainer finds anything else than the CPU."""
    return torch.accelerator.is_available() or is_torch_xla_available()


def bf16_pays(use_cpu: bool) -> bool:
    """Return whether bf16 is at hand; a CPU without instructions for it takes many times as long as in float32."""
    if has_accelerator() and not use_cpu:
        return is_torch_bf16_gpu_available() or is_torch_xla_available()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
