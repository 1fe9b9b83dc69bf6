"""The record of a patch: names of modules over releases of transformers, and records that do not fit their model."""

import copy
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import accelerate
import pytest
import torch
import transformers
from models import FAMILIES, output, realigned, turn_on
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CLIPTextModel,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    EncoderDecoderModel,
    SegformerConfig,
    SegformerForImageClassification,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from hf_graphfilter import (
    GraphFilterError,
    create_model_card,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    save_filter,
    transfer_attention,
    unpatch_model,
)
from hf_graphfilter.checkpoints.fingerprint import live_record
from hf_graphfilter.hosts import host_of
from hf_graphfilter.hosts.transformers.implementation import CURE

BERT = FAMILIES["bert"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}


def segformer():
    pyramid = {"hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "sr_ratios": [1, 1], "strides": [4, 2]}
    shape = {"num_encoder_blocks": 2, "depths": [1, 1], "patch_sizes": [7, 3], "mlp_ratios": [2, 2]}
    return SegformerForImageClassification(SegformerConfig(**pyramid, **shape, classifier_dropout_prob=0))


MODELS = {  # transformers gives the weights of their attention other names in checkpoints, in some or all releases
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SMALL)),
    "dinov2-with-registers": lambda: Dinov2WithRegistersForImageClassification(Dinov2WithRegistersConfig(**SMALL)),
    "vit": lambda: ViTForImageClassification(FAMILIES["vit"].config),
    "beit": FAMILIES["beit"].build,
    "swin": FAMILIES["swin"].build,
    "segformer": segformer,
}


def first(model, inputs):
    return model(**inputs)[0]


def other_name(model):
    """A module's name in the releases that do not call it as this one does."""
    host = host_of(model)
    sites, _ = host.find(model)
    saved = {site.name: name for name, site in host.saved_names(model, sites).items()}

    def renamed(name):
        here = host.relative_name(model, name)
        if saved[name] != here:
            return saved[name]
        # DINOv2: transformers 5.17 has encoder.layer.0.attention.attention, 5.23 encoder.layer.0.attention
        return here.removesuffix(".attention") if here.endswith("attention.attention") else f"{here}.attention"

    return {host.relative_name(model, site.name): renamed(site.name) for site in sites}


def respell(file, names, coefficients):
    """The file with the coefficients, name to tensor, of modules that are called otherwise there."""
    others = {key: tensor for key, tensor in load_file(file).items() if "w_" not in key}
    owner = {key: next(name for name in names if f"{name}." in key) for key in coefficients}
    renamed = {key.replace(owner[key], names[owner[key]]): tensor for key, tensor in coefficients.items()}
    save_file(others | renamed, file, {"format": "pt"})


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.feature("Checkpoints: written by a release of transformers that names modules otherwise", filter="gfsa")
def test_modules_that_another_release_names_otherwise(name, tmp_path):
    model = turn_on(patch_model(MODELS[name]().eval(), learn=("w_0", "w_K")))
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    expected, names = first(model, inputs), other_name(model)

    def old_record(config):
        record = config.get("graph_filter", config)
        record.pop("model")  # which the first release did not write
        for group in record["filters"]:
            group["modules"] = [names[module] for module in group["modules"]]
        if "base" in config:
            config["base"]["heads"] = {names[module]: heads for module, heads in config["base"]["heads"].items()}

    model.save_pretrained(tmp_path / "model")
    of_model = {key: tensor for key, tensor in model.state_dict().items() if "graph_filter" in key}
    respell(tmp_path / "model" / "model.safetensors", names, of_model)
    edit_json(tmp_path / "model" / "config.json", old_record)
    loaded = realigned(type(model).from_pretrained(tmp_path / "model"))
    assert torch.equal(first(loaded, inputs), expected)
    assert str(filter_status(loaded)) == str(filter_status(model))
    save_filter(loaded, tmp_path / "of loaded")  # before its record is brought up to date
    plain = load_filter(unpatch_model(copy.deepcopy(model)), tmp_path / "of loaded")
    assert torch.equal(first(plain, inputs), expected)

    loaded.save_pretrained(tmp_path / "again")  # in the names of this release
    record = json.loads((tmp_path / "again" / "config.json").read_text())["graph_filter"]
    assert record["filters"][0]["modules"] == list(names)
    assert torch.equal(first(realigned(type(model).from_pretrained(tmp_path / "again")), inputs), expected)

    save_filter(model, tmp_path / "filter")
    file = tmp_path / "filter" / "graph_filter.safetensors"
    respell(file, names, load_file(file))
    edit_json(tmp_path / "filter" / "graph_filter.json", old_record)
    again = load_filter(unpatch_model(copy.deepcopy(model)), tmp_path / "filter")
    assert torch.equal(first(again, inputs), expected)


@pytest.fixture
def checkpoint(tmp_path):
    turn_on(patch_model(BERT.build(), layers="even")).save_pretrained(tmp_path / "patched")
    return tmp_path / "patched"


def without_coefficients(checkpoint):
    file = checkpoint / "model.safetensors"
    save_file({k: t for k, t in load_file(file).items() if "graph_filter" not in k}, file, {"format": "pt"})


def right(record):
    return record["filters"][0]["modules"]


def test_a_model_with_fewer_layers_than_were_patched_is_named_so(tmp_path):
    patch_model(FAMILIES["bert"].build()).save_pretrained(tmp_path)
    with pytest.raises(GraphFilterError, match=r"load it with all of the layers that were patched, or patch"):
        AutoModel.from_pretrained(tmp_path, num_hidden_layers=2)


@pytest.mark.parametrize("release", ["this", "first"])
@pytest.mark.parametrize("coefficients", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["filters"][0].update(modules=["no.such"]), r"names 1 of 1 modules .*'no\.such', nearest here"),
        (lambda r: right(r).append("no.such"), r"names 1 of 3 modules that are no self-attention of BertModel"),
        (lambda r: right(r).append("encoder.layer.9.attention.self"), r"encoder\.layer\.9\.attention\.self"),
        (lambda r: right(r).append("encoder.layer.0.attention"), r"one module of BertModel twice"),
        (
            lambda r: right(r).append(right(r)[0]),
            r"malformed: it names the module 'encoder.layer.0.attention.self' twice",
        ),
        (lambda r: r["filters"].append(r["filters"][0]), "twice"),
        (lambda r: r["filters"][0].update(modules=[]), r"'modules' must be a list of names, got \[\]"),
        (lambda r: r["filters"][0].update(modules="encoder.layer.0.attention.self"), "must be a list of names"),
        (lambda r: r["filters"][0].update(modules=[0, 1]), r"must be a list of names, got \[0, 1\]"),
        (lambda r: r.update(filters=[]), r"'filters' must be a list of filters, got \[\]"),
        (lambda r: r.update(filters={}), r"'filters' must be a list of filters, got \{\}"),
        (lambda r: r.update(filters=["gfsa"]), "must be a list of filters"),
    ],
)
def test_records_that_do_not_fit_are_refused(change, message, coefficients, release, checkpoint, transformers_warnings):
    if not coefficients:
        without_coefficients(checkpoint)
    if release == "first":
        edit_json(checkpoint / "config.json", lambda config: config["graph_filter"].pop("model"))
    edit_json(checkpoint / "config.json", lambda config: change(config["graph_filter"]))
    with pytest.raises(GraphFilterError, match=message) as caught:
        AutoModel.from_pretrained(checkpoint)
    assert "\n" not in str(caught.value)
    transformers_warnings.clear()


@pytest.mark.parametrize("model_class", [BertForSequenceClassification, AutoModel])
def test_a_record_is_checked_against_the_class_that_was_saved(model_class, tmp_path, transformers_warnings):
    patch_model(BertForSequenceClassification(BERT.config)).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: right(config["graph_filter"]).append("decoder.no.such"))
    with pytest.raises(GraphFilterError, match=r"of Bert(Model|ForSequenceClassification) \('decoder\.no\.such'"):
        model_class.from_pretrained(tmp_path)
    transformers_warnings.clear()


@pytest.mark.parametrize("release", ["this", "first"])
@pytest.mark.parametrize("stack", ["encoder", "decoder", None])
def test_parts_see_their_own_modules(stack, release, tmp_path, transformers_warnings):
    model = turn_on(patch_model(T5ForConditionalGeneration(FAMILIES["t5"].config).eval(), stack=stack))
    model.save_pretrained(tmp_path / "whole")
    if release == "first":
        edit_json(tmp_path / "whole" / "config.json", lambda config: config["graph_filter"].pop("model"))
    encoder = T5EncoderModel.from_pretrained(tmp_path / "whole")
    assert len(filter_status(encoder)) == (0 if stack == "decoder" else 3)
    encoder.save_pretrained(tmp_path / "part")
    again = realigned(T5EncoderModel.from_pretrained(tmp_path / "part"))
    ids = FAMILIES["t5"].inputs()["input_ids"]
    assert torch.equal(again(ids).last_hidden_state, model.encoder(ids).last_hidden_state)
    transformers_warnings.clear()


def test_coefficients_of_other_modules_only_are_refused(checkpoint, transformers_warnings):
    file = checkpoint / "model.safetensors"
    moved = {k.replace("layer", "layers") if "graph_filter" in k else k: t for k, t in load_file(file).items()}
    save_file(moved, file, {"format": "pt"})
    with pytest.raises(GraphFilterError, match="lacks 6 of its 6 filter coefficients"):
        AutoModel.from_pretrained(checkpoint)
    transformers_warnings.clear()


def encoder_decoder():
    decoder = BertConfig(**{**BERT.config.to_dict(), "is_decoder": True, "add_cross_attention": True})
    parts = BertModel(copy.deepcopy(BERT.config)), BertLMHeadModel(decoder)
    encoder, decoder = (turn_on(patch_model(part.eval(), learn=("w_0", "w_K"))) for part in parts)
    values = [value.clone() for part in (encoder, decoder) for value in filter_parameters(part)]
    return EncoderDecoderModel(encoder=encoder, decoder=decoder).eval(), values


def test_a_composite_of_patched_models_keeps_trained_values(tmp_path, transformers_warnings):
    model, values = encoder_decoder()
    assert all(map(torch.equal, filter_parameters(model), values))
    model.init_weights()
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in vars(model.config), "only while it is saved"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["attn_implementation"] == saved["experts_implementation"] == CURE, "transformers alone loads its parts"
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    transformers_warnings.clear()
    assert len(values) == 12
    assert all(map(torch.equal, filter_parameters(loaded), values))
    (tmp_path / "README.md").unlink()
    unpatch_model(loaded).save_pretrained(tmp_path)
    assert "graph_filter" not in (tmp_path / "config.json").read_text()
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()


def test_values_in_a_composite_of_patched_models_are_checked(tmp_path, transformers_warnings):
    model, _ = encoder_decoder()
    with torch.no_grad():
        next(filter_parameters(model)).fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(GraphFilterError, match="w_0 holds NaN or infinity"):
        EncoderDecoderModel.from_pretrained(tmp_path)
    transformers_warnings.clear()


def test_coefficients_without_a_record_are_not_lost(checkpoint, transformers_warnings):
    keys = ("graph_filter", "attn_implementation", "experts_implementation")
    edit_json(checkpoint / "config.json", lambda c: [c.pop(key, None) for key in keys])
    with pytest.raises(GraphFilterError, match=r"no filter for .*config\.json holds no record of them"):
        AutoModel.from_pretrained(checkpoint)
    transformers_warnings.clear()


def test_a_tower_of_a_patched_model_is_refused(tmp_path, transformers_warnings):
    patch_model(FAMILIES["clip"].build(), layers=lambda _, name: "vision" in name).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    names = [part.get("experts_implementation") for part in (saved, saved["vision_config"], saved["text_config"])]
    assert names == [CURE, CURE, None], "transformers alone loads a tower by its own config"
    assert CLIPTextModel.from_pretrained(tmp_path)
    transformers_warnings.clear()
    with pytest.raises(GraphFilterError, match=r"has no filter for .*only a part of the model was patched"):
        CLIPVisionModel.from_pretrained(tmp_path)
    transformers_warnings.clear()


# --------------------------------------------------------------------------------------- what a model is left with


def traces(model):
    """What a patch changes besides modules: config objects and what they hold, attributes of the models."""
    parts = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return [(id(p.config), p.config.to_dict(), sorted(vars(p)), *(getattr(p, n) for n in kept)) for p in parts]


@pytest.mark.parametrize("name", ["bert", "t5", "clip", "beit"])
def test_unpatching_leaves_what_was_there(name, tmp_path, monkeypatch):
    model = FAMILIES[name].build()
    before = traces(model)
    patch_model(model, layers=[0])
    patch_model(model, layers=[1])
    unpatch_model(model)
    assert traces(model) == before
    other = patch_model(FAMILIES[name].build(), learn=("w_0", "w_K"))
    save_filter(other, tmp_path)
    file = tmp_path / "graph_filter.safetensors"
    tensors = load_file(file)
    save_file({k: t[:2] if "w_K" in k else t for k, t in tensors.items()}, file)
    with pytest.raises(GraphFilterError, match="should hold"):
        load_filter(model, tmp_path)
    assert traces(model) == before
    monkeypatch.setattr("hf_graphfilter.checkpoints.filter_file._copy", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        load_filter(model, tmp_path)
    assert traces(model) == before


def test_a_filter_of_a_model_that_was_shortened_fits_a_model_of_that_length(tmp_path):
    model, ids = turn_on(patch_model(BERT.build())).eval(), torch.arange(3, 11).view(1, 8)
    plain = unpatch_model(copy.deepcopy(model))
    for each in (model, plain):
        each.encoder.layer, each.config.num_hidden_layers = each.encoder.layer[:2], 2
    save_filter(model, tmp_path)
    expected = model(ids).last_hidden_state
    assert torch.equal(load_filter(plain, tmp_path)(ids).last_hidden_state, expected)
    assert torch.equal(load_filter(model, tmp_path)(ids).last_hidden_state, expected)


def test_a_filter_file_names_the_class_that_fsdp_made_its_own_from(tmp_path):
    """FSDP2 gives a model the class FSDP..., and accelerate may wrap its layers."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    own, bert = (turn_on(patch_model(m)) for m in (torch.nn.TransformerEncoder(layer, 2), BERT.build()))
    for model in (own, bert):
        plain, kind = unpatch_model(copy.deepcopy(model)), type(model)
        model.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch.distributed.fsdp"})
        if model is own:
            own.layers[0] = checkpoint_wrapper(own.layers[0])
        save_filter(model, tmp_path, base_model="me/base")
        assert json.loads((tmp_path / "graph_filter.json").read_text())["base_model"]["class"] == kind.__name__
        assert live_record(model)["model"] == kind.__name__
        card = create_model_card(model, coefficients=False)
        assert "FSDP" not in card.text
        assert card.data.pipeline_tag == ("feature-extraction" if model is bert else None)
        assert len(filter_status(load_filter(plain, tmp_path))) == len(filter_status(model))


def test_changes_of_the_config_stay_when_a_model_is_unpatched():
    config = copy.deepcopy(BERT.config)
    model = patch_model(BertForSequenceClassification(config))
    model.config.problem_type = "regression"
    del model.config.pad_token_id
    unpatch_model(model)
    assert model.config is config
    assert config.problem_type == "regression"
    assert "pad_token_id" not in vars(config)
    assert {id(m.config) for m in model.modules() if hasattr(m, "config")} == {id(config)}


def test_unpatching_leaves_other_models_of_the_config(tmp_path):
    config = copy.deepcopy(BERT.config)
    model, other = patch_model(BertModel(config)), BertModel(config)
    built = turn_on(BertModel(model.config).eval())
    other.set_attn_implementation("eager")
    other.config.problem_type = "regression"
    unpatch_model(model)
    assert model.config is config
    assert (config._attn_implementation, config.problem_type) == ("eager", "regression")
    built.save_pretrained(tmp_path)
    loaded = realigned(AutoModel.from_pretrained(tmp_path))
    assert torch.equal(output(loaded, BERT.inputs()), output(built, BERT.inputs()))


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_loaded_model_is_unpatched_without_traces(name, tmp_path):
    family = FAMILIES[name]
    plain = family.build()
    plain.save_pretrained(tmp_path / "plain")
    patch_model(plain).save_pretrained(tmp_path / "patched")
    clean, model = (AutoModel.from_pretrained(tmp_path / folder) for folder in ("plain", "patched"))
    unpatch_model(model)
    named = ("id", "_name_or_path", "architectures")

    def compared(model):
        return [({k: v for k, v in config.items() if k not in named}, *rest) for _, config, *rest in traces(model)]

    assert compared(model) == compared(clean)
    assert torch.equal(output(model, family.inputs()), output(clean, family.inputs()))


# -------------------------------------------------------------------------------------------- earlier releases


FIRST = Path(__file__).parent / "data" / "first-release"  # GFSA on layer 0, a blended AGF on layer 1


def first_release_output(model):
    given = load_file(FIRST / "expected.safetensors")
    with torch.no_grad():
        found = model.double()(given["input_ids"]).last_hidden_state
    rounding = torch.finfo(torch.float32).eps  # in which that release took the logarithm of a number of tokens
    torch.testing.assert_close(found, given["last_hidden_state"], atol=rounding, rtol=rounding)


@pytest.mark.feature("Checkpoints: written by the first release of this package", family="bert")
def test_a_checkpoint_of_the_first_release_loads():
    model = BertModel.from_pretrained(FIRST / "model", add_pooling_layer=False)
    assert [row.filter.filter for row in filter_status(model)] == ["gfsa", "agf"]
    first_release_output(model)


def test_a_filter_file_of_the_first_release_loads():
    model = BertModel.from_pretrained(FIRST / "model", add_pooling_layer=False)
    first_release_output(load_filter(unpatch_model(model), FIRST / "filter"))


def test_a_transfer_that_the_first_release_began_goes_on(tmp_path):
    """Its progress folder, of 10 of 20 steps; the last error is that of the whole run there."""
    model = BertModel.from_pretrained(FIRST / "model", add_pooling_layer=False).double()
    batches = [{"input_ids": (torch.arange(18).view(2, 9) * (i + 3) + i) % 20} for i in range(6)]
    shutil.copytree(FIRST / "transfer", tmp_path / "transfer")
    options = {"steps": 20, "holdout": 2, "eval_every": 10, "progress": False}
    report = transfer_attention(model, batches, checkpoint=tmp_path / "transfer", **options)
    assert report.steps == 20
    # coefficients are float32
    assert report.history == [
        (0, 0.36898057076480073),
        (10, 0.12397321171574133),
        (20, pytest.approx(0.12937989913995296, rel=1e-4)),
    ]


def test_weights_without_coefficients_are_not_saved(tmp_path):
    model = patch_model(BertModel(FAMILIES["bert"].config))
    state = model.state_dict()
    lacking = {name: tensor for name, tensor in state.items() if "1.attention.self.graph_filter" not in name}
    with pytest.raises(GraphFilterError, match=r"state_dict lacks 3 of the 9 filter weights of this BertModel"):
        model.save_pretrained(tmp_path, state_dict=lacking)
    assert not [*tmp_path.iterdir()]
    model.save_pretrained(tmp_path, state_dict=state)


@pytest.mark.parametrize("patched", [False, True])
def test_a_given_state_is_saved_without_that_of_the_model(patched, tmp_path, monkeypatch):
    """Only the first process saves; FSDP would wait for all of them if it asked the model."""
    model = BertModel(FAMILIES["bert"].config)
    model = patch_model(model) if patched else model
    state = model.state_dict()
    monkeypatch.setattr(model, "state_dict", None)
    model.save_pretrained(tmp_path, state_dict=state)
    assert len(filter_status(BertModel.from_pretrained(tmp_path))) == 3 * patched


@pytest.mark.parametrize("kind", ["inner", "timm"])
def test_weights_of_another_filter_do_not_enter_a_part_or_a_timm_model(kind):
    if kind == "timm":
        timm = pytest.importorskip("timm")
        models = [timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48) for _ in range(2)]
    else:
        models = [BertModel(FAMILIES["bert"].config) for _ in range(2)]
    first, second = (patch_model(model, name) for model, name in zip(models, ("gfsa", "xsa"), strict=True))
    if kind == "inner":
        first, second = first.encoder.layer[0], second.encoder.layer[0]
    with pytest.raises(
        GraphFilterError, match=r"are those of another filter, with w_0, w_1, w_K, and that .* has alpha"
    ):
        second.load_state_dict(first.state_dict(), strict=False)
    again = copy.deepcopy(first)
    assert again.load_state_dict(first.state_dict(), strict=False).unexpected_keys == []


def test_what_we_cannot_see(tmp_path):
    """docs/serving.md has this list: no call of ours is on these roads into an unpatched model."""
    plain = BertModel(FAMILIES["bert"].config)
    before, patched = copy.deepcopy(plain.state_dict()), patch_model(copy.deepcopy(plain))
    layers = [model.encoder.layer[0] for model in (plain, patched)]
    assert len(layers[0].load_state_dict(layers[1].state_dict(), strict=False).unexpected_keys) == 3
    save_file(patched.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    accelerate.load_checkpoint_and_dispatch(plain, tmp_path, device_map={"": "cpu"})
    assert plain.state_dict().keys() == before.keys()
    with pytest.raises(GraphFilterError, match="hold a graph filter at"):
        accelerate.load_checkpoint_and_dispatch(plain, tmp_path)
