"""What a checkpoint of others says is data: nothing of it is run, unpickled, fetched, or copied from elsewhere, and its
text stays text."""

import ast
import copy
import json
import pickle
import re
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import EvalResult
from models import FAMILIES
from safetensors import SafetensorError
from typer.testing import CliRunner

import hf_graphfilter
from hf_graphfilter import (
    GraphFilterError,
    create_model_card,
    filter_status,
    load_filter,
    load_timm_model,
    patch_model,
    save_filter,
    transfer_attention,
)
from hf_graphfilter.analysis.report import report
from hf_graphfilter.checkpoints.transformers import _is_a_part
from hf_graphfilter.cli import app, main
from hf_graphfilter.cli.checkpoints import save_modules
from hf_graphfilter.console import Console, table
from hf_graphfilter.fitting import load_conversion
from hf_graphfilter.remote_code import export_remote_code
from recipes.errors import one_line_errors
from recipes.models import load_model
from recipes.summary import plot_sweep


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def unpickled(tmp_path, monkeypatch):
    """A folder with a pickle; afterwards nothing has read it, and nobody was asked for another file."""
    mark = tmp_path / "unpickled"
    bomb = tmp_path / "bomb.pth"
    bomb.write_bytes(pickle.dumps(Bomb(mark)))

    def refuse(*args, **kwargs):
        raise AssertionError(f"{args} {kwargs}")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    yield bomb
    assert not mark.exists()


ARGUMENTS = [
    {"checkpoint_path": "bomb.pth"},
    {"pretrained": True},
    {"pretrained_cfg": {"file": "bomb.pth"}, "pretrained": True},
    {"pretrained_cfg_overlay": {"file": "bomb.pth"}},
    {"cache_dir": "elsewhere"},
    {"device": "cuda"},
    {"unknown": 1},
    ["checkpoint_path"],
]
ARCHITECTURES = ["hf-hub:a/b", "hf_hub:a/b", "local-dir:/", "a/b", "..", "", None, 3, ["x"], "deit_tiny_patch16_224\n"]


@pytest.mark.parametrize(
    "changed",
    [*({"model_args": {"depth": 1, **x} if isinstance(x, dict) else x} for x in ARGUMENTS)]
    + [{"architecture": name} for name in ARCHITECTURES],
    ids=str,
)
def test_a_checkpoint_of_timm(changed, tmp_path, unpickled):
    timm = pytest.importorskip("timm")
    folder = tmp_path / "checkpoint"
    model = patch_model(timm.create_model("deit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2, num_classes=2))
    timm.models.save_for_hf(model, folder, safe_serialization=True, model_args=(built := {"depth": 1, "embed_dim": 24}))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config["model_args"].items() >= built.items()
    config |= {k: json.loads(json.dumps(v).replace("bomb.pth", str(unpickled))) for k, v in changed.items()}
    file.write_text(json.dumps(config))
    with pytest.raises(GraphFilterError, match=r"which (the class of \w+ does not take|is no architecture of timm)"):
        load_timm_model(folder)


def test_where_a_checkpoint_of_timm_wants_its_weights_from_is_forgotten(tmp_path, unpickled):
    timm = pytest.importorskip("timm")
    model = patch_model(timm.create_model("deit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2))
    sources = {"url": "http://x", "file": str(unpickled), "hf_hub_id": "a/b", "source": "file", "custom_load": True}
    args = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True, model_args=args)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"] |= sources
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = load_timm_model(tmp_path).pretrained_cfg
    assert not {k: v for k, v in sources.items() if kept.get(k) == v}


MODULES = [
    *([{"path": path}] for path in ("**", "*", "..", ".", "/", "a/b", "/etc", "../secret", "[a]", ".hidden", 3, None)),
    *([{"name": "0"}], {"path": "x"}, 3, ["x"]),
]


@pytest.mark.parametrize("listed", MODULES, ids=str)
def test_the_modules_of_sentence_transformers(listed, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    source = tmp_path / "source"
    source.mkdir()
    (source / "modules.json").write_text(json.dumps(listed))
    (source / "config.json").write_text("{}")
    with pytest.raises(GraphFilterError, match=r"modules.json of .* (which is no folder|is no list of modules)"):
        save_modules(str(source), tmp_path / "output")
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("linked", ["folder", "file", "modules.json"])
def test_links_out_of_a_checkpoint_are_not_followed(linked, tmp_path):
    secret, source = tmp_path / "secret", tmp_path / "source"
    secret.mkdir()
    source.mkdir()
    (secret / "config.json").write_text('[{"path": "1_Pooling"}]')
    (source / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    if linked == "folder":
        (source / "1_Pooling").symlink_to(secret)
    elif linked == "file":
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling" / "config.json").symlink_to(secret / "config.json")
    else:
        (source / "modules.json").unlink()
        (source / "modules.json").symlink_to(secret / "config.json")
    with pytest.raises(GraphFilterError, match="is a link to a file outside"):
        save_modules(str(source), tmp_path / "output")
    assert not list((tmp_path / "output").rglob("config.json"))


def test_the_cache_of_the_hub_holds_links_within_a_repository(tmp_path):
    blobs, source = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    (source / "1_Pooling").mkdir(parents=True)
    (source / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (blobs / "0").write_text("{}")
    (source / "1_Pooling" / "config.json").symlink_to(blobs / "0")
    save_modules(str(source), tmp_path / "output")
    assert (tmp_path / "output" / "1_Pooling" / "config.json").read_text() == "{}"


def test_what_is_saved_is_not_written_over(tmp_path):
    """The modules of a source are copied before the model is saved."""
    source = tmp_path / "source"
    FAMILIES["bert"].build().save_pretrained(source)
    (source / "modules.json").write_text('[{"path": "**"}]')
    with pytest.raises(GraphFilterError, match="which is no folder in it"):
        CliRunner().invoke(app, ["patch", str(source), str(tmp_path / "output")], catch_exceptions=False)
    assert not (tmp_path / "output").exists()


STEERING = "\x1b", "\x9b", "\x07", "\r", "\u202e"
FORMULA = f"{''.join(STEERING)}$\\frac{{1}}$ $"
HOSTILE = f"{FORMULA}[2J<script>x</script>![x](y)|`"
NAME = HOSTILE.replace("/", "")
CONFIG = {"model_type": "bert", "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}


def harmless(text):
    return bool(text.strip()) and not any(c in text for c in STEERING)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": HOSTILE},
        CONFIG | {"architectures": [HOSTILE]},
        CONFIG | {"hidden_act": HOSTILE, "graph_filter": {"version": 1, "filters": []}},
        *(
            CONFIG | {"graph_filter": {"version": 1, "filters": [{"config": config, "modules": modules}]}}
            for config, modules in (
                ({"filter": HOSTILE}, ["encoder.layer.0.attention.self"]),
                ({"filter": "gfsa", HOSTILE: 1}, ["encoder.layer.0.attention.self"]),
                ({"filter": "gfsa", "K": HOSTILE}, ["encoder.layer.0.attention.self"]),
                ({"filter": "gfsa"}, [HOSTILE]),
            )
        ),
    ],
    ids=range(7),
)
def test_no_file_steers_the_terminal(config, tmp_path, monkeypatch, capfd):
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["hf-graphfilter", "status", str(folder)])
    with pytest.raises(SystemExit):
        main()
    written = capfd.readouterr()
    assert harmless(written.err)
    assert not any(c in written.out for c in STEERING)


@pytest.mark.parametrize("error", [GraphFilterError(HOSTILE), OSError(2, "no such file", HOSTILE)], ids=["ours", "OS"])
def test_no_error_of_a_recipe_steers_the_terminal(error, capsys):
    with pytest.raises(SystemExit), one_line_errors("recipe"):
        raise error
    assert harmless(capsys.readouterr().err)


def test_no_warning_steers_the_terminal(tmp_path):
    save_filter(patch_model(FAMILIES["bert"].build()), tmp_path / NAME)
    other = FAMILIES["bert"].build()
    torch.nn.init.zeros_(other.encoder.layer[0].attention.self.query.weight)
    with pytest.warns(match="a base with other weights") as warned:
        load_filter(other, tmp_path / NAME)
    assert harmless(str(warned[0].message))


@pytest.mark.parametrize("width", [20, 400])
def test_no_table_steers_the_terminal(width, capsys):
    Console(width=width).print(table([HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]], title=HOSTILE), HOSTILE)
    assert harmless(capsys.readouterr().out)


def test_a_card_has_no_markup_of_others():
    model = patch_model(FAMILIES["bert"].build())
    result = EvalResult(
        task_type="x",
        dataset_type="x",
        dataset_name=HOSTILE,
        metric_type="x",
        metric_name=HOSTILE,
        metric_value=HOSTILE,
    )
    card = create_model_card(
        model, repo_id=f'me/{NAME}"\n```', base_model=HOSTILE, results=[result], training={HOSTILE: HOSTILE}
    )
    programs = re.findall(r"^```(\w*)\n(.*?)^```$", card.text, flags=re.M | re.S)
    assert [language for language, _ in programs] == ["python", "json", "bibtex"]
    assert ast.parse(programs[0][1]).body
    text = re.sub(r"^```.*?^```$", "", card.text, flags=re.M | re.S)
    assert harmless(text)
    assert "<script" not in text
    assert "![x](" not in text.replace("\\[", "")
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (0, 3, 5, 8) for line in text.splitlines())


@pytest.fixture
def conversion(tmp_path):
    """What a file beside a checkpoint says of its conversion."""
    numbers = {HOSTILE: 1.0}
    run = {"before": numbers, "after": numbers, "history": [[0, 1.0], [8, 0.5]], "stopped": HOSTILE}
    measure = {"name": HOSTILE, "original": 1.0, "converted": 1.0, "without": numbers}
    content = {"before": numbers, "after": numbers, "by_context": {FORMULA: 1.0}, "errors_without": numbers}
    content |= {"measures": [measure], "stages": {HOSTILE: run}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "conversion.json").write_text(json.dumps(content))
    return load_conversion(tmp_path)


def test_a_page_and_its_figures_have_no_markup_of_others(conversion, tmp_path):
    model, batch = patch_model(FAMILIES["bert"].build()), FAMILIES["bert"].inputs()
    page = report(model, [batch], title=HOSTILE, conversion=conversion).to_html(tmp_path / "x.html").read_text()
    assert harmless(page)
    assert "<script" not in page
    assert "stage: " in page
    assert "\\frac{1}$ $" in page.partition("stage: ")[2][:200]  # as it is, not as a formula


def test_the_tables_of_a_conversion_have_no_markup_of_others(conversion):
    assert harmless(str(conversion))
    assert harmless(conversion.to_markdown())
    assert "<script" not in conversion.to_markdown()


def test_the_figure_of_a_sweep_takes_any_name(tmp_path):
    summary = {"plain": {"values": {"0": 1.0}}, f"{HOSTILE}=1, {HOSTILE}": {"values": {"0": 1.0}}}
    plot_sweep({"summary": summary, "metric": HOSTILE, "model": HOSTILE, "task": HOSTILE}, tmp_path / "sweep.png")


def test_a_record_names_model_classes_only(monkeypatch, tmp_path):
    monkeypatch.setattr(transformers, "called", lambda config: pytest.fail("called"), raising=False)
    model = FAMILIES["bert"].build()
    assert not _is_a_part(model, {"model": "called"}, {"nowhere"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["called"]}))
    with pytest.raises(GraphFilterError, match="which is no model of transformers"):
        load_model(tmp_path)


@pytest.mark.parametrize("asked", ["flash_attention_2", "unknown"])
@pytest.mark.parametrize("where", ["argument", "config", "call"])
def test_an_implementation_that_the_model_lacks(asked, where, tmp_path):
    model = patch_model(FAMILIES["t5"].build())
    model.save_pretrained(tmp_path)
    if where == "config":
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"_attn_implementation": asked}))
    argument = {"attn_implementation": asked} if where == "argument" else {}
    called = model.set_attn_implementation if where == "call" else partial(type(model).from_pretrained, **argument)
    with pytest.raises(GraphFilterError, match=f"T5Model with this graph filter cannot run with '{asked}'"):
        called(asked if where == "call" else tmp_path)


def saved(kind, folder):
    """A patched model's files, and what loads them."""
    model = FAMILIES["bert"].build()
    if kind == "load_timm_model":
        timm = pytest.importorskip("timm")
        args = {"depth": 1, "embed_dim": 24, "num_heads": 2}
        model = patch_model(timm.create_model("deit_tiny_patch16_224", **args))
        timm.models.save_for_hf(model, folder, safe_serialization=True, model_args=args)
        return lambda: load_timm_model(folder)
    if kind == "load_filter":
        base = copy.deepcopy(model)
        save_filter(patch_model(model), folder)
        return lambda: load_filter(base, folder)
    if kind == "transfer_attention":
        batches = [torch.arange(8).view(1, 8)] * 3
        run = partial(transfer_attention, patch_model(model, "agf"), batches, steps=2, holdout=1, checkpoint=folder)
        run()
        return run
    patch_model(model).save_pretrained(folder)
    if kind == "status":
        return lambda: CliRunner().invoke(app, ["status", str(folder)], catch_exceptions=False)
    if kind == "export_remote_code":
        return lambda: export_remote_code(folder)
    return lambda: transformers.AutoModel.from_pretrained(folder)


LOADERS = ["load_timm_model", "load_filter", "status", "from_pretrained"]


@pytest.mark.parametrize("kind", [*LOADERS, "transfer_attention"])
def test_no_loader_unpickles(kind, tmp_path, unpickled):
    load = saved(kind, tmp_path / "saved")
    files = [*(tmp_path / "saved").rglob("*.safetensors")]
    assert files
    for file in files:
        file.write_bytes(unpickled.read_bytes())
        file.with_name("pytorch_model.bin").write_bytes(unpickled.read_bytes())
    ignored = pytest.warns(UserWarning, match="progress is ignored, and the fit begins again")
    with ignored if kind == "transfer_attention" else pytest.raises((GraphFilterError, SafetensorError)):
        load()


@pytest.mark.parametrize(
    "name", ["hostile_module", "hostile_module:Config", "hostile_module.Config", "./hostile_module"]
)
@pytest.mark.parametrize("kind", [*LOADERS, "export_remote_code"])
def test_the_name_of_a_filter_imports_nothing(kind, name, tmp_path, monkeypatch):
    load = saved(kind, tmp_path)
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (file,) = (file for file in tmp_path.rglob("*.json") if '"filter": "gfsa"' in file.read_text())
    file.write_text(file.read_text().replace('"filter": "gfsa"', f'"filter": "{name}"'))
    with pytest.raises(GraphFilterError, match="unknown filter"):
        load()


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    load = saved("from_pretrained", tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    file = tmp_path / "config.json"
    names = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": names}))
    assert filter_status(load())
    assert CliRunner().invoke(app, ["status", str(tmp_path)], catch_exceptions=False).exit_code == 0


def test_the_metadata_of_a_card_are_data(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"---\nlicense: !!python/object/apply:builtins.open ['{tmp_path}/run', 'w']\n---\n")
    with pytest.raises(GraphFilterError, match="cannot be read"):
        create_model_card(patch_model(FAMILIES["bert"].build())).save(card)
    assert not (tmp_path / "run").exists()


def test_a_local_checkpoint_needs_no_network(tmp_path, monkeypatch):
    def connect(*args):
        raise AssertionError(args)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)  # without a network no connection is tried after it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for kind in (*LOADERS, "export_remote_code"):
        saved(kind, tmp_path / kind)()
    assert load_conversion(tmp_path / "status") is None
    create_model_card(transformers.AutoModel.from_pretrained(tmp_path / "status")).save(tmp_path / "card.md")


def test_the_package_opens_no_connection_itself():
    network = re.compile(r"^\s*(import|from) (requests|urllib|socket|https?|httpx2?|aiohttp|ftplib|smtplib)\b", re.M)
    files = [*Path(hf_graphfilter.__file__).parent.rglob("*.py")]
    assert [file for file in files if network.search(file.read_text())] == []
    assert len(files) > 100
