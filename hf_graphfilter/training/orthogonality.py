"""The orthogonality loss of AGF (Eq. 11 and 12) under its earlier names; ``penalties`` serves every loss."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from ..errors import GraphFilterError, is_number
from ..functional import Norm
from .penalties import RegularizerCallback


class OrthogonalityCallback(RegularizerCallback):
    """A ``RegularizerCallback`` for the loss of AGF: ``gamma * loss``, mean over the layers.

    Args:
        gamma: weight of the loss; the paper uses 1e-1 to 1e-4. Default: that of each layer's config.
        norm: norm in the loss: ``"mean_abs"`` (the authors' code) or ``"frobenius"`` (Eq. 11 as printed). Default:
            ``"mean_abs"``.

    Raises:
        GraphFilterError: an argument is out of range, or one of the errors of ``RegularizerCallback``.

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
    """Raise an error that names the successor, ``collect_penalties``.

    This function read what every layer kept of its last forward pass, also when nobody asked for it.

    Raises:
        GraphFilterError: always; it says what to write instead.
    """
    raise GraphFilterError(
        "orthogonality_loss(model) was removed, since layers no longer keep anything of a forward pass: write `with "
        "collect_penalties(model) as penalties:` around the forward pass and add penalties.total(), which includes "
        "gamma, to the loss (penalties.losses() does not)"
    )
