"""torch.compile: in one graph where the plain model's forward is one, with no more recompilations than it has."""

import copy

import pytest
import torch
from filters import combinations, filters
from models import FAMILIES, TORCH_2_11, output, turn_on
from torch._dynamo.testing import CompileCounterWithBackend

from hf_graphfilter import filter_parameters
from hf_graphfilter.ops.visibility import visibility

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute",  # dynamo's own, where a graph breaks
    "ignore:Dynamo detected a call to a .functools.lru_cache.-wrapped function at 'fsdp.py",  # of transformers
    "ignore:Torchinductor does not support code generation for complex operators",  # which run as they are
)


def compiled(model, **options):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, **options), counter


def lengths(family):
    """Inputs of several lengths, where the family has a length; more than one block of rotations (ops.hessenberg)."""
    given = [family.inputs(torch.float64, tokens=n) for n in (17, 20, 25)]
    return given if "input_ids" in given[0] else given[:1] * 2


def graphs(model, family, fullgraph):
    """(the outputs without gradients, number of graphs made for several lengths)."""
    run, counter = compiled(model, fullgraph=fullgraph)
    with torch.no_grad():
        return [output(run, inputs) for inputs in lengths(family)], counter.frame_count


@pytest.mark.feature("Compiling and exporting: torch.compile")
@combinations(FAMILIES, quick=lambda *_: False)  # test_routes.py and check_filter compile in a few seconds
def test_compiled_as_the_plain_model_is(family, entry):
    family = FAMILIES[family]
    plain = family.build().double()
    try:
        _, count = graphs(plain, family, fullgraph=True)
        fullgraph = True
    except Exception:  # its own forward breaks the graph
        _, count = graphs(plain, family, fullgraph=False)
        fullgraph = False
    model = turn_on(family.patch(copy.deepcopy(plain), entry))
    # without scores, the causal form is chosen by the input; torch 2.11 breaks the graph where a cache is prepared
    two_forms = (entry.replaces or TORCH_2_11) and family.kind.endswith(("decoder", "composite"))
    fullgraph = fullgraph and not two_forms
    found, patched_count = graphs(model, family, fullgraph)
    with torch.no_grad():
        for inputs, logits in zip(lengths(family), found, strict=True):
            torch.testing.assert_close(logits, output(model, inputs), atol=1e-8, rtol=1e-8)
    assert two_forms or patched_count <= count

    run, _ = compiled(model, fullgraph=fullgraph)
    inputs = family.inputs(torch.float64)
    output(run, inputs).square().sum().backward()
    gradients = [p.grad.clone() for p in filter_parameters(model)]
    model.zero_grad()
    output(model, inputs).square().sum().backward()
    for gradient, parameter in zip(gradients, filter_parameters(model), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-6)


def test_a_compiled_filter_refuses_another_mask_than_it_was_compiled_for():
    torch.compiler.reset()
    read = torch.compile(lambda mask: visibility(mask, False, 5)[1], backend="eager", fullgraph=True)
    padding = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    padding[1, ..., 3:] = False
    assert read(padding).tolist() == padding[:, 0, 0].tolist()
    with pytest.raises(RuntimeError, match=r"compiled for bidirectional attention, and its mask is neither padding"):
        read(torch.ones(2, 1, 5, 5).tril().bool())


@pytest.mark.slow
@pytest.mark.feature("Compiling and exporting: torch.compile with Inductor")
@filters()
@pytest.mark.parametrize("family", ["bert", "gpt2", "deit"])
def test_inductor(family, entry):
    family = FAMILIES[family]
    model, inputs = turn_on(family.patch(family.build().double(), entry)), family.inputs(torch.float64)
    torch.compiler.reset()
    # the coefficients are float32, and Inductor's tanh of them rounds in its own way
    torch.testing.assert_close(output(torch.compile(model), inputs), output(model, inputs), atol=1e-6, rtol=1e-6)
