"""Check that a filter does everything that the package promises for filters: ``check_filter``.

It runs on tiny models with random weights, made here: an encoder, a causal decoder with grouped keys, an
encoder-decoder, a vision model and an ``nn.TransformerEncoder``. Nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..errors import GraphFilterError
from ..filters import FilterConfig, as_config
from . import start, use
from .trial import Check, CheckRow, FilterReport, Trial

__all__ = ["CheckRow", "FilterReport", "check_filter"]

CHECKS = [c for module in (start, use) for c in vars(module).values() if isinstance(c, Check)]


def check_filter(
    filter: str | FilterConfig,
    *,
    formula: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None,
    only: Collection[str] | None = None,
    raise_on_failure: bool = True,
    **options: Any,
) -> FilterReport:
    """Check a filter on tiny models in a few seconds: explicit matrices, decoding, files, copies and the compiler.

    The states of the random generators are restored afterwards. The cache of ``torch.compile`` is cleared.

    Args:
        filter: name of a registered filter, or its config object.
        formula: the filter as an explicit matrix, ``formula(A, coefficients) -> H``. A and H are (batch, heads, tokens,
            tokens) in float64; the coefficients are those that ``GraphFilter.coefficients`` returns. The check is that
            the filter computes ``H @ value``.
        only: names of the checks to run. ``config``, ``patching`` and ``forward`` always run, since all others build on
            them.
        raise_on_failure: whether to raise an error if a check fails.
        **options: options of the filter, if it is given by name.

    Returns:
        ``FilterReport``, with one row per check: passed, failed, or does not apply, and the reason.

    Raises:
        GraphFilterError: the filter, an option or a check is unknown, or checks failed (the message names all of them).

    Example:
        >>> report = check_filter("gfsa", K=2, only=["causality"])
        >>> report[-1]
        CheckRow(check='causality', outcome='passed', detail='')
    """
    config = as_config(filter, **options)
    if unknown := {*(only or ())} - {check.name for check in CHECKS}:
        raise GraphFilterError(f"no check {min(unknown)!r}; the checks are {', '.join(check.name for check in CHECKS)}")
    report, failed_check = FilterReport(), ""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        devices = range(torch.cuda.device_count())
        with torch.enable_grad(), torch.random.fork_rng(devices), tempfile.TemporaryDirectory() as folder:
            trial = Trial(config, formula, Path(folder))
            for check in CHECKS:
                if failed_check:
                    report.append(CheckRow(check.name, "does not apply", f"not run, since {failed_check} failed"))
                elif check.basic or only is None or check.name in only:
                    report.append(trial.run(check))
                    failed_check = check.name if check.basic and report[-1].outcome == "failed" else ""
    finally:
        if bars:
            logging.enable_progress_bar()
    if report.failures and raise_on_failure:
        failed = "; ".join(f"{row.check} ({row.detail})" for row in report.failures)
        count = f"{len(report.failures)} of {len(report)} checks"
        raise GraphFilterError(f"{type(config).__name__} fails {count}: {failed}")
    return report
