"""A check of the values of coefficients in files before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import GraphFilterError


def check_values(read: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: object) -> None:
    """Raise if coefficients that are about to be loaded cannot come from a training that succeeded.

    Raises:
        GraphFilterError: a tensor has another shape than that of the filter, holds no floating-point numbers where the
            filter has these or lacks the tensor, or holds numbers that are not finite in float32. The message names
            ``source`` and the tensor.
    """
    for name, tensor in read.items():
        target = wanted.get(name)
        if target is not None and tensor.shape != target.shape:
            raise GraphFilterError(
                f"{source}: {name} should hold {tuple(target.shape)}, it holds {tuple(tensor.shape)}"
            )
        if target is not None and not target.is_floating_point():
            continue  # a counter or a mask, of another author's filter
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point():
            if tensor.detach().float().isfinite().all():
                continue
            kind = f"NaN or infinity ({kind})"
        raise GraphFilterError(
            f"{source}: {name} holds {kind}, and coefficients are finite floating-point numbers: the file is damaged, "
            "or the training diverged; save or download it again"
        )
