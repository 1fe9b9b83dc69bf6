"""Save, load, push: whole checkpoints through transformers' own verbs, and the filter-only file."""

import copy
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from accelerate import disk_offload
from deaths import Death, dying
from hub_server import TOKEN, Hub
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, RepoUrl
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from models import FAMILIES, assert_equal_in_float32, output, realigned, turn_on
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2DoubleHeadsModel,
    LlamaForCausalLM,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    T5EncoderModel,
    T5ForConditionalGeneration,
    TrainingArguments,
    set_seed,
)
from typer.testing import CliRunner

from hf_graphfilter import (
    FilterConfig,
    GraphFilter,
    GraphFilterAttention,
    GraphFilterError,
    create_model_card,
    drop_blend,
    filter_parameters,
    filter_status,
    load_filter,
    load_filtered_model,
    patch_model,
    push_filter,
    register_filter,
    save_filter,
    unpatch_model,
)
from hf_graphfilter.cli import app, common
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.hosts.transformers.auto_classes import auto_class_of
from hf_graphfilter.hosts.transformers.cards import usage

BERT = FAMILIES["bert"]


def patched(name="bert", **options):
    set_seed(0)
    options = {"K": 4, "w_0": -0.01, "learn": ("w_0", "w_K"), **options}
    return turn_on(patch_model(FAMILIES[name].build(), **options))


def coefficients(model):
    return torch.cat([v for row in filter_status(model) for v in row.coefficients.values()])


@pytest.fixture
def checkpoint(tmp_path):
    patched().save_pretrained(tmp_path / "patched")
    return tmp_path / "patched"


def edit(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "auto",
    [
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    ],
)
def test_every_auto_class(auto, checkpoint, tmp_path, transformers_warnings):
    model = auto.from_pretrained(checkpoint)
    transformers_warnings.clear()  # the heads are new
    assert torch.equal(coefficients(model), coefficients(patched()))
    # and back: a checkpoint with a head loads without it
    model.save_pretrained(tmp_path / "again")
    base = realigned(AutoModel.from_pretrained(tmp_path / "again"))
    transformers_warnings.clear()
    assert torch.equal(output(base, BERT.inputs()), output(patched(), BERT.inputs()))


def test_sharded_and_resaved(tmp_path):
    model = patched()
    model.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    again = AutoModel.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    third = realigned(AutoModel.from_pretrained(tmp_path / "b"))
    assert torch.equal(output(third, BERT.inputs()), output(model, BERT.inputs()))
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {"device_map": {"": "cpu"}}],
)
def test_loading_options(options, checkpoint):
    model = AutoModel.from_pretrained(checkpoint, **options)
    assert {p.dtype for p in filter_parameters(model)} == {torch.float32}, "coefficients stay in float32"
    assert torch.equal(coefficients(model), coefficients(patched()))
    assert model.dtype == options.get("dtype", torch.float32)


def test_disk_offload(checkpoint, tmp_path):
    layers = {f"encoder.layer.{i}": "cpu" for i in range(2)}
    device_map = {"embeddings": "cpu", **layers, "encoder.layer.2": "disk", "pooler": "cpu"}
    model = AutoModel.from_pretrained(checkpoint, device_map=device_map, offload_folder=tmp_path / "offload")
    assert_equal_in_float32(output(model, BERT.inputs()), output(patched(), BERT.inputs()), patched(), BERT.inputs())


def test_a_filter_is_not_loaded_into_a_model_on_disk(checkpoint, tmp_path):
    save_filter(patched(), tmp_path / "filter")
    model = disk_offload(AutoModel.from_pretrained(checkpoint), tmp_path / "offload")
    with pytest.raises(GraphFilterError, match="into a model on disk: load it before that is offloaded"):
        load_filter(model, tmp_path / "filter")


def test_backend_can_be_chosen_at_load(checkpoint):
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager")
    assert {row.backend for row in filter_status(model)} == {"eager"}
    assert {row.backend for row in filter_status(AutoModel.from_pretrained(checkpoint))} == {"sdpa"}


def test_from_config_gives_a_patched_model(checkpoint):
    model = AutoModel.from_config(AutoConfig.from_pretrained(checkpoint))
    assert len(filter_status(model)) == 3
    assert torch.equal(filter_status(model)[0].coefficients["w_0"], torch.full((4,), -0.01))


def test_plain_weights_into_a_patched_model(checkpoint, tmp_path, transformers_warnings):
    plain = BERT.build()
    plain.save_pretrained(tmp_path / "plain")
    model = realigned(AutoModel.from_pretrained(tmp_path / "plain", config=AutoConfig.from_pretrained(checkpoint)))
    assert any("graph_filter" in message for message in transformers_warnings)
    transformers_warnings.clear()
    assert torch.equal(output(unpatch_model(model), BERT.inputs()), output(plain, BERT.inputs()))
    model = AutoModel.from_pretrained(tmp_path / "plain", config=AutoConfig.from_pretrained(checkpoint))
    transformers_warnings.clear()
    for row in filter_status(model):
        values = {name: set(v.tolist()) for name, v in row.coefficients.items()}
        assert values == {"w_0": {torch.tensor(-0.01).item()}, "w_1": {1.0}, "w_K": {0.0}}


def test_patching_a_loaded_checkpoint_differently(checkpoint):
    model = AutoModel.from_pretrained(checkpoint)
    with pytest.raises(GraphFilterError, match="already patched"):
        patch_model(model, K=2)
    patch_model(unpatch_model(model), K=2, layers="odd")
    assert [row.filter.K for row in filter_status(model)] == [2]


def test_sub_model_of_an_encoder_decoder(tmp_path, transformers_warnings):
    model = T5ForConditionalGeneration(FAMILIES["t5"].config).eval()
    turn_on(patch_model(model)).save_pretrained(tmp_path)
    encoder = realigned(T5EncoderModel.from_pretrained(tmp_path))
    transformers_warnings.clear()
    ids = FAMILIES["t5"].inputs()["input_ids"]
    assert len(filter_status(encoder)) == 3
    assert torch.equal(encoder(ids).last_hidden_state, model.encoder(ids).last_hidden_state)


def test_push_to_hub_sends_what_save_pretrained_writes(monkeypatch, tmp_path):
    """The Hub's client is replaced by a folder; everything before it is transformers' own."""
    repository = tmp_path / "hub"

    def create_repo(self, repo_id, **_):
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id, operations, **_):
        for operation in operations:
            target = repository / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            with operation.as_file() as file:
                target.write_bytes(file.read())

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    model = patched()
    model.push_to_hub("me/bert-gfsa")
    assert {f.name for f in repository.iterdir()} >= {"config.json", "model.safetensors"}
    assert not list(repository.glob("*.bin"))
    loaded = realigned(AutoModel.from_pretrained(repository))
    assert torch.equal(output(loaded, BERT.inputs()), output(model, BERT.inputs()))


def test_a_saved_folder_says_how_to_load_it(tmp_path):
    patched().save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "import hf_graphfilter  # pip install hf-graphfilter\nfrom transformers import AutoModel\n" in card.text
    assert (card.data.library_name, card.data.tags) == ("transformers", ["graph-filter", "gfsa", "hf_graphfilter"])
    create_model_card(patched(), description="## Data\nreviews").save(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    patched().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == text


def test_a_folder_that_gets_another_filter_gets_its_card(tmp_path, transformers_warnings):
    file, result = tmp_path / "README.md", EvalResult("text-classification", "glue", "CoLA", "accuracy", 0.5)
    create_model_card(patched(), results=[result], description="## Data\n\nreviews").save(file)
    model = patch_model(BERT.build(), "ppr")
    model.save_pretrained(tmp_path)
    card = ModelCard.load(file)
    assert card.data.tags == ["graph-filter", "ppr", "hf_graphfilter"]
    assert "gfsa" not in card.text
    assert "| CoLA |" in card.text
    assert "## Data\n\nreviews" in card.text
    unpatch_model(model).save_pretrained(tmp_path)
    assert "README.md describes a graph filter, and the saved model has none" in transformers_warnings.pop()
    file.write_text(text := "# Mine")
    model.save_pretrained(tmp_path)
    patched().save_pretrained(tmp_path)
    assert file.read_text() == text


def test_no_readme_where_nothing_was_saved(tmp_path):
    patched().save_pretrained(tmp_path / "other process", is_main_process=False)
    model = patched()
    with pytest.raises(TypeError, match="complex"):
        model.save_pretrained(tmp_path / "failed", max_shard_size=1j)
    unpatch_model(model).save_pretrained(tmp_path / "plain")
    assert not [*tmp_path.rglob("README.md")]


def step_outside(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "graph_filter" not in name:
                parameter.add_(1e-4 * torch.rand_like(parameter))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_filter_saved_alone_after_its_base_was_trained_says_so(loaded, tmp_path):
    patched().save_pretrained(tmp_path / "model")
    model = AutoModel.from_pretrained(tmp_path / "model") if loaded else patched()
    turn_on(model)
    for cast in (torch.bfloat16, torch.float32):
        save_filter(model.to(cast), tmp_path / "filter")
    step_outside(model)
    with pytest.warns(UserWarning, match=r"weights outside the filter changed since .*embed.*: save the whole model"):
        save_filter(copy.deepcopy(model), tmp_path / "filter")
    save_filter(patch_model(unpatch_model(model)), tmp_path / "filter")


def test_a_filter_laid_over_another_base_says_so(tmp_path):
    save_filter(patched(), tmp_path)
    load_filter(unpatch_model(patched()).to(torch.bfloat16), tmp_path)
    set_seed(1)
    other = BERT.build()
    with pytest.warns(UserWarning, match="trained on a base with other weights .*attention.self.query.weight"):
        assert load_filter(other, tmp_path) is other
    description = json.loads((tmp_path / "graph_filter.json").read_text())
    del description["weights"]  # as earlier releases wrote it
    (tmp_path / "graph_filter.json").write_text(json.dumps(description))
    load_filter(unpatch_model(other), tmp_path)


def test_the_two_files_of_a_filter_are_of_one_call(tmp_path):
    """Of several K the coefficients have the same shapes."""
    saved = {K: patched(K=K, w_K=0.1 * K) for K in (3, 7)}
    outputs = {K: output(model, BERT.inputs()) for K, model in saved.items()}

    def command(folder):
        save_filter(saved[7], folder)
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".part"}

    with dying(tmp_path / "whole") as writes:
        expected = command(tmp_path / "whole")
    found = []
    for last in range(1, writes.count + 1):
        folder = save_filter(saved[3], tmp_path / f"{last}")
        with dying(folder, last), pytest.raises(Death):
            command(folder)
        base = unpatch_model(copy.deepcopy(saved[3]))
        try:
            load_filter(base, folder)
        except GraphFilterError as error:
            found.append(str(error).partition(" were ")[2])
            assert not filter_status(base)
        else:
            found.append(filter_status(base)[0].filter.K)
            assert torch.equal(output(base, BERT.inputs()), outputs[found[-1]])
        assert command(folder) == expected
    assert [*dict.fromkeys(found)] == [3, "not saved together; save or download both again", 7]


def test_a_full_disk_leaves_a_saved_filter_as_it_was(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    before = {file: file.read_bytes() for file in save_filter(patched(), tmp_path).iterdir()}
    monkeypatch.setattr(safetensors.torch, "serialize_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_filter(patched(K=7), tmp_path)
    assert caught.value.errno == 28
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


# ------------------------------------------------------------------------------------------------ failing closed


def run(code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)


def test_without_the_plug_in_loading_fails_and_names_the_cure(checkpoint, tmp_path):
    """Also for those who pass another implementation, as transformers' own sentence proposes."""
    result = run(
        f"""
        from transformers import AutoConfig, AutoModel
        assert AutoConfig.from_pretrained({str(checkpoint)!r}).model_type == "bert"
        for options in ({{}}, {{"attn_implementation": "sdpa"}}, {{"experts_implementation": "eager"}}):
            try:
                AutoModel.from_pretrained({str(checkpoint)!r}, **options)
            except ValueError as error:
                print(error)
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    named, again, third = result.stdout.splitlines()
    cure = '="hf_graphfilter (pip install -U hf-graphfilter, then import hf_graphfilter before loading; any other value'
    assert f"attn_implementation{cure}" in named
    assert f"experts_implementation{cure}" in again
    assert third == named


def test_checkpoints_with_the_name_of_earlier_releases_load(checkpoint):
    edit(checkpoint, attn_implementation="hf_graphfilter", experts_implementation=None)
    model = AutoModel.from_pretrained(checkpoint)
    assert model.config._attn_implementation == "sdpa"
    assert filter_status(model)
    assert "pip install" in model.config.to_dict()["attn_implementation"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"version": 9, "filters": []}, "version 9 of config.graph_filter is unknown"),
        ("gfsa", "version 'gfsa' of config.graph_filter is unknown"),
        ({"version": 1}, "config.graph_filter is malformed"),
        ({"version": 1, "filters": [{"config": {"filter": "gfsa", "version": 7}, "modules": []}]}, "version 7"),
        ({"version": 1, "filters": [{"config": {"filter": "nope", "version": 1}, "modules": []}]}, "unknown filter"),
    ],
)
def test_unknown_records_are_refused(record, message, checkpoint):
    edit(checkpoint, graph_filter=record)
    with pytest.raises(GraphFilterError, match=message):
        AutoModel.from_pretrained(checkpoint)


@pytest.mark.parametrize("load", [AutoModel, AutoModelForSequenceClassification])
def test_coefficients_that_no_filter_takes_are_refused(load, checkpoint, transformers_warnings):
    config = AutoConfig.from_pretrained(checkpoint)
    config.graph_filter = None
    with pytest.raises(GraphFilterError, match=r"holds filter coefficients that Bert.* has no filter for"):
        load.from_pretrained(checkpoint, config=config)
    transformers_warnings.clear()


@pytest.mark.parametrize("load", [AutoModel, AutoModelForSequenceClassification])
def test_a_patched_part_of_a_model_is_not_lost(load, tmp_path, transformers_warnings):
    model = BertForSequenceClassification(BERT.config)
    patch_model(model.bert)  # a part: the config of the whole does not know
    with pytest.raises(GraphFilterError, match=r"record of the filter at bert\..*patch this whole model with layers="):
        model.save_pretrained(tmp_path)
    inspect.unwrap(type(model).save_pretrained)(model, tmp_path)  # as earlier code did
    with pytest.raises(GraphFilterError, match="patch the whole model with layers="):
        load.from_pretrained(tmp_path)
    transformers_warnings.clear()


def test_a_part_that_was_unpatched_by_itself_is_not_recorded_as_patched(tmp_path):
    model = patch_model(BertForSequenceClassification(BERT.config))
    unpatch_model(model.bert)
    with pytest.raises(GraphFilterError, match=r"a filter at bert\..*a part unpatched separately.* patch it again"):
        model.save_pretrained(tmp_path)
    again = patch_model(copy.deepcopy(model), "gfsa", K=5)  # all of its modules once more
    again.save_pretrained(tmp_path / "again")
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "again")
    assert [f.config.K for _, f in filters_of(loaded)] == [5] * len(filter_status(again))
    unpatch_model(copy.deepcopy(model)).save_pretrained(tmp_path / "plain")
    assert not [*filters_of(BertForSequenceClassification.from_pretrained(tmp_path / "plain"))]
    model = patch_model(unpatch_model(patch_model(model, layers=lambda index, name: index == 1)), "gfsa")
    model.save_pretrained(tmp_path)
    assert len(filter_status(BertForSequenceClassification.from_pretrained(tmp_path))) == len(filter_status(model))


def renumber(model, layers):
    """Give a llama other layers of its own."""
    model.model.layers, model.config.num_hidden_layers = torch.nn.ModuleList(layers), len(layers)
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i


@pytest.mark.parametrize("change", [lambda layers: layers[:2], lambda layers: [layers[2], layers[0], layers[2]]])
def test_layers_that_were_taken_out_or_moved_are_saved_with_their_filters(change, tmp_path):
    family = FAMILIES["llama"]
    model = patch_model(turn_on(patch_model(LlamaForCausalLM(family.config), "gfsa", layers=[2])), "agf", layers=[0, 1])
    renumber(model, [copy.deepcopy(layer) for layer in change(model.model.layers)])
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert [row.filter for row in filter_status(loaded)] == [row.filter for row in filter_status(model)]
    assert torch.equal(loaded(**family.inputs()).logits, model.eval()(**family.inputs()).logits)


@pytest.mark.filterwarnings("ignore:.*(weights outside the filter changed|base with other weights)")
def test_filter_files_and_cards_hold_the_filters_that_are_there_now(tmp_path):
    family = FAMILIES["llama"]
    model = patch_model(LlamaForCausalLM(family.config), "gfsa", layers=[0], K=2)
    turn_on(patch_model(model, "gfsa", layers=[1], K=9))
    renumber(model, model.model.layers[1:2])
    save_filter(model, tmp_path)
    base = unpatch_model(copy.deepcopy(model))
    assert [row.filter.K for row in filter_status(load_filter(base, tmp_path))] == [9]
    assert torch.equal(base.eval()(**family.inputs()).logits, model.eval()(**family.inputs()).logits)
    card = str(create_model_card(model))
    assert '"K": 9' in card
    assert '"K": 2' not in card
    part = BertForSequenceClassification(BERT.config)
    patch_model(part.bert, "gfsa", layers=[0])
    save_filter(turn_on(patch_model(part, "gfsa", layers=[1])), tmp_path / "both")
    assert len(filter_status(load_filter(BertForSequenceClassification(BERT.config), tmp_path / "both"))) == 2


@pytest.mark.filterwarnings("ignore:.*(weights outside the filter changed|base with other weights)")
@pytest.mark.parametrize("places", [[1, 2], [0, 1], [2, 1, 0], [2, 0, 2]])
def test_kept_heads_move_with_their_layers(places, tmp_path):
    family = FAMILIES["llama"]
    model = turn_on(patch_model(LlamaForCausalLM(family.config), "far_field", window=4, keep={2: [1]})).eval()
    renumber(model, [copy.deepcopy(model.model.layers[place]) for place in places])
    expected = model(**family.inputs()).logits
    model.save_pretrained(tmp_path / "model")
    save_filter(model, tmp_path / "filter")
    base = unpatch_model(copy.deepcopy(model))
    for loaded in (LlamaForCausalLM.from_pretrained(tmp_path / "model"), load_filter(base, tmp_path / "filter")):
        torch.testing.assert_close(loaded.eval()(**family.inputs()).logits, expected)
        keep = {now: (1,) for now, place in enumerate(places) if place == 2}
        assert filter_status(loaded)[0].filter.keep == (keep or None)


@pytest.mark.parametrize("patches", [{"bert.": 2}, {"other.": 9}, {"bert.": 2, "other.": 9}])
@pytest.mark.parametrize("copied", [False, True])
def test_two_towers_of_one_class_keep_their_own_filters(copied, patches, tmp_path):
    class Towers(BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert, self.other = BertModel(config), BertModel(copy.deepcopy(config) if copied else config)
            self.post_init()

    model = Towers(BERT.config)
    for prefix, order in patches.items():
        patch_model(model, "gfsa", K=order, layers=lambda index, name, prefix=prefix: name.startswith(prefix))
    turn_on(model)
    for step in range(2):
        model.save_pretrained(tmp_path / str(step))
        loaded = Towers.from_pretrained(tmp_path / str(step))
        assert {row.module.partition(".")[0] + ".": row.filter.K for row in filter_status(loaded)} == patches
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
        model = loaded


@pytest.mark.parametrize("change", ["unpatched", "exchanged"])
@pytest.mark.parametrize("decoder", [False, True])
def test_a_part_of_a_composite_without_its_filter_is_saved_without_it(change, decoder, tmp_path, transformers_warnings):
    """The config of the whole still holds the record with which the part was loaded."""
    patch_model(BertModel(BERT.config), "agf").save_pretrained(tmp_path / "encoder")
    config = BertConfig(**{**BERT.config.to_dict(), "is_decoder": True, "add_cross_attention": True})
    text = patch_model(BertLMHeadModel(config)) if decoder else BertLMHeadModel(config)
    model = EncoderDecoderModel(encoder=BertModel.from_pretrained(tmp_path / "encoder"), decoder=text)
    if change == "unpatched":
        unpatch_model(model.encoder)
    else:
        model.encoder = BertModel(BERT.config)
    model.save_pretrained(tmp_path / "model")
    loaded = EncoderDecoderModel.from_pretrained(tmp_path / "model")
    assert [row.module for row in filter_status(loaded)] == [row.module for row in filter_status(model)]
    assert len(filter_status(loaded)) == decoder * BERT.config.num_hidden_layers
    if decoder:
        done = CliRunner().invoke(app, ["status", str(tmp_path / "model")])
        assert (done.exit_code, "gfsa" in done.output) == (0, True), done.output
    assert all("is overwritten by shared" in message for message in transformers_warnings)  # of EncoderDecoderModel
    transformers_warnings.clear()


class OwnAttention(BertPreTrainedModel):
    """A model of transformers with attention of its own, which holds a filter."""

    def __init__(self, config):
        super().__init__(config)
        self.bert, self.attend = BertModel(config), GraphFilterAttention("gfsa", 4, config.hidden_size // 4)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        heads = self.bert(input_ids, **kwargs)[0].unflatten(-1, (4, -1)).transpose(1, 2)
        return self.attend(heads, heads, heads)


@pytest.mark.parametrize("also_bert", [False, True])
def test_a_model_with_attention_of_its_own(also_bert, tmp_path):
    model = OwnAttention(BERT.config).eval()
    turn_on(patch_model(model, "gfsa", K=5) if also_bert else model)
    status = filter_status(model)
    assert [row.filter.K for row in status] == [5] * (len(status) - 1) + [3]
    assert status[-1].backend == "sdpa"
    model.save_pretrained(tmp_path / "model")
    loaded = OwnAttention.from_pretrained(tmp_path / "model").eval()
    expected = model(**BERT.inputs())
    assert torch.equal(loaded(**BERT.inputs()), expected)
    assert not filter_status(unpatch_model(model))


def test_a_filter_is_read_from_a_subfolder(tmp_path):
    base = BERT.build()
    for name, value in ((".", 0.1), ("b", 0.2)):
        model = patch_model(copy.deepcopy(base), "gfsa")
        for parameter in filter_parameters(model):
            parameter.data.fill_(value)
        save_filter(model, tmp_path / name)
    for folder, value in (("", 0.1), ("b", 0.2)):
        loaded = load_filter(copy.deepcopy(base), tmp_path, subfolder=folder)
        assert all(p.max().item() == pytest.approx(value) for p in filter_parameters(loaded))
    with pytest.raises(GraphFilterError, match=r"holds no .*; a saved filter is"):
        load_filter(BERT.build(), tmp_path, subfolder="c")


def test_a_part_can_be_patched_from_a_config_that_records_another(tmp_path):
    family = FAMILIES["t5"]
    patch_model(family.build(), "gfsa", stack="decoder").save_pretrained(tmp_path)
    encoder = patch_model(T5EncoderModel.from_pretrained(tmp_path), "gfsa")
    assert all("encoder" in name for group in encoder.config.graph_filter["filters"] for name in group["modules"])
    assert len(filter_status(T5EncoderModel(encoder.config))) == len(filter_status(encoder))


def test_what_a_part_was_patched_with_is_said(tmp_path):
    model = BertForSequenceClassification(BERT.config)
    turn_on(patch_model(model.bert, "agf"))
    before = copy.deepcopy(model.state_dict())
    save_filter(patch_model(BertForSequenceClassification(BERT.config), "gfsa"), tmp_path)
    for call in (lambda: load_filter(model, tmp_path), lambda: save_filter(model, tmp_path), lambda: drop_blend(model)):
        with pytest.raises(GraphFilterError, match=r"a part of it was patched separately|has no blended layer"):
            call()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    blended = BertForSequenceClassification(BERT.config)
    patch_model(blended.bert, "agf", init="blend")
    with pytest.raises(GraphFilterError, match="pass that part"):
        drop_blend(blended, force=True)


def test_missing_coefficients_are_refused(checkpoint, transformers_warnings):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.attention.self.graph_filter.w_K"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(GraphFilterError, match="lacks 1 of its 9 filter coefficients"):
        AutoModel.from_pretrained(checkpoint)
    transformers_warnings.clear()


def test_a_damaged_plain_checkpoint_fails_as_it_does_without_us(tmp_path):
    BERT.build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(SafetensorError) as caught:
        AutoModel.from_pretrained(tmp_path)
    assert not isinstance(caught.value, GraphFilterError)


@pytest.mark.parametrize("keep", [0, 4, 1000, -100])
def test_truncated_weights_are_refused(keep, checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(GraphFilterError, match="corrupted or truncated"):
        AutoModel.from_pretrained(checkpoint)


# ------------------------------------------------------------------------------------------ the filter-only file


def test_filter_file_over_plain_and_patched(tmp_path):
    model = patched()
    assert save_filter(model, tmp_path) == tmp_path
    assert sorted(f.name for f in tmp_path.iterdir()) == ["graph_filter.json", "graph_filter.safetensors"]
    assert (tmp_path / "graph_filter.safetensors").stat().st_size < 4096
    expected = output(model, BERT.inputs())
    for other in (BERT.build(), patch_model(BERT.build(), K=4, w_0=-0.01, learn=("w_0", "w_K"))):
        weights = {name: x for name, x in model.state_dict().items() if "graph_filter" not in name}
        other.load_state_dict(weights, strict=False)
        assert load_filter(other, tmp_path) is other
        assert torch.equal(output(other, BERT.inputs()), expected)


def test_filter_file_carries_between_heads(tmp_path):
    save_filter(patched(), tmp_path)
    model = BertForSequenceClassification(BERT.config)
    model.bert.load_state_dict(unpatch_model(patched()).state_dict(), strict=False)  # its own has no pooler
    load_filter(model, tmp_path)
    assert torch.equal(coefficients(model), coefficients(patched()))


def refused(model, path, message):
    inputs = BERT.inputs()
    expected, state, config = model(**inputs)[0], list(model.state_dict()), model.config.to_dict()
    with pytest.raises(GraphFilterError, match=message):
        load_filter(model, path)
    assert torch.equal(model(**inputs)[0], expected)
    assert (list(model.state_dict()), model.config.to_dict()) == (state, config)


def test_filter_file_mismatches(tmp_path):
    save_filter(patched(), tmp_path)
    refused(BERT.build(num_hidden_layers=2), tmp_path, "made for 3 attention layers, this model has 2")
    refused(BERT.build(num_attention_heads=2), tmp_path, r"layer\.0\.attention\.self had 4 heads, here it has 2")
    refused(FAMILIES["roberta"].build(), tmp_path, "made for a bert model, this is roberta")
    refused(patch_model(BERT.build(), K=2), tmp_path, "is patched with .*'K': 2.*unpatch_model first")


def test_damaged_filter_files(tmp_path):
    good = save_filter(patched(), tmp_path / "good")

    def damaged(name, change):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        change(bad / name)
        return bad

    config, weights = "graph_filter.json", "graph_filter.safetensors"
    refused(BERT.build(), damaged(weights, lambda f: f.write_bytes(f.read_bytes()[:50])), "corrupted or truncated")
    refused(BERT.build(), damaged(weights, lambda f: f.unlink()), "holds no graph_filter.safetensors")
    refused(BERT.build(), damaged(config, lambda f: f.write_text("{")), "not readable JSON")
    refused(BERT.build(), damaged(config, lambda f: f.write_text("[]")), "version None is unknown")
    without = '{"version": 1, "base": {}}'
    refused(BERT.build(), damaged(config, lambda f: f.write_text(without)), "is malformed")
    refused(patch_model(BERT.build()), damaged(config, lambda f: f.write_text(without)), "is malformed")

    def set_version(file):
        file.write_text(json.dumps({**json.loads(file.read_text()), "version": 5}))

    refused(BERT.build(), damaged(config, set_version), "version 5 is unknown")

    def other_shape(file):
        save_file({k: v[:2] for k, v in load_file(file).items()}, file)

    refused(BERT.build(), damaged(weights, other_shape), r"should hold \(4,\), it holds \(2,\)")
    refused(BERT.build(), tmp_path / "nowhere", "no directory and no reachable Hub repository")


VALUES = [
    (torch.full((4,), math.nan), r"NaN or infinity \(float32\)"),
    (torch.full((4,), -math.inf, dtype=torch.bfloat16), r"NaN or infinity \(bfloat16\)"),
    (torch.full((4,), 1e39, dtype=torch.float64), r"NaN or infinity \(float64\)"),
    (torch.ones(4, dtype=torch.int64), "int64"),
    (torch.ones(4, dtype=torch.bool), "bool"),
    (torch.ones(4, dtype=torch.complex64), "complex64"),
]


@pytest.mark.parametrize(("values", "found"), VALUES, ids=[str(v.dtype) for v, _ in VALUES])
@pytest.mark.parametrize("sharded", [False, True])
def test_coefficients_are_finite_floating_point_numbers(values, found, sharded, tmp_path):
    message = rf"layer\.1\.attention\.self\.(graph_filter\.)?w_K holds {found}, and coefficients are finite"
    model = patched()
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    save_filter(model, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("layer.1.attention.self.graph_filter.w_K") or name.endswith("layer.1.attention.self.w_K"):
                tensors[name] = values
        save_file(tensors, file, metadata={"format": "pt"})
    for options in ({}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}):
        with pytest.raises(GraphFilterError, match=message):
            AutoModel.from_pretrained(tmp_path, **options)
    state = load_file(tmp_path / "model.safetensors") if not sharded else None
    if state is not None:
        with pytest.raises(GraphFilterError, match="state_dict: .*" + message):
            type(model).from_pretrained(None, config=model.config, state_dict=state)
    refused(BERT.build(), tmp_path, message)
    refused(patched(), tmp_path, message)


def test_coefficients_of_another_shape_are_refused(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.1.attention.self.graph_filter.w_K"] = torch.zeros(2)
    save_file(tensors, file, metadata={"format": "pt"})
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(GraphFilterError, match=r"w_K should hold \(4,\), it holds \(2,\)"):
            AutoModel.from_pretrained(checkpoint, **options)


def test_counters_and_masks_of_a_filter_are_loaded(tmp_path):
    class Counting(GraphFilter):
        def __init__(self, config, site):
            super().__init__(config, site)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("open", torch.ones(site.heads, dtype=torch.bool))

        def reset_parameters(self):
            torch.nn.init.zeros_(self.seen)
            torch.nn.init.ones_(self.open)

        def forward(self, shift, value):
            return shift(value)

    @register_filter("test-counting")
    @dataclass(frozen=True)
    class CountingConfig(FilterConfig):
        module = Counting

    base = BERT.build()
    model = patch_model(copy.deepcopy(base), "test-counting")
    model.encoder.layer[0].attention.self.graph_filter.seen += 7
    model.save_pretrained(tmp_path)
    save_filter(model, tmp_path)
    for again in (AutoModel.from_pretrained(tmp_path), load_filter(base, tmp_path)):
        assert again.encoder.layer[0].attention.self.graph_filter.seen == 7


@pytest.mark.parametrize("path", [None, 3, b"x", "a\0b", "\ud800"], ids=repr)
def test_what_is_no_path_is_refused(path):
    refused(BERT.build(), path, "a filter is saved at a path or on the Hub, got")
    with pytest.raises(GraphFilterError, match="a filter is saved at a path"):
        save_filter(patched(), path)


def test_a_path_beyond_all_limits():
    refused(BERT.build(), "a" * 5000, "no directory and no reachable Hub repository 'aaa.{90,120}aaa' with")
    with pytest.raises(OSError, match="too long"):
        save_filter(patched(), "a" * 5000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not readable JSON"),
        ('{"a":' * 100_000, "is not readable JSON"),
        ("9" * 5000, "is not readable JSON"),
        ({"base": {"seed": 1}}, r"names facts of its base model that this installation does not know \(\['seed'\]\)"),
        ({"base": {"heads": {"x": None, "y": 4, "z": [4]}}}, "x had None heads, here it has no such layer"),
        ({"base": {"heads": 4}}, "it does not describe its base model"),
    ],
    ids=str,
)
def test_odd_descriptions_are_refused(text, message, tmp_path):
    save_filter(patched(), tmp_path)
    file = tmp_path / "graph_filter.json"
    if isinstance(text, dict):
        saved = json.loads(file.read_text())
        text = json.dumps({**saved, "base": {**saved["base"], **text["base"]}})
    file.write_text(text)
    refused(BERT.build(), tmp_path, message)


def test_saving_the_filter_of_an_unpatched_model(tmp_path):
    with pytest.raises(GraphFilterError, match="call patch_model first"):
        save_filter(BERT.build(), tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------------ the card


def test_card(tmp_path):
    model = turn_on(patch_model(BertForSequenceClassification(BERT.config)))
    result = EvalResult("text-classification", "glue", "CoLA", "matthews_correlation", 0.6, dataset_split="validation")
    card = create_model_card(
        model, repo_id="me/bert-gfsa", base_model="bert-base-uncased", results=[result], language="en"
    )
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    data = again.data.to_dict()
    assert data["base_model"] == "bert-base-uncased"
    assert data["library_name"] == "transformers"
    assert {"graph-filter", "gfsa"} <= set(data["tags"])
    assert data["datasets"] == ["glue"]
    assert data["metrics"] == ["matthews_correlation"]
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.6
    for part in (
        'AutoModelForSequenceClassification.from_pretrained("me/bert-gfsa")',
        "import hf_graphfilter",
        "| bert.encoder.layer.2.attention.self | gfsa |",
        "12 parameters were added",
        "| CoLA | validation | matthews_correlation | 0.6000 |",
        "@inproceedings{choi2024gfsa",
    ):
        assert part in again.text
    with pytest.raises(GraphFilterError, match="no graph filter to describe"):
        create_model_card(BERT.build())


AUTO_CLASSES = {
    "BertModel": "AutoModel",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForPreTraining": "AutoModelForPreTraining",
    "RobertaForMaskedLM": "AutoModelForMaskedLM",
    "RobertaForCausalLM": "AutoModelForCausalLM",
    "GPT2LMHeadModel": "AutoModelForCausalLM",
    "GPT2DoubleHeadsModel": None,
    "BartForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "T5EncoderModel": "AutoModelForTextEncoding",
    "Speech2TextForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "WhisperForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "Wav2Vec2ForCTC": "AutoModelForCTC",
    "LlavaForConditionalGeneration": "AutoModelForImageTextToText",
    "DeiTForImageClassificationWithTeacher": "AutoModelForImageClassification",
}


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_the_auto_class_of_a_card_makes_the_class_of_the_model(name):
    model_class = getattr(transformers, name)
    assert auto_class_of(model_class, model_class.config_class()) == AUTO_CLASSES[name]


class OneOfMyOwn(BertForSequenceClassification):
    pass


@pytest.mark.parametrize("build", ["speech_to_text", "double heads", "one's own", "wrapped"])
def test_the_code_of_a_card_loads_the_whole_model(build, tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20, "conv_channels": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    if build == "speech_to_text":
        model = Speech2TextForConditionalGeneration(Speech2TextConfig(**sizes, **heads))
    elif build == "double heads":
        model = GPT2DoubleHeadsModel(
            GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0, num_labels=1)
        )
    else:
        model = (OneOfMyOwn if build == "one's own" else BertForSequenceClassification)(BERT.config)
    if build == "wrapped":  # as FSDP2 does, by a class of a module of torch
        kind = type(model)
        model.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch.distributed.fsdp"})
    code = usage(patch_model(model.eval(), "gfsa"), str(tmp_path))
    if build == "wrapped":
        model.__class__ = kind
    model.save_pretrained(tmp_path)
    names = {}
    exec(code, names)
    assert type(names["model"]) is type(model)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in names["model"].state_dict().items())


LM_EVAL = {
    "results": {
        "lambada_openai": {"alias": "lambada_openai", "sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.1},
        "gsm8k": {"alias": " - gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"},
        "niah_single_1": {"512,none": 1.0, "512_stderr,none": 0.0, "4096,none": -1, "4096_stderr,none": "N/A"},
    },
    "n-shot": {"lambada_openai": 0, "gsm8k": 5},
    "lm_eval_version": "0.4.13",
}
MTEB = {
    "dataset_revision": "1",
    "task_name": "STSBenchmark",
    "mteb_version": "2.26.24",
    "scores": {"test": [{"main_score": -0.75, "pearson": 0.7, "hf_subset": "default", "languages": ["eng-Latn"]}]},
}


def test_a_card_has_the_results_of_other_programs(tmp_path):
    model, folder = patch_model(BERT.build()), tmp_path / "results"
    folder.mkdir()
    (folder / "model_meta.json").write_text('{"name": "me/bert"}')
    with pytest.raises(GraphFilterError, match="holds no results of lm_eval"):
        create_model_card(model, results=folder)
    (folder / "results_2026-11-26.json").write_text(json.dumps(LM_EVAL))
    (folder / "STSBenchmark.json").write_text(json.dumps(MTEB))
    (folder / "results_2026-11-27.json").write_text(
        json.dumps({**LM_EVAL, "results": {"lambada_openai": {"acc,none": 0.6}}})
    )
    os.utime(folder / "results_2026-11-26.json", (0, 0))
    card = create_model_card(model, repo_id="me/bert-gfsa", results=str(folder))
    for part in (
        "| lambada_openai |  | acc | 0.6000 |",
        "| gsm8k |  | exact_match (strict-match) | 0.2500 |",
        "| niah_single_1 |  | 512 | 1.0000 |",
        "| STSBenchmark | test | main score | -0.7500 |",
    ):
        assert part in card.text
    assert "4096" not in card.text
    assert "stderr" not in card.text
    card.save(tmp_path / "README.md")
    [entry] = ModelCard.load(tmp_path / "README.md").data.to_dict()["model-index"]
    assert len(entry["results"]) == 4
    for name, content in (("shots", {**LM_EVAL, "n-shot": None}), ("split", {**MTEB, "scores": {"test": ["x"]}})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "task.json").write_text(json.dumps({**LM_EVAL, "results": {"x": 3}}))
    (folder / "link.json").symlink_to("nowhere")
    assert len(create_model_card(model, repo_id="me/bert-gfsa", results=folder).data.eval_results) == 4
    with pytest.raises(GraphFilterError, match=r"nowhere.json holds no results"):
        create_model_card(model, results="nowhere.json")


def test_a_card_of_a_model_whose_part_was_patched_by_itself_shows_its_filter():
    model = BertForSequenceClassification(BERT.config)
    patch_model(model.bert, "agf", window=4, layers=[1])
    written = create_model_card(model).text.partition("```json\n")[2].partition("\n```")[0]
    [there] = json.loads(written)["filters"]
    assert there["modules"] == ["bert.encoder.layer.1.attention.self"]
    assert FilterConfig.from_dict(there["config"]) == filter_status(model)[0].filter


def test_a_card_that_is_saved_twice_takes_nothing_along(tmp_path):
    model = patch_model(BERT.build())
    result = EvalResult("text-classification", "glue", "CoLA", "accuracy", 0.5)
    create_model_card(model, results=[result], description="## Mine\n\nText.").save(tmp_path / "a.md")
    card = create_model_card(model)
    for name in ("a.md", "b.md"):
        card.save(tmp_path / name)
    first, second = ((tmp_path / name).read_text() for name in ("a.md", "b.md"))
    assert "## Mine" in first
    assert "CoLA" in first
    assert "## Mine" not in second
    assert "CoLA" not in second


def test_a_card_keeps_what_is_recorded(tmp_path):
    file, model = tmp_path / "README.md", turn_on(patch_model(BertForSequenceClassification(BERT.config)))
    made = [
        EvalResult("text-classification", "glue", "CoLA", "matthews_correlation", value, dataset_split=split)
        for split, value in (("validation", 0.6), ("test", 0.5), ("test", 0.7))
    ]
    training = TrainingArguments(str(tmp_path), learning_rate=3e-5, report_to="none", hub_token="hf_secret")
    create_model_card(model, results=made[:2], training=training, description="## Data\n\nMine.").save(file)
    assert "| learning_rate | 3e-05 |" in file.read_text()
    assert "hf_secret" not in file.read_text()
    create_model_card(model, results=made[2:], license="mit").save(file)
    for _ in range(2):  # its own card, written again
        create_model_card(model).save(file)
        card = ModelCard.load(file)
        assert [(r.dataset_split, r.metric_value) for r in card.data.eval_results] == [
            ("test", 0.7),
            ("validation", 0.6),
        ]
        assert card.data.license == "mit"
        for part in ("| CoLA | validation |", "| CoLA | test |", "## Data\n\nMine.", "| learning_rate | 3e-05 |"):
            assert card.text.count(part) == 1


def test_a_card_of_another_is_not_replaced(tmp_path):
    file, card = tmp_path / "README.md", create_model_card(patched())
    for text in ("# Mine\n", "---\ntags:\n- hf_graphfilter\n---\n\n# By push_to_hub\n"):
        file.write_text(text)
        with pytest.raises(GraphFilterError, match=r"not written by hf_graphfilter.*force=True"):
            card.save(file)
        assert file.read_text() == text
    result = EvalResult("feature-extraction", "sts", "STS", "spearman", 0.8)
    data = ModelCardData(eval_results=[result], model_name="mine", language="de")
    file.write_text(f"---\n{data.to_yaml()}\n---\n\n# Long\n")
    card.save(file, force=True)
    found = ModelCard.load(file)
    assert (found.data.language, found.data.eval_results) == ("de", [result])
    assert "| STS |" in found.text
    file.write_text(file.read_text().replace("## Evaluation", "## Evaluation\n\nA remark of mine."))
    with pytest.raises(GraphFilterError, match="edited since"):
        card.save(file)
    file.write_text("---\na: [\n---\n")
    with pytest.raises(GraphFilterError, match=r"metadata of .* cannot be read"):
        card.save(file, force=True)


def test_a_card_speaks_of_its_own_filter(monkeypatch):
    model = patch_model(BERT.build(), "agf", layers=[1])
    monkeypatch.setattr("hf_graphfilter.checkpoints.card.package_address", lambda: "https://example.org/home")
    card = create_model_card(model)
    assert "gfsa" not in card.text.lower()
    assert "w_K" not in card.text
    assert "Mean over the heads" not in card.text, "one set of coefficients a layer"
    assert "[hf_graphfilter](https://example.org/home)" in card.text
    assert "pypi.org" not in card.text
    assert f"transformers {transformers.__version__}" in card.text
    assert (card.data.pipeline_tag, card.data.base_model) == ("feature-extraction", None)


@pytest.mark.parametrize("model_class", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_the_task_of_a_class_that_has_several(model_class):
    config = FAMILIES["bart" if model_class.startswith("Bart") else "t5"].config
    model = patch_model(getattr(transformers, model_class)(config), "gfsa")
    assert create_model_card(model).data.pipeline_tag == "text2text-generation"


def test_the_address_is_that_of_the_package_s_metadata(monkeypatch):
    from email.message import Message

    from hf_graphfilter.checkpoints import card

    found = Message()
    monkeypatch.setattr(card.metadata, "metadata", lambda name: found)
    assert card.package_address() is None
    for entry in ("Changelog, https://example.org/log", "Homepage, https://example.org/home"):
        found["Project-URL"] = entry
    assert card.package_address() == "https://example.org/home"


@pytest.mark.parametrize(("name", "cached", "base"), [("me/base", True, "me/base"), ("runs/base", False, None)])
def test_the_base_model_is_what_came_from_the_hub(name, cached, base, monkeypatch):
    from hf_graphfilter.hosts.transformers import cards

    model = patched()
    model.config._name_or_path = name
    monkeypatch.setattr(cards, "try_to_load_from_cache", lambda *_: "/cache/config.json" if cached else None)
    data = create_model_card(model).data.to_dict()
    assert (data.get("base_model"), data.get("base_model_relation")) == (base, base and "finetune")
    assert create_model_card(model, repo_id=name).data.base_model is None, "not of itself"


def test_model_tags(tmp_path):
    model = BertForSequenceClassification(BERT.config)
    patch_model(model, layers=[0])
    patch_model(model, "agf", layers=[1])
    assert model.model_tags == ["graph-filter", "agf", "gfsa", "hf_graphfilter"]
    with pytest.raises(GraphFilterError):
        patch_model(model, layers=[0])
    model.add_model_tags("mine")
    model.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.model_tags == ["graph-filter", "agf", "gfsa", "hf_graphfilter"]
    assert unpatch_model(model).model_tags == ["mine"]
    unpatch_model(loaded)
    assert all("model_tags" not in vars(m) for m in loaded.modules())
    assert BertForSequenceClassification.model_tags is None


def test_transformers_is_in_the_tested_range():
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert (major, minor) >= (5, 17)


PUSH = """
import torch
from transformers import BertConfig, BertForSequenceClassification
from hf_graphfilter import GraphFilterError, filter_parameters, load_filter, load_filtered_model, patch_model
from hf_graphfilter import push_filter
config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
BertForSequenceClassification(config).push_to_hub("me/base")
model = patch_model(BertForSequenceClassification.from_pretrained("me/base"), "gfsa", K=3)
for parameter in filter_parameters(model):
    parameter.data.add_(0.3)
print(push_filter(model, "me/filter", private=True))
loaded, ids = load_filtered_model("me/filter"), torch.arange(8)[None]
assert type(loaded) is BertForSequenceClassification
assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
assert load_filtered_model("me/filter", dtype=torch.bfloat16).dtype == torch.bfloat16
push_filter(model, "me/filter", revision="trial", commit_message="Try it")
again = load_filter(BertForSequenceClassification.from_pretrained("me/base"), "me/filter", revision="trial")
assert torch.equal(again(ids).logits, model(ids).logits)
model.save_pretrained("local")
from typer.testing import CliRunner
from hf_graphfilter.cli import app
done = CliRunner().invoke(app, ["push-filter", "local", "me/another", "--base-model", "me/base", "--private"])
assert done.exit_code == 0 and "pushed to" in done.output, done.output
assert torch.equal(load_filtered_model("me/another")(ids).logits, model(ids).logits)
import tempfile
from huggingface_hub import EvalResult, HfApi, hf_hub_download
from hf_graphfilter import create_model_card
def read_card(repo_id):
    return open(hf_hub_download(repo_id, "README.md", local_dir=tempfile.mkdtemp())).read()
def write_card(repo_id):
    content = b"---\\nlicense: mit\\n---\\nMine."
    HfApi().upload_file(path_or_fileobj=content, path_in_repo="README.md", repo_id=repo_id)
write_card("me/another")
command = ["push-filter", "local", "me/another", "--base-model", "me/base"]
done = CliRunner().invoke(app, command)
assert "was not written by hf_graphfilter" in str(done.exception), done.output
assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0
text = read_card("me/another")
assert "license: mit" in text and "Mine." not in text and "load_filtered_model" in text, text
from hf_graphfilter.cli.common import move_to_front
command = ["patch", "me/base", "out", "--revision", "main", "--push-to-hub", "me/patched", "--device=cpu"]
done = CliRunner().invoke(app, move_to_front(command))
assert done.exit_code == 0 and "pushed to me/patched" in done.output, done.output
assert 'from_pretrained("me/patched")' in read_card("me/patched")
result = EvalResult("text-classification", "glue", "CoLA", "accuracy", 0.5)
for results, description in [([result], "## Data\\n\\nReviews."), ([], "")]:
    create_model_card(model, results=results, description=description).push_to_hub("me/patched")
assert "| CoLA |" in read_card("me/patched") and "## Data" in read_card("me/patched")
write_card("me/patched")
try:
    create_model_card(model).push_to_hub("me/patched")
except GraphFilterError as error:
    print(error)
done = CliRunner().invoke(app, move_to_front(command))
assert done.exit_code == 0 and "me/patched keeps its README.md" in done.output, done.output
assert read_card("me/patched").endswith("Mine.")
create_model_card(model).push_to_hub("me/patched", force=True)
assert "license: mit" in read_card("me/patched") and "Mine." not in read_card("me/patched")
done = CliRunner().invoke(app, move_to_front(["unpatch", "local", "plain", "--push-to-hub", "them/plain"]))
assert isinstance(done.exception, GraphFilterError), done.output
assert "plain is saved, but cannot be pushed to them/plain: " in str(done.exception)
assert "me has no rights in them" in str(done.exception)
BertForSequenceClassification.from_pretrained("plain")
try:
    push_filter(model, "me/filter", token="wrong")
except GraphFilterError as error:
    print(error)
"""


def test_a_card_and_its_figures_are_one_pull_request(monkeypatch):
    class Figures:
        def summary(self):
            return ["Tokens do not grow alike."]

        def save_figures(self, folder, names=None):
            folder.mkdir()
            (folder / "smoothing.png").write_bytes(b"")

    sent = {}

    def upload(api, repo_id, folder_path, **options):
        files = {str(f.relative_to(folder_path)) for f in Path(folder_path).rglob("*") if f.is_file()}
        return sent.update(options, repo_id=repo_id, files=files) or "https://hub/pr/1"

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", lambda *_, **__: None)  # the repository has no card
    assert create_model_card(patched(), report=Figures()).push_to_hub("me/x", None, "model", create_pr=True)
    assert sent["files"] == {"README.md", "figures/smoothing.png"}
    assert (sent["create_pr"], sent["repo_type"]) == (True, "model")


def test_a_filter_is_pushed_and_fetches_its_base_model(tmp_path):
    with Hub() as hub:
        environment = hub.environment(tmp_path, HF_TOKEN=TOKEN)
        run = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path}
        done = subprocess.run([sys.executable, "-c", PUSH], **run)
    assert done.returncode == 0, done.stderr
    assert set(hub.repos["me/filter"]) - {".gitattributes"} == {
        "README.md",
        "graph_filter.json",
        "graph_filter.safetensors",
    }
    assert {"config.json", "model.safetensors"} <= {*hub.repos["me/patched"]}
    private = {r for r, sent in hub.created.items() if sent.get("private") or sent.get("visibility") == "private"}
    assert private == {"me/filter", "me/another"}
    assert ("me/filter", "trial", "Try it") in hub.commits
    for name in ("graph_filter.json", "graph_filter.safetensors"):
        assert ("HEAD", f"me/filter/resolve/trial/{name}") in hub.requests
    card = hub.repos["me/filter"]["README.md"].decode()
    assert 'model = load_filtered_model("me/filter")' in card
    assert "base_model_relation: adapter" in card
    assert json.loads(hub.repos["me/filter"]["graph_filter.json"])["base_model"]["class"] == (
        "BertForSequenceClassification"
    )
    assert "did not take 'me/filter'" in done.stdout
    assert "the card of me/patched was not written by hf_graphfilter" in done.stdout
    assert "wrong" not in done.stdout + done.stderr


def push_folder(model, folder):
    common.begin(None)
    common.note_saved(folder, model)
    common.push("me/x")


@pytest.mark.parametrize("push", [push_folder, lambda model, folder: push_filter(model, "me/x")])
@pytest.mark.parametrize("step", ["create_repo", "hf_hub_download"])
def test_a_hub_that_does_not_answer_gets_nothing(step, push, monkeypatch, tmp_path):
    """Its card may be one that must not be replaced."""
    library = sys.modules[HTTPError.__module__.partition(".")[0]]  # httpx, or httpx2 in later releases
    error = {"create_repo": library.ConnectError("no way"), "hf_hub_download": LocalEntryNotFoundError("no way")}[step]

    def fail(*_, **__):
        raise error

    sent = []
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: RepoUrl("https://huggingface.co/me/x"))
    monkeypatch.setattr(HfApi, "upload_folder", lambda *_, **options: sent.append(options))
    monkeypatch.setattr(HfApi, step, fail)
    with pytest.raises(GraphFilterError, match="no way"):
        push(patched(), tmp_path)
    assert not sent


def test_a_filter_without_a_named_base_asks_for_it(tmp_path):
    save_filter(patched(), tmp_path)  # a model that came from nowhere
    with pytest.raises(GraphFilterError, match="does not name its base model: load that yourself"):
        load_filtered_model(tmp_path)
    description = json.loads((tmp_path / "graph_filter.json").read_text())
    description["base_model"] = {"name": "me/base", "revision": None, "class": "NoSuchModel"}
    (tmp_path / "graph_filter.json").write_text(json.dumps(description))
    with pytest.raises(GraphFilterError, match="'NoSuchModel', which is no class of transformers"):
        load_filtered_model(tmp_path)
