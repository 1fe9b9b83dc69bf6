"""The verb ``env``: the facts about the machine that a bug report needs."""

from __future__ import annotations

import os
import platform
from importlib import metadata

PACKAGES = (
    *("hf-graphfilter", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy"),
    *("peft", "timm", "trl", "sentence-transformers", "triton", "datasets", "scipy", "rdkit", "onnxruntime"),
)


def describe_environment() -> list[tuple[str, str]]:
    """Return (name, value) pairs: Python, machine, devices, and the versions of the libraries at hand.

    Example:
        >>> dict(describe_environment())["hf-graphfilter"] == metadata.version("hf-graphfilter")
        True
    """
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not devices and torch.accelerator.is_available():
        devices = [str(torch.accelerator.current_accelerator())]
    rows = [
        ("Python", platform.python_version()),
        ("system", platform.platform()),
        ("processor", f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"),
        ("accelerators", ", ".join(devices) or "none"),
    ]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    settings = sorted(name for name in os.environ if name.startswith("HF_GRAPHFILTER_"))
    return [*rows, *((name, os.environ[name]) for name in settings)]


def env() -> None:
    """Print the versions of the libraries and the machine, for a bug report.

    [dim]hf-graphfilter env[/dim]
    """
    for name, value in describe_environment():
        print(f"- {name}: {value}")
