"""A check whether ``torch.export`` runs."""

from __future__ import annotations

import torch

_REPORTS_ANY_COMPILATION = torch.__version__.startswith("2.11.")


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces this call.

    In torch 2.11, Dynamo treats ``torch.compiler.is_exporting()`` as True in every compilation.
    """
    if _REPORTS_ANY_COMPILATION:
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_exporting()
