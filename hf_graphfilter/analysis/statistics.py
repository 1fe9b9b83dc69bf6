"""Mean and standard deviation over any number of samples, in the memory of one sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """The mean and standard deviation of a quantity over samples; the quantity is a number or a curve.

    Attributes:
        mean, sd: float64 tensors of one shape; ``sd`` is 0 for one sample.
        samples: number of samples.
    """

    mean: Tensor
    sd: Tensor
    samples: int

    def to_dict(self) -> dict[str, object]:
        """Return the numbers, ready for JSON."""
        return {"mean": self.mean.tolist(), "sd": self.sd.tolist(), "samples": self.samples}


class Running:
    """The running mean and deviation of samples (Welford's algorithm)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, sample: Tensor | float) -> None:
        """Add a sample."""
        x = torch.as_tensor(sample).detach().to("cpu", torch.float64)
        self.count += 1
        deviation = x - self.mean
        self.mean = self.mean + deviation / self.count
        self.squares = self.squares + deviation * (x - self.mean)

    def band(self) -> Band:
        """Return mean and standard deviation of the samples so far."""
        return Band(self.mean, (self.squares / max(self.count - 1, 1)).clamp(min=0).sqrt(), self.count)
