"""torch.export and ONNX: the exported graph gives the same outputs, at other sizes too."""

from dataclasses import replace

import pytest
import torch
from filters import FILTERS, combinations, filters
from models import FAMILIES, TORCH_2_11, TORCH_2_12, assert_equal_in_float32, output, turn_on
from transformers import LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from hf_graphfilter import GraphFilterError, SynvolutionConfig
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE

ENCODERS = ("bert", "roberta", "distilbert", "electra", "deit", "vit")


def exported(*decoders, quick):
    """Every filter in the encoders, in decoders those with scores; of BERT quick."""
    return combinations(
        (*ENCODERS, *decoders),
        lambda family, entry: entry.everywhere and (family in ENCODERS or not entry.replaces),
        lambda family, entry: family == "bert" and entry in map(FILTERS.get, quick),
    )


def patched(family, entry, dtype=torch.float64):
    family = FAMILIES[family]
    model = turn_on(family.patch(family.build(num_hidden_layers=2), entry)).to(dtype)
    model.config.use_cache = False
    inputs = family.inputs(dtype)
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, -3:] = 0
    return model, inputs, family.inputs(dtype, batch=3, tokens=14)


@pytest.mark.feature("Compiling and exporting: torch.export, any batch and length")
@exported("gpt2", "llama", quick=("gfsa", "agf"))
def test_export(family, entry):
    model, inputs, others = patched(family, entry)
    auto = torch.export.Dim.AUTO
    sizes = {k: {0: auto, 1: auto} if x.dim() == 2 else {0: auto} for k, x in inputs.items()}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=sizes).module()
        for given in (inputs, others):
            torch.testing.assert_close(output(program, given), output(model, given), atol=1e-9, rtol=1e-9)


FREE = torch.export.Dim.DYNAMIC  # an error where a size becomes a constant, or is bounded on one side


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *(("gfsa", 12), ("gfsa", 20), ("attnscale", 20), ("contranorm", 12), ("agf", 20)),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (("hedgehog", 40), ("kernelution", 12), ("far_field", 20))
        ),
    ],
)
def test_one_example_serves_any_batch_and_length(name, tokens):
    family = FAMILIES["bert"]
    model = turn_on(family.patch(family.build(num_hidden_layers=1), FILTERS[name])).double()
    inputs = family.inputs(tokens=tokens)
    with torch.no_grad():
        sizes = {k: {0: FREE, 1: FREE} for k in inputs}
        program = torch.export.export(model, (), inputs, dynamic_shapes=sizes).module()
        for batch, length in ((1, 5), (3, 16), (4, 17), (2, 31), (5, 32), (3, 33)):
            given = family.inputs(batch=batch, tokens=length)
            given["attention_mask"][-1, -2:] = 0
            torch.testing.assert_close(output(program, given), output(model, given), atol=1e-9, rtol=1e-9)


def test_one_example_of_a_decoder_with_far_field_serves_any_batch_and_length():
    model = FAMILIES["gpt2"].patch(FAMILIES["gpt2"].build(num_hidden_layers=1), FILTERS["far_field"])
    model = turn_on(model).double().eval()
    with torch.no_grad():
        sizes = {"input_ids": {0: FREE, 1: FREE}, "use_cache": None}
        example = {"input_ids": torch.randint(1, 90, (2, 20)), "use_cache": False}
        program = torch.export.export(model, (), example, dynamic_shapes=sizes).module()
        for batch, length in ((1, 5), (3, 16), (4, 17), (2, 31)):
            given = {"input_ids": torch.randint(1, 90, (batch, length)), "use_cache": False}
            torch.testing.assert_close(output(program, given), output(model, given), atol=1e-9, rtol=1e-9)


def converted(*quick):
    """The filters that replace attention, with the options that ``linearize`` gives them and more sinks than tokens."""
    entries = {
        name: replace(FILTERS[name], config=type(FILTERS[name].config).for_conversion(sinks=5, position_bias="drop"))
        for name in ("agf", "hedgehog", "singularformer", "kernelution")
    }
    return pytest.mark.parametrize(
        "entry",
        [pytest.param(e, id=name, marks=() if name in quick else pytest.mark.slow) for name, e in entries.items()],
    )


def at_lengths(*lengths):
    for length in lengths:
        given = FAMILIES["bert"].inputs(batch=length % 3 + 1, tokens=length)
        given["attention_mask"][-1, 3:5] = 0
        yield given


@pytest.mark.feature("Compiling and exporting: torch.export of a few tokens, run with any number", family="bert")
@converted("agf")
def test_exported_with_few_tokens(entry):
    """Fewer than the window and than the sinks; two, as rotations of neighbours are one fewer than tokens."""
    family = FAMILIES["bert"]
    model = turn_on(family.patch(family.build(num_hidden_layers=1).double(), entry))
    inputs = family.inputs(tokens=2)
    with torch.no_grad():
        program = torch.export.export(
            model, (), inputs, dynamic_shapes={k: {0: FREE, 1: FREE} for k in inputs}
        ).module()
        for given in at_lengths(1, 2, 3, 9, 66, 140):
            torch.testing.assert_close(output(program, given), output(model, given), atol=1e-9, rtol=1e-9)


@pytest.mark.feature("Compiling and exporting: torch.jit.trace of a few tokens, run with any number", family="bert")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@converted("agf", "hedgehog", "singularformer", "kernelution")
def test_traced_with_few_tokens(entry, transformers_warnings):
    """The window is that of the config, and not the original attention, which spans so few tokens."""
    family = FAMILIES["bert"]
    model = turn_on(family.patch(family.build(num_hidden_layers=1).double(), entry))
    model.config.return_dict = False
    with torch.no_grad():
        traced = torch.jit.trace(model, tuple(family.inputs(tokens=3).values()))
        for given in at_lengths(2, 9, 66, 140):
            found, expected = (run(*given.values())[0] for run in (traced, model))
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    transformers_warnings.clear()  # a tracer reads every attribute


@pytest.mark.feature("Compiling and exporting: torch.export of a step with a static cache", family="llama")
@filters(lambda entry: not entry.encoders_only, quick=lambda entry: entry.config.filter in ("gfsa", "agf", "gated"))
def test_export_of_a_step_with_a_static_cache(entry, refuses):
    """By transformers' own module for it, whose program holds keys and values: right for filters that keep no more."""
    family = replace(FAMILIES["llama"], model_class=LlamaForCausalLM)
    model = turn_on(family.patch(family.build(num_hidden_layers=1).double(), entry))
    model.generation_config.update(
        use_cache=True, cache_implementation="static", cache_config={"batch_size": 1, "max_cache_len": 12}
    )
    ids = family.inputs(batch=1)["input_ids"]

    def exported():
        module = TorchExportableModuleWithStaticCache(model, 1, 12, torch.device("cpu"))
        step = {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}
        return torch.export.export(module, (), step, strict=False).module()

    with torch.no_grad():
        if model.model.layers[0].self_attn.graph_filter.decoding != "rows" or keeps_signals(model, ids):
            with refuses(
                "cannot hold it: use a DynamicCache|exported decoding step .*compile the step with torch.compile"
            ):
                exported()
            return
        run = exported()
        found = [run(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(9)]
        torch.testing.assert_close(torch.cat(found, 1), model(ids, use_cache=False).logits, atol=1e-9, rtol=1e-9)


def keeps_signals(model, ids):
    """Whether a filter has rows in the cache beside keys and values."""
    return bool(model(ids, use_cache=True)[CACHE].layers[0].kept)


@pytest.mark.feature("Compiling and exporting: torch.jit.trace, with and without padding", family="gpt2")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tokens", [1, 9])
@filters(lambda entry: entry.everywhere and not entry.exports_causal and not entry.encoders_only)
def test_a_trace_of_a_causal_filter_is_refused(entry, tokens, refuses, transformers_warnings):
    model, _, _ = patched("gpt2", entry)

    class States(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, return_dict=False)[0]

    with refuses("exported graph cannot: .* 'gfsa' or 'far_field'"):
        torch.jit.trace(States().eval(), (FAMILIES["gpt2"].inputs(tokens=tokens)["input_ids"],))
    transformers_warnings.clear()


@pytest.mark.feature("Compiling and exporting: torch.export, any batch and length", family="gpt2")
@filters(lambda entry: entry.everywhere and not entry.exports_causal)
def test_export_of_a_causal_filter_is_refused(entry, refuses):
    model, inputs, _ = patched("gpt2", entry)
    with torch.no_grad(), refuses("exported graph cannot: .* 'gfsa' or 'far_field'"):
        torch.export.export(model, (), inputs)


@pytest.mark.feature("Compiling and exporting: ONNX, run by onnxruntime")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter
@exported("gpt2", quick=("gfsa",))
def test_onnx(family, entry, tmp_path, record_property):
    if (TORCH_2_11 or TORCH_2_12) and not entry.replaces:
        pytest.skip("its exporter does not decompose a product with a number")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, inputs, _ = patched(family, entry, torch.float32)

    class Positional(torch.nn.Module):
        def forward(self, *tensors):
            return output(model, dict(zip(inputs, tensors, strict=True)))

    wrapped = Positional()
    wrapped.model = model
    if isinstance(entry.config, SynvolutionConfig):
        with pytest.raises(torch.onnx.OnnxExporterError) as caught:
            torch.onnx.export(wrapped.eval(), tuple(inputs.values()), dynamo=True, verbose=False)
        refusal = caught.value
        while refusal.__cause__ is not None:  # of the exporter's own errors
            refusal = refusal.__cause__
        assert "computes with complex numbers, which ONNX has not" in str(refusal)
        record_property("refused", str(refusal))
        return
    program = torch.onnx.export(wrapped.eval(), tuple(inputs.values()), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs.values(), strict=True)}
    with torch.no_grad():
        expected = output(model, inputs)
    assert_equal_in_float32(torch.from_numpy(session.run(None, feed)[0]), expected, model, inputs)


@pytest.mark.feature("Compiling and exporting: torch.jit.trace, with and without padding")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@filters()
@pytest.mark.parametrize("gradients", [False, True], ids=["evaluated", "with_gradients"])
@pytest.mark.parametrize("family", ["bert"])
def test_traced_without_padding_saved_and_run_with(family, gradients, entry, tmp_path, transformers_warnings):
    model, inputs, others = patched(family, entry)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    model.config.return_dict = False
    with torch.set_grad_enabled(gradients):
        torch.jit.trace(model, (ids, torch.ones_like(mask))).save(tmp_path / "model.pt")
        traced = torch.jit.load(tmp_path / "model.pt")
        for given in ((ids, mask), tuple(others.values())):
            torch.testing.assert_close(traced(*given)[0], model(*given)[0], atol=1e-9, rtol=1e-9)
    if gradients:
        for run in (traced, model):
            run(ids, mask)[0].square().sum().backward()
        for own, other in zip(traced.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, atol=1e-9, rtol=1e-9)
    transformers_warnings.clear()  # a tracer reads every attribute


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@filters(lambda entry: entry.replaces)
def test_the_exporter_of_torchscript_is_refused(entry, tmp_path):
    pytest.importorskip("onnx")
    model, inputs, _ = patched("bert", entry, torch.float32)

    class States(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids).last_hidden_state

    with pytest.raises(GraphFilterError, match=r"dynamo=True\) only|complex numbers"):
        torch.onnx.export(States(), (inputs["input_ids"],), str(tmp_path / "model.onnx"), dynamo=False)
