"""Importing is cheap and changes nothing for models without a filter."""

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import textwrap

import pytest
import torch

import hf_graphfilter
from hf_graphfilter._on_import import when_imported


def run(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reactions_to_an_import_outlive_questions_and_interruptions(tmp_path, monkeypatch):
    """As ``find_spec("transformers.modeling_utils")``, or Ctrl-C in a notebook while it is imported."""
    file, seen = tmp_path / "slowly_imported.py", []
    file.write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    when_imported("slowly_imported", lambda: seen.append(sys.modules["slowly_imported"].done))
    assert importlib.util.find_spec("slowly_imported").origin == str(file)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("slowly_imported")
    assert not seen
    file.write_text("done = True  # now")
    importlib.invalidate_caches()
    importlib.import_module("slowly_imported")
    assert seen == [True]
    importlib.reload(sys.modules["slowly_imported"])
    assert seen == [True], "once"
    del sys.modules["slowly_imported"]


def test_a_reaction_that_fails_is_not_left_out_of_the_next_import(tmp_path, monkeypatch):
    """As a module of HF_GRAPHFILTER_IMPORT with a mistake, which would be forgotten silently."""
    problems = [ImportError("first"), ImportError("second")]

    def react():
        if problems:
            raise problems.pop(0)
        seen.append(True)

    seen = []
    (tmp_path / "imported_again.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    when_imported("imported_again", react)
    for message in ("first", "second"):
        with pytest.raises(ImportError, match=message):
            importlib.import_module("imported_again")
    importlib.reload(importlib.import_module("imported_again"))
    assert seen == [True], "once"
    del sys.modules["imported_again"]


def test_import_is_light():
    found = run("""
        import sys, transformers
        before = set(sys.modules)
        import hf_graphfilter
        print("torch" in sys.modules, "transformers.modeling_utils" in sys.modules, len(set(sys.modules) - before))
    """).split()
    assert found[:2] == ["False", "False"]
    assert int(found[2]) < 10


ORDERS = {
    "models first": "import transformers.modeling_utils, hf_graphfilter",
}
MORE_ORDERS = {
    "us first": "import hf_graphfilter, transformers",
    "a part of a model": "import hf_graphfilter.models.converter.layers",
    "from within": "import hf_graphfilter.hosts.transformers.cache",
    "transformers first": "import transformers, hf_graphfilter",
    "layers first": "import hf_graphfilter, transformers.modeling_layers",
}


@pytest.mark.parametrize(
    "order",
    [
        *(pytest.param(order, id=name) for name, order in ORDERS.items()),
        *(pytest.param(order, id=name, marks=pytest.mark.slow) for name, order in MORE_ORDERS.items()),
    ],
)
def test_import_order_does_not_matter(order):
    assert run(f"""
        {order}
        from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM as MaskedLM, BertModel
        from transformers import AutoModelForSequenceClassification as Classifier
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        config = AutoConfig.for_model("converter")
        models = [cls.from_config(config) for cls in (AutoModel, MaskedLM, Classifier)]
        print("hf_graphfilter" in ALL_ATTENTION_FUNCTIONS, *(type(model).__name__ for model in models))
    """).split() == ["True", "ConverterModel", "ConverterForMaskedLM", "ConverterForSequenceClassification"]


@pytest.mark.parametrize("separately", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_changes_for_unpatched_models(separately):
    """The same program with and without the import: outputs, files, attention functions, load reports.

    In one process before and after the import, or in two, of which one begins with it.
    """
    code = """
    {plug_in}
    import hashlib, json, os, tempfile
    import torch, transformers as t
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    def report():
        torch.manual_seed(0)
        found = {{}}
        for name, model in {{
            "bert": t.BertForMaskedLM(t.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2,
                                                   num_attention_heads=2, intermediate_size=16)),
            "gpt2": t.GPT2LMHeadModel(t.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
                                                   eos_token_id=0)),
        }}.items():
            model.eval()
            ids = torch.arange(5, 15)[None]
            logits = model(ids, labels=ids).logits
            logits.sum().backward()
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                files = {{f: hashlib.sha256(open(os.path.join(folder, f), "rb").read()).hexdigest()
                         for f in sorted(os.listdir(folder))}}
                again, info = type(model).from_pretrained(folder, output_loading_info=True)
            found[name] = [
                logits.detach().double().sum().item(),
                sum(p.grad.double().abs().sum().item() for p in model.parameters()),
                files,
                torch.equal(again(ids).logits, logits),
                {{k: sorted(map(str, v)) for k, v in info.items()}},
                [n for n, _ in model.named_modules()],
                model.config._attn_implementation,
            ]
        found["functions"] = sorted(set(ALL_ATTENTION_FUNCTIONS) - {{"hf_graphfilter"}})
        return json.dumps(found)

    print(report())
    """
    first = run(code.format(plug_in="") + ("" if separately else "\n    import hf_graphfilter\n    print(report())\n"))
    lines = [first, run(code.format(plug_in="import hf_graphfilter"))] if separately else first.splitlines()[-2:]
    # the last lines: other packages may print when they are imported
    plain, with_us = (json.loads(text.splitlines()[-1]) for text in lines)
    assert plain == with_us


def test_public_names():
    for name in hf_graphfilter.__all__:
        assert getattr(hf_graphfilter, name).__doc__, name
    assert set(hf_graphfilter.__all__) <= set(dir(hf_graphfilter))
    with pytest.raises(AttributeError, match="attribute nope"):
        hf_graphfilter.nope  # noqa: B018


CONFIGS = [
    name
    for name in hf_graphfilter.__all__
    if name.endswith("Config") and name not in ("ConverterConfig", "FilterConfig", "GraphormerConfig")
]


@pytest.mark.parametrize("name", CONFIGS)
def test_docstrings_of_configs_state_the_defaults(name):
    config_class = getattr(hf_graphfilter, name)
    described = dict(re.findall(r"^ +(\w+) \(.*, default (.*?)\): ", config_class.__doc__, re.MULTILINE))
    for field in dataclasses.fields(config_class):
        if field.name in inspect.get_annotations(config_class) or field.name in described:
            assert ast.literal_eval(described[field.name]) == field.default


MODULES = [m.name for m in pkgutil.walk_packages(hf_graphfilter.__path__, "hf_graphfilter.")]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module, monkeypatch):
    if not torch.cuda.is_available():  # DeepSpeed, where it is installed and not told, prints that it found none
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    if module.startswith("hf_graphfilter.ops.triton."):
        pytest.importorskip("triton")
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize(
    ("earlier", "now", "names"),
    [
        ("conversion", "fitting", ["Rates", "convert", "load_conversion", "save_conversion", "speed", "text_batches"]),
        ("training.transfer", "fitting", ["TransferReport", "transfer_attention"]),
        ("status", "patching.status", ["FilterStatus", "filter_parameters", "filter_status"]),
        ("patching", "patching.patch", ["patch_model", "unpatch_model"]),
        ("shift", "shift.operator", ["DenseShift", "ShiftOperator"]),
    ],
)
def test_earlier_names_of_modules(earlier, now, names):
    before, after = (importlib.import_module(f"hf_graphfilter.{name}") for name in (earlier, now))
    assert all(getattr(before, name) is getattr(after, name) for name in names)
