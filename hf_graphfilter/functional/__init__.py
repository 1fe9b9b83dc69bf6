"""The filters as pure functions of tensors, usable without any model.

Signals are (batch, heads, tokens, features) throughout. The same kernels run inside patched models.
"""

from .converter import Kernel, gibbs_damping, kernel_polynomial_loss, kernelution, synvolution, unitary
from .decomposition import agf, singularformer
from .losses import Norm, diagonal_loss, orthogonality_loss
from .matrix_polynomial import apply_gfsa, gfsa

__all__ = [
    "Kernel",
    "Norm",
    "agf",
    "apply_gfsa",
    "diagonal_loss",
    "gfsa",
    "gibbs_damping",
    "kernel_polynomial_loss",
    "kernelution",
    "orthogonality_loss",
    "singularformer",
    "synvolution",
    "unitary",
]
