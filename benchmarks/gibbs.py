"""Figure 3 of the Converter paper, a step by Chebyshev polynomials with each kernel: ``python benchmarks/gibbs.py``.

Writes docs/figures/gibbs.png and benchmarks/results/gibbs.csv: how far the polynomial goes beyond the step (the Gibbs
phenomenon), and from which x on it has nine tenths of its height (the price of the damping). Nothing is timed.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import torch
from measure import RESULTS, write

sys.path.append(str(Path(__file__).parents[1]))
from hf_graphfilter.analysis.plots import make_figure, save_figure
from hf_graphfilter.functional import gibbs_damping
from hf_graphfilter.functional.converter import Kernel

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "gibbs.png"
ORDERS = (8, 32, 128)
DRAWN = 32
COLUMNS = ["kernel", "K", "overshoot", "reaches"]


def approximate_step(kernel: str, K: int, x: torch.Tensor) -> torch.Tensor:
    """Return the damped Chebyshev expansion of the sign of ``x``: odd orders with 4 / (pi k), in alternating signs."""
    k = torch.arange(K + 1, dtype=torch.float64)
    coefficients = torch.where(k % 2 == 1, 4 / (torch.pi * k.clamp(min=1)) * (torch.pi * k / 2).sin(), 0.0)
    return (gibbs_damping(kernel, K) * coefficients * (k * x.arccos()[:, None]).cos()).sum(-1)


def measure(kernel: str, K: int) -> dict[str, object]:
    x = torch.linspace(0, 1, 40_001, dtype=torch.float64)
    p = approximate_step(kernel, K, x)
    high = (p >= 0.9).nonzero()
    reaches = f"{x[high[0, 0]]:.3f}" if len(high) else ""
    return {"kernel": kernel, "K": K, "overshoot": f"{max(0.0, p.max().item() - 1):.4f}", "reaches": reaches}


def draw() -> None:
    x = torch.linspace(-1, 1, 2_001, dtype=torch.float64)
    figure = make_figure(7.5, 3.6)
    axes = figure.subplots()
    for kernel in typing.get_args(Kernel):
        axes.plot(x, approximate_step(kernel, DRAWN, x), linewidth=1, label=kernel)
    axes.plot(x, x.sign(), color="black", linewidth=0.8, linestyle="--", label="step")
    axes.set(xlabel="x", ylabel=f"polynomial of order {DRAWN}", xlim=(-0.6, 0.6))
    axes.legend(frameon=False, fontsize=8, ncols=2)
    save_figure(figure, FIGURE)


def main() -> None:
    rows = [measure(kernel, K) for kernel in typing.get_args(Kernel) for K in ORDERS]
    for row in rows:
        print(*row.values())
    write(rows, RESULTS / "gibbs.csv", COLUMNS)
    draw()


if __name__ == "__main__":
    main()
