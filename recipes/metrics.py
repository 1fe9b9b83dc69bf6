"""Metrics as ``evaluate.Metric`` classes that need no download: ``evaluate.load`` fetches its scripts from the Hub."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import datasets
import evaluate
from scipy import stats
from sklearn import metrics as sklearn_metrics


class _Metric(evaluate.Metric):
    """Base: kept in memory, so that nothing is written to a cache."""

    columns: tuple[str, str] = ("predictions", "references")
    dtype = "int64"

    def __init__(self, **kwargs: Any):
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation="",
            inputs_description=f"{self.columns[0]} and {self.columns[1]}, lists of as many numbers ({self.dtype})",
            features=datasets.Features({name: datasets.Value(self.dtype) for name in self.columns}),
        )


class Accuracy(_Metric):
    """The part of the predictions that is right."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(sklearn_metrics.accuracy_score(references, predictions))}


class F1(_Metric):
    """F1 of class 1, the harmonic mean of precision and recall; 0 where class 1 is neither predicted nor true."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"f1": float(sklearn_metrics.f1_score(references, predictions, zero_division=0))}


class Matthews(_Metric):
    """Matthews correlation coefficient, from -1 to 1; 0 for a constant prediction."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"matthews_correlation": float(sklearn_metrics.matthews_corrcoef(references, predictions))}


class Correlation(_Metric):
    """Spearman's rank correlation and Pearson's correlation; 0 for a constant prediction, where neither is defined."""

    dtype = "float64"

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if len(set(predictions)) < 2 or len(set(references)) < 2:
            return {"spearmanr": 0.0, "pearson": 0.0}
        return {
            "spearmanr": float(stats.spearmanr(predictions, references).statistic),
            "pearson": float(stats.pearsonr(predictions, references).statistic),
        }


class Perplexity(_Metric):
    """exp of the mean negative log-likelihood a token, from the sums over windows of a text and their token counts.

    Windows that overlap (a sliding window with a stride) count every token once.
    """

    columns = ("nll", "tokens")
    dtype = "float64"

    def _compute(self, nll: Any, tokens: Any) -> dict[str, float]:
        total = math.fsum(tokens)
        try:
            return {"perplexity": math.exp(math.fsum(nll) / total) if total else math.nan}
        except OverflowError:  # of a model that diverged
            return {"perplexity": math.inf}


def classification(measures: Iterable[type[evaluate.Metric]], num_labels: int) -> Callable[[Any], dict[str, float]]:
    """``compute_metrics`` of a Trainer; a regression where there is one label."""

    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted = logits.squeeze(-1) if num_labels == 1 else logits.argmax(-1)
        return evaluate.combine([kind() for kind in measures]).compute(
            predictions=predicted, references=prediction.label_ids
        )

    return compute
