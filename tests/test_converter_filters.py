"""Converter's filters: what the common tester does not ask of them. Their matrix is in oracle.py."""

import itertools

import pytest
import test_common
import torch
from filters import Entry
from models import FAMILIES, output, turn_on
from oracle import digraph_matrix
from test_penalties import train
from transformers import BertForSequenceClassification

from hf_graphfilter import (
    GraphFilterError,
    KernelutionConfig,
    RegularizerCallback,
    SynvolutionConfig,
    collect_penalties,
    filter_parameters,
    patch_model,
    transfer_attention,
)
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.filters.core.unitary_spectrum import Spectrum, reflect
from hf_graphfilter.functional import kernel_polynomial_loss, kernelution, unitary
from hf_graphfilter.ops.unitary import filter_tokens

B, H, N, D = 2, 3, 19, 4
PERMUTATIONS = ("identity", "stride", "bit_reversal")


def tensors(sets=1, orders=1, n=N, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = (B, H, n, D), (B, sets, n), (B, sets, orders, 6, n)
    return [3 * torch.randn(shape, generator=g, dtype=dtype) for shape in shapes]


def filter_of(**options):
    return filters_of(patch_model(FAMILIES["bert"].build().double(), KernelutionConfig(**options)))[0][1]


@pytest.mark.parametrize("sets", [1, H], ids=["shared", "per head"])
@pytest.mark.parametrize("orders", [1, 3])
@pytest.mark.parametrize("permutation", PERMUTATIONS)
def test_equals_the_definition(sets, orders, permutation):
    """Phi from ``functional.unitary``, which test_unitary.py compares with the Givens matrices."""
    value, response, angles = tensors(sets, orders)
    places = list(range(N))
    if permutation == "stride":
        places = places[::2] + places[1::2]
    if permutation == "bit_reversal":
        places = [int(f"{place:05b}"[::-1], 2) for place in range(32)]
        places = [place for place in places if place < N]
    eye = torch.eye(N, dtype=torch.complex128).expand(B, -1, -1)
    out = filter_tokens(value, response, angles, permutation=permutation)
    for head in range(H):
        own = head % sets
        phi = eye
        for order in reversed(range(orders)):
            lower, upper = angles[:, own, order, :3, :-1], angles[:, own, order, 3:, :-1]
            phi = unitary(phi[:, places], lower, upper, torch.zeros(B, N, dtype=torch.float64))
        turn = torch.exp(1j * response[:, own])[..., None]
        torch.testing.assert_close(out[:, head], phi.mH @ (turn * (phi @ value[:, head].to(phi))))


@pytest.mark.parametrize("sets", [1, H], ids=["shared", "per head"])
@pytest.mark.parametrize("permutation", PERMUTATIONS)
@pytest.mark.parametrize("hidden", [slice(12, None), slice(0, 7), [0, 3, 4, 18], slice(None)], ids=str)
def test_padding_has_no_influence_wherever_it_is(sets, permutation, hidden):
    value, response, angles = tensors(sets, 2)
    is_present = torch.ones(1, N, dtype=torch.bool)
    is_present[:, hidden] = False
    out = filter_tokens(value, response, angles, is_present=is_present, permutation=permutation)
    seen = is_present[0]
    short = filter_tokens(value[:, :, seen], response[..., seen], angles[..., seen], permutation=permutation)
    torch.testing.assert_close(out[:, :, seen], short)
    alone = torch.exp(1j * response)[..., None] * value
    torch.testing.assert_close(out[:, :, ~seen], alone[:, :, ~seen])


@pytest.mark.parametrize("shape", [(B, 1), (B, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_hardly_anything(shape, padded):
    batch, n = shape
    for sets, permutation in itertools.product((1, H), PERMUTATIONS):
        value, response, angles = tensors(sets, 2, n)
        is_present = torch.zeros(batch, n, dtype=torch.bool) if padded else None
        out = filter_tokens(
            value[:batch], response[:batch], angles[:batch], is_present=is_present, permutation=permutation
        )
        torch.testing.assert_close(out, (torch.exp(1j * response)[..., None] * value)[:batch], rtol=0, atol=1e-12)


def test_the_filter_is_the_function():
    """Sequences of one length, one set of angles: the pure function, made real."""
    graph_filter = filter_of(K=2, kernel="wang", a=2.0, b=1.5)
    hidden, value = torch.randn(B, N, 32, dtype=torch.float64), torch.randn(B, 4, N, 8, dtype=torch.float64)
    with torch.no_grad():
        graph_filter.w += 0.3
        graph_filter.zeta.copy_(torch.tensor([1.0, 0.5, 0.0, 1.25]))
    eigenvalues, angles = graph_filter.spectrum(hidden)
    lower, upper = angles[:, 0, 0, :3, :-1], angles[:, 0, 0, 3:, :-1]
    options = {"kernel": "wang", "a": 2.0, "b": 1.5}
    z = kernelution(value, eigenvalues[:, 0], graph_filter.w, lower, upper, torch.randn(B, N), **options)
    zeta = torch.tensor([1.0, 0.5, 0.0, 0.75], dtype=torch.float64).view(-1, 1, 1)

    class Shift:
        visible = staticmethod(lambda: (False, None))

    Shift.hidden = hidden
    torch.testing.assert_close(graph_filter.filtered(Shift, value), zeta * z.real + (1 - zeta) * z.imag)
    torch.testing.assert_close(graph_filter.coefficients()["zeta"], zeta.flatten())


@pytest.mark.parametrize("family", ["bert", "deit", "bart", "t5"])
def test_all_options_in_a_model(family):
    options = {"per_head": True, "orders": 2, "permutation": "stride", "hidden": 7, "position_bias": "drop"}
    test_common.test_equals_the_dense_form(
        FAMILIES[family], Entry(SynvolutionConfig(**options), digraph_matrix), "sdpa"
    )


def test_zeta_stays_in_its_interval_and_alive():
    """A step out is reflected, from both bounds, and the gradient is never lost."""
    graph_filter = filter_of()
    optimizer = torch.optim.SGD([graph_filter.zeta], lr=0.3)
    for wanted in (2.0, -1.0, 0.4):
        for _ in range(20):
            optimizer.zero_grad()
            (reflect(graph_filter.zeta) - wanted).square().sum().backward()
            assert graph_filter.zeta.grad.abs().min() > 1e-12 or wanted == 0.4
            optimizer.step()
            zeta = graph_filter.coefficients()["zeta"]
            assert ((zeta >= 0) & (zeta <= 1)).all()
    torch.testing.assert_close(zeta, torch.full_like(zeta, 0.4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_spectrum(dtype):
    spectrum = Spectrum(32, 48, sets=2, orders=3).to(dtype)
    eigenvalues, angles = spectrum(torch.randn(B, N, 32).to(dtype))
    assert (eigenvalues.shape, angles.shape) == ((B, 2, N), (B, 2, 3, 7, N))
    assert eigenvalues.dtype == angles.dtype == torch.float32
    assert eigenvalues.abs().max() <= 1
    assert angles.abs().max() <= 2 * torch.pi + 1e-5
    assert (eigenvalues.std(-1) > 0.01).all()


def test_new_parameters():
    sizes = {name: p.numel() for name, p in filter_of(hidden=14).named_parameters()}
    layers = {"0": (32 + 1) * 14, "1": (14 + 1) * 14}
    siren = {k: sum(n for name, n in sizes.items() if name.startswith(f"spectrum.eigenvalues.{k}")) for k in layers}
    assert siren == layers
    assert sizes["spectrum.angles.1.bias"] == 12, "two for each of the six angles: there is no phase"
    assert {name for name in sizes if "." not in name} == {"zeta", "w"}
    assert filter_of(per_head=True, K=4).w.shape == (4, 5)
    torch.testing.assert_close(filter_of(K=3).w, torch.tensor([0.25, 0.5, 0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("per_head", [False, True])
def test_eta_of_the_paper(tmp_path, per_head):
    """Under the callback with gamma = eta / (1 - eta): 1 / (1 - eta) times the gradient of Eq. 14."""
    eta = 0.2
    torch.manual_seed(0)
    config = KernelutionConfig(K=3, gamma_kernel=eta / (1 - eta), per_head=per_head)
    patched = patch_model(BertForSequenceClassification(FAMILIES["bert"].config).double(), config)
    changes, trainer = train(tmp_path, patched, gamma=None, callbacks=[RegularizerCallback()])
    for name, value in changes.items():
        if name in (parameters := dict(patched.named_parameters())):
            parameters[name].data += value  # back to the start
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
    ws = [f.w for _, f in filters_of(patched)]
    loss = torch.stack([kernel_polynomial_loss(row) for w in ws for row in w.view(-1, 4)]).mean()
    patched.zero_grad()
    ((1 - eta) * patched(**batch).loss + eta * loss).backward()
    for name, parameter in patched.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close((1 - eta) * changes[name], parameter.grad, atol=1e-7, rtol=1e-6)
    assert trainer.state.log_history[0]["kernel_polynomial_loss"] == pytest.approx(loss.item())
    with collect_penalties(patched.train()) as penalties:
        patched(**batch)
    torch.testing.assert_close(penalties.total(), config.gamma_kernel * loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": -1}, "KernelutionConfig: K must be >= 0, got -1"),
        ({"K": 1001}, "K must be at most 1000"),
        ({"kernel": "gauss"}, "kernel must be one of 'dirichlet', 'fejer'"),
        ({"kernel": "lanczos", "M": 0}, "KernelutionConfig: M must be an integer >= 1, got 0"),
        ({"M": 1001}, "M must be at most 1000"),
        ({"kernel": "lorentz", "xi": 0.0}, "KernelutionConfig: xi must be a finite number that is not 0"),
        ({"kernel": "wang", "a": -1.0}, "KernelutionConfig: a must be finite and >= 0"),
        ({"gamma_kernel": -1.0}, "gamma_kernel must be >= 0"),
        ({"orders": 0}, "KernelutionConfig: orders must be 1 to 64, got 0"),
        ({"hidden": 0}, "hidden must be 1 to 16384, got 0"),
        ({"permutation": "learned"}, "permutation must be one of 'identity', 'stride', 'bit_reversal'"),
        ({"window": -1}, "window must be >= 0"),
    ],
)
def test_wrong_options_are_one_clear_error(options, message):
    model = FAMILIES["bert"].build()
    with pytest.raises(GraphFilterError, match=message):
        patch_model(model, "kernelution", **options)
    assert not filters_of(model)


@pytest.mark.parametrize("filter", ["synvolution", "kernelution"])
def test_causal_modules_are_refused_with_the_reason(filter):
    model = FAMILIES["gpt2"].build()
    with pytest.raises(GraphFilterError, match=f"is causal, and {filter.upper()} mixes all tokens and has no causal"):
        patch_model(model, filter)
    assert not filters_of(model)
    clip = patch_model(FAMILIES["clip"].build(), filter)
    with pytest.raises(GraphFilterError, match="the attention mask is causal"):
        output(clip, FAMILIES["clip"].inputs())


def test_transfer():
    torch.manual_seed(0)
    model = patch_model(FAMILIES["bert"].build().double(), "kernelution")
    batches = [FAMILIES["bert"].inputs() for _ in range(3)]
    report = transfer_attention(model, batches, steps=15, holdout=1, progress=False)
    assert report.mean_after < report.mean_before


def test_every_parameter_is_trained():
    model = turn_on(patch_model(FAMILIES["bert"].build().double(), "synvolution", per_head=True, orders=2)).train()
    output(model, FAMILIES["bert"].inputs()).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(model))
