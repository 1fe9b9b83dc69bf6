"""The model card of a patched checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from torch import nn
from transformers import TrainingArguments

from ..errors import GraphFilterError
from ..filters.core.attached import class_of, filters_of, patched_modules
from ..filters.core.build import foreign_modules
from ..filters.core.overview import summary
from ..filters.core.record import group_by_config
from ..hosts import Host, encoder_of, host_of, own_record, unwrapped
from ..packages import version_of
from ..patching.status import FilterStatus, filter_parameters, filter_status
from ..tables import markdown_table
from ..text import markdown_text, quoted
from .copies import holds_filters
from .evaluations import read_evaluations
from .filter_card import FIGURES, SHOWN, FilterCard, Seen

HYPERPARAMETERS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("label_smoothing_factor", "bf16", "fp16", "seed"),
)


def create_model_card(
    model: nn.Module,
    *,
    repo_id: str = "path/to/this/checkpoint",
    base_model: str | None = None,
    results: Sequence[EvalResult] | str | os.PathLike[str] = (),
    datasets: str | list[str] | None = None,
    metrics: list[str] | None = None,
    language: str | None = None,
    license: str | None = None,
    description: str = "",
    training: Mapping[str, Any] | TrainingArguments | None = None,
    report: Seen | None = None,
    coefficients: bool = True,
    filter_only: bool = False,
) -> FilterCard:
    """Return the model card of a patched model, with metadata that the Hub reads.

    Args:
        model: a patched model, also within a PEFT model or a ``SentenceTransformer``.
        repo_id: the Hub id or path that the model will be loaded from.
        base_model: the Hub id of the model that was patched. Default: the repository that it was loaded from.
        results: evaluation results, or a file or folder of them that lm-evaluation-harness or MTEB wrote (standard
            errors are left out). Their datasets and metrics go into the metadata, unless ``datasets`` and ``metrics``
            are given.
        datasets, metrics, language, license: metadata for the Hub.
        description: Markdown text that says how the model was trained.
        training: hyper-parameters by name, or the arguments of the Trainer.
        report: a result of ``analysis.report``; the card shows its findings and three of its figures.
        coefficients: whether the card has a table of coefficients. If the model is sharded, all processes must then
            call this function.
        filter_only: whether the card is for the files of ``save_filter``, which hold no weights of the base.

    Returns:
        The card, a ``huggingface_hub.ModelCard`` with the methods ``save(path)`` and ``push_to_hub(repo_id)``. Both
        replace only a README that this package wrote, unless ``force=True``, and keep the results in it.

    Raises:
        GraphFilterError: the model is not patched, or there are no results in the file or folder.
    """
    inner = unwrapped(model)
    results = read_evaluations(results) if isinstance(results, str | os.PathLike) else list(results)
    if not (filters := {name: graph_filter.config for name, graph_filter in filters_of(inner)}):
        raise GraphFilterError(
            f"{type(model).__name__} has no graph filter to describe; call patch_model first (hf-graphfilter patch)"
        )
    status = filter_status(model) if coefficients else FilterStatus()
    configs = {config.filter: type(config) for config in filters.values()}
    host = host_of(inner)
    base_model = base_model or host.base_model(inner)
    base_model = None if base_model == repo_id else base_model
    library, task, usage = _describe_loading(model, host, repo_id, base_model)
    if filter_only:
        usage = _describe_filter_file(host, inner, repo_id, base_model)
    name = repo_id.rstrip("/").rsplit("/", 1)[-1]
    relation = (
        {"base_model_relation": "adapter" if filter_only or library == "peft" else "finetune"} if base_model else {}
    )
    data = ModelCardData(
        base_model=base_model,
        **relation,  # type: ignore[arg-type]
        library_name=library,
        pipeline_tag=task,
        tags=["graph-filter", *sorted(configs), "hf_graphfilter"],
        datasets=datasets or sorted({r.dataset_type for r in results}) or None,
        metrics=metrics or sorted({r.metric_type for r in results}) or None,
        language=language,
        license=license,
        eval_results=results or None,
        model_name=name if results else None,
    )
    modules = foreign_modules(filters.values())
    package = library.removeprefix("py")  # the Hub says pytorch
    packages = dict.fromkeys(["hf_graphfilter", package, "transformers", "torch"])
    table = [values for row in status for values in row.coefficients.values()]
    # a model whose parts were patched separately has no record of its own
    record = own_record(host, inner) if host.read_record(inner) else {"filters": group_by_config(filters.items())}
    fields = {
        "title": markdown_text(name),
        "model_class": class_of(inner).__name__,
        "address": package_address(),
        "filters": "\n".join(f"- `{n}`: {summary(c)}".removesuffix(": ") for n, c in sorted(configs.items())),
        "adapter": library == "peft",
        "filter_only": filter_only,
        "own_model": class_of(inner).__module__.startswith("hf_graphfilter."),
        "usage": "\n".join([*(f"import {m}  # registers its filter" for m in modules), usage]),
        "description": "\n\n".join(filter(None, [description.strip(), _describe_report(report)])),
        "training_table": _tabulate_training(training),
        "coefficient_table": markdown_table(*status.table(), escape=True) if table else "",
        "per_head": any(values.numel() > 1 for values in table),
        "added_parameters": sum(p.numel() for p in filter_parameters(inner)),
        "configuration": json.dumps(record, indent=2),
        "versions": ", ".join(f"{package} {version_of(package)}" for package in packages),
        "citation": "\n\n".join(dict.fromkeys(c.citation for c in configs.values() if c.citation)),
    }
    card = FilterCard.of(data, fields)
    card.report = report
    return card


def _describe_report(report: Seen | None) -> str:
    if report is None:
        return ""
    lines = "\n".join(f"- {line}" for line in report.summary())
    figures = "\n\n".join(f"![{name}]({FIGURES}/{name}.png)" for name in SHOWN)
    return f"## What its attention does\n\n{lines}\n\n{figures}"


def package_address() -> str | None:
    """Return the public address of the package, or None if it has none."""
    try:
        entries = metadata.metadata("hf-graphfilter").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    pairs = (entry.partition(",") for entry in entries if ".example/" not in entry)  # a placeholder (RFC 2606)
    urls = {label.strip().lower(): url.strip() for label, _, url in pairs}
    preferred = [urls[label] for label in ("homepage", "repository", "source") if label in urls]
    return next(iter([*preferred, *urls.values()]), None)


def _describe_loading(model: Any, host: Host, repo_id: str, base_model: str | None) -> tuple[str, str | None, str]:
    """Return (library, task, Python that loads the model) as the Hub's page shows them."""
    inner = unwrapped(model)
    if encoder_of(model) is not model:
        kind = type(model).__name__
        usage = f"import hf_graphfilter\nfrom sentence_transformers import {kind}\n\nmodel = {kind}({quoted(repo_id)})"
        return "sentence-transformers", "sentence-similarity" if kind == "SentenceTransformer" else None, usage
    if hasattr(model, "get_base_model"):
        base = host.usage(inner, base_model or "path/to/the/base/model")
        has_filter = holds_filters(
            model.peft_config[model.active_adapters[0]], (name for name, _ in patched_modules(inner))
        )
        line = f"hf_graphfilter.load_filter(model, {quoted(repo_id)})  # what save_filter(model, folder) writes\n"
        load = f"{'' if has_filter else line}model = PeftModel.from_pretrained(model, {quoted(repo_id)})"
        return "peft", host.pipeline_tag(inner), f"from peft import PeftModel\n{base}\n{load}"
    return host.LIBRARY, host.pipeline_tag(inner), host.usage(inner, repo_id)


def _describe_filter_file(host: Host, model: Any, repo_id: str, base_model: str | None) -> str:
    """Return Python code that loads a filter into its base model, and also the base model if the file names it."""
    if base_model is not None:
        return f"from hf_graphfilter import load_filtered_model\n\nmodel = load_filtered_model({quoted(repo_id)})"
    base = host.usage(model, base_model or "path/to/the/base/model")
    return f"{base}\nhf_graphfilter.load_filter(model, {quoted(repo_id)})"


def _tabulate_training(training: Mapping[str, Any] | TrainingArguments | None) -> str:
    if isinstance(training, TrainingArguments):
        values = {name: getattr(training, name) for name in HYPERPARAMETERS}
        training = {k: getattr(v, "value", v) for k, v in values.items() if v not in (None, False, 0, -1)}
    return markdown_table(["name", "value"], list(training.items()), escape=True) if training else ""
