"""The device of this process, whatever its kind, and which of several processes it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import GraphFilterError

if TYPE_CHECKING:
    import torch


_chosen: list[str] = []


def choose(name: str | None) -> None:
    """Compute on this device from now on; None leaves the choice to this module.

    Raises:
        GraphFilterError: PyTorch knows no such device, or does not find it.
    """
    _chosen.clear()
    if name is None:
        return
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch without CUDA
        raise GraphFilterError(f"--device {name}: {str(error).splitlines()[0]}") from error
    _chosen.append(name)


def default_device() -> torch.device:
    """Return the device that was chosen, the accelerator that PyTorch found (CUDA, MPS, XPU, NPU ...), or the CPU.

    Example:
        >>> default_device().type in ("cpu", "cuda", "mps", "xpu", "npu")
        True
    """
    import torch

    if _chosen:
        return torch.device(_chosen[0])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def process() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def is_first_process() -> bool:
    """Return whether this process is the one that writes."""
    return process()[0] == 0


def device_of(module: torch.nn.Module) -> Any:
    """Return the device on which a module computes, also if accelerate fetches its weights for that.

    Return None for a module on the meta device, which nothing fetches weights for.

    Example:
        >>> import torch
        >>> device_of(torch.nn.Linear(2, 2))
        device(type='cpu')
    """
    import torch

    weight_device = next(module.parameters(), torch.empty(0)).device
    if weight_device.type != "meta":
        return weight_device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(device) for device in devices if device is not None), None)


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
    return model.to(default_device() if _chosen else state.device), state.is_main_process
