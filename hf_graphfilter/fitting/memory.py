"""Measure the peak memory of a GPU or of this process."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import torch


def begin_peak_memory(device: torch.device) -> float | None:
    """Reset the peak of the memory, and return the memory in use now in MB.

    Return None where the peak cannot be reset; on a CPU that needs Linux.
    """
    if device.type != "cpu":
        with suppress(RuntimeError, NotImplementedError):  # raised by accelerators without such statistics
            torch.accelerator.reset_peak_memory_stats(device)
            return torch.accelerator.memory_allocated(device) / 2**20
        return None
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that the C library holds back would hide later use
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return peak_memory(device)
    return None


def peak_memory(device: torch.device) -> float:
    """Return the peak in MB: memory allocated on the GPU, or resident memory of this process with its libraries."""
    if device.type != "cpu":
        with suppress(RuntimeError, NotImplementedError):
            return torch.accelerator.max_memory_allocated(device) / 2**20
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 2**10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
