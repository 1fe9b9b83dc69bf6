"""What only a GPU shows: its attention kernels under the same tester. Skipped where there is none."""

import copy

import pytest
import torch
from filters import filters
from models import FAMILIES, output, turn_on
from oracle import dense_twin

from hf_graphfilter import GFSAConfig, filter_parameters
from hf_graphfilter.functional import agf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
families = pytest.mark.parametrize("family", [pytest.param(f, id=n) for n, f in FAMILIES.items()])

IN_FLOAT32 = [FAMILIES[name] for name in ("llama", "t5", "codet5", "wav2vec2")]  # in parts, whatever their dtype


def is_gfsa(entry):
    return isinstance(entry.config, GFSAConfig)


def on_gpu(family, dtype):
    inputs = {name: tensor.cuda() for name, tensor in family.inputs(dtype).items()}
    return family.build().to("cuda", dtype), inputs


@families
@filters(lambda entry: entry.everywhere and entry.config.starts_as_original, quick=is_gfsa)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_at_the_start(family, entry, dtype):
    model, inputs = on_gpu(family, dtype)
    with torch.no_grad():
        expected = output(model, inputs)
        assert torch.equal(output(family.patch(model, entry), inputs), expected)


@families
@filters(quick=is_gfsa)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_equals_the_dense_form(family, entry, dtype, tolerance):
    if dtype == torch.float32 and not is_gfsa(entry):
        pytest.skip("explicit matrices of the other filters are in float64")
    plain, inputs = family.build().to(dtype), family.inputs(dtype)
    patched = turn_on(family.patch(copy.deepcopy(plain), entry))
    expected = output(dense_twin(plain, patched, entry.formula), inputs)
    found = output(patched.cuda(), {name: tensor.cuda() for name, tensor in inputs.items()})
    if any(family is other for other in IN_FLOAT32):
        tolerance = 1e-3
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    found.float().square().sum().backward()
    assert all(p.is_cuda and p.grad.isfinite().all() for p in filter_parameters(patched))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_agf_equals_the_cpu(causal, dtype, tolerance):
    inputs, theta = [torch.randn(2, 3, 200, 16).to(dtype) for _ in range(4)], torch.tensor([1.0, 0.2, -0.1])
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[1, -50:] = False
    results = []
    for device in ("cpu", "cuda"):
        moved = [x.to(device, copy=True).requires_grad_() for x in inputs]
        out = agf(*moved, theta.to(device), mask=mask.to(device), causal=causal)
        out.float().square().sum().backward()
        results.append([out.cpu(), *(x.grad.cpu() for x in moved)])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
