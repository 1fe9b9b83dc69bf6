"""The filters that the suites run: ``TEST_FILTERS=MODULE`` adds the ``FILTERS`` of another module to them."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import oracle
import pytest
import torch
from linear_attention import LinearAttentionConfig
from oracle import agf_matrix, digraph_matrix, gfsa_matrix, linear_attention_matrix, singular_matrix
from torch import nn

from hf_graphfilter import (
    AGFConfig,
    AttentionSite,
    FilterConfig,
    GFSAConfig,
    GraphFilter,
    HedgehogConfig,
    KernelutionConfig,
    LinearTransformerConfig,
    PerformerConfig,
    ReplacingConfig,
    SingularformerConfig,
    register_filter,
)
from hf_graphfilter.filters.arma import ARMAConfig
from hf_graphfilter.filters.attnscale import AttnScaleConfig
from hf_graphfilter.filters.centered import CenteredConfig
from hf_graphfilter.filters.contranorm import ContraNormConfig
from hf_graphfilter.filters.core.power_series import FromFirstLayerConfig
from hf_graphfilter.filters.dex import DexConfig
from hf_graphfilter.filters.far_field import FarFieldConfig
from hf_graphfilter.filters.featscale import FeatScaleConfig
from hf_graphfilter.filters.gated import GatedConfig
from hf_graphfilter.filters.neutreno import NeuTRENOConfig
from hf_graphfilter.filters.polynomial import PolynomialConfig
from hf_graphfilter.filters.ppr import PPRConfig
from hf_graphfilter.filters.value_residual import ValueResidualConfig
from hf_graphfilter.filters.xsa import XSAConfig


@dataclass(frozen=True)
class Entry:
    """A filter under test; what it can do, the suites ask the filter itself.

    Attributes:
        config: tiny, with all that the filter has switched on.
        formula: its matrix in the place of ``A``, made without the package: ``formula(A, c, config, seen)``, see
            oracle.py.
        everywhere: in every suite, or only where each filter meets each family (test_common.py, test_timm.py).
        quick: whether the suites besides these two run it among the quick tests.
        common: of which families these two run it among the quick tests: ``"all"``, ``"some"``, where another entry
            asks the same code of all, or ``"none"``.
    """

    config: FilterConfig
    formula: Callable
    everywhere: bool = True
    quick: bool = True
    common: str = "all"

    @property
    def replaces(self) -> bool:
        """Whether it has no scores: nothing to add a bias, shifted windows or talking heads to, or to return."""
        return isinstance(self.config, ReplacingConfig)

    @property
    def reads_first(self) -> bool:
        """Whether it reads what the first layer made, which one within windows cannot."""
        return isinstance(self.config, FromFirstLayerConfig)

    @property
    def encoders_only(self) -> bool:
        """Whether it is refused by causal modules."""
        return self.replaces and not self.config.module.causal_form

    @property
    def decoders_only(self) -> bool:
        """Whether it is refused by modules that are not causal: heads that keep their attention are a decoder's."""
        return bool(getattr(self.config, "keep", None))

    @property
    def exports_causal(self):
        """Whether a graph of its causal form serves all inputs; others choose between two forms."""
        return not self.replaces or self.config.filter == "far_field"

    @property
    def keeps_rows(self) -> bool:
        """Whether decoding keeps rows of signals, which can be static and cropped, rather than a state."""
        place = nn.Linear(8, 8)
        site = AttentionSite("site", place, 2, True, "decoder", "", 0, hidden_size=8, head_dim=4, stack_module=place)
        return not self.encoders_only and self.config.build(site).decoding == "rows"


class Damped(GraphFilter):
    """A third party's filter: c S(V)."""

    per_head = ("c",)

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.c)

    def scale(self, x):
        return self.c.to(x.dtype).view(-1, 1, 1) * x

    def forward(self, shift, value):
        return self.scale(shift(value))


@register_filter("test-damped")
@dataclass(frozen=True)
class DampedConfig(FilterConfig):
    module = Damped


def damped_matrix(A, c, config=None, seen=None):
    return c["c"].to(A.dtype).view(-1, 1, 1) * A


ALL = ("w_0", "w_1", "w_K")
FILTERS = {
    "gfsa": Entry(GFSAConfig(K=4, learn=ALL), gfsa_matrix),
    "gfsa-default": Entry(GFSAConfig(K=3), gfsa_matrix, everywhere=False, common="some"),
    "gfsa-exact": Entry(GFSAConfig(K=3, learn=ALL, approximation="none"), gfsa_matrix, everywhere=False, common="some"),
    "third-party": Entry(DampedConfig(), damped_matrix, everywhere=False, common="some"),
    "agf": Entry(
        AGFConfig(K=4, a=2, b=-1, constrain_theta=False, correction=True, window=2, sinks=1, position_bias="drop"),
        agf_matrix,
    ),
    "agf-default": Entry(AGFConfig(position_bias="drop"), agf_matrix, everywhere=False, common="some"),
    **{
        f"agf-{name}": Entry(AGFConfig(position_bias="drop", **ablated), agf_matrix, everywhere=False, common="some")
        for name, ablated in {
            "sigmoid": {"rho": "sigmoid", "K": 2},
            "tanh": {"rho": "tanh", "singular_values": "one"},
            "none": {"rho": "none", "init": "blend"},
            "uv": {"singular_values": "one"},
            "svd": {"singular_values": "learned"},
        }.items()
    },
    "agf-blend": Entry(
        AGFConfig(
            init="blend", K=2, basis="legendre", theta="per_head", correction=True, window=64, position_bias="drop"
        ),
        agf_matrix,
    ),
    "singularformer": Entry(
        SingularformerConfig(r=3, temperature=0.7, init="blend", window=2, position_bias="drop"),
        singular_matrix,
        quick=False,
    ),
    "kernelution": Entry(
        KernelutionConfig(K=3, kernel="jackson", window=2, sinks=2, far="beyond", position_bias="drop"),
        digraph_matrix,
        quick=False,
    ),
}
FILTERS["hedgehog"] = Entry(
    HedgehogConfig(window=2, sinks=1, far="beyond", position_bias="drop"),
    oracle.hedgehog_matrix,
    quick=False,
    common="none",
)
FILTERS["linear_transformer"] = Entry(
    LinearTransformerConfig(position_bias="drop"), oracle.linear_transformer_matrix, everywhere=False, common="some"
)
FILTERS["performer"] = Entry(
    PerformerConfig(features=12, seed=1, position_bias="drop"),
    oracle.performer_matrix,
    everywhere=False,
    common="some",
)
FILTERS["far_field"] = Entry(
    FarFieldConfig(window=2, sinks=1, position_bias="drop"), oracle.far_field_matrix, quick=False, common="some"
)
FILTERS["far_field-kept"] = Entry(
    FarFieldConfig(window=2, sinks=1, keep={0: (0,)}, position_bias="drop"),
    oracle.far_field_matrix,
    everywhere=False,
    common="some",
)
FILTERS["linear-attention"] = Entry(
    LinearAttentionConfig(init="blend", sharpness=3.0, position_bias="drop"),
    linear_attention_matrix,
    everywhere=False,
    common="some",
)
MENU = {
    "polynomial": Entry(PolynomialConfig(K=4, basis="jacobi", a=1.5, b=0.5), oracle.polynomial_matrix),
    "bernstein": Entry(PolynomialConfig(basis="bernstein", theta="tanh"), oracle.polynomial_matrix),
    "ppr": Entry(PPRConfig(), oracle.diffusion_matrix),
    "heat": Entry(PPRConfig(kernel="heat", t=0.7), oracle.diffusion_matrix),
    "arma": Entry(ARMAConfig(order=2), oracle.arma_matrix),
    "attnscale": Entry(AttnScaleConfig(), oracle.attnscale_matrix),
    "featscale": Entry(FeatScaleConfig(), oracle.featscale),
    "centered": Entry(CenteredConfig(), oracle.centered_matrix),
    "xsa": Entry(XSAConfig(), oracle.xsa),
    "dex": Entry(DexConfig(), oracle.dex),
    "gated": Entry(GatedConfig(), oracle.gated),
    "gated-heads": Entry(GatedConfig(gate="head"), oracle.gated),
    "neutreno": Entry(NeuTRENOConfig(), oracle.neutreno),
    "value-residual": Entry(ValueResidualConfig(), oracle.value_residual),
    "contranorm": Entry(ContraNormConfig(), oracle.contranorm),
}  # one among the quick tests of the common tester; test_menu.py asks all of them of some families
FILTERS |= {
    name: replace(entry, everywhere=False, common="all" if name == "gated" else "none") for name, entry in MENU.items()
}
for _module in filter(None, os.environ.get("TEST_FILTERS", "").split(",")):
    FILTERS |= importlib.import_module(_module).FILTERS


def everywhere(entry):
    return entry.everywhere


def llama_or_bert(family, entry):
    """Llama, or BERT for a filter that causal modules refuse; for ``combinations``."""
    return entry.everywhere and family == ("bert" if entry.encoders_only else "llama")


def cases(where=everywhere):
    """(id, entry) of the filters for which ``where`` holds."""
    return [(name, entry) for name, entry in FILTERS.items() if where(entry)]


def filters(where=everywhere, quick=lambda entry: entry.quick):
    """``pytest.mark.parametrize`` over them, as ``entry``; slow unless ``quick``."""
    parameters = [
        pytest.param(entry, id=name, marks=() if quick(entry) else pytest.mark.slow) for name, entry in cases(where)
    ]
    return pytest.mark.parametrize("entry", parameters)


def common(few):
    """Whether the common tester asks an entry of a family among the quick tests; ``few`` are those of ``"some"``."""
    return lambda family, entry: entry.common == "all" or (entry.common == "some" and family in few)


def by_axis(few):
    """Quick: GFSA of every family and every filter of ``few``, for what hardly depends on the two together."""
    return lambda family, entry: entry is FILTERS["gfsa"] or (entry.quick and entry.common == "all" and family in few)


def everything(family, entry):
    return True


def each_once(few):
    """Quick: GFSA of every family and every filter of ``few``; so a third axis meets each family and each filter."""
    return lambda family, entry: entry is FILTERS["gfsa"] or family in few


@dataclass(frozen=True)
class Third:
    """What ``combinations`` crosses families and filters with: values by id, and ``quick(value, family, entry)``."""

    name: str | None
    values: dict
    quick: Callable


NO_THIRD = Third(None, {"": None}, lambda value, family, entry: True)


def combinations(families, where=lambda family, entry: entry.everywhere, quick=everything, values=None, third=NO_THIRD):
    """The same over names of families and filters, as ``family``, or what ``values`` has of its name, and ``entry``;
    slow unless ``quick``. And over the values of a third axis, if there is one."""
    parameters = [
        pytest.param(
            values[family] if values else family,
            entry,
            *([value] if third.name else []),
            id="-".join([*filter(None, [label]), family, name]),
            marks=() if quick(family, entry) and third.quick(value, family, entry) else pytest.mark.slow,
        )
        for label, value in third.values.items()
        for family in families
        for name, entry in FILTERS.items()
        if where(family, entry)
    ]
    return pytest.mark.parametrize(("family", "entry", *([third.name] if third.name else [])), parameters)
