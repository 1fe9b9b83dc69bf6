"""Synvolution against the parallel scan of its paper: ``python benchmarks/synvolution.py``, on a GPU if there is one.

plain: Eq. 8 with the parallel scan of Algorithm 1 (Converter, appendix A) in PyTorch; blocks:
``hf_graphfilter.functional.synvolution``. Both from the same angles, eigenvalues and values, one sequence, of 64
features, as the paper's models have, and of 768, all heads of a BERT; before anything is timed, results and gradients
are compared.

Both are timed in turn within a round, ratios are taken within a round, and medians over the rounds are reported; writes
benchmarks/results/synvolution-DEVICE.csv with percentiles and hardware.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from measure import PASSES, Benchmark, main
from torch import Tensor

from hf_graphfilter import functional

FEATURES = (64, 768)
LENGTHS = (1024, 4096, 16384)


class Scan(torch.autograd.Function):
    """Algorithm 1: ``y_t = a_t y_{t-1} + x_t``, a (batch, tokens), x (batch, tokens, features), y_0 (batch, features).

    Where the listing conjugates a second time, for the gradient of a complex a, it is corrected.
    """

    @staticmethod
    def expand(a: Tensor, x: Tensor) -> None:
        if a.shape[1] == 1:
            return
        even = a.shape[1] // 2 * 2
        a_, x_ = (t[:, :even].unflatten(1, (-1, 2)) for t in (a, x))
        x_[:, :, 1].add_(a_[:, :, 1] * x_[:, :, 0])
        a_[:, :, 1].mul_(a_[:, :, 0])
        Scan.expand(a_[:, :, 1], x_[:, :, 1])
        x_[:, 1:, 0].add_(a_[:, 1:, 0] * x_[:, :-1, 1])
        a_[:, 1:, 0].mul_(a_[:, :-1, 1])
        if even < a.shape[1]:
            x[:, -1].add_(a[:, -1] * x[:, -2])
            a[:, -1].mul_(a[:, -2])

    @staticmethod
    def accumulate(a: Tensor, x: Tensor) -> None:
        """``x_t += conj(a_{t+1}) x_{t+1}``, from the end."""
        if x.shape[1] == 1:
            return
        even = x.shape[1] // 2 * 2
        a_, x_ = (t[:, -even:].unflatten(1, (-1, 2)) for t in (a, x))
        x_[:, :, 0].add_(a_[:, :, 1].conj() * x_[:, :, 1])
        b = a_[:, :, 0].clone()
        b[:, 1:].mul_(a_[:, :-1, 1])
        Scan.accumulate(b, x_[:, :, 0])
        x_[:, :-1, 1].add_(a_[:, 1:, 0].conj() * x_[:, 1:, 0])
        if even < x.shape[1]:
            x[:, 0].add_(a[:, 1].conj() * x[:, 1])

    @staticmethod
    def forward(ctx, a: Tensor, x: Tensor, y_0: Tensor) -> Tensor:
        ctx.a, ctx.y_0 = a[:, :, None].clone(), y_0[:, None, :].clone()
        ctx.a_star, ctx.x_star = ctx.a.clone(), x.clone()
        Scan.expand(ctx.a_star, ctx.x_star)
        return ctx.a_star * ctx.y_0 + ctx.x_star

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = grad * ctx.a_star.conj()
        r = grad.clone()
        Scan.accumulate(ctx.a.clone(), r)
        q = ctx.y_0.expand_as(ctx.x_star).clone()
        q[:, 1:].mul_(ctx.a_star[:, :-1]).add_(ctx.x_star[:, :-1])
        return (q.conj() * r).sum(-1), r, u.sum(1)


def rotations(angles: Tensor) -> Tensor:
    """Eq. 6: (batch, 3, n) to (batch, n, 2, 2)."""
    alpha, beta, gamma = (angles / 2).unbind(1)
    c = gamma.cos() * torch.exp(1j * (alpha + beta))
    s = gamma.sin() * torch.exp(1j * (alpha - beta))
    return torch.stack([c.conj(), -s, s.conj(), c], -1).unflatten(-1, (2, 2))


def downward(cells: Tensor, x: Tensor) -> Tensor:
    """``G_{N-1} ... G_1 x`` as in Algorithm 2: a scan, and what every rotation makes of its two tokens."""
    (g_ii, g_ij), (g_ji, g_jj) = ((entry[..., None] for entry in row.unbind(-1)) for row in cells.unbind(-2))
    h = torch.cat([x[:, :1], Scan.apply(g_ji[..., 0], g_jj * x[:, 1:], x[:, 0])], 1)
    return torch.cat([g_ii * h[:, :-1] + g_ij * x[:, 1:], h[:, -1:]], 1)


def upward(cells: Tensor, x: Tensor) -> Tensor:
    return downward(cells.flip(1, 2, 3), x.flip(1)).flip(1)


def scan_twice(value: Tensor, eigenvalues: Tensor, lower: Tensor, upper: Tensor, phase: Tensor) -> Tensor:
    """Eq. 8."""
    low, up, turn = rotations(lower), rotations(upper), torch.exp(1j * phase)[..., None]
    x = turn * downward(low, upward(up, value.to(turn.dtype)))
    x = turn.conj() * torch.exp(1j * eigenvalues)[..., None] * x
    return downward(up.mH, upward(low.mH, x))


FORMS = {"plain": scan_twice, "blocks": functional.synvolution}


def inputs(n: int, features: int, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (1, n, features), (1, n), (1, 3, n - 1), (1, 3, n - 1), (1, n)
    return [torch.randn(shape, device=device, generator=generator).requires_grad_() for shape in shapes]


def call(form: str, n: int, features: int, device: str, backward: bool) -> Callable[[], list[Tensor]]:
    """One call of a form: its result, or the gradients."""
    tensors = inputs(n, features, device)

    def run() -> list[Tensor]:
        if backward:
            out = FORMS[form](*tensors)
            return list(torch.autograd.grad(out.real.square().sum(), tensors))
        with torch.no_grad():
            return [FORMS[form](*tensors)]

    return run


def time_scan(benchmark: Benchmark) -> Iterator[list[dict]]:
    for backward, features, n in itertools.product((False, True), FEATURES, benchmark.lengths):
        calls = {form: call(form, n, features, benchmark.device, backward) for form in FORMS}
        for result, expected in zip(calls["blocks"](), calls["plain"](), strict=True):
            assert (result - expected).abs().max() <= 1e-3 * max(1.0, float(expected.abs().max()))
        yield benchmark.time(calls, f"{features} features", n, False, PASSES[backward])


if __name__ == "__main__":
    main("synvolution", __doc__, {"scan": time_scan}, LENGTHS, file="synvolution-{device}")
