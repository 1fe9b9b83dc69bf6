"""The logger of the package, ``hf_graphfilter``, which follows the verbosity of transformers.

``transformers.logging.set_verbosity_info()`` or ``TRANSFORMERS_VERBOSITY=info`` shows what was patched, loaded and
resumed, in one line each. By default only warnings are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from transformers.utils import logging as transformers_logging

from .text import printable

logger = logging.getLogger("hf_graphfilter")
logger.parent = transformers_logging.get_logger()  # type: ignore[assignment]  # for its level and handlers


def log_filters(action: str, model: object, filters: Iterable[tuple[str, Any]], source: object = None) -> None:
    """Log at level INFO what was done with a patched model; log nothing if it has no filters.

    Args:
        action: the first words of the line, such as "loaded".
        model: the patched model, of which the class is named.
        filters: pairs (module name, filter).
        source: the file or folder that was read, if any.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    names = [graph_filter.config.filter for _, graph_filter in filters]
    if names:
        origin = "" if source is None else f" from {printable(source)}"
        kinds, count, kind = ", ".join(sorted({*names})), len(names), type(model).__name__
        logger.info("%s %s with %s in %d attention modules%s", action, kind, kinds, count, origin)
