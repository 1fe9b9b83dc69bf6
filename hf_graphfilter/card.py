"""The model card of a patched checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from .errors import GraphFilterError
from .filters.base import foreign_modules
from .hosts import host_of
from .patching import filter_parameters, filter_status

TEMPLATE = Path(__file__).parent / "data" / "model_card.md"


def create_model_card(
    model: nn.Module,
    *,
    repo_id: str = "path/to/this/checkpoint",
    base_model: str | None = None,
    results: Sequence[EvalResult] = (),
    datasets: str | list[str] | None = None,
    metrics: list[str] | None = None,
    language: str | None = None,
    license: str | None = None,
    description: str = "",
) -> ModelCard:
    """The card of a patched model, with metadata that the Hub reads.

    Args:
        model: a patched model.
        repo_id: where it will be loaded from.
        base_model: Hub id of the model that was patched.
        results: evaluation results; their datasets and metrics are named in the metadata unless given.
        datasets, metrics, language, license: metadata of the Hub.
        description: Markdown, how it was trained.

    Returns:
        A ``huggingface_hub.ModelCard``: ``card.save(path)``, ``card.push_to_hub(repo_id)``.

    Raises:
        GraphFilterError: the model is not patched.
    """
    status = filter_status(model)
    if not status:
        raise GraphFilterError(f"{type(model).__name__} has no graph filter to describe; call patch_model first")
    names = sorted({row.filter.filter for row in status})
    results = list(results)
    host = host_of(model)
    data = ModelCardData(
        base_model=base_model,
        library_name=host.LIBRARY,
        tags=["graph-filter", *names, "hf_graphfilter"],
        datasets=datasets or sorted({r.dataset_type for r in results}) or None,
        metrics=metrics or sorted({r.metric_type for r in results}) or None,
        language=language,
        license=license,
        eval_results=results or None,
        model_name=repo_id.rsplit("/", 1)[-1] if results else None,
    )
    header, rows = status.table()
    foreign = foreign_modules(row.filter for row in status)
    return ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text(),
        title=repo_id.rsplit("/", 1)[-1],
        repo_id=repo_id,
        model_class=type(model).__name__,
        usage="".join(f"import {m}  # registers its filter\n" for m in foreign) + host.usage(model, repo_id),
        base_model=base_model,
        filters=", ".join(names),
        description=description.strip(),
        results_table=_results(results),
        coefficient_table=markdown_table(header, rows),
        added_parameters=sum(p.numel() for p in filter_parameters(model)),
        configuration=json.dumps(host.read_record(model), indent=2),
        citation="\n\n".join(dict.fromkeys(row.filter.citation for row in status if row.filter.citation)),
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A GitHub-flavoured Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _results(results: list[EvalResult]) -> str:
    if not results:
        return ""
    rows = [
        [r.dataset_name, r.dataset_split or "", r.metric_name or r.metric_type, f"{r.metric_value:.4f}"]
        for r in results
    ]
    return markdown_table(["data", "split", "metric", "value"], rows)
