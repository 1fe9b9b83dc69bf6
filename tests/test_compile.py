"""torch.compile: GFSA in one graph where the plain model's forward is one, with no more recompilations than it has."""

import copy

import pytest
import torch
from models import FAMILIES, output, turn_on
from torch._dynamo.testing import CompileCounterWithBackend

from hf_graphfilter import AGFConfig, GFSAConfig, filter_parameters

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, where a graph breaks

CONFIGS = {
    "gfsa": GFSAConfig(K=3, learn=("w_0", "w_1", "w_K")),
    "agf": AGFConfig(K=2, position_bias="drop"),
    "agf-blend": AGFConfig(K=2, init="blend", window=2, position_bias="drop"),
}
QUICK = [("bert", "gfsa"), ("gpt2", "gfsa"), ("deit", "agf")]
cases = pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(f, n, marks=() if (f, n) in QUICK else pytest.mark.slow, id=f"{f}-{n}")
        for f in FAMILIES
        for n in CONFIGS
    ],
)


def compiled(model, **options):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, **options), counter


def lengths(family):
    """Inputs of several lengths, where the family has a length."""
    return [family.inputs(tokens=n) for n in (9, 12, 17)] if "input_ids" in family.inputs() else [family.inputs()] * 2


def graphs(model, family, fullgraph):
    """(the outputs without gradients, number of graphs made for several lengths)."""
    run, counter = compiled(model, fullgraph=fullgraph)
    with torch.no_grad():
        return [output(run, inputs) for inputs in lengths(family)], counter.frame_count


@cases
def test_compiled_as_the_plain_model_is(family, name):
    family = FAMILIES[family]
    plain = family.build()
    try:
        _, count = graphs(plain, family, fullgraph=True)
        fullgraph = True
    except Exception:  # its own forward breaks the graph
        _, count = graphs(plain, family, fullgraph=False)
        fullgraph = False
    model = turn_on(family.patch(copy.deepcopy(plain), CONFIGS[name]))
    reads_masks = name != "gfsa"  # AGF must know what a mask says, which breaks the graph
    fullgraph = fullgraph and not reads_masks
    found, patched_count = graphs(model, family, fullgraph)
    with torch.no_grad():
        for inputs, logits in zip(lengths(family), found, strict=True):
            torch.testing.assert_close(logits, output(model, inputs), atol=1e-4, rtol=1e-4)
    assert reads_masks or patched_count <= count

    run, _ = compiled(model, fullgraph=fullgraph)
    inputs = family.inputs()
    output(run, inputs).square().sum().backward()
    gradients = [p.grad.clone() for p in filter_parameters(model)]
    model.zero_grad()
    output(model, inputs).square().sum().backward()
    for gradient, parameter in zip(gradients, filter_parameters(model), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "deit"])
def test_inductor(name):
    family = FAMILIES[name]
    model = turn_on(family.patch(family.build(), CONFIGS["gfsa"]))
    torch.compiler.reset()
    torch.testing.assert_close(
        output(torch.compile(model), family.inputs()), output(model, family.inputs()), atol=1e-4, rtol=1e-4
    )
