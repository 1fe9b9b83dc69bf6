"""The device of this process, whatever its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def default_device() -> torch.device:
    """Return the accelerator that PyTorch found (CUDA, MPS, XPU, NPU ...), or the CPU.

    Example:
        >>> default_device().type in ("cpu", "cuda", "mps", "xpu", "npu")
        True
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what was asked of it, before a time is taken.

    Example:
        >>> wait_for(default_device())
    """
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def place(model: Any) -> tuple[Any, bool]:
    """Move a model to the device of this process, and return it with whether this process is the first.

    Under torchrun or ``accelerate launch`` it joins the other processes.
    """
    from accelerate import PartialState

    state = PartialState()
    return model.to(state.device), state.is_main_process
