"""Precision and memory in training: autocast, half-precision weights, gradient checkpointing."""

import copy

import pytest
import torch
from filters import FILTERS, by_axis, combinations
from models import FAMILIES, ONE_OF_A_KIND, checkpointed, output, turn_on
from transformers import set_seed

from hf_graphfilter import GraphFilter, filter_parameters, parameter_groups

each = combinations(FAMILIES, quick=by_axis(ONE_OF_A_KIND))


def patched(family, entry):
    family = FAMILIES[family]
    plain = family.build()
    return plain, family.patch(copy.deepcopy(plain), entry), family.inputs()


def coefficients(model):
    return [p for f in model.modules() if isinstance(f, GraphFilter) for p in f.parameters(recurse=False)]


@pytest.mark.feature("Training: autocast in bfloat16 and float16")
@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(family, entry, dtype):
    plain, model, inputs = patched(family, entry)
    with torch.no_grad():
        wide = output(plain, inputs)
        with torch.autocast("cpu", dtype):
            lost = (output(plain, inputs) - wide).norm() / wide.norm()
            if entry.config.starts_as_original:
                assert torch.equal(output(model, inputs), output(plain, inputs))
    expected = output(turn_on(model), inputs)
    with torch.autocast("cpu", dtype):
        found = output(model.train(), inputs)
    error = (found - expected).norm()
    assert error / expected.norm() < 0.03 + 4 * lost
    assert error < 0.5 * (found - wide).norm(), "no more than the filter itself does"
    found.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in filter_parameters(model))


@pytest.mark.feature("Training: bfloat16 weights, float32 coefficients")
@each
def test_a_step_with_weights_in_bfloat16(family, entry):
    """A step of 1e-4 on a coefficient near 1 would be lost in bfloat16."""
    _, model, _ = patched(family, entry)
    turn_on(model.to(torch.bfloat16).train(), scale=0.1)
    before = [p.detach().clone() for p in coefficients(model)]
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-5, filter_lr=1e-4))
    output(model, FAMILIES[family].inputs(torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    for parameter, start in zip(coefficients(model), before, strict=True):
        assert parameter.dtype == torch.float32
        moved = (parameter.detach() - start).abs()
        assert moved.max() == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coefficients_that_were_float64_come_back_to_float32(dtype):
    model = turn_on(patched("bert", FILTERS["gfsa"])[1]).double()
    assert {p.dtype for p in coefficients(model)} == {torch.float64}
    assert {p.dtype for p in coefficients(model.to(dtype))} == {torch.float32}


@pytest.mark.feature("Training: gradient checkpointing, reentrant and not")
@each
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family, entry, reentrant, transformers_warnings):
    plain, model, inputs = patched(family, entry)
    inputs = FAMILIES[family].inputs(torch.float64)
    try:
        plain_can = same_gradients_with_checkpointing(plain.double(), inputs, reentrant)
    except (ValueError, RuntimeError, UserWarning):
        plain_can = False
    can = plain_can and same_gradients_with_checkpointing(turn_on(model.double()), inputs, reentrant)
    transformers_warnings.clear()  # use_cache is switched off
    if not plain_can:
        pytest.skip("not in the plain model")
    assert can


def same_gradients_with_checkpointing(model, inputs, reentrant):
    expected = gradients(model.train(), inputs)
    found = gradients(checkpointed(model, reentrant), inputs)
    # some models normalise in float32 whatever their dtype; what is unused gets zeros from the reentrant kind
    return found.keys() >= expected.keys() and all(
        (gradient - expected.get(name, 0)).norm() <= 1e-4 * gradient.norm() + 1e-12  # of biases that softmax ignores
        for name, gradient in found.items()
    )


def gradients(model, inputs):
    model.zero_grad()
    set_seed(1)
    output(model, inputs).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
