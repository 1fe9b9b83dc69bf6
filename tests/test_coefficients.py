"""Which parameters are coefficients, told once by the filter: precision, learning rate, loading, display."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from models import FAMILIES, output
from torch import nn
from transformers import BertModel

from hf_graphfilter import (
    AGFConfig,
    CoefficientCallback,
    FilterConfig,
    GraphFilter,
    GraphFilterError,
    filter_status,
    parameter_groups,
    patch_model,
    register_filter,
    transfer_attention,
)
from hf_graphfilter.filters.core.attached import filters_of

PARTS = {"real": 1.0, "imag": 0.5}


class Phased(GraphFilter):
    """A complex number a head, kept as pairs in a child, of which the real part scales ``S``; and a weight."""

    def __init__(self, config, site):
        super().__init__(config, site)
        self.phase = nn.Module()
        self.phase.pairs = nn.Parameter(torch.empty(site.heads, 2))
        self.weight = nn.Linear(site.head_dim, site.head_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.phase.pairs.copy_(torch.tensor([1.0, 0.5]))
        nn.init.zeros_(self.weight.weight)

    def coefficient_names(self):
        return {"phase.pairs"}

    def coefficients(self):
        return {"phase": torch.view_as_complex(self.phase.pairs.detach())}

    learned_coefficients = coefficients

    def forward(self, shift, value):
        real = torch.view_as_complex(self.phase.pairs).real.view(-1, 1, 1)
        return (real * (shift(value) + self.weight(shift.identity(value)))).to(value.dtype)


@pytest.fixture
def config():
    @register_filter("phased")
    @dataclass(frozen=True)
    class PhasedConfig(FilterConfig):
        module = Phased

    return PhasedConfig()


def build(config):
    torch.manual_seed(0)
    return patch_model(FAMILIES["bert"].build(), config)


def test_only_coefficients_keep_their_precision(config, tmp_path):
    model = build(config)
    model.save_pretrained(tmp_path)
    for half in (build(config).to(torch.bfloat16), BertModel.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        for _, graph_filter in filters_of(half):
            assert graph_filter.phase.pairs.dtype == torch.float32
            assert graph_filter.weight.weight.dtype == torch.bfloat16
        assert filter_status(half)[0].coefficients["phase"].tolist() == [1 + 0.5j] * 4
        assert output(half, FAMILIES["bert"].inputs()).dtype == torch.bfloat16


def test_gradients_of_coefficients_keep_it_too(config):
    model = build(config)
    output(model, FAMILIES["bert"].inputs()).sum().backward()
    ((_, graph_filter), *_) = filters_of(model.to(torch.bfloat16))
    assert graph_filter.phase.pairs.grad.dtype == torch.float32
    assert graph_filter.weight.weight.grad.dtype == torch.bfloat16


def test_they_have_a_learning_rate_of_their_own(config):
    model = build(config)
    *_, own = parameter_groups(model, lr=1e-5, filter_lr=1e-2)
    assert {id(p) for p in own["params"]} == {id(f.phase.pairs) for _, f in filters_of(model)}


def test_damaged_ones_are_refused(config, tmp_path):
    model = build(config)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.graph_filter.phase.pairs[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(GraphFilterError, match=r"layer\.1.*phase\.pairs holds NaN or infinity"):
        BertModel.from_pretrained(tmp_path)


def test_complex_values_are_shown_and_logged_whole(config):
    model = build(config)
    status = filter_status(model)
    assert "1.0000+0.5000j" in str(status)
    callback = CoefficientCallback()
    callback.model = model
    assert callback.values() == {f"filter/{i}/phase_{part}": x for i in range(3) for part, x in PARTS.items()}


def test_transfer_fits_them(config):
    batches = [FAMILIES["bert"].inputs() for _ in range(3)]
    model = build(config)
    with torch.no_grad():
        for _, graph_filter in filters_of(model):
            graph_filter.phase.pairs.mul_(0.5)
    report = transfer_attention(model, batches, steps=5, holdout=1, progress=False)
    assert report.mean_after < report.mean_before


@pytest.mark.parametrize("where", ["parameter", "buffer", "child"])
def test_complex_tensors_are_refused_by_name(where):
    class Complex(GraphFilter):
        def __init__(self, config, site):
            super().__init__(config, site)
            tensor = torch.ones(site.heads, dtype=torch.complex64)
            if where == "buffer":
                self.register_buffer("turn", tensor, persistent=False)
            elif where == "child":
                self.inner = nn.Module()
                self.inner.turn = nn.Parameter(tensor)
            else:
                self.turn = nn.Parameter(tensor)

        def reset_parameters(self):
            pass

        def forward(self, shift, value):
            return shift(value)

    register_filter("complex")(dataclass(frozen=True)(type("ComplexConfig", (FilterConfig,), {"module": Complex})))
    model = FAMILIES["bert"].build()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(GraphFilterError, match=r"turn' is complex, and casting .* \(\.\.\., 2\) .*view_as_complex"):
        patch_model(model, "complex")
    assert {name: id(p) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("names", [["w"], {"v"}])
def test_names_of_nothing_are_refused(names):
    class Wrong(GraphFilter):
        w: ClassVar[int] = 0

        def coefficient_names(self):
            return names

        def forward(self, shift, value):
            return shift(value)

    register_filter("wrong")(dataclass(frozen=True)(type("WrongConfig", (FilterConfig,), {"module": Wrong})))
    with pytest.raises(GraphFilterError, match=r"coefficient_names\(\) must return the set of names"):
        patch_model(FAMILIES["bert"].build(), "wrong")


def test_the_float32_names_are_complete_after_one_patch(config):
    assert build(config)._keep_in_fp32_modules_strict == {"graph_filter.phase.pairs"}
    model = patch_model(FAMILIES["bert"].build(), AGFConfig(init="blend"), layers=[0])
    assert model._keep_in_fp32_modules_strict == {"graph_filter.theta", "graph_filter.gate"}
    patch_model(model, "gfsa", layers=[1])
    assert "graph_filter.w_K" in model._keep_in_fp32_modules_strict
