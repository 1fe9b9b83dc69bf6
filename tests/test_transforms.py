"""What PyTorch does to a whole model: torch.func, DataParallel, anomaly detection."""

import copy

import pytest
import torch
from filters import combinations, filters
from models import FAMILIES, output, turn_on
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.parallel import comm, replicate

from hf_graphfilter import filter_parameters, filter_status
from hf_graphfilter.functional import gfsa

families = pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "deit"])


def patched(family, entry):
    family = FAMILIES[family]
    model = turn_on(family.patch(family.build().double(), entry))
    model.config.use_cache = False  # a cache is no output that torch.func knows
    return model, family.inputs(torch.float64)


def loss(model, parameters, inputs):
    return functional_call(model, parameters, (), inputs).last_hidden_state.square().sum()


@pytest.mark.feature("Transforms of PyTorch: torch.func.functional_call and grad")
@families
@filters()
def test_functional_call_and_grad(family, entry):
    model, inputs = patched(family, entry)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    others = {k: v + 0.01 for k, v in parameters.items()}
    found, gradients = loss(model, others, inputs), grad(lambda p: loss(model, p, inputs))(parameters)
    output(model, inputs).square().sum().backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[key], parameter.grad, atol=1e-6, rtol=1e-6)
    model.load_state_dict({**model.state_dict(), **others})
    torch.testing.assert_close(found, output(model, inputs).square().sum())


@pytest.mark.feature("Transforms of PyTorch: torch.func.vmap over an ensemble")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@combinations(
    ("bert", "deit", "gpt2", "llama"),
    lambda family, entry: entry.everywhere,
)
def test_vmap(family, entry):
    model, inputs = patched(family, entry)
    other = turn_on(copy.deepcopy(model))
    parameters, _ = stack_module_state([model, other])
    found = vmap(lambda p: functional_call(model, p, (), inputs).last_hidden_state)(parameters)
    for result, member in zip(found, (model, other), strict=True):
        torch.testing.assert_close(result, output(member, inputs), atol=1e-9, rtol=1e-9)


def test_vmap_over_a_coefficient_alone():
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    found = vmap(lambda w: gfsa(query, key, value, -0.1, 1.0, w, 3))(strengths := torch.linspace(0, 1, 3).double())
    for result, strength in zip(found, strengths, strict=True):
        torch.testing.assert_close(result, gfsa(query, key, value, -0.1, 1.0, strength, 3))


@pytest.mark.feature("Transforms of PyTorch: torch.func.vmap over gradients, one for each example")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@combinations(("bert", "gpt2"), lambda family, entry: entry.everywhere)
def test_gradients_by_example(family, entry):
    model, inputs = patched(family, entry)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    inputs.pop("attention_mask", None)  # transformers reads its values
    examples = {k: torch.stack([v, v.roll(1, -1)]) for k, v in inputs.items()}
    found = vmap(grad(lambda p, one: loss(model, p, one)), (None, 0))(parameters, examples)
    for i in range(2):
        expected = grad(lambda p, one: loss(model, p, one))(parameters, {k: v[i] for k, v in examples.items()})
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key][i], gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.feature("Transforms of PyTorch: DataParallel (replicas, without GPUs)")
@families
@filters()
def test_replicas_of_data_parallel(family, entry, monkeypatch):
    model, inputs = patched(family, entry)
    copies = lambda tensors, devices: [[t.clone() for t in tensors] for _ in devices]  # noqa: E731
    monkeypatch.setattr(comm, "broadcast_coalesced", copies)
    with torch.no_grad():
        for replica in replicate(model, [0, 1], detach=True):
            assert torch.equal(output(replica, inputs), output(model, inputs))
    assert len(filter_status(torch.nn.DataParallel(model))) == len(filter_status(model))


@pytest.mark.feature("Transforms of PyTorch: autograd.detect_anomaly")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@families
@filters()
def test_detect_anomaly(family, entry):
    model, inputs = patched(family, entry)
    with torch.autograd.detect_anomaly():
        output(model.train(), inputs).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in filter_parameters(model))
