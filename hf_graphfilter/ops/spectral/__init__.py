"""Filters in the singular value domain: ``U Sigma V^T x`` in linear time, over all tokens or causally.

``U`` is a softmax over features, ``V`` a softmax over tokens, ``Sigma`` a polynomial of singular values in (0, 1), one
set per token (AGF paper, Eq. 7-10). The causal form, which the paper does not have, takes the softmax over the tokens
so far.

All computation runs block by block, over batch and heads first and then along the tokens, forward and backward. So the
working set stays in the CPU's cache, and only the inputs are kept for the backward pass. Softmaxes and masses are
float32 or wider whatever the inputs, and so is all inner arithmetic of the causal form.
"""

from .bidirectional import filter_all
from .blocks import CausalState, hide, to_float32
from .causal import filter_causal, running_mass
from .factors import Left, Rho, basis, gram_deviation
from .products import multiply_all, multiply_causal

__all__ = [
    "CausalState",
    "Left",
    "Rho",
    "basis",
    "filter_all",
    "filter_causal",
    "gram_deviation",
    "hide",
    "multiply_all",
    "multiply_causal",
    "running_mass",
    "to_float32",
]
