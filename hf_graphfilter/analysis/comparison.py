"""A paired comparison of two ways to train, over the same seeds; it needs the extra ``recipes`` (scipy)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import GraphFilterError, needs


@dataclass(frozen=True)
class PairedComparison:
    """The differences ``treated - baseline`` over the seeds, one difference per seed.

    Attributes:
        pairs: number of seeds.
        mean, sd: mean and standard deviation of the differences; ``sd`` is NaN for one pair.
        low, high: 95 % confidence interval of the mean (Student's t); NaN for one pair, and if all differences are
            equal, since their spread is then unknown.
        p: two-sided p-value of the sign-flip permutation test (exact up to 13 pairs, otherwise 10,000 draws); NaN for
            one pair. With n pairs it cannot be below 2 / 2^n: five seeds reach 0.0625 at best.
    """

    pairs: int
    mean: float
    sd: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{self.mean:+.4f} with one seed, which carries no claim"
        if math.isnan(self.low):
            return (
                f"{self.mean:+.4f} with each of {self.pairs} seeds, which gives no interval; sign-flip p = {self.p:.3g}"
            )
        verdict = (
            "the interval excludes zero" if self.low > 0 or self.high < 0 else "no difference that these seeds can show"
        )
        return (
            f"{self.mean:+.4f} over {self.pairs} seeds, 95 % interval [{self.low:+.4f}, {self.high:+.4f}], "
            f"sign-flip p = {self.p:.3g}: {verdict}"
        )

    def format(self, form: str = "+.4f") -> str:
        """Return the mean, with its interval where there is one, as text.

        Example:
            >>> paired_comparison([0.80, 0.82, 0.79], [0.81, 0.84, 0.80]).format("+.2f")
            '+0.01 [-0.00, +0.03]'
        """
        bounds = "" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.mean:{form}}{bounds}"


def paired_comparison(baseline: Sequence[float], treated: Sequence[float]) -> PairedComparison:
    """Compare two lists of results that have the same seeds in the same order.

    Args:
        baseline: results of the baseline, one per seed.
        treated: results of the runs that are compared with the baseline, one per seed.

    Raises:
        GraphFilterError: the lists are empty, differ in length, or hold a value that is not finite, or scipy is not
            installed.

    Example:
        >>> paired_comparison([0.80, 0.82, 0.79], [0.81, 0.84, 0.80]).mean.__round__(4)
        0.0133
    """
    with needs("recipes", "a paired comparison"):
        from scipy import stats

    if not baseline or len(baseline) != len(treated):
        raise GraphFilterError(
            "a paired comparison needs the same number of results of both kinds, at least one, got "
            f"{len(baseline)} and {len(treated)}"
        )
    differences = [float(b - a) for a, b in zip(baseline, treated, strict=True)]  # mean() truncates numpy integers
    if not all(map(math.isfinite, differences)):
        raise GraphFilterError(f"a paired comparison needs finite results, got the differences {differences}")
    mean, n = statistics.mean(differences), len(differences)
    if n == 1:
        return PairedComparison(1, mean, math.nan, math.nan, math.nan, math.nan)
    sd = statistics.stdev(differences)
    low = high = math.nan
    if sd > 1e-9 * max(map(abs, (*baseline, *treated))):
        low, high = map(float, stats.ttest_rel(treated, baseline).confidence_interval())
    test = stats.permutation_test(
        (differences,), statistics.mean, permutation_type="samples", vectorized=False, n_resamples=9999, rng=0
    )
    return PairedComparison(n, mean, sd, low, high, float(test.pvalue))


def mean_and_sd(values: Sequence[float], form: str = ".4f") -> str:
    """Return ``mean ± standard deviation`` as text.

    One value gives the mean alone. Runs that diverged have values that are not finite; these are left out and counted.

    Args:
        values: results, one per run.
        form: format of a number.

    Example:
        >>> mean_and_sd([0.5, 0.7, float("nan")], ".1f")
        '0.6 ± 0.1, 1 of 3 diverged'
    """
    finite = [value for value in values if math.isfinite(value)]
    divergence_note = f"{len(values) - len(finite)} of {len(values)} diverged" if len(finite) < len(values) else ""
    spread = f" ± {statistics.stdev(finite):{form}}" if len(finite) > 1 else ""
    mean_text = f"{statistics.mean(finite):{form}}{spread}" if finite else ""
    return ", ".join(filter(None, (mean_text, divergence_note)))
