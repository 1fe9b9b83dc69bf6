"""Put code into a checkpoint through which ``trust_remote_code=True`` finds the installed package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.modeling_utils import PreTrainedModel

from .errors import GraphFilterError, shown
from .files import write_text
from .filters.core.attached import CHILD
from .filters.core.build import foreign_modules
from .filters.core.record import read_groups
from .hosts.transformers.auto_classes import auto_classes
from .hosts.transformers.records import CODE_FILE, is_our_code

# checkpoints keep this: it names nothing but public classes of transformers and `with_filters`
_CODE = '''"""The models of transformers with the graph filters of this checkpoint, for trust_remote_code=True.

Written by `hf-graphfilter export-remote-code`; the filters are in the package hf-graphfilter, which must be installed.
"""

{imports}

{classes}
'''


def with_filters(model_class: type[PreTrainedModel], module: str) -> type[PreTrainedModel]:
    """Return a subclass for the code of a checkpoint.

    ``from_pretrained`` marks the class that it loads, so that saving copies its ``module``. In all else transformers
    treats it as ``model_class``, weights of older versions included.
    """
    attributes = {
        "__module__": module,
        "is_custom_code": classmethod(lambda cls: False),
        "_can_set_experts_implementation": model_class._can_set_experts_implementation,
    }
    return type(model_class.__name__, (model_class,), attributes)


def export_remote_code(folder: str | os.PathLike[str]) -> list[str]:
    """Let programs that do not import this package load the filters with ``trust_remote_code=True``.

    They call ``AutoModelX.from_pretrained(folder, trust_remote_code=True)``. The package must be installed there.

    Adds ``modeling_graph_filter.py`` and an ``auto_map`` in ``config.json``; weights are not touched. Doing it again
    changes nothing. Models loaded in this way are saved with the code.

    Args:
        folder: where ``save_pretrained`` has written a patched model.

    Returns:
        The auto classes that load the folder.

    Example:
        >>> from tempfile import mkdtemp
        >>> from transformers import BertConfig, BertModel
        >>> from hf_graphfilter import patch_model
        >>> model, folder = BertModel(BertConfig(vocab_size=9, hidden_size=24, intermediate_size=24)), mkdtemp()
        >>> patch_model(model, "gfsa").save_pretrained(folder)
        >>> "AutoModelForSequenceClassification" in export_remote_code(folder)
        True

    Raises:
        GraphFilterError: the folder holds no checkpoint of transformers; or one without a filter, with an unknown
            filter, with its own code or of a class outside transformers (``GraphormerModel``). The folder is then as
            it was.
    """
    folder = Path(folder)
    description = _read(folder)
    groups = read_groups(description[CHILD], str(folder), " of config.graph_filter")
    auto_map = description.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise GraphFilterError(f"{folder}: the auto_map of its config.json is no dict but {shown(auto_map)}")
    others = {k: v for k, v in auto_map.items() if not is_our_code(v)}
    if foreign := [name for name in others if name.startswith(("AutoConfig", "AutoModel"))]:
        raise GraphFilterError(
            f"{folder} brings code of its own for {foreign[0]} ({others[foreign[0]]}): load it where hf_graphfilter is "
            "imported, as by hf-graphfilter run"
        )
    models = _models(folder)
    if not models:
        raise GraphFilterError(
            f"{folder} holds a model of type {shown(description['model_type'])}, whose class is not one of "
            "transformers: load it where hf_graphfilter is imported, as by hf-graphfilter run"
        )
    modules = foreign_modules(config for config, _ in groups)
    imports = sorted(["import transformers", *(f"import {name}" for name in modules)])
    imports.append(f"from {__name__} import {with_filters.__name__}")
    names = sorted({model_class.__name__ for model_class in models.values()})
    classes = [f"{name} = with_filters(transformers.{name}, __name__)" for name in names]
    write_text(folder / CODE_FILE, _CODE.format(imports="\n".join(imports), classes="\n".join(classes)))
    ours = {auto: f"{Path(CODE_FILE).stem}.{model_class.__name__}" for auto, model_class in models.items()}
    write_text(folder / "config.json", json.dumps({**description, "auto_map": {**others, **ours}}, indent=2) + "\n")
    return list(models)


def _read(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a patched checkpoint."""
    try:
        description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise GraphFilterError(f"{folder} is no checkpoint: its config.json is not readable ({error})") from error
    if not isinstance(description, dict) or "model_type" not in description:
        raise GraphFilterError(f"{folder} is no checkpoint of transformers: its config.json names no model_type")
    if CHILD not in description:
        raise GraphFilterError(f"{folder} has no graph filter; patch it with: hf-graphfilter patch")
    return description


def _models(folder: Path) -> dict[str, type[PreTrainedModel]]:
    """Return the model class by auto class, for all that load this kind of checkpoint."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever a file that was written by hand leads to
        raise GraphFilterError(f"transformers {transformers.__version__} cannot read {folder}: {error}") from error
    # others get a part of the config first, which happens for the classes of transformers only
    return {
        name: model_class
        for name, model_class in auto_classes(config).items()
        if model_class.config_class is type(config) and hasattr(transformers, model_class.__name__)
    }
