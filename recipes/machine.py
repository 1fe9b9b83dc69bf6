"""What this machine can do, and which process of it writes."""

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available


def accelerated() -> bool:
    """Whether the Trainer finds anything else than the CPU."""
    return torch.accelerator.is_available() or is_torch_xla_available()


def bf16_pays(use_cpu: bool) -> bool:
    """Whether bf16 is at hand; a CPU without instructions for it takes many times as long as in float32."""
    if accelerated() and not use_cpu:
        return is_torch_bf16_gpu_available() or is_torch_xla_available()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def begin_peak_memory(device: torch.device) -> None:
    """Forget the peak so far. On a CPU that needs Linux: elsewhere the peak is that of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> float:
    """MB: allocated on the GPU, or else resident in this process, the libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 2**10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def is_main_process() -> bool:
    """Whether this is the process that writes, under torchrun or accelerate launch; without them it is."""
    return os.environ.get("RANK", "0") == "0"


def machine_name(arguments: Any) -> str:
    if torch.cuda.is_available() and not arguments.use_cpu:
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
