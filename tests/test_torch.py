"""Filters in models around ``torch.nn.MultiheadAttention``, with explicit matrices as the oracle."""

import copy
import itertools
import pickle

import pytest
import torch
from accelerate import dispatch_model
from filters import FILTERS, combinations, common
from models import turn_on
from oracle import compare_own_gradients
from torch import nn
from torch_models import CAUSAL, FAMILIES, IS_CAUSAL, SIZES, TOKENS, encoder, explicit_twin, inputs, padding

from hf_graphfilter import (
    GraphFilterError,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    save_filter,
    unpatch_model,
)

families = pytest.mark.parametrize("family", FAMILIES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script(_method)?. is deprecated:DeprecationWarning"),
]


def honours(family, entry):
    refused = entry.decoders_only or (entry.encoders_only and family in IS_CAUSAL)
    return not entry.reads_first and not refused


honoured = combinations(FAMILIES, honours, quick=common(("encoder-padded",)))


def run(model, family, dtype=torch.float32):
    out = model(**inputs(family, dtype))
    return out.masked_fill(padding()[..., None], 0.0) if family == "encoder-padded" else out


@honoured
def test_equals_the_original_at_the_start_and_afterwards(family, entry):
    plain = FAMILIES[family].build()
    model = copy.deepcopy(plain)
    with torch.no_grad():
        fast = run(plain, family)
    slow = run(plain, family)
    keys = set(model.state_dict())
    assert patch_model(model, entry.config) is model
    assert keys <= set(model.state_dict())  # equal where a filter learns nothing
    status = filter_status(model)
    assert (len(status), len(status.left_alone)) == (FAMILIES[family].patched, FAMILIES[family].left_alone)
    assert {row.backend for row in status} == {"sdpa"}
    if entry.config.starts_as_original:
        torch.testing.assert_close(run(model, family), slow, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(run(model, family), fast, rtol=1e-5, atol=5e-6)
    unpatch_model(model)
    assert set(model.state_dict()) == keys
    assert torch.equal(run(model, family), slow)
    with torch.no_grad():
        assert torch.equal(run(model, family), fast), "the fast path is back"


@honoured
def test_equals_explicit_matrices(family, entry):
    plain = FAMILIES[family].build().double()
    model = turn_on(patch_model(copy.deepcopy(plain), entry.config))
    twin_filters = copy.deepcopy(model)
    twin = explicit_twin(plain, twin_filters, entry.formula)
    found, expected = (run(m, family, torch.float64) for m in (model, twin))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert not torch.allclose(found, run(plain, family, torch.float64), rtol=1e-6, atol=1e-6), "the filter is on"
    with torch.no_grad():
        torch.testing.assert_close(run(model, family, torch.float64), expected, rtol=1e-8, atol=1e-8)
    for out in (found, expected):
        out.square().sum().backward()
    gradients = {name.replace(".module.", "."): p.grad for name, p in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        if gradients.get(name) is not None and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-6, atol=1e-7)
    compare_own_gradients(model, twin_filters, rtol=1e-6, atol=1e-7)
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(model))


@pytest.mark.parametrize("options", [{}, {"window": 2, "sinks": 1}], ids=["alone", "window"])
@pytest.mark.parametrize("name", sorted({entry.config.filter for entry in FILTERS.values() if entry.replaces}))
def test_a_text_of_no_tokens_gives_an_empty_output(name, options):
    model, empty = patch_model(encoder(True), name, **options), torch.randn(2, 0, 32)
    out = model(empty)
    assert out.shape == empty.shape
    out.sum().backward()
    with torch.no_grad():
        assert model.eval()(empty).shape == empty.shape


OPTIONS = [*itertools.product((True, False), (True, False), (None, 12))]


@pytest.mark.parametrize(("batch_first", "need_weights", "vdim"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_argument_of_the_module(batch_first, need_weights, vdim, dtype):
    """Right after patching, against the module itself: masks of both kinds, the hint, one sequence, other values."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 4, batch_first=batch_first, vdim=vdim, bias=vdim is None).to(dtype).eval()
    model = patch_model(copy.deepcopy(plain), "gfsa")
    x, v = torch.randn(2, 7, 16).to(dtype), torch.randn(2, 7, vdim or 16).to(dtype)
    pad, causal = torch.arange(7) >= torch.tensor([[7], [5]]), torch.ones(7, 7, dtype=torch.bool).triu(1)
    added = torch.zeros(2, 7, dtype=dtype).masked_fill(pad, -torch.inf)
    bias = torch.randn(8, 7, 7).to(dtype)
    masks = [
        {},
        {"key_padding_mask": pad},
        {"attn_mask": causal},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal, "is_causal": True, "key_padding_mask": pad},
        {"attn_mask": bias[0]},
        {"attn_mask": bias, "key_padding_mask": added},
        {"attn_mask": causal.expand(8, 7, 7), "key_padding_mask": pad},
    ]
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
    close = {"rtol": tolerance, "atol": tolerance}
    if not batch_first:
        x, v = x.transpose(0, 1), v.transpose(0, 1)
    values = (v,) if vdim else (x, v)
    for mask, value, average in itertools.product(masks, values, (True, False)):
        options = {**mask, "need_weights": need_weights, "average_attn_weights": average}
        torch.testing.assert_close(model(x, x, value, **options), plain(x, x, value, **options), **close)
        with torch.no_grad():
            torch.testing.assert_close(model(x, x, value, **options), plain(x, x, value, **options), **close)
    one, value = torch.randn(7, 16).to(dtype), torch.randn(7, vdim or 16).to(dtype)
    for m in (None, pad[1]):
        found, expected = (a(one, one, value, key_padding_mask=m, need_weights=need_weights) for a in (model, plain))
        torch.testing.assert_close(found, expected, **close)


def padded_inputs(nested):
    x, mask = torch.randn(2, TOKENS, 32), padding()
    return x, {"src_key_padding_mask": mask} if nested else {}


CONTEXTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "with gradients": torch.enable_grad}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("layers", [None, [0], [2]], ids=["all", "first", "last"])
def test_the_fast_path_never_passes_the_filter_by(context, nested, layers, monkeypatch):
    """The base is frozen, so that the fast path of PyTorch may be taken with gradients too."""
    torch.manual_seed(0)
    model = encoder(True).eval().requires_grad_(False)
    x, mask = padded_inputs(nested)
    with CONTEXTS[context]():
        before = model(x, **mask)
    turn_on(patch_model(model, "gfsa", layers=layers))
    taken, fast = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: taken.append(0) or fast(*a, **k))
    learns = context == "with gradients"
    if learns and nested and layers == [0]:  # the next layer gets what needs a gradient, and PyTorch refuses it
        with pytest.raises(AssertionError, match="does not support NestedTensor outside of its fast path"):
            model(x, **mask)
        return
    with CONTEXTS[context]():
        out = model(x, **mask)
    assert len(taken) == (0 if learns and layers == [0] else 3 - len(filter_status(model))), "others keep it"
    assert not torch.allclose(out, before, atol=1e-3)
    model.enable_nested_tensor = model.use_nested_tensor = False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = model(x, **mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    tokens = ~padding() if nested else torch.ones(2, TOKENS, dtype=torch.bool)
    torch.testing.assert_close(out[tokens], expected[tokens], rtol=1e-5, atol=1e-5)
    if nested:
        assert not out[~tokens].any(), "as PyTorch gives"
        assert not before[~tokens].any()
    if learns:
        out.square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in filter_parameters(model))


def test_the_encoder_without_nested_tensors():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**SIZES, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    turn_on(patch_model(model, "gfsa"))
    x, mask = padded_inputs(True)
    with torch.no_grad():
        fast = model(x, **mask)
    torch.testing.assert_close(fast, model(x, **mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("encoder-padded", "gfsa"),
        pytest.param("encoder-causal", "gfsa", marks=pytest.mark.slow),
        pytest.param("tokens-first", "gfsa", marks=pytest.mark.slow),
        pytest.param("encoder-padded", "hedgehog", marks=pytest.mark.slow),
        pytest.param("tokens-first", "hedgehog", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_exported(family, name):
    model = turn_on(patch_model(FAMILIES[family].build(), FILTERS[name].config)).requires_grad_(False)
    given = inputs(family)
    keep = ~padding() if family == "encoder-padded" else slice(None)
    with torch.no_grad():
        expected = model(**given)[keep]
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")(**given)[keep]
        torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
        exported = torch.export.export(model, (), given, strict=False).module()
        torch.testing.assert_close(exported(**given)[keep], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(way):
    model = turn_on(patch_model(FAMILIES["encoder"].build(), "gfsa"))
    twin = way(model)
    assert torch.equal(run(twin, "encoder"), run(model, "encoder"))
    assert torch.equal(run(unpatch_model(twin), "encoder"), run(FAMILIES["encoder"].build(), "encoder"))
    assert isinstance(twin.layers[0].self_attn, nn.MultiheadAttention)
    assert type(twin.layers[0].self_attn) is nn.MultiheadAttention


def test_nothing_of_pytorch_is_changed():
    before = {c: dict(vars(c)) for c in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)}
    patch_model(FAMILIES["encoder"].build(), "gfsa")
    assert all(dict(vars(c)) == attributes for c, attributes in before.items())


def test_training_with_dropout_and_checkpointing():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(**{**SIZES, "dropout": 0.2}, batch_first=True)
    model = patch_model(nn.TransformerEncoder(layer, 2).train(), "gfsa")
    x, grads = torch.randn(2, TOKENS, 32), []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        hidden = x
        for part in model.layers:
            hidden = (
                torch.utils.checkpoint.checkpoint(part, hidden, use_reentrant=False) if checkpointed else part(hidden)
            )
        hidden.square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in filter_parameters(model)]))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    assert grads[0].abs().sum() > 0


def test_one_module_used_twice_is_right():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            for _ in range(2):
                x = x + self.attn(x, x, x, need_weights=False)[0]
            return x

    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(2, TOKENS, 32, dtype=torch.float64)
    patched = turn_on(patch_model(copy.deepcopy(model), "gfsa"))
    attn, expected = patched.attn, x
    for _ in range(2):
        expected = expected + attn(expected, expected, expected)[0]
    torch.testing.assert_close(patched(x), expected)
    assert len(filter_status(patched)) == 1


def test_views_of_one_tensor_are_one():
    """Code that transposes each argument by itself."""
    model = turn_on(patch_model(nn.MultiheadAttention(32, 4), "gfsa"))
    x = torch.randn(2, TOKENS, 32)
    query, key, value = (x.transpose(0, 1) for _ in range(3))
    torch.testing.assert_close(model(query, key, value)[0], model(query, query, query)[0])


def scripted():
    model = nn.ModuleDict({"inner": FAMILIES["encoder"].build()})
    model["inner"].layers[0].self_attn = torch.jit.script(nn.MultiheadAttention(32, 4))
    return nn.Sequential(model["inner"].layers[0].self_attn)


class Own(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def replaced():
    model = nn.Sequential(nn.MultiheadAttention(32, 4))
    model[0].forward = lambda query, key, value: (value, None)
    return model


def wrapped():
    model = nn.Sequential(nn.MultiheadAttention(32, 4))
    model.add_module("outer", type("FullyShardedDataParallel", (nn.Sequential,), {})())
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "cannot patch a torch.nn.modules.container.Sequential"),
        (lambda: nn.Sequential(nn.MultiheadAttention(32, 4, add_bias_kv=True)), "add_bias_kv: a key that is no token"),
        (lambda: nn.Sequential(nn.MultiheadAttention(32, 4, add_zero_attn=True)), "add_zero_attn: a key that"),
        (lambda: nn.ModuleDict({"cross_attn": nn.MultiheadAttention(32, 4)}), "cross-attention: A is not square"),
        (lambda: nn.Sequential(torch.ao.nn.quantizable.MultiheadAttention(32, 4)), "quantized: patch the model before"),
        (lambda: nn.Sequential(Own(32, 4)), "a subclass with a forward of its own"),
        (replaced, "its forward was replaced"),
        (wrapped, "wrapped by FullyShardedDataParallel"),
        (lambda: nn.DataParallel(nn.MultiheadAttention(32, 4)), "patch the model itself, before"),
        (lambda: torch.compile(nn.Sequential(nn.MultiheadAttention(32, 4))), "patch the model itself, before"),
        (scripted, "scripted: patch the model instead"),
    ],
)
def test_what_cannot_be_patched_is_refused_and_left_as_it_was(make, message):
    model = make()
    keys, classes = list(model.state_dict()), [*map(type, model.modules())]
    with pytest.raises(GraphFilterError, match=message):
        patch_model(model, "gfsa")
    assert (list(model.state_dict()), [*map(type, model.modules())]) == (keys, classes)


def test_masks_of_whole_numbers_are_refused_as_pytorch_does():
    attention, x = patch_model(nn.MultiheadAttention(32, 4), "gfsa"), torch.randn(5, 2, 32)
    for masks in ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.long)}, {"attn_mask": torch.ones(5, 5).byte()}):
        with pytest.raises(GraphFilterError, match="must be bool, True where attention is not allowed"):
            attention(x, x, x, **masks)


def test_cross_attention_is_an_error_at_the_call_that_says_so():
    """Also of a module that is used for self-attention in the same forward pass."""
    model = patch_model(nn.Sequential(nn.MultiheadAttention(32, 4, batch_first=True)), "gfsa")
    x, other = torch.randn(2, TOKENS, 32), torch.randn(2, 4, 32)
    model[0](x, x, x)
    for query, key, value in ((x, other, other), (x, x.clone(), x), (x, x, other)):
        with pytest.raises(GraphFilterError, match=r"0 \(MultiheadAttention\) was called with .* exclude this module"):
            model[0](query, key, value)
    with pytest.raises(GraphFilterError, match="attn_mask must be of shape"):
        model[0](x, x, x, attn_mask=CAUSAL[:3])
    with pytest.raises(GraphFilterError, match="key_padding_mask must be of shape"):
        model[0](x, x, x, key_padding_mask=padding()[:, :3])
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        model[0](x, x, x, is_causal=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
def test_scripting_a_patched_model_is_refused():
    with pytest.raises(GraphFilterError, match="cannot compile a graph filter"):
        torch.jit.script(patch_model(FAMILIES["encoder"].build(), "gfsa"))


def test_the_status_names_what_is_left_alone():
    text = str(filter_status(patch_model(FAMILIES["detr"].build(), "gfsa")))
    line = "left alone: decoder.layers.0.multihead_attn and 1 more (cross-attention: A is not square)"
    assert text.splitlines()[-1] == line


@pytest.mark.parametrize("family", ["encoder", "detr", "torchvision-vit"])
def test_the_filter_alone_and_the_state_dict(family, tmp_path):
    model = turn_on(patch_model(FAMILIES[family].build(), "gfsa", K=4))
    expected = run(model, family)
    save_filter(model, tmp_path)
    assert torch.equal(run(load_filter(FAMILIES[family].build(), tmp_path), family), expected)
    state = model.state_dict()
    twin = patch_model(FAMILIES[family].build(), "gfsa", K=4)
    twin.load_state_dict(state)
    assert torch.equal(run(twin, family), expected)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*graph_filter"):
        FAMILIES[family].build().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*graph_filter"):
        twin.load_state_dict(FAMILIES[family].build().state_dict())


def test_a_filter_does_not_fit_another_model(tmp_path):
    save_filter(patch_model(FAMILIES["encoder"].build(), "gfsa"), tmp_path)
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 48, batch_first=True), 3)
    with pytest.raises(GraphFilterError, match="it was made for a TransformerEncoder"):
        load_filter(other, tmp_path)
    assert not filter_status(other)


def both_towers():
    """CLIP of open_clip, whose towers are one class with a mask and without."""
    model = pytest.importorskip("open_clip").model.CLIP(
        embed_dim=32,
        vision_cfg={"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32},
        text_cfg={"context_length": 12, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2},
    )
    images, texts = torch.randn(2, 3, 32, 32), torch.randint(1, 98, (2, 12))
    return model, lambda model: torch.cat([model.encode_image(images), model.encode_text(texts)]), 4


def graph_network():
    """Layers of PyG, which pad the graphs of a batch."""
    g = pytest.importorskip("torch_geometric").nn
    convs = [g.GPSConv(32, g.GINConv(nn.Linear(32, 32)), heads=4, dropout=0.0) for _ in range(2)]
    x, edges, of_graph = torch.randn(11, 32), torch.randint(0, 11, (2, 30)), torch.tensor([0] * 6 + [1] * 5)
    model = g.Sequential("x, edges, of_graph", [(conv, "x, edges, of_graph -> x") for conv in convs])
    return model, lambda model: model(x, edges, of_graph), 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("make", [both_towers, graph_network])
def test_other_libraries(make):
    torch.manual_seed(0)
    model, call, patched = make()
    before = call(model.eval())
    with torch.no_grad():
        fast = call(model)
    patch_model(model, "gfsa")
    assert (len(filter_status(model)), filter_status(model).left_alone) == (patched, {})
    torch.testing.assert_close(call(model), before, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(model), fast, rtol=1e-5, atol=1e-5)
    call(turn_on(model)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(model))
    unpatch_model(model)
    assert torch.equal(call(model), before)


def test_what_accelerate_has_dispatched_is_refused_and_lazy_parameters_are_no_harm():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2, enable_nested_tensor=False)
    model = patch_model(nn.Sequential(encoder, nn.LazyLinear(3)).eval(), "gfsa")
    assert model(torch.randn(1, 5, 32)).shape == (1, 5, 3)
    unpatch_model(model)
    dispatch_model(encoder, {"": "cpu"}, force_hooks=True)
    with pytest.raises(GraphFilterError, match="undo that before patch_model"):
        patch_model(encoder, "gfsa")
