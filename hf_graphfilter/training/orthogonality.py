"""The orthogonality loss of AGF (Eq. 11 and 12) by its names of the first releases; ``penalties`` serves every loss."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from ..errors import GraphFilterError, is_number
from ..functional import Norm
from .penalties import RegularizerCallback


class OrthogonalityCallback(RegularizerCallback):
    """``RegularizerCallback`` by the name and with the options of AGF's loss: ``gamma * loss``, mean over the layers.

    Args:
        gamma: weight; ``None`` for that of each layer's config. The paper uses 1e-1 to 1e-4.
        norm: ``"mean_abs"`` (the authors' code) or ``"frobenius"`` (Eq. 11 as printed).

    Raises:
        GraphFilterError: as ``RegularizerCallback`` does.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[OrthogonalityCallback(gamma=1e-2)]).train()``
    """

    def __init__(self, gamma: float | None = None, norm: Norm = "mean_abs"):
        if gamma is not None and not is_number(gamma):
            raise GraphFilterError(f"OrthogonalityCallback: gamma must be >= 0, got {gamma!r}")
        if norm not in ("mean_abs", "frobenius"):
            raise GraphFilterError(f"OrthogonalityCallback: norm={norm!r}: use 'mean_abs' or 'frobenius'")
        super().__init__({} if gamma is None else {"orthogonality": gamma}, {"orthogonality": {"norm": norm}})


def orthogonality_loss(model: nn.Module, *, norm: Norm = "mean_abs") -> NoReturn:
    """Gave way to ``collect_penalties``: it read what every layer kept of its last forward pass, asked or not.

    Raises:
        GraphFilterError: always; it says what to write instead.
    """
    raise GraphFilterError(
        "orthogonality_loss(model) is gone, since layers keep nothing of a forward pass any more: write `with "
        "collect_penalties(model) as penalties:` around the forward pass and add penalties.total(), which has gamma in "
        "it, to the loss (penalties.losses() are without)"
    )
