"""The README.md in the folder of a saved patched model, which says what to import before loading."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from ..errors import GraphFilterError, shown
from ..files import write_text
from ..filters.core.attached import patched_modules
from ..logs import logger
from ..text import printable
from ..wrappers import Function, wrap

_PACKAGE_IMPORT = "import hf_graphfilter  # pip install hf-graphfilter\n"
_LIBRARY_IMPORT = "from sentence_transformers import "


def write_readme(model: Any, directory: Any) -> None:
    """Write the card of a patched model that was just saved, if its folder has none or our card of another filter.

    The card has no table of the coefficients: they may be sharded, and only one process calls this function.
    """
    file = Path(directory, "README.md")
    if not file.with_name("config.json").is_file():
        return
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else None
        if text is not None and not _is_signed_card(text):
            return
        if patched_modules(model, required=False):
            from .card import create_model_card

            card = create_model_card(model, repo_id=f"path/to/{file.absolute().parent.name}", coefficients=False)
            if text is None or _describes_another_filter(text, json.loads(card.fields["configuration"])):
                card.save(file)
        elif text is not None:
            logger.warning("%s describes a graph filter, and the saved model has none: remove it", printable(file))
    except Exception as error:  # an error in the card must not stop the saving
        logger.warning("%s was not written (%s); create_model_card(model) makes it", printable(file), shown(error))


def _describes_another_filter(text: str, record: Any) -> bool:
    """Return whether a card of this package is for filters with another record."""
    block = re.search(r"^## Configuration\n+```json\n(.*?)\n```", text, re.M | re.S)
    return block is not None and json.loads(block[1]) != record


def write_hub_readme(model: Any, folder: Path, api: Any, repo_id: str) -> bool:
    """Write the card of a saved model again, for the repository that its folder is pushed to.

    The card keeps what the cards of the folder and of the repository hold.

    Returns:
        Whether the card can be uploaded: the repository has no card that this package did not write.
    """
    from .card import create_model_card
    from .filter_card import download_card

    file = folder / "README.md"
    with tempfile.TemporaryDirectory() as temporary:
        try:
            hub_file = download_card(api, repo_id, temporary)
        except GraphFilterError:
            return False
        if patched_modules(model, required=False):
            with contextlib.suppress(GraphFilterError):  # a card that the user wrote is uploaded as it is
                create_model_card(model, repo_id=repo_id).merge(file).merge(hub_file).save(file)
    return True


def install() -> None:
    """Let the cards of sentence-transformers name the import as well, if the encoder is patched."""
    from sentence_transformers import SentenceTransformer

    name = "_create_model_card"
    for owner in SentenceTransformer.__mro__:
        if name in vars(owner):
            wrap(owner, name, _name_the_import)


def _name_the_import(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    if (text := self._model_card_text) and _is_encoder_card(text):
        self._model_card_text = None  # else the encoder's card would become that of the SentenceTransformer
    original(self, *args, **kwargs)
    file = Path(inspect.signature(original).bind(self, *args, **kwargs).arguments["path"], "README.md")
    if file.is_file() and patched_modules(self, required=False):
        text = file.read_text(encoding="utf-8")
        if "import hf_graphfilter" not in text and _LIBRARY_IMPORT in text:
            new_text = text.replace(_LIBRARY_IMPORT, _PACKAGE_IMPORT + _LIBRARY_IMPORT, 1)
            write_text(file, new_text)


def _is_encoder_card(text: str) -> bool:
    """Return whether a card is the one that this package wrote for the encoder alone."""
    return _LIBRARY_IMPORT not in text and _is_signed_card(text)


def _is_signed_card(text: str) -> bool:
    """Return whether this package wrote a card, metadata included, and nobody edited its text."""
    from huggingface_hub import ModelCard

    from .filter_card import SIGNATURE, is_signed

    return SIGNATURE.search(text) is not None and is_signed(ModelCard(text).text)
