"""The exporters of transformers: their programs give a patched model's outputs, saved and loaded too."""

import itertools
from dataclasses import replace

import pytest
import torch
from filters import FILTERS
from models import FAMILIES, turn_on
from transformers import LlamaForCausalLM

from hf_graphfilter import GraphFilterError

exporters = pytest.importorskip("transformers.exporters", reason="an earlier transformers")
if not hasattr(exporters, "ExportedModel"):
    pytest.skip("its exporters return programs that cannot be saved", allow_module_level=True)
# what a format runs in, and how far half precision may take it
FORMATS = {"Dynamo": (None, 1e-5), "Onnx": ("onnxruntime", 1e-5), "OpenVINO": ("openvino", 1e-2)}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def build(family, name):
    model = FAMILIES[family].patch(FAMILIES[family].build(num_hidden_layers=1), FILTERS[name])
    model.config.use_cache = False
    return turn_on(model).eval()


def export(model, inputs, kind, **options):
    exporter, config = (getattr(exporters, f"{kind}{part}") for part in ("Exporter", "Config"))
    return exporter().export(model, inputs, config=config(dynamic=True, **options))


@pytest.mark.feature("Compiling and exporting: exporters of transformers, saved and loaded")
@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("bert", "gfsa", "Dynamo"),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (
                *itertools.product(("bert",), ("agf", "hedgehog"), ("Dynamo", "Onnx")),
                *itertools.product(("llama",), ("gfsa", "far_field"), ("Dynamo", "Onnx")),
                *(("bert", "gfsa", kind) for kind in ("Onnx", "OpenVINO")),
            )
        ),
    ],
)
def test_programs_of_other_sizes(family, name, kind, tmp_path, transformers_warnings):
    runtime, tolerance = FORMATS[kind]
    if runtime:
        pytest.importorskip(runtime)
    model = build(family, name)
    with torch.no_grad():
        exported = export(model, FAMILIES[family].inputs(batch=2, tokens=12), kind)
        exported.save_pretrained(tmp_path)
        loaded = exporters.ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)  # one's own
        given = FAMILIES[family].inputs(batch=3, tokens=7)
        expected = model(**given)[0]
        for program in (exported, loaded):
            found = next(iter(program(**given).values()))
            torch.testing.assert_close(torch.as_tensor(found), expected, atol=tolerance, rtol=tolerance)
    transformers_warnings.clear()  # which versions it was tested with


@pytest.mark.parametrize("name", ["gfsa", "far_field"])
def test_decoding_is_refused(name, transformers_warnings):
    """What a filter keeps beside keys and values is no output of a program."""
    family = replace(FAMILIES["llama"], model_class=LlamaForCausalLM)
    model = turn_on(family.patch(family.build(num_hidden_layers=1), FILTERS[name])).eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match="export_program failed") as raised:
        exporters.DynamoExporter().export_for_generation(
            model, {"input_ids": family.inputs(batch=1)["input_ids"]}, config=exporters.DynamoConfig()
        )
    error = raised.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, GraphFilterError)
    assert "use_cache=False" in str(error)
    transformers_warnings.clear()
