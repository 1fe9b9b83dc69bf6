"""The filters as pure functions of tensors, usable without any model.

Shapes are (batch, heads, tokens, features) throughout. The same kernels run inside patched models.
"""

from .decomposition import agf, singularformer
from .losses import Norm, diagonal_loss, orthogonality_loss
from .polynomial import attention_terms, gfsa

__all__ = ["Norm", "agf", "attention_terms", "diagonal_loss", "gfsa", "orthogonality_loss", "singularformer"]
