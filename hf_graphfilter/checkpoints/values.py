"""A check of the values of coefficients in files before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import GraphFilterError


def check_values(read: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: object) -> None:
    """Raise an error if coefficients in a file cannot be the result of a successful training.

    Raises:
        GraphFilterError: a tensor has another shape than in the filter, holds numbers that are not finite in float32,
            or holds integers or booleans (unless the filter does, too). The message names ``source`` and the tensor.
    """
    for name, tensor in read.items():
        target = wanted.get(name)
        if target is not None and tensor.shape != target.shape:
            raise GraphFilterError(
                f"{source}: {name} should hold {tuple(target.shape)}, it holds {tuple(tensor.shape)}"
            )
        if target is not None and not target.is_floating_point():
            continue  # a counter or a mask of a custom filter
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point():
            if tensor.detach().float().isfinite().all():
                continue
            kind = f"NaN or infinity ({kind})"
        raise GraphFilterError(
            f"{source}: {name} holds {kind}, and coefficients are finite floating-point numbers: the file is damaged, "
            "or the training diverged; save or download it again"
        )
