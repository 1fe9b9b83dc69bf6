"""What this machine can do, and which process of it writes."""

import functools
import os
import platform
import subprocess
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


def is_main_process() -> bool:
    """Whether this is the process that writes, under torchrun or accelerate launch; without them it is."""
    return os.environ.get("RANK", "0") == "0"


def machine_name(arguments: Any) -> str:
    if torch.cuda.is_available() and not arguments.use_cpu:
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@functools.cache
def commit() -> str | None:
    """Of the checkout that the recipes are in, with ``-dirty`` where it was changed; None where there is none."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
