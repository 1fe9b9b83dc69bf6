"""AGF: the attentive graph filter, a learned filter in the singular value domain, linear in the number of tokens.

Source: Wi et al., "Learning Advanced Self-Attention for Linear Transformers in the Singular Value Domain" (IJCAI 2025,
arXiv 2505.08516), Eq. 7-12 and Appendix F.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from ..ops import spectral
from ..ops.combine import combine
from ..ops.polynomials import Basis, recurrence
from ..ops.window import attend_nearby
from ..shift import AttentionShift, ShiftOperator, repeat_heads
from .base import LARGEST_ORDER, FilterConfig, GraphFilter, register_filter

if typing.TYPE_CHECKING:
    from ..hosts import AttentionSite

CITATION = """@inproceedings{wi2025agf,
  title     = {Learning Advanced Self-Attention for Linear Transformers in the Singular Value Domain},
  author    = {Hyowon Wi and Jeongwhan Choi and Noseong Park},
  booktitle = {International Joint Conference on Artificial Intelligence},
  year      = {2025}
}"""


class AGF(GraphFilter):
    """``U Sigma V^T value``: O(n d^2) time and O(n d + d^2) memory, no n x n matrix.

    ``U = softmax over features (query)``, ``V = softmax over tokens (key)``, ``Sigma = sum_k theta_k T_k(sigmoid(X
    W_Sigma))`` for every token and feature (Eq. 7-10). Query, key and value are those of the pretrained projections,
    with whatever the model does to them (rotary positions, norms). ``sigma`` holds W_Sigma. The coefficients ``theta``
    start such that Sigma = 1; constrained, theta_0 = 1 is fixed and the others are the tanh of what is learned.

    In a causal module the softmax over tokens is a running one, see ``ops.spectral``, and decoding keeps a state of
    constant size.

    Beyond the paper, both off by default:

    ``correction``: ``U`` and ``V`` get learned projections of their own on top of query and key, ``query + X W``, with
    W = 0 at the start. They let attention transfer work while query and key stay as they are.

    ``window``: softmax attention over the tokens at most ``window`` away is mixed in, weighted as if it and the filter
    were parts of one softmax: with ``l`` the logarithm of the summed scores in the window and ``outside`` a learned
    estimate of the mean score, output = s window + (1 - s) AGF, s = sigmoid(l - outside(X) - log(tokens)).
    """

    config: AGFConfig
    reads_hidden: ClassVar[bool] = True
    gate: Tensor | None
    theta: nn.Parameter | None

    def __init__(self, config: AGFConfig, site: AttentionSite):
        super().__init__(config, site)
        _refuse(config, site)
        assert site.hidden_size is not None
        inner = site.heads * site.head_dim
        self.head_dim = site.head_dim
        self.steps = recurrence(config.basis, config.K, config.a, config.b)
        learned = config.K + (not config.constrain_theta)
        shape = (learned,) if config.theta == "shared" else (site.heads, learned)
        self.theta = nn.Parameter(torch.empty(shape)) if learned else None
        self.sigma = nn.Linear(site.hidden_size, inner, bias=False) if config.K else None
        self.correct_u = nn.Linear(site.hidden_size, inner) if config.correction else None
        # no bias: a softmax over tokens does not see one
        self.correct_v = nn.Linear(site.hidden_size, inner, bias=False) if config.correction else None
        self.outside = nn.Linear(site.hidden_size, site.heads) if config.window else None
        self.register_buffer("gate", torch.empty(site.heads) if config.init == "blend" else None)
        self.regulariser: Callable[..., Tensor] | None = None
        self.last: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.theta is not None:
            nn.init.zeros_(self.theta)
            if not self.config.constrain_theta:
                nn.init.ones_(self.theta[..., :1])
        if self.sigma is not None:
            nn.init.xavier_uniform_(self.sigma.weight)
        for zero in (self.correct_u, self.correct_v, self.outside):
            if zero is not None:
                for parameter in zero.parameters():
                    nn.init.zeros_(parameter)
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    @property
    def effective_theta(self) -> Tensor:
        """The coefficients of T_0 ... T_K, (K+1,) or (heads, K+1)."""
        if not self.config.constrain_theta:
            assert self.theta is not None
            return self.theta
        if self.theta is None:
            return torch.ones(1)
        one = self.theta.new_ones(*self.theta.shape[:-1], 1)
        return torch.cat([one, self.theta.tanh()], -1)

    def coefficients(self) -> dict[str, Tensor]:
        """``theta_0`` ... ``theta_K`` as they enter the formula, (1,) or (heads,), and the ``gate`` of a blend."""
        theta = self.effective_theta.detach()
        found = {f"theta_{k}": theta[..., k].reshape(-1) for k in range(theta.shape[-1])}
        return found if self.gate is None else {**found, "gate": self.gate}

    @property
    def decoding(self) -> Literal["rows", "state", "state and keys"]:
        return "state" if self.gate is None else "state and keys"

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        """``value`` (batch, key heads, key tokens, features) to (batch, heads, query tokens, features)."""
        if self.gate is None:
            return self.approximate(shift, value)
        original = shift(value)
        return combine([(1 - self.gate, original), (self.gate, self.approximate(shift, value))])

    def approximate(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        if not isinstance(shift, AttentionShift) or shift.hidden is None:
            raise GraphFilterError(
                f"{self.site_name}: AGF is made of the model's projections and its input, not of an attention matrix"
            )
        tokens, heads = shift.query.shape[2], self.heads
        if shift.query.shape[-1] != self.head_dim:
            raise GraphFilterError(
                f"{self.site_name}: AGF was made for {self.head_dim} features a head, the query has "
                f"{shift.query.shape[-1]} (shape {tuple(shift.query.shape)})"
            )
        key, value = (repeat_heads(x[:, :, -tokens:], heads) for x in (shift.key, value))
        hidden = shift.hidden if self.sigma is None else _for(self.sigma, shift.hidden)
        u, v = shift.query, key
        if self.correct_u is not None and self.correct_v is not None:
            u, v = u + self._split(self.correct_u(hidden)), v + self._split(self.correct_v(hidden))
        sigma = None if self.sigma is None else self._split(self.sigma(hidden))
        causal, keys = shift.visible()
        keys = None if keys is None else keys[:, -tokens:]
        w = spectral.left_vectors(u, sigma, self.effective_theta.to(u.device), self.steps)
        state = shift.state
        causal = causal or state is not None
        if not causal:
            out = spectral.filter_all(w, v, value, keys)
        else:
            past = spectral.CausalState(state["mass"], state["mean"]) if state else None
            out, after = spectral.filter_causal(w, v, value, keys, past)
            if state is not None:
                state.update(after._asdict())
        out = self._regularise(out, u, v, keys)
        return out if self.outside is None else self._with_window(out, shift, key, value, keys, causal)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads * features) to (batch, heads, tokens, features)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _with_window(
        self, far: Tensor, shift: AttentionShift, key: Tensor, value: Tensor, keys: Tensor | None, causal: bool
    ) -> Tensor:
        assert self.outside is not None
        assert shift.hidden is not None
        tokens, state, window = shift.query.shape[2], shift.state, self.config.window
        there = key.new_ones(key.shape[0], tokens, dtype=torch.bool) if keys is None else keys.expand(key.shape[0], -1)
        count = there.cumsum(-1) if causal else there.sum(-1, keepdim=True)
        if state is not None:
            if "count" in state:
                count = count + state["count"]
                key, value = (torch.cat([state[n], x], 2) for n, x in (("near_key", key), ("near_value", value)))
                there = torch.cat([state["near"], there], 1)
            state.update(count=count[:, -1:], near=there[:, -window:])
            state.update(near_key=key[:, :, -window:], near_value=value[:, :, -window:])
        near, mass = attend_nearby(shift.query, key, value, window, shift.scaling, causal, there)
        outside = self.outside(_for(self.outside, shift.hidden)).mT.unsqueeze(-1)
        share = torch.sigmoid(mass - outside - count.clamp(min=1).log()[:, None, :, None])
        return torch.lerp(far, near.to(far.dtype), share.to(far.dtype))  # near is narrower under autocast

    def _regularise(self, out: Tensor, u: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
        """Let the orthogonality loss see this application; ``training.orthogonality`` says how."""
        if not self.training:
            return out
        if self.regulariser is not None:
            return self.regulariser(out, u, v, keys)
        if self.config.gamma:
            self.last = (u, v, keys) if torch.is_grad_enabled() else None
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last": None, "regulariser": None}  # they belong to a training run


def _for(layer: nn.Module, x: Tensor) -> Tensor:
    """``x`` in the dtype that ``layer`` takes, which a quantized one does not tell."""
    weight = layer.weight
    return x.to(weight.dtype) if isinstance(weight, Tensor) and weight.is_floating_point() else x


def _refuse(config: AGFConfig, site: AttentionSite) -> None:
    where = f"{site.name} ({type(site.module).__name__})"
    if site.hidden_size is None:
        raise GraphFilterError(
            f"{where} does not hand its input on to the attention function, which AGF needs for its singular values; "
            "choose other layers with layers=, or a filter of the attention matrix such as 'gfsa'"
        )
    if site.sliding_window is not None:
        raise GraphFilterError(
            f"{where} sees a sliding window of {site.sliding_window} tokens, and AGF sees all; choose other layers "
            "with layers="
        )
    if site.other_scores:
        raise GraphFilterError(
            f"{where} makes its attention scores of more than query and key ({site.other_scores}), and AGF has no "
            "scores; choose other layers with layers=, or a filter of the attention matrix such as 'gfsa'"
        )
    if site.position_bias and config.position_bias == "refuse":
        raise GraphFilterError(
            f"{where} adds a learned bias of positions to its attention scores, and AGF has no scores to add it to; "
            "position_bias='drop' leaves it out of the filter (the model then knows of positions only what other "
            "layers tell it), or choose other layers with layers="
        )


@register_filter("agf")
@dataclass(frozen=True)
class AGFConfig(FilterConfig):
    """AGF, a learned filter in the singular value domain, with linear cost.

    Args:
        K: order of the polynomial of the singular values, 0 to 1000; the paper uses 2 to 5.
        basis: ``"jacobi"`` (the paper's), ``"chebyshev"``, ``"legendre"`` or ``"monomial"``.
        a, b: parameters of the Jacobi basis, > -1 where it is to be orthogonal; the paper searches a in 1 ... 2 and b
            in -2 ... 2.
        theta: one set of coefficients a layer (``"shared"``, the paper's), or one a head.
        constrain_theta: theta_0 = 1 fixed and tanh of the others, as in the authors' code; else all are free.
        gamma: weight of the orthogonality loss (Eq. 12) that ``OrthogonalityCallback`` adds; the paper's are 1e-1 to
            1e-4. With 0, ``orthogonality_loss(model)`` is not prepared either.
        init: ``"copy"`` puts AGF in the place of attention; ``"blend"`` computes (1 - g) attention + g AGF with a gate
            g a head that starts at 0, so that the patched model equals the original; ``BlendSchedule`` carries it to 1
            and ``drop_blend`` then takes the attention out.
        correction: learned additions to the projections of U and V, zero at the start; for attention transfer.
        window: softmax attention over so many tokens on each side is mixed in, at most a million; 0 is the paper's
            form. A window longer than the text costs as much as one that spans it.
        position_bias: ``"refuse"`` modules with a learned bias of positions (T5), which AGF cannot honour, or
            ``"drop"`` it.

    Example:
        >>> AGFConfig(K=2, basis="chebyshev").to_dict()["theta"]
        'shared'
    """

    module = AGF
    citation = CITATION

    K: int = 3
    basis: Basis = "jacobi"
    a: float = 1.0
    b: float = 1.0
    theta: Literal["shared", "per_head"] = "shared"
    constrain_theta: bool = True
    gamma: float = 1e-2
    init: Literal["copy", "blend"] = "copy"
    correction: bool = False
    window: int = 0
    position_bias: Literal["refuse", "drop"] = "refuse"

    @property
    def starts_as_original(self) -> bool:
        return self.init == "blend"

    def validate(self) -> None:
        for name in ("K", "window", "gamma"):
            if getattr(self, name) < 0:
                raise GraphFilterError(f"AGFConfig: {name} must be >= 0, got {shown(getattr(self, name))}")
        for name, most in (("K", LARGEST_ORDER), ("window", 1_000_000)):
            if getattr(self, name) > most:
                raise GraphFilterError(f"AGFConfig: {name} must be at most {most}, got {shown(getattr(self, name))}")
        try:
            recurrence(self.basis, self.K, self.a, self.b)
        except GraphFilterError as error:
            raise GraphFilterError(f"AGFConfig: {error}") from None
