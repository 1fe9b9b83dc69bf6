"""Singularformer: a learned singular value decomposition that replaces attention, linear in the number of tokens.

Source: Wu et al., "Singularformer: Learning to Decompose Self-Attention to Linearize the Complexity of Transformer"
(IJCAI 2023), Eq. 8-18.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from .. import functional
from ..errors import GraphFilterError
from ..ops import spectral
from ..shift.attention import AttentionShift
from .core.build import register_filter
from .core.fields import SMALLEST_TEMPERATURE, check_counts, check_limits
from .core.replacing import ReplacingConfig, ReplacingFilter
from .core.site import AttentionSite
from .core.window import in_dtype_of

CITATION = """@inproceedings{wu2023singularformer,
  title     = {Singularformer: Learning to Decompose Self-Attention to Linearize the Complexity of Transformer},
  author    = {Yifan Wu and Shichao Kan and Min Zeng and Min Li},
  booktitle = {International Joint Conference on Artificial Intelligence},
  year      = {2023}
}"""


class Singularformer(ReplacingFilter):
    """The filter ``alpha softmax((alpha^ Q)(alpha^ K)^T / sqrt(d)) alpha^ value``, for encoders.

    It takes O(n r d) time and O(n (r + d)) memory. ``alpha^``, the softmax of ``X W + b`` over the tokens, makes r
    pseudo tokens. ``alpha``, the softmax of the same scores over r, spreads them over the tokens again. The child
    ``alpha`` holds W and b, which the heads share (Eq. 14). Q, K and value come from the pretrained projections:
    pooling after projecting equals projecting after pooling, also with biases, since the rows of ``alpha^`` sum to 1.

    A pseudo token is made of all tokens, so there is no causal form.
    """

    config: SingularformerConfig
    causal_form: ClassVar[bool] = False
    alpha: nn.Linear

    def __init__(self, config: SingularformerConfig, site: AttentionSite):
        super().__init__(config, site)
        assert site.hidden_size is not None
        self.reads_earlier = config.residual
        if config.residual and site.stack_module is None:
            raise GraphFilterError(
                f"{site.name} ({type(site.module).__name__}): residual=True adds the scores of the layer before, and "
                "the layers of this model pass nothing on to each other besides the hidden states; leave residual out"
            )
        r = config.r or site.head_dim
        if config.residual and site.stack_module is not None:
            for other in site.stack_module.modules():
                if isinstance(other, Singularformer) and other.config.residual and other.alpha.out_features != r:
                    raise GraphFilterError(
                        f"{site.name}: residual=True adds the r x r scores of the layer before, but r is "
                        f"{other.alpha.out_features} at {other.site_name} and {r} here: give all layers the same r"
                    )
        self.alpha = nn.Linear(site.hidden_size, r)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.xavier_uniform_(self.alpha.weight)
        nn.init.zeros_(self.alpha.bias)

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        assert shift.hidden is not None
        _, keys = shift.visible()
        scores = spectral.to_float32(self.alpha(in_dtype_of(self.alpha, shift.hidden))) / self.config.temperature
        earlier_cores = shift.earlier.left_before(self.site_name, self.config.filter) if self.config.residual else []
        previous = earlier_cores[-1].to(value.device) if earlier_cores else None
        out, core = functional.singularformer(
            shift.query, shift.key, value, scores, mask=keys, previous=previous, scale=shift.scaling
        )
        if self.config.residual:
            shift.earlier.leave(self.site_name, core, self.config.filter)
        logits = scores.unsqueeze(1)  # alpha is one for all heads
        return self.penalised(
            out,
            orthogonality=lambda norm="off_diagonal": functional.orthogonality_loss(logits, logits, keys, norm=norm),
            diagonal=lambda: functional.diagonal_loss(core),
        )


@register_filter("singularformer")
@dataclass(frozen=True)
class SingularformerConfig(ReplacingConfig):
    """Singularformer, a learned decomposition that replaces the attention of encoders at linear cost.

    Singularformer (Wu et al., IJCAI 2023) gathers the tokens into r pseudo tokens. These attend to each other, and the
    result is spread over the tokens again. The heads of a layer share the one new projection. It is for encoders: a
    pseudo token is made of all tokens, so there is no causal form.

    Right after patching, a model is far from the original, except with ``init="blend"``; ``linearize`` or
    ``transfer_attention`` fits it.

    Departure from the authors' code: the diagonal loss is squared, as the paper prints it.

    Args:
        r (int or None, default None): Number of pseudo tokens, 1 to 65536. ``None`` is the number of features per head,
            as in the paper. It may exceed the number of tokens and the hidden size, but that only adds cost.
        temperature (float, default 1.0): Divisor of the scores before both softmaxes, at least 1e-38. Smaller values
            make sharper pseudo tokens.
        residual (bool, default False): Add the scores of the layer before, as Realformer does (text after Eq. 14). All
            filters of a stack must then have the same ``r``, and gradient checkpointing must not be reentrant.
        gamma_orthogonal (float, default 0.01): Weight of the orthogonality loss (Eq. 15), which ``RegularizerCallback``
            adds in training. The paper uses 0.01.
        gamma_diagonal (float, default 0.01): Weight of the diagonal loss (Eq. 16), which ``RegularizerCallback`` adds
            in training. The paper uses 0.01.
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> SingularformerConfig(r=32).penalties
        {'orthogonality': 0.01, 'diagonal': 0.01}
    """

    module = Singularformer
    citation = CITATION
    formula = "alpha softmax((alpha^ Q)(alpha^ K)^T / sqrt(d)) alpha^ V"
    cost = "linear in the tokens"

    r: int | None = None
    temperature: float = 1.0
    residual: bool = False
    gamma_orthogonal: float = 1e-2
    gamma_diagonal: float = 1e-2

    @property
    def penalties(self) -> dict[str, float]:
        return {"orthogonality": self.gamma_orthogonal, "diagonal": self.gamma_diagonal}

    def validate(self) -> None:
        super().validate()
        check_counts(self, r=65_536)
        check_limits(self, "temperature", above=0, least=SMALLEST_TEMPERATURE)
        check_limits(self, "gamma_orthogonal", "gamma_diagonal", least=0)
