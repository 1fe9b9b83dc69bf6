"""The kernels in Triton against float64: in its interpreter on the CPU and, marked gpu, on the device.

The interpreter is asked for before Triton is imported, so ``test_in_the_interpreter`` runs this file in a process of
its own.
"""

import inspect
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch.utils.flop_counter import FlopCounterMode

from hf_graphfilter import GraphFilterError
from hf_graphfilter.ops import triton as kernels
from hf_graphfilter.ops.combine import combine
from hf_graphfilter.ops.spectral import causal as plain
from hf_graphfilter.ops.spectral.blocks import CausalState, hide, no_past
from hf_graphfilter.ops.triton import enabled as choice

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_the_device(test):
    """In the interpreter, or marked gpu."""
    return test if INTERPRETED else pytest.mark.gpu(needs_gpu(test))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
slow_here = pytest.mark.slow if INTERPRETED else ()
outside = pytest.mark.skipif(INTERPRETED, reason="is what runs the interpreter")
interpreter_runs = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"),
    reason="the interpreter of Triton 3.6 needs NumPy before 2.4",
)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv(choice.SWITCH, "1")
    torch.manual_seed(0)


@outside
@interpreter_runs
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which):
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-m", which, __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take a second to import
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


def random(shape, dtype):
    """Stored as models store it: (batch, heads, tokens, features), tokens before heads."""
    batch, heads, tokens, features = shape
    x = torch.randn(batch, tokens, heads, features, device=DEVICE)
    return x.to(dtype).transpose(1, 2).requires_grad_()


def assert_near(found, expected, dtype):
    for x, y in zip(found, expected, strict=True):
        error = (x.double() - y).abs().max() / y.abs().max().clamp_min(1e-3)
        assert error < TOLERANCE[dtype]


def gradients(outputs, inputs, retain=False):
    torch.manual_seed(1)
    toward = [torch.randn(x.shape, device=DEVICE).to(inputs[0].dtype).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, inputs, toward, retain_graph=retain)


# ------------------------------------------------------------------------------------------------------- apply_twice


def masked(kind, batch, heads, tokens):
    """In the interpreter some rows see nothing; what a GPU's own attention returns for them depends on its kernel."""
    if kind == "padding":
        mask = torch.rand(batch, 1, 1, tokens, device=DEVICE) > 0.3
        mask[-1] = mask[-1] & (not INTERPRETED)
        return mask
    if kind == "additive":
        lowest = torch.finfo(torch.float32).min
        mask = torch.randn(1, heads, tokens, tokens, device=DEVICE)
        mask.masked_fill_(torch.rand(tokens, tokens, device=DEVICE) > 0.6, lowest)
        mask[:, :, 2] = lowest if INTERPRETED else 0.0
        return mask
    return None


def by_matrix(query, key, value, mask, causal):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).tril()
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    A = scores.softmax(-1).nan_to_num(0.0)
    return A @ value, A @ (A @ value)


# batch, heads, groups, tokens, features, features of values, dtype, mask, causal
TWICE = [
    (2, 2, 1, 37, 16, 16, torch.float32, None, True),
    *(
        pytest.param(*case, marks=slow_here)
        for case in [
            (1, 2, 2, 197, 64, 64, torch.float32, None, False),
            (1, 4, 2, 70, 24, 12, torch.float32, None, True),
            (2, 4, 2, 45, 8, 12, torch.float32, "padding", False),
            (2, 3, 3, 33, 8, 8, torch.float32, "additive", False),
            (1, 1, 1, 1, 8, 8, torch.float32, None, False),
            (1, 2, 1, 300, 64, 64, torch.bfloat16, None, True),
            (2, 2, 2, 150, 80, 80, torch.bfloat16, "padding", False),
            (1, 2, 1, 130, 128, 128, torch.float16, None, False),
        ]
    ),
]
fields = ("batch", "heads", "groups", "tokens", "features", "columns", "dtype", "mask", "causal")


@on_the_device
@pytest.mark.parametrize(fields, TWICE)
def test_apply_twice(batch, heads, groups, tokens, features, columns, dtype, mask, causal):
    shapes = (heads, features), (groups, features), (groups, columns)
    inputs = [random((batch, count, tokens, width), dtype) for count, width in shapes]
    mask = masked(mask, batch, heads, tokens)
    given = mask.to(dtype).clamp_min(torch.finfo(dtype).min) if mask is not None and mask.is_floating_point() else mask
    both = kernels.apply_twice(*inputs, given, causal=causal)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = by_matrix(*wide, mask if mask is None or mask.dtype == torch.bool else mask.double(), causal)
    assert_near(both, expected, dtype)
    assert_near(gradients(both, inputs), gradients(expected, wide), dtype)


@on_the_device
def test_the_first_application_keeps_its_bits():
    query, key, value = (random((2, heads, 20, 16), torch.float32) for heads in (4, 2, 2))
    first, _ = kernels.apply_twice(query, key, value, causal=True)
    assert torch.equal(first, F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))


@on_the_device
def test_what_apply_twice_leaves_to_the_plain_form():
    inputs = [random((1, 2, 5, 8), torch.float32) for _ in range(3)]
    assert kernels.apply_twice(*inputs) is not None
    assert kernels.apply_twice(*inputs, dropout=0.1) is None
    assert kernels.apply_twice(*inputs, torch.zeros(1, 1, 5, 5, device=DEVICE, requires_grad=True)) is None
    assert kernels.apply_twice(inputs[0][:, :, :1], *inputs[1:]) is None
    assert kernels.apply_twice(*(x.double() for x in inputs)) is None
    assert kernels.apply_twice(*(x.detach() for x in inputs)) is None
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kernels.apply_twice(*inputs) is None
    with torch.no_grad():
        assert kernels.apply_twice(*inputs) is None


@on_the_device
@pytest.mark.slow
def test_gradients_summed_in_any_order_are_left_out_where_the_order_counts():
    inputs = [random((1, 2, 5, 8), torch.float32) for _ in range(3)]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.apply_twice(*inputs) is None
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------------------ combine

# heads, tokens, features, dtype of the signals and of the coefficients, how many, which need a gradient
COMBINED = [
    (3, 70, 5, torch.float32, torch.float32, 3, "all"),
    *(
        pytest.param(*case, marks=slow_here)
        for case in [
            (2, 300, 64, torch.bfloat16, torch.float32, 2, "all"),
            (2, 9, 96, torch.float16, torch.float32, 4, "coefficients"),
            (1, 1, 1, torch.bfloat16, torch.bfloat16, 1, "signals"),
        ]
    ),
]


@on_the_device
@pytest.mark.parametrize(("heads", "tokens", "features", "dtype", "of_numbers", "count", "needed"), COMBINED)
def test_combine(heads, tokens, features, dtype, of_numbers, count, needed):
    numbers = [torch.randn(heads, device=DEVICE).to(of_numbers) for _ in range(count)]
    numbers = [c.requires_grad_(needed != "signals") for c in numbers]
    signals = [random((2, heads, tokens, features), dtype).requires_grad_(needed != "coefficients") for _ in numbers]
    assert kernels.combine(numbers, signals) is not None
    terms = [*zip(numbers, signals, strict=True)]
    found = combine(terms)
    assert (found.dtype, found.stride()) == (dtype, signals[0].stride())
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (*numbers, *signals)]
    expected = sum(c.view(-1, 1, 1) * x for c, x in zip(wide[:count], wide[count:], strict=True))
    assert_near([found], [expected], dtype)
    inputs, wide = ([x for x in given if x.requires_grad] for given in ((*numbers, *signals), wide))
    assert_near(gradients([found], inputs), gradients([expected], wide), dtype)
    sums = (
        combine(terms).sum(),
        sum(c.view(-1, 1, 1) * x for c, x in zip(numbers, signals, strict=True)).sum(),
    )  # strides 0
    assert_near(*(torch.autograd.grad(x, inputs) for x in sums), dtype)


@on_the_device
def test_one_signal_keeps_its_bits_in_a_combination():
    signals = [random((2, 3, 10, 8), torch.float32) for _ in range(3)]
    numbers = [torch.full((3,), c, device=DEVICE) for c in (0.0, 1.0, 0.0)]
    assert torch.equal(kernels.combine(numbers, signals), signals[1])


@on_the_device
def test_what_combine_leaves_to_the_plain_form():
    one, x = torch.ones(2, device=DEVICE), random((1, 2, 5, 8), torch.float32)
    assert kernels.combine([one], [x]) is not None
    assert kernels.combine([one], [x.double()]) is None
    assert kernels.combine([one, one], [x, x[:, :, :1]]) is None
    assert kernels.combine([one[:1]], [x]) is None
    assert kernels.combine([one], [x.mT]) is None
    assert kernels.combine([one], [x[:, :, :0]]) is None
    assert torch.vmap(lambda y: combine([(one, y)]))(x[None]).shape == (1, *x.shape)
    with FlopCounterMode(display=False):  # and any other that sees the operations of PyTorch alone
        assert kernels.combine([one], [x]) is None
    ignored = warnings.catch_warnings(action="ignore")  # of PyTorch, about its own code
    with torch.no_grad(), ignored, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(combine([(one, dual)])).tangent is not None
    assert kernels.combine([one] * 9, [x] * 9) is None
    number = one.clone().requires_grad_()
    (first,) = torch.autograd.grad(combine([(number, x)]).square().sum(), number, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), number)
    torch.testing.assert_close(second, 2 * x.square().sum((0, 2, 3)))


# ------------------------------------------------------------------------------------------------------ filter_causal

# tokens, features, features of values, dtype, whether there is a past, whether tokens are missing, spread of the logits
CAUSAL = [
    (37, 16, 8, torch.float32, False, False, 1.0),
    *(
        pytest.param(*case, marks=slow_here)
        for case in [
            (150, 24, 12, torch.float32, True, False, 1.0),
            (140, 16, 16, torch.float32, False, True, 1.0),
            (140, 16, 16, torch.float32, False, False, 6.0),
            (70, 64, 64, torch.bfloat16, True, False, 1.0),
            (70, 64, 64, torch.float16, False, True, 1.0),
        ]
    ),
]


@on_the_device
@pytest.mark.parametrize(("tokens", "features", "columns", "dtype", "past", "missing", "spread"), CAUSAL)
def test_filter_causal(tokens, features, columns, dtype, past, missing, spread):
    w, v, value = (random((2, 2, tokens, width), dtype) for width in (features, features, columns))
    v = (v.detach() * spread).requires_grad_()
    keys = None
    if missing:
        keys = torch.ones(2, tokens, dtype=torch.bool, device=DEVICE)
        keys[0, : tokens // 2] = keys[1, 3:5] = keys[1, -9:] = False
    hidden = hide(v, value, keys)
    state = no_past(*hidden)
    if past:
        state = CausalState(*(torch.randn(x.shape, device=DEVICE, requires_grad=True) for x in state))
    found = kernels.filter_causal(lambda: w, *hidden, *state, plain.TINY)
    wide = [x.detach().double().requires_grad_() for x in (w, v, value)]
    before = [x.detach().double().requires_grad_(past) for x in state]
    out, after = plain._stable_causal(wide[0], *hide(*wide[1:], keys), CausalState(*before))
    assert_near(found, (out, *after), dtype)
    inputs, wide = (w, v, value), (*wide, *before)
    inputs, wide = ((*inputs, *state), wide) if past else (inputs, wide[:3])
    assert_near(gradients(found, inputs), gradients((out, *after), wide), dtype)


@on_the_device
def test_what_filter_causal_leaves_to_the_plain_form():
    w, v, value = (random((1, 2, 5, 8), torch.float32) for _ in range(3))
    state = no_past(v, value)
    assert kernels.filter_causal(lambda: w, v, value, *state, 1e-30) is not None
    assert kernels.filter_causal(w.double, v.double(), value.double(), *state, 1e-30) is None
    assert kernels.filter_causal(lambda: w, v, value.repeat(1, 1, 1, 9), *state, 1e-30) is None


@on_the_device
@pytest.mark.parametrize("kernel", ["filter_causal", "apply_twice"])
def test_second_derivatives_raise(kernel):
    """Also where the incoming gradient is constant."""
    x, weight = random((1, 1, 5, 8), torch.float32), torch.randn(8, 8, device=DEVICE, requires_grad=True)
    y = x @ weight
    if kernel == "apply_twice":
        out = kernels.apply_twice(y, y, y)[1]
    else:
        out = kernels.filter_causal(lambda: y, y, y, *no_past(y, y), plain.TINY)[0]
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(GraphFilterError, match="has first derivatives only"):
        torch.autograd.grad(grad.square().sum(), weight)


# ------------------------------------------------------------------------------------------- models, and the choice


def models():
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["intermediate_size"] = 32
    without = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    yield "gfsa", transformers.BertModel(transformers.BertConfig(**sizes, **without))
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
    yield "gfsa", transformers.LlamaModel(config)
    yield "agf", transformers.LlamaModel(config)


@on_the_device
@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=["bert-gfsa", "llama-gfsa", "llama-agf"])
def test_models_with_and_without_kernels(number, monkeypatch):
    """The same outputs and gradients, and at the start those of the unpatched model, bit for bit."""
    from hf_graphfilter import filter_parameters, patch_model

    name, model = list(models())[number]
    model = model.to(DEVICE).train()
    batch = {"input_ids": torch.randint(0, 50, (2, 21), device=DEVICE)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :4] = 0
    before = model(**batch).last_hidden_state
    patch_model(model, name)
    if name == "gfsa":
        assert torch.equal(model(**batch).last_hidden_state, before)
    for parameter in filter_parameters(model):
        parameter.data.fill_(0.2)
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv(choice.SWITCH, switch)
        out = model(**batch).last_hidden_state
        model.zero_grad()
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert any(not torch.equal(found, expected) for found, expected in zip(*results, strict=True))


class OnGPU:
    """What the choice asks of a tensor."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tokens):
        self.shape, self.numel = (1, 1, tokens, 8), lambda: tokens * 8


@pytest.fixture
def newest(monkeypatch):
    """A GPU of compute capability 9.0, on which kernels are chosen by what was measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(choice, "_launches", lambda device: True)
    monkeypatch.setattr(choice, "FASTER", {"agf": {(9, 0): 512, (8, 0): 1024}, "combine": {(8, 0): 800}})
    monkeypatch.setenv(choice.SWITCH, "")


def test_a_kernel_is_chosen_where_it_was_measured_to_win_or_asked_for(newest, monkeypatch):
    chosen = {
        switch: [
            choice.chosen(kernel, OnGPU(tokens)) for kernel, tokens in (("agf", 511), ("agf", 512), ("gfsa", 9999))
        ]
        for switch in ("0", "1", "")
        if not monkeypatch.setenv(choice.SWITCH, switch)
    }
    assert chosen == {"0": [False] * 3, "1": [True] * 3, "": [False, True, False]}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert [choice.chosen("agf", OnGPU(tokens)) for tokens in (512, 1024)] == [False, True]
    assert [choice.chosen("combine", OnGPU(tokens)) for tokens in (99, 100)] == [False, True]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not choice.chosen("agf", OnGPU(1024))
    monkeypatch.setenv(choice.SWITCH, "1")
    assert choice.chosen("agf", torch.zeros(1, 1, 1, 1)) == INTERPRETED
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not choice.chosen("agf", OnGPU(512))


def test_without_a_c_compiler_no_kernel_is_chosen(newest, monkeypatch, caplog):
    from hf_graphfilter.logs import logger
    from hf_graphfilter.ops.triton import combine_kernel

    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.undo()
    choice._launches.cache_clear()
    monkeypatch.setattr(combine_kernel, "combine", fail)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(shape))
    said = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    assert not choice._launches(0)
    assert not choice._launches(0)
    assert said == [
        "No kernel of Triton can be launched, so filters take longer on this GPU: Failed to find C compiler."
    ]
    choice._launches.cache_clear()


# ---------------------------------------------------------------------------------------------- compiled, without a GPU


def compiled(kernel, arguments, keywords, architecture):
    """What a launch would run on a GPU that is not here."""
    options = {name: keywords.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature, constants, attributes = {}, {}, {}

    def kind(x, *place):
        if isinstance(x, tuple):
            return tuple(kind(part, *place, i) for i, part in enumerate(x))
        if x is None or (isinstance(x, int) and x == 1):
            constants[place] = x
            return "constexpr"
        if isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0):
            attributes[place] = [["tt.divisibility", 16]]
        if isinstance(x, torch.Tensor):
            return f"*{TYPES[x.dtype]}"
        return "fp32" if isinstance(x, float) else "i32"

    bound = inspect.signature(kernel.fn).bind(*arguments, **keywords).arguments
    for i, (parameter, x) in enumerate(zip(kernel.params, bound.values(), strict=True)):
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else kind(x, i)
        if parameter.is_constexpr:
            constants[i,] = x
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, triton.backends.compiler.GPUTarget("cuda", architecture, 32), options)


TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.bool: "i1"}


@outside
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 120])
@pytest.mark.parametrize(
    ("dtype", "features", "mask"),
    [(torch.bfloat16, 64, None), (torch.float16, 128, "padding"), (torch.float32, 64, "additive")],
)
def test_every_launch_compiles_and_fits(architecture, dtype, features, mask, monkeypatch, tmp_path):
    from hf_graphfilter.ops.triton import causal_kernel as causal
    from hf_graphfilter.ops.triton import combine_kernel as combination
    from hf_graphfilter.ops.triton import twice_kernel as attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "cpu")
    shared = []

    def run(kernel, *arguments, grid, warmup, **keywords):
        shared.append(compiled(kernel, arguments, keywords, architecture).metadata.shared)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    query, key, value = (random((2, heads, 200, features), dtype) for heads in (4, 2, 2))
    both = attention.apply_twice(query, key, value, masked(mask, 2, 4, 200), 0.1, mask is None)
    gradients(both, (query, key, value))
    numbers, signals = [torch.ones(4, requires_grad=True)] * 3, [random((2, 4, 200, features), dtype) for _ in range(3)]
    combination.combine(numbers, signals)
    combination.differentiate(signals[0].detach(), numbers, signals, [True] * 6)
    if features <= 64:
        inputs = [random((2, 2, 200, features), dtype) for _ in range(3)]
        gradients(causal.filter_causal(*inputs, *no_past(*inputs[1:]), 1e-30)[:1], inputs)
    assert len(shared) >= 5
    assert max(shared) <= 99 * 1024  # what sm_86, sm_89 and sm_120 have
