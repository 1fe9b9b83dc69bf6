"""Filter files on the Hub: upload them with a card, and load the base model that they name with its filter."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from torch import nn

from ..devices import is_first_process
from ..errors import GraphFilterError, shown
from ..text import printable
from .card import create_model_card
from .filter_card import CARD, download_card
from .filter_file import BASE_MODEL, CONFIG_FILE, WEIGHTS_FILE, load_filter, read_description, save_filter


def push_filter(
    model: nn.Module,
    repo_id: str,
    *,
    base_model: str | None = None,
    token: str | None = None,
    force: bool = False,
    **options: Any,
) -> str:
    """Upload the filter of a patched model, and nothing else, to a repository of the Hub.

    The repository then holds the two files of ``save_filter`` and a card. ``load_filter(model, repo_id)`` loads the
    filter into a copy of the base model, and ``load_filtered_model(repo_id)`` fetches that model too.

    Args:
        model: a patched model.
        repo_id: ``owner/name``; the repository is made if it does not exist.
        base_model: the Hub id of the model that was patched. Default: the repository that it was loaded from.
        token: a token of the Hub. Default: that of ``hf auth login``. It is not stored anywhere.
        force: overwrite the text of an existing card that this package did not write, or that was edited since. Its
            metadata and results are kept in any case.
        **options: ``private`` for a new repository; ``revision`` and ``commit_message`` for the upload.

    Returns:
        The address of the repository.

    Raises:
        GraphFilterError: the model is not patched, the Hub rejects the name or the token, or the repository has such a
            card and ``force`` is not set.
    """
    api, private = HfApi(token=token), options.pop("private", None)
    with tempfile.TemporaryDirectory() as folder:
        save_filter(model, folder, base_model=base_model)
        if not is_first_process():
            return f"{api.endpoint}/{repo_id}"  # the first process uploads
        card = create_model_card(model, repo_id=repo_id, base_model=base_model, filter_only=True, coefficients=False)
        try:
            name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            earlier = download_card(api, name, folder, force=force, revision=options.get("revision"))
            card.save(earlier, force=force)
            files = [CONFIG_FILE, WEIGHTS_FILE, CARD]
            api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=files, **options)
        except GraphFilterError:
            raise
        except (HTTPError, OSError, ValueError) as error:
            text = " ".join(str(error).split())[:300]
            raise GraphFilterError(f"the Hub at {api.endpoint} did not take {shown(repo_id)}: {text}") from error
    return f"{api.endpoint}/{name}"


def load_filtered_model(
    source: str | os.PathLike[str],
    model_class: Any = None,
    *,
    hub_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return the base model that a filter file names, with the filter in it.

    Args:
        source: a directory that ``save_filter`` wrote, or the id of a Hub repository with its files.
        model_class: the class to load the base with, such as ``AutoModelForCausalLM``. Default: the class that was
            patched.
        hub_options: ``revision``, ``token``, ``cache_dir`` ... of the download of the filter.
        **options: options of ``from_pretrained`` of the base, such as ``dtype``. The default of ``revision`` is the one
            that the filter was made for, if the file records it (transformers 5.24 no longer reports it).

    Returns:
        The patched model, in evaluation mode.

    Raises:
        GraphFilterError: the file names no base model or an unknown class, or does not fit the model.
    """
    from ..hosts.transformers.records import model_class as class_of

    description = read_description(source, **hub_options or {})
    base = description.get(BASE_MODEL)
    if not isinstance(base, dict) or not isinstance(base.get("name"), str):
        raise GraphFilterError(
            f"{printable(source)} does not name its base model: load that yourself, and pass it to load_filter"
        )
    base_class = model_class or class_of(base.get("class"))
    if base_class is None:
        raise GraphFilterError(
            f"{printable(source)} was made for a {shown(base.get('class'))}, which is no class of transformers: pass "
            "model_class="
        )
    if isinstance(base.get("revision"), str):
        options.setdefault("revision", base["revision"])
    model = base_class.from_pretrained(base["name"], **options)
    return load_filter(model, source, **hub_options or {})
