"""The metrics of the recipes, behind the interface of ``evaluate``, whose own are scripts to download."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
from scipy import stats
from sklearn import metrics

from hf_graphfilter.errors import needs

if TYPE_CHECKING:
    import evaluate


def correlation(measure: Callable[..., Any], references: Any, predictions: Any) -> float:
    """Return a correlation, 0 where one side is constant and none is defined."""
    constant = len(set(predictions)) < 2 or len(set(references)) < 2
    return 0.0 if constant else measure(predictions, references).statistic


def perplexity(nll: Any, tokens: Any) -> float:
    """Return exp of the mean negative log-likelihood per token, from sums over windows and their token counts."""
    total = math.fsum(tokens)
    try:
        return math.exp(math.fsum(nll) / total) if total else math.nan
    except OverflowError:  # of a model that diverged
        return math.inf


def errors(measure: str, references: Any, predictions: Any) -> float:
    """Return how many words (wer) or characters (cer) are wrong, as a share of those of the references."""
    with needs("speech", f"the metric {measure}"):
        import jiwer
    return float(getattr(jiwer, measure)(list(references), list(predictions)))


LABELS, NUMBERS = ("int64", "references", "predictions"), ("float64", "references", "predictions")
TEXTS = ("string", "references", "predictions")
# what each metric computes, and from what
METRICS: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "accuracy": (metrics.accuracy_score, LABELS),
    "f1": (lambda *labels: metrics.f1_score(*labels, zero_division=0), LABELS),  # of class 1
    "f1_macro": (lambda *labels: metrics.f1_score(*labels, average="macro", zero_division=0), LABELS),
    "matthews_correlation": (metrics.matthews_corrcoef, LABELS),
    "spearmanr": (lambda *numbers: correlation(stats.spearmanr, *numbers), NUMBERS),
    "pearson": (lambda *numbers: correlation(stats.pearsonr, *numbers), NUMBERS),
    "mae": (metrics.mean_absolute_error, NUMBERS),
    "rmse": (metrics.root_mean_squared_error, NUMBERS),
    "roc_auc": (metrics.roc_auc_score, NUMBERS),
    "wer": (partial(errors, "wer"), TEXTS),
    "cer": (partial(errors, "cer"), TEXTS),
    "perplexity": (perplexity, ("float64", "nll", "tokens")),
}


def load(name: str) -> evaluate.Metric:
    """Return a metric, as ``evaluate.load`` does; nothing is downloaded or written to a cache."""
    import evaluate  # takes seconds

    compute, (dtype, *columns) = METRICS[name]
    features = datasets.Features({column: datasets.Value(dtype) for column in columns})

    class Metric(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(description=name, citation="", features=features)

        def _compute(self, **values: Any) -> dict[str, float]:
            return {name: float(compute(*(values[column] for column in columns)))}

    return Metric(keep_in_memory=True)


def score(names: Iterable[str], predictions: Any, references: Any) -> dict[str, float]:
    """Return several metrics of the same predictions."""
    import evaluate

    return evaluate.combine([load(name) for name in names]).compute(predictions=predictions, references=references)


def several_labels(prediction: Any) -> dict[str, float]:
    """Return the share of rows with all labels right, and F1 over all labels (micro); for a Trainer."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    predicted, labels = logits > 0, prediction.label_ids > 0.5
    micro = metrics.f1_score(labels, predicted, average="micro", zero_division=0)
    return {"accuracy": float(metrics.accuracy_score(labels, predicted)), "f1": float(micro)}


def classification(names: Iterable[str], num_labels: int) -> Callable[[Any], dict[str, float]]:
    """Return the ``compute_metrics`` of a Trainer; that of a regression where there is one label."""

    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted = logits.squeeze(-1) if num_labels == 1 else logits.argmax(-1)
        return score(names, predicted, prediction.label_ids)

    return compute
