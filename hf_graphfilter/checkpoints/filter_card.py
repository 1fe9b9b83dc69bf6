"""The card that ``create_model_card`` returns; it replaces only its own README, and keeps sections that it lacks."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from ..errors import GraphFilterError
from ..files import write_text
from ..filters import available_filters
from ..tables import markdown_table
from ..text import markdown_text

TEMPLATE = Path(__file__).parents[1] / "data" / "model_card.md"
CARD, FIGURES, SHOWN = "README.md", "figures", ("smoothing", "response", "spectrum")
PUSHED = ("repo_type", "commit_message", "commit_description", "revision", "create_pr", "parent_commit")
SIGNATURE = re.compile(r"\n*<!-- written by hf_graphfilter, (\w+) -->\s*$")


class Seen(Protocol):
    """The parts of an ``analysis.report`` that a card reads."""

    def summary(self) -> list[str]:
        """Return the findings, one sentence each."""

    def save_figures(self, folder: str | Path, names: Sequence[str] | None = None) -> list[Path]:
        """Save figures into a folder, all if no names are given; return their files."""


class FilterCard(ModelCard):
    """A ``ModelCard`` that replaces only a README that it wrote, recognised by the signature at its end."""

    fields: dict[str, Any]
    rendered: str
    report: Seen | None = None

    @classmethod
    def of(cls, data: ModelCardData, fields: dict[str, Any]) -> FilterCard:
        card: FilterCard = cls.from_template(
            data,
            template_str=TEMPLATE.read_text(),
            base_model=markdown_text(data.base_model) if isinstance(data.base_model, str) else None,
            results_table=_tabulate_results(data.eval_results or []),
            **fields,
        )
        card.fields, card.text = fields, _sign(card.text)
        card.rendered = card.text
        return card

    def save(self, filepath: str | Path, *, force: bool = False) -> None:
        """Write the card, and the figures of its report into ``figures`` beside it.

        Metadata and results of a README there are kept if this card lacks them. The sections of its own earlier card
        are kept, too.

        Args:
            filepath: where to write.
            force: overwrite the text of a README that was not written by this method, or was edited since.

        Raises:
            GraphFilterError: there is such a README and ``force`` is not set, or its metadata cannot be read.
        """
        write_text(Path(filepath), str(self.merge(Path(filepath), force=force)))
        if self.report is not None:
            self.report.save_figures(Path(filepath).parent / FIGURES, SHOWN)

    def merge(self, path: Path, *, force: bool = False) -> FilterCard:
        """Return this card with what only the card at ``path`` has, as ``save`` writes it; raise the same errors."""
        earlier, card, is_edited = check_card(path, force), self, self.text != self.rendered
        if earlier is not None:  # merged into a new card: this one may be saved elsewhere too
            fields = self.fields
            if is_signed(earlier.text):
                fields = {**fields, "description": _join_sections(earlier.text, self.rendered, fields["description"])}
            card = FilterCard.of(_merge_metadata(earlier.data, self.data), fields)
        if is_edited:
            card.text = _sign(self.text)
        return card

    def push_to_hub(
        self, repo_id: str, token: str | None = None, *args: Any, force: bool = False, **options: Any
    ) -> str:
        """Upload the card and the figures of its report, in one commit or one pull request.

        It replaces the card of the repository as ``save`` replaces a file, and ``force`` means the same.

        Raises:
            GraphFilterError: the repository has a card of another author and ``force`` is not set, or the metadata of
                its card cannot be read.
        """
        options |= dict(zip(PUSHED, args, strict=False))
        options["commit_message"] = options.get("commit_message") or f"Upload {CARD}"
        api, source = HfApi(token=token), {name: options.get(name) for name in ("repo_type", "revision")}
        with tempfile.TemporaryDirectory() as folder:
            self.save(download_card(api, repo_id, folder, force=force, **source), force=force)
            patterns = [CARD, f"{FIGURES}/*"]
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=patterns, **options))


def download_card(api: HfApi, repo_id: str, folder: str | Path, *, force: bool = False, **options: Any) -> Path:
    """Download the card of a repository, if it has one, into ``folder``, and check it with ``check_card``.

    Returns:
        The path of the card. ``FilterCard.save`` writes one there that can replace that of the repository.
    """
    file = Path(folder, CARD)
    # not EntryNotFoundError: it also means that the Hub does not answer, and then the card would be overwritten
    with contextlib.suppress(RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        api.hf_hub_download(repo_id, CARD, local_dir=folder, **options)
    check_card(file, force, f"the card of {repo_id}")
    return file


def check_card(path: Path, force: bool = False, name: str | None = None) -> ModelCard | None:
    """Return the card at ``path`` that ``FilterCard.save`` would replace, or None; raise the same errors as it.

    ``name`` is what the errors call the card. Default: its path.
    """
    if not path.exists():
        return None
    if path.is_dir():
        raise GraphFilterError(f"{path} is a directory: name a file for the card, such as {path / 'README.md'}")
    try:
        card = ModelCard.load(path)
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise GraphFilterError(
            f"the metadata of {name or path} cannot be read and would be lost: correct it or write elsewhere ({error})"
        ) from error
    if force or is_signed(card.text) or not card.text.strip():
        return card
    raise GraphFilterError(
        f"{name or path} was not written by hf_graphfilter, or was edited since: write elsewhere, or pass force=True "
        "(--force) to replace its text (its metadata and results are kept)"
    )


def _join_sections(earlier_text: str, new_text: str, description: str) -> str:
    """Return the description with the sections of an earlier card that this one lacks."""
    generated = {"How to use", "Evaluation", "Filter coefficients", "Configuration", "Citation"}
    old, new = (
        {part.partition("\n")[0].strip(): f"## {part.strip()}" for part in re.split(r"^## ", text, flags=re.M)[1:]}
        for text in (SIGNATURE.sub("", earlier_text), new_text)
    )
    return "\n\n".join(filter(None, [description, *(old[h] for h in old if h not in new and h not in generated)]))


def _tabulate_results(results: list[EvalResult]) -> str:
    if not results:
        return ""
    rows = []
    for r in results:
        value = f"{r.metric_value:.4f}" if isinstance(r.metric_value, float) else r.metric_value
        rows.append([r.dataset_name, r.dataset_split or "", r.metric_name or r.metric_type, value])
    return markdown_table(["data", "split", "metric", "value"], rows, escape=True)


def _merge_metadata(earlier: Any, data: Any) -> ModelCardData:
    """Merge the metadata of two cards: ``data`` wins, lists are joined, equal measurements are replaced."""
    old, new = ({k: v for k, v in vars(each).items() if v is not None} for each in (earlier, data))
    joined = {**old, **new}
    old["tags"] = [t for t in old.get("tags", []) if t not in available_filters()]  # drop the tags of an earlier filter
    for key in ("tags", "datasets", "metrics"):
        joined[key] = list(dict.fromkeys([*_as_list(new.get(key)), *_as_list(old.get(key))])) or None
    results = new.get("eval_results", [])
    earlier_results = [r for r in old.get("eval_results", []) if not any(r.is_equal_except_value(n) for n in results)]
    joined["eval_results"] = [*results, *earlier_results] or None
    return ModelCardData(**joined)


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())


def _sign(text: str) -> str:
    """Return ``text`` with a comment that shows whether it was edited since."""
    body = SIGNATURE.sub("", text).rstrip()
    digest = hashlib.sha256("\n".join(body.split()).encode()).hexdigest()[:16]
    return f"{body}\n\n<!-- written by hf_graphfilter, {digest} -->\n"


def is_signed(text: str) -> bool:
    """Return whether a card ends with its own signature, unedited."""
    return text.split() == _sign(text).split()
