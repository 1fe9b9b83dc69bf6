"""The model card of a patched checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from torch import nn
from transformers import TrainingArguments

from ..errors import GraphFilterError
from ..files import write_text
from ..filters import available_filters
from ..filters.core.attached import filters_of, patched_modules
from ..filters.core.build import foreign_modules
from ..filters.core.overview import summary
from ..filters.core.record import grouped
from ..hosts import Host, encoder_of, host_of, unwrapped
from ..patching.status import FilterStatus, filter_parameters, filter_status
from ..tables import markdown_table
from ..text import markdown_text, quoted
from .copies import holds

TEMPLATE = Path(__file__).parents[1] / "data" / "model_card.md"
HYPERPARAMETERS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("label_smoothing_factor", "bf16", "fp16", "seed"),
)
FIGURES, SHOWN = "figures", ("smoothing", "response", "spectrum")
_SIGNATURE = re.compile(r"\n*<!-- written by hf_graphfilter, (\w+) -->\s*$")


class Seen(Protocol):
    """What a card reads of ``analysis.report``."""

    def summary(self) -> list[str]: ...

    def save_figures(self, folder: str | Path, names: Sequence[str] | None = None) -> list[Path]: ...


class FilterCard(ModelCard):
    """A ``ModelCard`` that writes over no README but its own, which a signature at its end tells."""

    fields: dict[str, Any]
    rendered: str
    report: Seen | None = None

    @classmethod
    def of(cls, data: ModelCardData, fields: dict[str, Any]) -> FilterCard:
        card: FilterCard = cls.from_template(
            data,
            template_str=TEMPLATE.read_text(),
            base_model=markdown_text(data.base_model) if isinstance(data.base_model, str) else None,
            results_table=_results(data.eval_results or []),
            **fields,
        )
        card.fields, card.text = fields, _signed(card.text)
        card.rendered = card.text
        return card

    def save(self, filepath: str | Path, *, force: bool = False) -> None:
        """Write the card, and the figures of its report into ``figures`` beside it. Of a README there, metadata and
        results that this card lacks are kept, and of its own earlier card the sections too.

        Args:
            filepath: where to write.
            force: write over the text of a README that was not written by this method, or was edited since.

        Raises:
            GraphFilterError: such a README without ``force``, or one whose metadata cannot be read.
        """
        there = check_card(Path(filepath), force)
        if there is not None:
            if is_signed(there.text):
                self.fields |= {"description": _joined(there.text, self.rendered, self.fields["description"])}
            self.data = _merged(there.data, self.data)
            edited, self.rendered = self.text != self.rendered, FilterCard.of(self.data, self.fields).text
            self.text = self.text if edited else self.rendered
        self.text = _signed(self.text)
        write_text(Path(filepath), str(self))
        if self.report is not None:
            self.report.save_figures(Path(filepath).parent / FIGURES, SHOWN)

    def push_to_hub(self, repo_id: str, token: str | None = None, *args: Any, **options: Any) -> str:
        """As of every card; the figures of its report come first, to the same revision."""
        if self.report is not None:
            place = {name: options[name] for name in ("repo_type", "revision") if name in options}
            with tempfile.TemporaryDirectory() as folder:
                self.report.save_figures(folder, SHOWN)
                HfApi(token=token).upload_folder(repo_id=repo_id, folder_path=folder, path_in_repo=FIGURES, **place)
        return super().push_to_hub(repo_id, token, *args, **options)  # type: ignore[no-any-return]


def check_card(path: Path, force: bool = False) -> ModelCard | None:
    """The card at ``path``, if there is one that ``FilterCard.save`` would replace; errors as there."""
    if not path.exists():
        return None
    if path.is_dir():
        raise GraphFilterError(f"{path} is a directory: name a file for the card, such as {path / 'README.md'}")
    try:
        there = ModelCard.load(path)
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise GraphFilterError(
            f"the metadata of {path} cannot be read and would be lost: mend it or write to another file ({error})"
        ) from error
    if force or is_signed(there.text) or not there.text.strip():
        return there
    raise GraphFilterError(
        f"{path} was not written by hf_graphfilter, or was edited since: write to another file, or pass force=True "
        "(--force) to replace its text (its metadata and results are kept)"
    )


def _joined(there: str, here: str, description: str) -> str:
    """The description with the sections of an earlier card that this one lacks."""
    derived = {"How to use", "Evaluation", "Filter coefficients", "Configuration", "Citation"}
    old, new = (
        {part.partition("\n")[0].strip(): f"## {part.strip()}" for part in re.split(r"^## ", text, flags=re.M)[1:]}
        for text in (_SIGNATURE.sub("", there), here)
    )
    return "\n\n".join(filter(None, [description, *(old[h] for h in old if h not in new and h not in derived)]))


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
    training: Mapping[str, Any] | TrainingArguments | None = None,
    report: Seen | None = None,
    coefficients: bool = True,
) -> FilterCard:
    """The card of a patched model, with metadata that the Hub reads.

    Args:
        model: a patched model, also within a PEFT model or a ``SentenceTransformer``.
        repo_id: where it will be loaded from.
        base_model: Hub id of the model that was patched; if not given, the repository that it was loaded from.
        results: evaluation results; their datasets and metrics are named in the metadata unless given.
        datasets, metrics, language, license: metadata of the Hub.
        description: Markdown, how it was trained.
        training: hyper-parameters by name, or the arguments of the Trainer.
        report: of ``analysis.report``; the card has its findings and three of its figures.
        coefficients: whether it has a table of them, for which all processes of a sharded model must call.

    Returns:
        A ``huggingface_hub.ModelCard``: ``card.save(path)``, ``card.push_to_hub(repo_id)``. ``save`` writes over no
        README but its own (``force=True`` does), and keeps the results recorded there.

    Raises:
        GraphFilterError: the model is not patched.
    """
    inner, results = unwrapped(model), list(results)
    if not (filters := {name: graph_filter.config for name, graph_filter in filters_of(inner)}):
        raise GraphFilterError(
            f"{type(model).__name__} has no graph filter to describe; call patch_model first (hf-graphfilter patch)"
        )
    status = filter_status(model) if coefficients else FilterStatus()
    configs = {config.filter: type(config) for config in filters.values()}
    host = host_of(inner)
    base_model = base_model or host.base_model(inner)
    base_model = None if base_model == repo_id else base_model
    library, task, usage = _loading(model, host, repo_id, base_model)
    name = repo_id.rstrip("/").rsplit("/", 1)[-1]
    relation = {"base_model_relation": "adapter" if library == "peft" else "finetune"} if base_model else {}
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
    packages = dict.fromkeys(["hf_graphfilter", library, "transformers", "torch"])
    table = [values for row in status for values in row.coefficients.values()]
    # a model whose parts were patched by themselves has no record of its own
    record = host.read_record(inner) or {"filters": grouped(filters.items())}
    fields = {
        "title": markdown_text(name),
        "model_class": type(inner).__name__,
        "address": package_address(),
        "filters": "\n".join(f"- `{n}`: {summary(c)}".removesuffix(": ") for n, c in sorted(configs.items())),
        "adapter": library == "peft",
        "usage": "\n".join([*(f"import {m}  # registers its filter" for m in modules), usage]),
        "description": "\n\n".join(filter(None, [description.strip(), _seen(report)])),
        "training_table": _training(training),
        "coefficient_table": markdown_table(*status.table(), escape=True) if table else "",
        "per_head": any(values.numel() > 1 for values in table),
        "added_parameters": sum(p.numel() for p in filter_parameters(inner)),
        "configuration": json.dumps(record, indent=2),
        "versions": ", ".join(f"{package} {metadata.version(package)}" for package in packages),
        "citation": "\n\n".join(dict.fromkeys(c.citation for c in configs.values() if c.citation)),
    }
    card = FilterCard.of(data, fields)
    card.report = report
    return card


def _seen(report: Seen | None) -> str:
    if report is None:
        return ""
    lines = "\n".join(f"- {line}" for line in report.summary())
    figures = "\n\n".join(f"![{name}]({FIGURES}/{name}.png)" for name in SHOWN)
    return f"## What its attention does\n\n{lines}\n\n{figures}"


def package_address() -> str | None:
    """Where the package says that it lives; None where it does not."""
    try:
        named = metadata.metadata("hf-graphfilter").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    pairs = (entry.partition(",") for entry in named if ".example/" not in entry)  # no host (RFC 2606)
    urls = {label.strip().lower(): url.strip() for label, _, url in pairs}
    preferred = [urls[label] for label in ("homepage", "repository", "source") if label in urls]
    return next(iter([*preferred, *urls.values()]), None)


def _loading(model: Any, host: Host, repo_id: str, base_model: str | None) -> tuple[str, str | None, str]:
    """(library, task, Python that loads the model) as the Hub's page shows them."""
    inner = unwrapped(model)
    if encoder_of(model) is not model:
        kind = type(model).__name__
        usage = f"import hf_graphfilter\nfrom sentence_transformers import {kind}\n\nmodel = {kind}({quoted(repo_id)})"
        return "sentence-transformers", "sentence-similarity" if kind == "SentenceTransformer" else None, usage
    if hasattr(model, "get_base_model"):
        base = host.usage(inner, base_model or "path/to/the/base/model")
        held = holds(model.peft_config[model.active_adapters[0]], (name for name, _ in patched_modules(inner)))
        lay = f"hf_graphfilter.load_filter(model, {quoted(repo_id)})  # what save_filter(model, folder) writes\n"
        load = f"{'' if held else lay}model = PeftModel.from_pretrained(model, {quoted(repo_id)})"
        return "peft", host.pipeline_tag(inner), f"from peft import PeftModel\n{base}\n{load}"
    return host.LIBRARY, host.pipeline_tag(inner), host.usage(inner, repo_id)


def _training(training: Mapping[str, Any] | TrainingArguments | None) -> str:
    if isinstance(training, TrainingArguments):
        values = {name: getattr(training, name) for name in HYPERPARAMETERS}
        training = {k: getattr(v, "value", v) for k, v in values.items() if v not in (None, False, 0, -1)}
    return markdown_table(["name", "value"], list(training.items()), escape=True) if training else ""


def _results(results: list[EvalResult]) -> str:
    if not results:
        return ""
    rows = []
    for r in results:
        value = f"{r.metric_value:.4f}" if isinstance(r.metric_value, float) else r.metric_value
        rows.append([r.dataset_name, r.dataset_split or "", r.metric_name or r.metric_type, value])
    return markdown_table(["data", "split", "metric", "value"], rows, escape=True)


def _merged(there: Any, here: Any) -> ModelCardData:
    """The metadata of two cards: ``here`` wins, lists are joined, results of the same measurement are replaced."""
    old, new = ({k: v for k, v in vars(data).items() if v is not None} for data in (there, here))
    joined = {**old, **new}
    old["tags"] = [t for t in old.get("tags", []) if t not in available_filters()]  # of an earlier filter
    for key in ("tags", "datasets", "metrics"):
        joined[key] = list(dict.fromkeys([*_listed(new.get(key)), *_listed(old.get(key))])) or None
    results = new.get("eval_results", [])
    kept = [r for r in old.get("eval_results", []) if not any(r.is_equal_except_value(n) for n in results)]
    joined["eval_results"] = [*results, *kept] or None
    return ModelCardData(**joined)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())


def _signed(text: str) -> str:
    """``text`` with a comment that tells whether it was edited since."""
    body = _SIGNATURE.sub("", text).rstrip()
    digest = hashlib.sha256("\n".join(body.split()).encode()).hexdigest()[:16]
    return f"{body}\n\n<!-- written by hf_graphfilter, {digest} -->\n"


def is_signed(text: str) -> bool:
    return text.split() == _signed(text).split()
