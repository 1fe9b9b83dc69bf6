"""torch.compile: in one graph where the plain model's forward is one, with no more recompilations than it has."""

import copy

import pytest
import torch
from filters import combinations, filters
from models import FAMILIES, TORCH_2_11, output, turn_on
from torch._dynamo.testing import CompileCounterWithBackend

from hf_graphfilter import filter_parameters
from hf_graphfilter.ops import compiled_polynomial
from hf_graphfilter.ops.polynomial_form import polynomial_form
from hf_graphfilter.ops.visibility import visibility

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute",  # dynamo's own, where a graph breaks
    "ignore:Dynamo detected a call to a .functools.lru_cache.-wrapped function at 'fsdp.py",  # of transformers
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",  # of torch 2.11 in itself
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


def attend_twice(query, key, value, mask, causal=False):
    c = [torch.linspace(0.5, 1.5, query.shape[1], dtype=query.dtype) * k for k in (1, -2, 3)]
    return polynomial_form(query, key, value, mask, c, causal=causal, exact=False)


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "additive"])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_compiled_polynomial_writes_out_the_matrix(kind, groups):
    torch.compiler.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 7, 8, dtype=torch.float64, requires_grad=True) for h in (4, groups, groups)]
    mask, bias = None, torch.zeros(7, 7, dtype=torch.float64)
    if kind == "causal":
        bias = torch.full_like(bias, -torch.inf).triu(1)
    elif kind == "padding":
        mask = torch.rand(2, 1, 7, 7) < 0.6
        mask[0, 0, 3] = False  # a row that attends to nothing
        bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    elif kind == "additive":
        mask = bias = torch.randn(1, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    given = [*inputs, *([mask] if kind == "additive" else [])]

    compiled_form = torch.compile(attend_twice, backend="aot_eager", fullgraph=True)
    found, (first,) = compiled_form(*inputs, mask, causal=kind == "causal")
    gradients = torch.autograd.grad(found.square().sum() + first.sum(), given)

    query, key, value = (x.repeat_interleave(4 // x.shape[1], 1) for x in inputs)
    A = (query @ key.mT / 8**0.5 + bias).masked_fill(bias.amax(-1, keepdim=True) == -torch.inf, 0.0).softmax(-1)
    A = A.masked_fill(bias.amax(-1, keepdim=True) == -torch.inf, 0.0)
    c = torch.linspace(0.5, 1.5, 4, dtype=torch.float64).view(-1, 1, 1)
    expected = c * value - 2 * c * (A @ value) + 3 * c * (A @ (A @ value))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(first, A @ value)
    for gradient, reference in zip(
        gradients, torch.autograd.grad(expected.square().sum() + (A @ value).sum(), given), strict=True
    ):
        torch.testing.assert_close(gradient, reference)


def test_a_compiled_polynomial_drops_entries_of_each_application():
    torch.compiler.reset()
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 5, 4)
    c = [None, None, torch.ones(1)]

    def twice(query, key, value):
        return polynomial_form(query, key, value, None, c, dropout=0.25, exact=False)

    eye = torch.eye(5).expand(20_000, 1, 5, 5)
    many = [x.expand(20_000, -1, -1, -1) for x in (query, key)]
    second, (first,) = torch.compile(twice, backend="aot_eager", fullgraph=True)(*many, eye)
    A = (query @ key.mT / 2).softmax(-1)[0, 0]
    torch.testing.assert_close(first.mean((0, 1)), A, atol=0.01, rtol=0)
    torch.testing.assert_close(second.mean((0, 1)), A @ A, atol=0.01, rtol=0)
    assert ((first == 0).float().mean() - 0.25).abs() < 0.01


def test_a_large_or_exact_matrix_is_left_to_calls_of_attention_when_compiled(monkeypatch):
    """The start of a filter, and what would keep too much memory."""
    torch.compiler.reset()
    inputs, c = torch.randn(3, 1, 2, 5, 4), [None, torch.ones(2), torch.ones(2)]

    def is_written_out(exact=False):
        torch.compiler.reset()
        form = torch.compile(
            lambda *x: polynomial_form(*x, None, c, exact=exact) is not None, backend="eager", fullgraph=True
        )
        return form(*inputs)

    assert is_written_out()
    assert not is_written_out(exact=True)
    assert polynomial_form(*inputs, None, c, exact=False) is None, "so few entries do not repay the calls of a block"
    monkeypatch.setattr(compiled_polynomial, "MOST_ENTRIES", 49)
    assert not is_written_out()


def test_lengths_on_both_sides_of_the_largest_matrix_take_one_graph_more(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(compiled_polynomial, "MOST_ENTRIES", 2 * 8**2)
    counter, c = CompileCounterWithBackend("aot_eager"), [None, torch.ones(2), torch.ones(2)]

    def twice(*tensors):
        joint = polynomial_form(*tensors, None, c, exact=False)
        if joint is not None:
            return joint[0]
        once = torch.nn.functional.scaled_dot_product_attention(*tensors)
        return once + torch.nn.functional.scaled_dot_product_attention(*tensors[:2], once)

    form = torch.compile(twice, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for tokens in (6, 7, 8, 9, 10, 6):
        query, key, value = torch.randn(3, 1, 2, tokens, 4)
        A = (query @ key.mT / 2).softmax(-1)
        torch.testing.assert_close(form(query, key, value), A @ value + A @ (A @ value))
        counts.append(counter.frame_count - counts[0] if counts else counter.frame_count)
    assert counts[1:] == [0, 0, 1, 1, 1]
