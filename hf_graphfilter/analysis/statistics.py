"""Means and deviations over any number of samples, in the memory of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """A quantity over samples: a number, or a curve of them.

    Attributes:
        mean, sd: float64 tensors of one shape; ``sd`` is 0 for one sample.
        samples: how many.
    """

    mean: Tensor
    sd: Tensor
    samples: int

    def to_dict(self) -> dict[str, object]:
        return {"mean": self.mean.tolist(), "sd": self.sd.tolist(), "samples": self.samples}


class Running:
    """Samples one by one (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, sample: Tensor | float) -> None:
        x = torch.as_tensor(sample).detach().to("cpu", torch.float64)
        self.count += 1
        off = x - self.mean
        self.mean = self.mean + off / self.count
        self.squares = self.squares + off * (x - self.mean)

    def band(self) -> Band:
        return Band(self.mean, (self.squares / max(self.count - 1, 1)).clamp(min=0).sqrt(), self.count)
