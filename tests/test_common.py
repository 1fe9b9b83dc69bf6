"""The common tester: filters x architectures. Whatever is added to the package goes through it."""

import copy
import dataclasses
import pickle
from collections import Counter

import pytest
import torch
from filters import FILTERS, NO_THIRD, Third, by_axis, combinations, common, each_once, everything, filters
from models import FAMILIES, ONE_OF_A_KIND, TOKENS, output, realigned, turn_on, use
from oracle import compare_own_gradients, dense_twin
from transformers import AutoModel, Wav2Vec2Model

from hf_graphfilter import GraphFilter, GraphFilterError, filter_parameters, filter_status, patch_model, unpatch_model
from hf_graphfilter.analysis.observing import Reader, observe
from hf_graphfilter.filters.contranorm import ContraNorm
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.filters.core.power_series import PowerSeries
from hf_graphfilter.filters.gfsa import GFSA
from hf_graphfilter.ops.heads import repeat_heads

DECODERS = [name for name, family in FAMILIES.items() if family.kind in ("decoder", "encoder-decoder")]
PADDED = [
    name
    for name, family in FAMILIES.items()
    if family.kind not in ("vision", "audio", "composite") and name not in ("whisper", "speech_to_text")
]
PER_TOKEN = ("input_ids", "attention_mask", "node_features", "in_degree", "out_degree")
JOINT = (GFSA, PowerSeries, ContraNorm)  # which apply A through ShiftOperator.polynomial or a joint form

families = pytest.mark.parametrize("family", [pytest.param(f, id=n) for n, f in FAMILIES.items()])
backends = pytest.mark.parametrize("backend", ["sdpa", "eager"])
once = each_once(ONE_OF_A_KIND)
BACKENDS = Third("backend", {"sdpa": "sdpa", "eager": "eager"}, lambda backend, *both: backend == "sdpa" or once(*both))
# all that take a mask with padding, the others without
PADDINGS = Third(
    "padding", {"0": 0, "3": 3}, lambda padding, name, entry: (padding > 0) == (name in PADDED) or once(name, entry)
)


def each_filter(names, quick=common, third=NO_THIRD):
    """Every filter on these families."""
    return combinations(names, everything, quick(ONE_OF_A_KIND), values=FAMILIES, third=third)


def common_once(few):
    """Quick: what ``common`` and ``each_once`` are."""
    return lambda family, entry: common(few)(family, entry) and each_once(few)(family, entry)


@pytest.mark.feature("Filtering: equal to the original at the start (AGF: as a blend), SDPA and eager")
@each_filter(FAMILIES, third=BACKENDS)
def test_identical_at_the_start(family, entry, backend):
    model, inputs = family.build(backend), family.inputs()

    def both():  # with gradients PyTorch may take another kernel
        with torch.no_grad():
            inference = output(model, inputs)
        return inference, output(model, inputs)

    expected = both()
    assert family.patch(model, entry) is model
    if entry.config.starts_as_original:
        assert all(map(torch.equal, both(), expected))
    else:
        assert all(
            found.isfinite().all() and not torch.equal(found, e) for found, e in zip(both(), expected, strict=True)
        )
    status = filter_status(model)
    if not entry.encoders_only and not entry.decoders_only:  # of these, a part
        assert len(status) == family.patched // (2 if entry.config.module.reads_mask and family.whole_windows else 1)
    assert {row.backend for row in status} == {model.config._attn_implementation}


@pytest.mark.feature(
    "Filtering: equal to the original within a window that the filter is weighed beyond, SDPA and eager"
)
@combinations(FAMILIES, lambda _, entry: entry.replaces, lambda _, entry: entry is FILTERS["agf"], FAMILIES)
@backends
def test_within_the_window_it_is_the_original(family, entry, backend):
    model, inputs = family.build(backend, use_cache=False), family.inputs()
    expected = output(model, inputs)
    within = dataclasses.replace(entry.config, init="copy", window=64, far="beyond", position_bias="refuse")
    try:
        family.patch(model, dataclasses.replace(entry, config=within))
    except GraphFilterError as error:
        if "bias of positions" not in str(error):
            raise
        pytest.skip("has a bias of positions")
    assert torch.equal(output(turn_on(model), inputs), expected)


@pytest.mark.feature("Filtering: equal to explicit matrices, SDPA and eager")
@each_filter(FAMILIES, third=BACKENDS)
def test_equals_the_dense_form(family, entry, backend):
    plain, inputs = family.build(backend).double(), family.inputs(torch.float64)
    before = output(plain, inputs)
    patched = turn_on(family.patch(copy.deepcopy(plain), entry))
    found = output(patched, inputs)
    with torch.no_grad():
        inference = output(patched, inputs)
    expected = output(dense_twin(plain, patched, entry.formula), inputs)
    tolerance = 1e-9 if backend == "sdpa" else 1e-4  # some eager functions do their softmax in float32
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(inference, expected, atol=tolerance, rtol=tolerance)
    assert (found - before).abs().max() > 1e-3, "the filter does nothing"


@pytest.mark.feature("Filtering: gradients equal to those through explicit matrices")
@each_filter(FAMILIES, third=PADDINGS)
def test_gradients_equal_the_dense_form(family, entry, padding):
    check_gradients(family, entry, padding)


@pytest.mark.feature("Filtering: gradients of the joint form equal to those through explicit matrices")
@combinations(
    FAMILIES, lambda _, entry: issubclass(entry.config.module, JOINT), common(ONE_OF_A_KIND), FAMILIES, PADDINGS
)
def test_gradients_of_the_joint_form_equal_the_dense_form(family, entry, padding, monkeypatch):
    """Whatever the size; by itself it begins at sizes that these models do not have."""
    monkeypatch.setattr("hf_graphfilter.ops.polynomial_form.FEWEST_ENTRIES", 1)
    check_gradients(family, entry, padding)


def check_gradients(family, entry, padding):
    plain, inputs = family.build().double(), family.inputs(torch.float64)
    if padding:
        if "attention_mask" not in inputs:
            pytest.skip("takes no mask")
        inputs["attention_mask"][1, -padding:] = 0
    patched = turn_on(family.patch(copy.deepcopy(plain), entry)).train()
    twin_filters = copy.deepcopy(patched)
    weights = torch.randn(output(plain, inputs).shape)
    if padding:
        weights[1, -padding:] = 0
    (output(patched, inputs) * weights).sum().backward()
    (output(dense_twin(plain, twin_filters, entry.formula).train(), inputs) * weights).sum().backward()
    reference = dict(plain.named_parameters())
    for name, parameter in patched.named_parameters():
        if parameter.grad is None:
            assert reference[name].grad is None or not reference[name].grad.any()  # a position bias is dropped
            continue
        assert parameter.grad.isfinite().all(), name
        if name in reference:
            torch.testing.assert_close(parameter.grad, reference[name].grad, atol=1e-8, rtol=1e-6)
    compare_own_gradients(patched, twin_filters, atol=1e-8, rtol=1e-6)
    # a decoder's first token has no path of two steps, and V_0 is V in the first layer: all layers together must learn
    learned = Counter()
    for _, graph_filter in filters_of(patched):
        learned.update({name: p.grad.abs().sum().item() for name, p in graph_filter.named_parameters()})
    assert all(learned.values())


@pytest.mark.feature("Filtering: padding changes nothing")
@each_filter(PADDED)
def test_padding_changes_nothing(family, entry):
    model = turn_on(family.patch(family.build().double(), entry))
    inputs = family.inputs(tokens=TOKENS)
    short = {name: x[:, :6] if name in PER_TOKEN else x for name, x in inputs.items()}
    if "pair_kinds" in short:
        short["pair_kinds"] = inputs["pair_kinds"][:, :6, :6]
    padded = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    padded["attention_mask"][:, 6:] = 0
    found, expected = output(model, padded), output(model, short)
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.feature("Filtering: causality")
@each_filter(DECODERS, third=BACKENDS)
def test_a_later_token_never_changes_an_earlier_output(family, entry, backend):
    model, inputs = turn_on(family.patch(family.build(backend).double(), entry)), family.inputs(torch.float64)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, 5:] = (changed[name][:, 5:] + 7) % 90 + 5
    if name == "decoder_input_ids":
        model(**inputs)
    before, after = output(model, inputs), output(model, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-9, rtol=1e-9)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


@pytest.mark.feature("Checkpoints: unpatch_model restores everything")
@each_filter(FAMILIES, quick=by_axis)
def test_unpatch_restores_everything(family, entry):
    model, inputs = family.build(), family.inputs()
    expected, names = output(model, inputs), list(model.state_dict())
    saved, modules = model.config.to_dict(), {n: type(m) for n, m in model.named_modules()}
    turn_on(family.patch(model, entry))
    assert unpatch_model(model) is model
    assert torch.equal(output(model, inputs), expected)
    assert list(model.state_dict()) == names
    assert model.config.to_dict() == saved
    assert {n: type(m) for n, m in model.named_modules()} == modules
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.feature("Checkpoints: save_pretrained and from_pretrained")
@each_filter(FAMILIES, quick=common_once)
def test_save_and_load(family, entry, tmp_path):
    model, inputs = turn_on(family.patch(family.build(), entry)), family.inputs()
    expected = output(model, inputs)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    loaded = realigned(AutoModel.from_pretrained(tmp_path))
    assert torch.equal(output(loaded, inputs), expected)
    assert [(r.module, r.filter) for r in filter_status(loaded)] == [(r.module, r.filter) for r in filter_status(model)]


@pytest.mark.feature("Training: bfloat16 weights, float32 coefficients")
@each_filter(FAMILIES, quick=by_axis)
def test_half_precision(family, entry):
    def loss_of_precision(model):
        expected = output(model, family.inputs())
        found = output(model.to(torch.bfloat16), family.inputs(torch.bfloat16))
        assert found.dtype == torch.bfloat16
        similarity = torch.nn.functional.cosine_similarity(found.float().flatten(), expected.flatten(), dim=0)
        return found, expected, 1 - similarity.item()

    *_, plain = loss_of_precision(family.build())
    model = turn_on(family.patch(family.build(), entry))
    off = output(unpatch_model(copy.deepcopy(model)), family.inputs())
    found, expected, patched = loss_of_precision(model)
    filters = [m for m in model.modules() if isinstance(m, GraphFilter)]
    assert {p.dtype for f in filters for p in f.coefficients().values()} <= {torch.float32}
    weights = [p for f in filters for name, p in f.named_parameters() if name not in f.coefficient_names()]
    assert {p.dtype for p in weights} <= {torch.bfloat16}
    assert patched < 0.02 + 4 * plain
    effect = expected - off
    share = ((found - off) * effect).sum() / effect.square().sum()  # 0 without the filter; rounding hardly enters
    assert share.item() == pytest.approx(1, abs=0.5)
    found.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in filter_parameters(model))


@each_filter(FAMILIES, quick=by_axis)
def test_double_patch_is_an_error(family, entry):
    model, inputs = turn_on(family.patch(family.build(), entry)), family.inputs()
    expected = output(model, inputs)
    with pytest.raises(GraphFilterError, match=r"already patched at .*unpatch_model"):
        patch_model(model, "gfsa")
    assert torch.equal(output(model, inputs), expected)


@pytest.mark.feature("Routes past the filter: deepcopy and pickle")
@each_filter(FAMILIES, quick=by_axis)
def test_deepcopy_and_pickle(family, entry):
    model, inputs = turn_on(family.patch(family.build(), entry)), family.inputs()
    expected = output(model, inputs)
    twins = [copy.deepcopy(model)]
    if family.model_class is not Wav2Vec2Model:  # its weight norm cannot be pickled, patched or not
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert torch.equal(output(twin, inputs), expected)
        with torch.no_grad():
            for p in filter_parameters(twin):
                p.add_(1)
        use(twin, "eager")
        assert {r.backend for r in filter_status(twin)} == {"eager"}
    assert {r.backend for r in filter_status(model)} == {family.backends[0]}
    assert torch.equal(output(model, inputs), expected)


class Applied(Reader):
    """What each filter was given, times the matrix that analysis sees."""

    matrices = True

    def __init__(self):
        self.calls, self.products = 0, []

    def attention(self, call):
        self.calls += 1
        if call.graph_filter is not None and call.is_matrix:
            self.products.append(call.filtered @ repeat_heads(call.value, call.graph_filter.heads))


@pytest.mark.feature("Analysis: the matrix that each filter applies, of a model left as it was")
@families
@filters(lambda entry: True, quick=lambda entry: entry.everywhere and entry.quick)
def test_analysis_sees_the_matrix_that_is_applied(family, entry):
    model, inputs = turn_on(family.patch(family.build().double(), entry)), family.inputs(torch.float64)
    expected, given, applied = output(model, inputs), [], Applied()
    linear = [f for _, f in filters_of(model) if f.linear]
    hooks = [f.register_forward_hook(lambda _, args, out: given.append(out)) for f in linear]
    observe(model, [inputs], [applied])
    for hook in hooks:
        hook.remove()
    assert applied.calls >= family.patched
    assert len(applied.products) == len(given)
    assert bool(given) is bool(linear)
    for product, out in zip(applied.products, given, strict=True):
        torch.testing.assert_close(product, out, atol=1e-9, rtol=1e-9)
    assert torch.equal(output(model, inputs), expected)
