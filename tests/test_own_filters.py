"""Filters that other people write: loaded values stay, in whatever way ``reset_parameters`` sets the start."""

import copy
from dataclasses import dataclass

import pytest
import torch
from models import FAMILIES, output, realigned, turn_on
from torch import nn
from transformers import AutoConfig, AutoModel

from hf_graphfilter import (
    FilterConfig,
    GraphFilter,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    register_filter,
    save_filter,
    unpatch_model,
)

BERT = FAMILIES["bert"]


class Weighted(GraphFilter):
    """c_0 V + c_1 S(V), c (heads, 2); a fixed scale, a small network on V, and a table that no checkpoint holds."""

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(site.heads, 2))
        self.register_buffer("scale", torch.empty(site.heads, 1, 1))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.mix = nn.Linear(site.head_dim, site.head_dim)
        self.reset_parameters()

    def forward(self, shift, value):
        c = self.c.to(value.dtype)[:, :, None, None]
        signal = c[:, 0] * shift.identity(value) + c[:, 1] * shift(value)
        return signal + self.scale.to(value.dtype) * self.table.sum().to(value.dtype) * self.mix(signal)


def through_init(f):
    nn.init.zeros_(f.c)
    nn.init.ones_(f.c[:, 1])
    nn.init.constant_(f.scale, 0.0)
    nn.init.constant_(f.table, 1.0)
    f.mix.reset_parameters()


def in_place(f):
    with torch.no_grad():
        f.c.zero_()
        f.c[:, 1] = 1.0
        f.scale.fill_(0.0)
        f.table.fill_(1.0)
        f.mix.weight.zero_()
        f.mix.bias.zero_()


def through_data(f):
    f.c.data = torch.tensor([0.0, 1.0], device=f.c.device).repeat(f.heads, 1)
    f.scale.data.zero_()
    f.table.data.copy_(torch.ones(3))
    f.mix.weight.data.normal_()
    f.mix.bias.data = torch.zeros_like(f.mix.bias)


def as_new_tensors(f):
    f.c = nn.Parameter(torch.tensor([[0.0, 1.0]] * f.heads))
    f.scale = torch.zeros(f.heads, 1, 1)
    f.table = torch.ones(3)
    f.mix.weight, f.mix.bias = nn.Parameter(torch.eye(len(f.mix.bias))), nn.Parameter(torch.zeros(len(f.mix.bias)))


def in_a_loop(f):
    start = {"c": torch.tensor([0.0, 1.0]), "scale": torch.zeros(()), "table": torch.ones(())}
    with torch.no_grad():
        for name, tensor in (*f.named_parameters(), *f.named_buffers()):
            tensor.copy_(start.get(name, torch.tensor(0.1)).expand_as(tensor))


WAYS = [through_init, in_place, through_data, as_new_tensors, in_a_loop]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def name(request):
    made = type("Weighted", (Weighted,), {"reset_parameters": lambda self: request.param(self)})

    @register_filter(f"test-{request.param.__name__}")
    @dataclass(frozen=True)
    class WeightedConfig(FilterConfig):
        module = made

    return WeightedConfig.filter


def trained(name):
    model = turn_on(patch_model(BERT.build(), name))
    for module in model.modules():
        if isinstance(module, GraphFilter):
            module.scale.fill_(0.7)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"shards": "20KB"}],
    ids=lambda o: next(iter(o), ""),
)
def test_trained_values_survive(name, options, tmp_path):
    model = trained(name)
    assert not torch.equal(output(model, BERT.inputs()), output(BERT.build(), BERT.inputs()))
    model.save_pretrained(tmp_path, max_shard_size=options.get("shards", "5GB"))
    dtype = options.get("dtype", torch.float32)
    loaded = realigned(AutoModel.from_pretrained(tmp_path, dtype=dtype, device_map=options.get("device_map")))
    for (key, found), expected in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        own = key.rpartition(".graph_filter.")[2] in ("c", "scale")
        torch.testing.assert_close(found, expected if own else expected.to(dtype), atol=0, rtol=0)
    assert all(m.table.tolist() == [1, 1, 1] for m in loaded.modules() if isinstance(m, GraphFilter))
    if dtype == torch.float32:
        assert torch.equal(output(loaded, BERT.inputs()), output(model, BERT.inputs()))


def test_values_that_were_not_saved_start(name, tmp_path, transformers_warnings):
    BERT.build().save_pretrained(tmp_path / "plain")
    trained(name).save_pretrained(tmp_path / "patched")
    config = AutoConfig.from_pretrained(tmp_path / "patched")
    loaded = AutoModel.from_pretrained(tmp_path / "plain", config=config)
    transformers_warnings.clear()
    assert all(r.coefficients["c"].tolist() == [[0, 1]] * 4 for r in filter_status(loaded))
    assert torch.equal(output(loaded, BERT.inputs()), output(unpatch_model(loaded), BERT.inputs()))


class Numbered(GraphFilter):
    """c_i i S(V) for head i: what ``__init__`` alone sets, and integers."""

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(site.heads))
        self.register_buffer("order", torch.arange(site.heads))
        self.register_buffer("number", torch.arange(1.0, 1.0 + site.heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.c, 0.5)

    def forward(self, shift, value):
        return (self.c[self.order] * self.number).to(value.dtype).view(-1, 1, 1) * shift(value)


@register_filter("test-numbered")
@dataclass(frozen=True)
class NumberedConfig(FilterConfig):
    module = Numbered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_only_init_sets_are_there_after_loading(dtype, tmp_path):
    model = turn_on(patch_model(BERT.build(), "test-numbered"))
    model.save_pretrained(tmp_path)
    seed = torch.random.get_rng_state()
    loaded = realigned(AutoModel.from_pretrained(tmp_path, dtype=dtype))
    assert torch.equal(torch.random.get_rng_state(), seed)
    of_filter = [(n, b) for n, b in loaded.named_buffers() if "graph_filter" in n]
    assert all(b.tolist() == ([0, 1, 2, 3] if n.endswith("order") else [1, 2, 3, 4]) for n, b in of_filter)
    assert {b.dtype for n, b in of_filter if n.endswith("order")} == {torch.int64}
    found = output(loaded, BERT.inputs(dtype))
    if dtype == torch.float32:
        assert torch.equal(found, output(model, BERT.inputs()))


def test_the_filter_file_keeps_them(name, tmp_path):
    model = trained(name)
    save_filter(model, tmp_path)
    again = load_filter(unpatch_model(copy.deepcopy(model)), tmp_path)
    assert torch.equal(output(again, BERT.inputs()), output(model, BERT.inputs()))
    assert sum(p.numel() for p in filter_parameters(again)) == sum(p.numel() for p in filter_parameters(model))
