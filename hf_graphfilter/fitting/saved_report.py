"""Save and load the report of a linearized checkpoint, with its model card."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.card import create_model_card
from ..checkpoints.filter_card import FIGURES, check_card
from ..errors import GraphFilterError, shown
from ..files import DamagedFileError, find_optional, read_json, write_text
from .report import ConversionReport

CONVERSION_FILE = "conversion.json"


def load_conversion(source: str | Path, **hub_options: Any) -> ConversionReport | None:
    """Load the report that ``save_conversion`` wrote beside a checkpoint; return None if there is none.

    Args:
        source: the folder of the checkpoint, or the id of its Hub repository.
        hub_options: ``revision``, ``token``, ``cache_dir`` and other options of the download.

    Raises:
        GraphFilterError: the file is damaged, or there is no such folder or repository.
    """
    try:
        file = find_optional(str(source), CONVERSION_FILE, **hub_options)
    except OSError as error:
        raise GraphFilterError(f"no folder and no reachable Hub repository {shown(str(source))}: {error}") from error
    if file is None:
        return None
    try:
        return ConversionReport.from_dict(read_json(Path(file)))
    except DamagedFileError as error:
        raise GraphFilterError(
            f"{file} is not what a conversion wrote ({error}): remove it, or linearize again"
        ) from error


def save_conversion(
    model: nn.Module, report: ConversionReport, folder: str | Path, *, force: bool = False, **card: Any
) -> None:
    """Write the report of a linearization beside its checkpoint.

    The files are ``conversion.json``, a model card with the tables, and, if matplotlib is installed, the curves.

    Args:
        model: the linearized model.
        report: the report that ``linearize`` returned.
        folder: the folder of the checkpoint.
        force: overwrite a README that this package did not write, or that was edited since.
        card: further arguments of ``create_model_card``.

    Raises:
        GraphFilterError: the model is not patched, or there is such a README and ``force`` is not set. Nothing is
            written then.

    Example:
        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import linearize
        >>> model, folder = BertModel(BertConfig(num_hidden_layers=1)), tempfile.mkdtemp()
        >>> batches = [torch.randint(0, 1000, (1, 16)) for _ in range(3)]
        >>> report = linearize(model, batches, window=2, budget=16, evaluations=1, holdout=1, progress=False)
        >>> save_conversion(model, report, folder, base_model="bert-base-uncased")
        >>> sorted(file.name for file in Path(folder).iterdir())
        ['README.md', 'conversion.json', 'figures']
    """
    if not isinstance(report, ConversionReport):
        raise GraphFilterError(f"report must be what linearize returned, got {shown(report)}")
    folder, name = Path(folder), f"{FIGURES}/conversion.png"
    check_card(folder / "README.md", force)
    has_figure = importlib.util.find_spec("matplotlib") is not None
    sections = [
        "## Conversion",
        "A filter replaces the attention of this model. It was fitted to the outputs of that attention on "
        f"{report.tokens:,} tokens. The numbers are of inputs that the fit did not see. *Without* names a part of the "
        "filter that is switched off.",
        report.to_markdown(),
        f"![held-out error over the tokens, and by context]({name})" * has_figure,
        card.pop("description", ""),
    ]
    description = "\n\n".join(filter(None, sections))
    model_card = create_model_card(model, **{"repo_id": str(folder), **card}, description=description)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONVERSION_FILE, json.dumps(report.to_dict(), indent=1) + "\n")
    if has_figure:
        report.save_figure(folder / name)
    model_card.save(folder / "README.md", force=force)
