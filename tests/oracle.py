"""The other way to the same numbers: attention with explicit matrices, registered as an attention implementation.

It shares no code with the package: scores, softmax, and each filter's formula as the paper prints it.
"""

from functools import partial

import torch
from models import use
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "dense_oracle"


def gfsa_matrix(A, c, config):
    """Eq. 5 of the GFSA paper, or its exact form."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    w_0, w_1, w_K = (c[name].to(A.dtype).view(-1, 1, 1) for name in ("w_0", "w_1", "w_K"))
    power = torch.matrix_power(A, config.K) if config.approximation == "none" else A + (config.K - 1) * (A @ A - A)
    return w_0 * eye + w_1 * A + w_K * power


def dense_attention(module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs):
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    matrix = scores.softmax(-1)
    if hasattr(module, "oracle"):
        matrix = module.oracle(matrix)
    return (matrix @ value).transpose(1, 2).contiguous(), matrix


AttentionInterface.register(NAME, dense_attention)
AttentionMaskInterface.register(NAME, eager_mask)


def dense_twin(plain, patched, formula):
    """``plain`` computing what ``patched`` should, with explicit matrices."""
    use(plain, NAME)
    for name, module in patched.named_modules():
        if "graph_filter" in module._modules:
            f = module.graph_filter
            plain.get_submodule(name).oracle = partial(formula, c=f.coefficients(), config=f.config)
    return plain
