"""Programs that do not know of the package: started with it loaded, or loading checkpoints with trust_remote_code."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest
import torch
import transformers as t
from models import FAMILIES, turn_on

from hf_graphfilter import (
    GraphFilterError,
    GraphormerConfig,
    GraphormerModel,
    export_remote_code,
    filter_status,
    patch_model,
    unpatch_model,
)
from hf_graphfilter.filters import import_filters
from hf_graphfilter.launch import IMPORTS, command_line, environment, run_program

PROGRAM = """
import json, multiprocessing, os, signal, subprocess, sys

PROBE = 'import sys; print("hf_graphfilter" in sys.modules, "torch" in sys.modules)'


def loaded():
    return ["hf_graphfilter" in sys.modules, "torch" in sys.modules]


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(loaded)
    started = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True).stdout.split()
    print(json.dumps({"loaded": [loaded(), spawned, started]}))
    print(json.dumps([sys.argv, sys.path, __name__, __file__, sys.modules["sitecustomize"].__file__]), flush=True)
    ENDING
"""
ARGUMENTS = ("--model", "hf", "-m", "--help", "--", "--import", "x")


def run(command, **variables):
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def python_path(*folders):
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    ("how", "ending", "code"),
    [
        ("file", "sys.exit(7)", 7),
        ("module", "raise OSError('its own')", 1),
        # of its own, since what runs in the background of a shell is started to ignore it
        (
            "command",
            "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)",
            -signal.SIGINT,
        ),
    ],
)
def test_a_program_runs_as_without_us(how, ending, code, tmp_path):
    """Arguments, path, exit code, signals, traceback, and the ``sitecustomize`` of the user; but we are loaded."""
    file = tmp_path / "program.py"
    file.write_text(f"#!{sys.executable}{PROGRAM.replace('ENDING', ending)}")
    (tmp_path / "sitecustomize.py").touch()
    command, plain = tmp_path / "program", {"file": [sys.executable, file], "module": [sys.executable, "-m", "program"]}
    command.write_bytes(file.read_bytes())
    command.chmod(stat.S_IRWXU)
    given = {"file": [file], "module": ["-m", "program"], "command": ["program"]}[how]
    path = {"PYTHONPATH": python_path(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    expected = run([*plain.get(how, [command]), *ARGUMENTS], **path)
    found = run([sys.executable, "-m", "hf_graphfilter", "run", *given, *ARGUMENTS], **path)
    assert found[0] == expected[0] == code
    assert found[1][1:] == expected[1][1:]
    assert found[2] == expected[2]
    assert json.loads(found[1][0]) == {"loaded": [[True, False], [True, False], ["True", "False"]]}
    assert json.loads(expected[1][0]) == {"loaded": [[False, False], [False, False], ["False", "False"]]}


def test_what_a_program_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("bin/train", "train", "notes", "pytest"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bin" / "train").chmod(stat.S_IRWXU)
    python = sys.executable
    assert command_line("train", ["-x"]) == [str(tmp_path / "bin" / "train"), "-x"]
    assert command_line("./train") == [python, "./train"]
    assert command_line("notes") == [python, "notes"]
    assert command_line("no_such.py") == [python, "no_such.py"]  # Python says what it lacks
    assert command_line("train", module=True) == [python, "-m", "train"]
    assert os.path.dirname(command_line("pytest")[0]) == os.path.dirname(python)  # of this environment, not on PATH
    with pytest.raises(GraphFilterError, match="no program ''"):
        command_line("")
    with pytest.raises(GraphFilterError, match="no program 'lm_evil': it is neither a file nor a command"):
        command_line("lm_evil")


def test_a_program_that_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "train").write_text("no first line that names an interpreter")
    (tmp_path / "train").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GraphFilterError, match="train does not start: Exec format error"):
        run_program("train")


def test_environment_is_added_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = environment({"HOME": "/"})
    assert alone["HOME"] == "/"
    assert os.path.isfile(os.path.join(alone["PYTHONPATH"], "sitecustomize.py"))
    once = environment({"PYTHONPATH": "a:b"}, ["mine"])
    assert once["PYTHONPATH"] == f"{alone['PYTHONPATH']}{os.pathsep}a:b"
    assert environment(once, ["their.own", "f.py"])[IMPORTS].split(os.pathsep) == [
        "mine",
        "their.own",
        str(tmp_path / "f.py"),
    ]


def test_the_sitecustomize_of_the_user_runs_also_where_the_package_fails(tmp_path):
    (tmp_path / "hf_graphfilter.py").write_text("raise RuntimeError('of another release')")
    (tmp_path / "sitecustomize.py").write_text("print('the sitecustomize of the user')")
    path = environment({"PYTHONPATH": str(tmp_path)})["PYTHONPATH"]
    code, lines, errors = run([sys.executable, "-c", "print('the program')"], PYTHONPATH=path)
    assert (code, lines) == (0, ["the sitecustomize of the user", "the program"])
    assert "of another release" in errors


FILTER = """
from dataclasses import dataclass
from hf_graphfilter import FilterConfig, GraphFilter, register_filter

class Twice(GraphFilter):
    def reset_parameters(self):
        pass

    def forward(self, shift, value):
        return shift(shift(value))

@register_filter("test-twice")
@dataclass(frozen=True)
class TwiceConfig(FilterConfig):
    module = Twice
"""
LOAD = """
import json, sys, torch, transformers
with torch.no_grad():
    model = transformers.AutoModel.from_pretrained(sys.argv[1])
    print(json.dumps(model(torch.arange(5, 12)[None]).last_hidden_state.double().norm().item()))
"""
LOAD_REMOTE = """
import importlib.abc, json, sys, torch, transformers

class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hf_graphfilter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def load(**options):
    return transformers.AutoModel.from_pretrained(sys.argv[1], **options)

sys.meta_path.insert(0, NotInstalled())
for options in ({}, {"trust_remote_code": True}):
    try:
        load(**options)
    except (ImportError, ValueError) as error:
        print(json.dumps(str(error)))
sys.meta_path.pop(0)
with torch.no_grad():
    print(json.dumps(load(trust_remote_code=True)(torch.arange(5, 12)[None]).last_hidden_state.double().norm().item()))
"""


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """Where transformers copies the code of checkpoints to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def third_party(tmp_path):
    """A checkpoint with a filter of a module ``their_filters``, which lies elsewhere; and the norm of its outputs."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "their_filters.py").write_text(FILTER)
    import_filters([str(tmp_path / "elsewhere" / "their_filters.py")])
    model = patch_model(FAMILIES["bert"].build(), "test-twice")
    model.save_pretrained(tmp_path / "patched")
    yield tmp_path, model(torch.arange(5, 12)[None]).last_hidden_state.double().norm().item()
    del sys.modules["their_filters"]


def test_a_program_loads_a_filter_of_others(third_party):
    folder, expected = third_party
    (folder / "load.py").write_text(LOAD)
    file = folder / "elsewhere" / "their_filters.py"
    verb = [sys.executable, "-m", "hf_graphfilter", "--import", file, "run"]
    code, lines, errors = run([*verb, folder / "load.py", folder / "patched"])
    assert code == 0, errors
    assert json.loads(lines[-1]) == pytest.approx(expected, rel=1e-5)


def test_an_unpatched_model_does_not_name_the_code_of_the_filter(tmp_path):
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    patch_model(t.BertModel(t.BertConfig(**sizes, intermediate_size=16)), "gfsa").save_pretrained(tmp_path / "a")
    export_remote_code(tmp_path / "a")
    model = t.BertModel.from_pretrained(tmp_path / "a")
    assert model.config.auto_map
    unpatch_model(model).save_pretrained(tmp_path / "b")
    assert "auto_map" not in json.loads((tmp_path / "b" / "config.json").read_text())
    t.AutoModel.from_pretrained(tmp_path / "b", trust_remote_code=True)


def test_remote_code_in_a_program_without_us(third_party):
    folder, expected = third_party
    export_remote_code(folder / "patched")
    (folder / "load.py").write_text(LOAD_REMOTE)
    path = python_path(folder / "elsewhere")
    code, lines, errors = run([sys.executable, folder / "load.py", folder / "patched"], PYTHONPATH=path)
    assert code == 0, errors
    refused, named, found = map(json.loads, lines[-3:])
    assert 'attn_implementation="hf_graphfilter (pip install -U hf-graphfilter, then import' in refused
    assert "packages that were not found in your environment: hf_graphfilter" in named
    assert found == pytest.approx(expected, rel=1e-5)


MIXTRAL = t.MixtralConfig(
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    num_key_value_heads=2,
    num_local_experts=2,
)


@pytest.mark.parametrize(
    ("model_class", "config", "auto_class"),
    [
        (t.BertForMaskedLM, FAMILIES["bert"].config, t.AutoModelForMaskedLM),
        (t.GPT2LMHeadModel, FAMILIES["gpt2"].config, t.AutoModelForCausalLM),
        (t.T5ForConditionalGeneration, FAMILIES["t5"].config, t.AutoModelForSeq2SeqLM),
        (t.ViTForImageClassification, FAMILIES["vit"].config, t.AutoModelForImageClassification),
        (t.CLIPModel, FAMILIES["clip"].config, t.AutoModel),
        (t.MixtralModel, MIXTRAL, t.AutoModel),  # its weights are stored under other names
    ],
)
def test_remote_code_loads_like_the_package(model_class, config, auto_class, tmp_path):
    """Sharded too, with and without trust_remote_code; saved again the code goes along; nothing global is marked."""
    model = turn_on(patch_model(model_class(config).eval()))
    model.save_pretrained(tmp_path / "patched", max_shard_size="40KB")
    before = {file.name: file.read_bytes() for file in (tmp_path / "patched").iterdir()}
    assert len(before) > 3
    assert auto_class.__name__ in export_remote_code(tmp_path / "patched")
    once = {file.name: file.read_bytes() for file in (tmp_path / "patched").iterdir()}
    export_remote_code(tmp_path / "patched")
    assert once == {file.name: file.read_bytes() for file in (tmp_path / "patched").iterdir()}
    assert {name for name in once if once[name] != before.get(name)} == {"config.json", "modeling_graph_filter.py"}

    loaded = {o: auto_class.from_pretrained(tmp_path / "patched", trust_remote_code=o) for o in (True, False, None)}
    loaded[True].save_pretrained(tmp_path / "again")
    loaded["again"] = auto_class.from_pretrained(tmp_path / "again", trust_remote_code=True)
    for found in loaded.values():
        assert isinstance(found, model_class)
        assert str(filter_status(found)) == str(filter_status(model))
        for (name, value), (other, same) in zip(model.state_dict().items(), found.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(value, same)
    assert type(loaded[True]) is not model_class
    assert type(loaded[None]) is type(loaded[False]) is model_class
    assert model_class._auto_class is None


def change(folder, **entries):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def graphormer():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return GraphormerModel(GraphormerConfig(**sizes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is no checkpoint: its config.json is not readable"),
        (lambda f: (f / "config.json").write_text('{"architecture": "vit"}'), "its config.json names no model_type"),
        (lambda f: FAMILIES["bert"].config.save_pretrained(f), "has no graph filter; patch it with"),
        (lambda f: change(f, model_type="brt"), r"transformers \S+ cannot read .*brt"),
        (
            lambda f: change(
                f, graph_filter={"version": 1, "filters": [{"config": {"filter": "gsfa"}, "modules": []}]}
            ),
            "did you mean 'gfsa'",
        ),
        (lambda f: change(f, auto_map={"AutoModel": "their.Model"}), r"code of its own for AutoModel \(their.Model\)"),
        (
            lambda f: change(f, auto_map=["their.Model"]),
            r"the auto_map of its config.json is no dict but \['their.Model",
        ),
        (lambda f: patch_model(graphormer()).save_pretrained(f), r"of type 'graphormer', whose class is not one of"),
        (lambda f: change(f, model_type=[]), r"transformers \S+ cannot read "),
        (lambda f: change(f, hidden_size="wide"), r"transformers \S+ cannot read .*hidden_size"),
    ],
)
def test_remote_code_is_refused_by_name(damage, message, tmp_path):
    patch_model(t.BertModel(FAMILIES["bert"].config)).save_pretrained(tmp_path)
    damage(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(GraphFilterError, match=message):
        export_remote_code(tmp_path)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
