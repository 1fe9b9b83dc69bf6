"""Synvolution: the learned unitary filter of Converter, which replaces attention in linear time.

Source: Zhang et al., "Converting Transformers into DGNNs Form" (preprint, 2025), Eq. 4-15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError
from ..ops.heads import repeat_heads
from ..ops.unitary import Permutation, filter_tokens
from ..shift.attention import AttentionShift
from .core.build import register_filter
from .core.fields import check_counts
from .core.replacing import ReplacingConfig, ReplacingFilter
from .core.site import AttentionSite
from .core.unitary_spectrum import Spectrum, real_form, reflect

CITATION = """@article{zhang2025converter,
  title   = {Converting Transformers into DGNNs Form},
  author  = {Jie Zhang and Mao-Hsuan Mao and Bo-Wei Chiu and Min-Te Sun},
  journal = {arXiv preprint arXiv:2502.00585},
  year    = {2025}
}"""


class Synvolution(ReplacingFilter):
    """The real form of ``z = Phi^-1 [exp(i Lambda) * (Phi value)]``, in O(n d) time and memory, for encoders.

    ``Phi`` is unitary, of full rank and dense: a product of Givens rotations of neighbouring tokens (Eq. 7). The child
    ``spectrum`` makes their angles and the eigenvalues Lambda from the module's input. Query and key are not used. The
    phase D of Eq. 7 is left out, because it cancels with its inverse.

    The real form is ``zeta Re z + (1 - zeta) Im z`` with one zeta per head that starts at 1. The authors clamp it to
    [0, 1], so its gradient is lost outside. Here a zeta outside the interval is reflected into it.

    Every token reaches every other, so there is no causal form.
    """

    config: SynvolutionConfig
    causal_form: ClassVar[bool] = False
    w: nn.Parameter | None

    def __init__(self, config: SynvolutionConfig, site: AttentionSite):
        super().__init__(config, site)
        assert site.hidden_size is not None
        self.sets = site.heads if config.per_head else 1
        hidden = config.hidden or site.hidden_size
        self.spectrum = Spectrum(site.hidden_size, hidden, sets=self.sets, orders=config.orders, phase=False)
        self.zeta = nn.Parameter(torch.empty(site.heads))
        self.w = self.polynomial()
        self.reset_parameters()

    def polynomial(self) -> nn.Parameter | None:
        """Return the coefficients, (K+1,) or (heads, K+1), not yet set; None to use the eigenvalues as they are."""
        return None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.spectrum.reset_parameters()
        nn.init.ones_(self.zeta)

    def coefficients(self) -> dict[str, Tensor]:
        """Return ``zeta`` in [0, 1], ``w_0`` ... ``w_K``, each (1,) or (heads,), and a blend's ``gate``."""
        by_name = {**super().coefficients(), "zeta": reflect(self.zeta.detach())}
        w = by_name.pop("w", None)
        if w is None:
            return by_name
        # by index: FSDP2 may have sharded the dimension that unbind would go along
        return {**by_name, **{f"w_{k}": w[..., k].reshape(-1) for k in range(w.shape[-1])}}

    def response(self, eigenvalues: Tensor) -> Tensor:
        """Return the phase that the filter gives each eigenvalue (batch, sets, tokens), in radians."""
        return eigenvalues

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        assert shift.hidden is not None
        if torch.onnx.is_in_onnx_export():
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__} computes with complex numbers, which ONNX has not; use "
                "torch.export"
            )
        if value.shape[2] != shift.hidden.shape[1]:
            raise GraphFilterError(
                f"{self.site_name}: {type(self).__name__} rotates the {shift.hidden.shape[1]} tokens of the module's "
                f"input, but the values have {value.shape[2]} tokens"
            )
        eigenvalues, angles = self.spectrum(shift.hidden)
        _, is_token = shift.visible()
        value, response = repeat_heads(value, self.heads), self.response(eigenvalues)
        out = filter_tokens(value, response, angles, is_present=is_token, permutation=self.config.permutation)
        return real_form(out, self.zeta.view(-1, 1, 1)).to(value.dtype)


@register_filter("synvolution")
@dataclass(frozen=True)
class SynvolutionConfig(ReplacingConfig):
    """Synvolution, a learned unitary filter that replaces the attention of encoders at linear cost.

    Synvolution is the filter of Converter (Zhang et al., 2025). Two small networks make the eigenvalues and
    eigenvectors of a unitary matrix from the layer's input; the eigenvectors are a product of rotations of neighbouring
    tokens. Query and key are not used. It is for encoders: every token reaches every other, so there is no causal form.

    Right after patching, a model is far from the original, except with ``init="blend"``; ``linearize`` or
    ``transfer_attention`` fits it.

    Departures from the paper and its code:

    - The phase D of Eq. 7 is left out, because it cancels with its inverse.
    - zeta is reflected into [0, 1] instead of clamped, so its gradient is never lost.
    - Padding takes part in no rotation.

    Args:
        per_head (bool, default False): Give each head its own eigenvalues and eigenvectors. If False, a layer has one
            set, as in the paper.
        orders (int, default 1): Number of pairs of Hessenberg factors, L of Eq. 7, 1 to 64. The paper uses 1; cost
            grows with it.
        permutation (str, default "identity"): Order of the tokens before each pair, P of Eq. 7. ``"identity"``:
            unchanged, as in the paper. ``"stride"``: every second token behind the others. ``"bit_reversal"``: by the
            reversed binary digits of the places. Learned permutations are not supported.
        hidden (int or None, default None): Features of the layers of the two networks, 1 to 16384. ``None`` is the
            number of features of the module's input.
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> SynvolutionConfig(orders=2, permutation="stride").starts_as_original
        False
    """

    module = Synvolution
    citation = CITATION
    formula = "Phi^-1 exp(i Lambda) Phi V, Phi of Givens rotations"
    cost = "linear in the tokens"

    per_head: bool = False
    orders: int = 1
    permutation: Permutation = "identity"
    hidden: int | None = None

    def validate(self) -> None:
        super().validate()
        check_counts(self, orders=64, hidden=16_384)
