"""AGF, the attentive graph filter: a learned filter in the singular value domain, linear in the number of tokens.

Source: Wi et al., "Learning Advanced Self-Attention for Linear Transformers in the Singular Value Domain" (IJCAI 2025,
arXiv 2505.08516), Eq. 7-12 and Appendix F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from .. import functional
from ..errors import GraphFilterError
from ..ops import spectral
from ..ops.heads import repeat_heads
from ..ops.polynomials import Basis, expand, recurrence
from ..shift.attention import AttentionShift
from .core.base import LARGEST_ORDER
from .core.build import register_filter
from .core.fields import check_limits
from .core.replacing import ReplacingConfig, ReplacingFilter
from .core.site import AttentionSite
from .core.window import in_dtype_of

CITATION = """@inproceedings{wi2025agf,
  title     = {Learning Advanced Self-Attention for Linear Transformers in the Singular Value Domain},
  author    = {Hyowon Wi and Jeongwhan Choi and Noseong Park},
  booktitle = {International Joint Conference on Artificial Intelligence},
  year      = {2025}
}"""


class AGF(ReplacingFilter):
    """The attentive graph filter ``U Sigma V^T value``, in O(n d^2) time and O(n d + d^2) memory.

    ``U = softmax over features (query)``, ``V = softmax over tokens (key)``, and ``Sigma = sum_k theta_k T_k(sigmoid(X
    W_Sigma))`` for every token and feature (Eq. 7-10). No n x n matrix is formed. Query, key and value come from the
    pretrained projections, after rotary positions and norms if the model has them. The child ``sigma`` holds W_Sigma.
    The coefficients ``theta`` start such that Sigma = 1. With ``constrain_theta``, theta_0 is fixed at 1 and the others
    are the tanh of the learned numbers.

    In a causal module the softmax over tokens runs over the tokens so far (``ops.spectral``), and decoding keeps a
    state of constant size.

    Beyond the paper, ``correction`` gives ``U`` and ``V`` learned projections on top of query and key, ``query + X W``,
    with W = 0 at the start. They let attention transfer work while query and key stay as they are.
    """

    config: AGFConfig
    theta: nn.Parameter | None
    singular: nn.Parameter | None

    def __init__(self, config: AGFConfig, site: AttentionSite):
        super().__init__(config, site)
        assert site.hidden_size is not None
        inner = site.heads * site.head_dim
        self.head_dim = site.head_dim
        polynomial = config.singular_values == "polynomial"
        order = config.K if polynomial else 0
        self.steps = recurrence(config.basis, order, config.a, config.b)
        count = order + (not config.constrain_theta) if polynomial else 0
        shape = (count,) if config.theta == "shared" else (site.heads, count)
        self.theta = nn.Parameter(torch.empty(shape)) if count else None
        self.sigma = nn.Linear(site.hidden_size, inner, bias=False) if order else None
        self.singular = None
        if config.singular_values == "learned":
            self.steps = recurrence("monomial", 1, 0.0, 0.0)
            self.singular = nn.Parameter(torch.empty(site.heads, 1, site.head_dim))
        self.correct_u = nn.Linear(site.hidden_size, inner) if config.correction else None
        # no bias: a softmax over tokens does not see one
        self.correct_v = nn.Linear(site.hidden_size, inner, bias=False) if config.correction else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.theta is not None:
            nn.init.zeros_(self.theta)
            if not self.config.constrain_theta:
                nn.init.ones_(self.theta[..., :1])
        if self.sigma is not None:
            nn.init.xavier_uniform_(self.sigma.weight)
        if self.singular is not None:
            nn.init.zeros_(self.singular)
        for zero in (self.correct_u, self.correct_v):
            if zero is not None:
                for parameter in zero.parameters():
                    nn.init.zeros_(parameter)

    @property
    def effective_theta(self) -> Tensor:
        """The coefficients of T_0 ... T_K as they enter the formula, (K+1,) or (heads, K+1)."""
        if self.singular is not None:
            return torch.tensor([0.0, 2.0])  # times a sigmoid: 1 at the start
        if self.theta is None:
            return torch.ones(1)
        if not self.config.constrain_theta:
            return self.theta
        theta_0 = self.theta.new_ones(*self.theta.shape[:-1], 1)
        return torch.cat([theta_0, self.theta.tanh()], -1)

    def coefficients(self) -> dict[str, Tensor]:
        """Return ``theta_0`` ... ``theta_K`` as they enter the formula, (1,) or (heads,), and a blend's ``gate``.

        Learned singular values come as ``singular``, their mean per head.
        """
        theta = self.effective_theta.detach()
        by_order = {f"theta_{k}": theta[..., k].reshape(-1) for k in range(theta.shape[-1])}
        if self.singular is not None:
            by_order = {"singular": 2 * self.singular.detach().sigmoid().mean((1, 2))}
        return by_order if self.gate is None else {**by_order, "gate": self.gate}

    def learned_coefficients(self) -> dict[str, Tensor]:
        coefficients = super().learned_coefficients()
        if self.config.constrain_theta:
            coefficients.pop("theta_0", None)  # 1 always
        return coefficients

    def singular_response(self, values: Tensor) -> Tensor | None:
        """Return ``sum_k theta_k T_k(sigma)`` (Eq. 9)."""
        if self.singular is not None:
            return None
        theta = self.effective_theta.detach().to(values.device)
        return expand(values.view(1, 1, -1, 1).expand(1, self.heads, -1, 1), theta, self.steps)[0, :, :, 0]

    def filtered(self, shift: AttentionShift, value: Tensor) -> Tensor:
        tokens, heads = shift.query.shape[2], self.heads
        if shift.query.shape[-1] != self.head_dim:
            raise GraphFilterError(
                f"{self.site_name}: AGF was made for {self.head_dim} features per head, but the query has "
                f"{shift.query.shape[-1]} (shape {tuple(shift.query.shape)})"
            )
        key, value = (repeat_heads(x[:, :, -tokens:], heads) for x in (shift.key, value))
        assert shift.hidden is not None
        projection = self.correct_u if self.sigma is None else self.sigma
        hidden = shift.hidden if projection is None else in_dtype_of(projection, shift.hidden)
        u, v = shift.query, key
        if self.correct_u is not None and self.correct_v is not None:
            u, v = u + self._split(self.correct_u(hidden)), v + self._split(self.correct_v(hidden))
        sigma = None if self.sigma is None else self._split(self.sigma(hidden))
        if self.singular is not None:
            sigma = self.singular.expand_as(u)
        causal, keys = shift.visible()
        keys = None if keys is None else keys[:, -tokens:]
        left = spectral.Left(u, sigma, self.effective_theta.to(u.device), self.steps)
        state = shift.state
        causal = causal or state is not None
        if self.config.rho != "softmax":
            out = self._filter_without_softmax(left, v, value, keys, causal, state)
        elif not causal:
            out = spectral.filter_all(left, v, value, keys)
        else:
            past_state = spectral.CausalState(state["mass"], state["mean"]) if state else None
            out, next_state = spectral.filter_causal(left, v, value, keys, past_state, needs_state=state is not None)
            if state is not None and next_state is not None:
                state.update(next_state._asdict())
        return self.penalised(
            out,
            orthogonality=lambda norm="mean_abs": functional.orthogonality_loss(
                u, v, keys, norm=norm, rho=self.config.rho
            ),
        )

    def _filter_without_softmax(
        self,
        left: spectral.Left,
        v: Tensor,
        value: Tensor,
        keys: Tensor | None,
        causal: bool,
        state: dict[str, Tensor] | None,
    ) -> Tensor:
        """Return ``rho(U) Sigma rho(V)^T value`` for the activations that normalise nothing (Table 18)."""
        rho, dtype = self.config.rho, value.dtype
        rows = spectral.basis(left.u, -1, None, rho) * left.singular_values()
        v = spectral.basis(v, -2, keys, rho)
        value = spectral.hide(v, spectral.to_float32(value), keys)[1]
        with torch.autocast(value.device.type, enabled=False):  # sums over all tokens
            if causal:
                out, sums = spectral.multiply_causal(rows, v, value, state.get("sums") if state else None)
            else:
                out, sums = spectral.multiply_all(rows, v, value), None
        if state is not None and sums is not None:
            state.update(sums=sums)
        if dtype == torch.float16:  # infinity times the gate of a blend, 0 at the start, would be NaN
            largest = torch.finfo(dtype).max
            out = out.clamp(-largest, largest)
        return out.to(dtype)

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (batch, tokens, heads * features) to (batch, heads, tokens, features)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


@register_filter("agf")
@dataclass(frozen=True)
class AGFConfig(ReplacingConfig):
    """AGF, a learned filter in the singular value domain that replaces attention at linear cost.

    AGF (Wi et al., IJCAI 2025) makes U, Sigma and V^T, the factors of a singular value decomposition, from query, key
    and the layer's input. A polynomial with learned coefficients gives the singular values Sigma. No attention matrix
    is formed: time and memory are linear in the number of tokens, and decoding keeps a state of constant size.

    AGF is not an approximation of pretrained attention. Right after patching, a model is far from the original, except
    with ``init="blend"``; ``linearize`` or ``transfer_attention`` fits it.

    Departures from the paper:

    - It works in decoders, where the softmax over tokens runs over the tokens so far. The paper has encoders only.
    - ``correction`` adds learned projections to U and V.
    - ``theta="per_head"`` gives each head its own coefficients.
    - The learned singular values of ``singular_values="learned"`` stay between 0 and 2.

    Args:
        K (int, default 3): Order of the polynomial of the singular values, 0 to 1000. The paper uses 3 to 10
            (Tables 10, 11).
        basis (str, default "jacobi"): The polynomials T_k: ``"jacobi"`` (the paper's), ``"chebyshev"``, ``"legendre"``
            or ``"monomial"``.
        a (float, default 1.0): First parameter of the Jacobi basis, > -1 for orthogonal polynomials. The paper searches
            1 to 2.
        b (float, default 1.0): Second parameter of the Jacobi basis, > -1 for orthogonal polynomials. The paper
            searches -2 to 2.
        theta (str, default "shared"): Whether the coefficients are ``"shared"`` by the heads of a layer (the paper's)
            or ``"per_head"``.
        constrain_theta (bool, default True): Fix theta_0 = 1 and use the tanh of the other coefficients, as the
            authors' code does. If False, all are free.
        gamma (float, default 0.01): Weight of the orthogonality loss (Eq. 12), which ``RegularizerCallback`` or
            ``OrthogonalityCallback`` adds in training. The paper uses 1e-1 to 1e-4.
        correction (bool, default False): Add learned projections of the input to U and V. They start at zero and help
            attention transfer.
        rho (str, default "softmax"): Activation of U and V: ``"softmax"``, as in the paper. ``"sigmoid"``, ``"tanh"``
            and ``"none"`` are the ablation of Table 18. They do not normalise, so the output grows with the number of
            tokens.
        singular_values (str, default "polynomial"): How Sigma is made. ``"polynomial"``: by the polynomial, as in the
            paper. ``"one"``: Sigma = 1. ``"learned"``: one learned number per head and feature, which starts at 1. The
            last two are the ablation of Table 6 (H_UV and H_SVD). With them, ``K``, ``basis``, ``a``, ``b``, ``theta``
            and ``constrain_theta`` have no effect.
        init, window, sinks, far, position_bias: Options of every replacement filter, see ``ReplacingConfig``.

    Example:
        >>> AGFConfig(K=2, basis="chebyshev").to_dict()["theta"]
        'shared'
    """

    module = AGF
    citation = CITATION
    formula = "U Sigma V^T, Sigma = sum_k theta_k T_k(sigmoid(X W))"
    cost = "linear in the tokens"

    K: int = 3
    basis: Basis = "jacobi"
    a: float = 1.0
    b: float = 1.0
    theta: Literal["shared", "per_head"] = "shared"
    constrain_theta: bool = True
    gamma: float = 1e-2
    correction: bool = False
    rho: spectral.Rho = "softmax"
    singular_values: Literal["polynomial", "one", "learned"] = "polynomial"

    @classmethod
    def for_conversion(cls, **options: Any) -> Self:
        return super().for_conversion(**{"theta": "per_head", "correction": True, **options})

    @property
    def penalties(self) -> dict[str, float]:
        return {"orthogonality": self.gamma}

    def validate(self) -> None:
        super().validate()
        check_limits(self, "K", "gamma", least=0)
        check_limits(self, "K", most=LARGEST_ORDER)
        try:
            recurrence(self.basis, self.K, self.a, self.b)
        except GraphFilterError as error:
            raise GraphFilterError(f"AGFConfig: {error}") from None
