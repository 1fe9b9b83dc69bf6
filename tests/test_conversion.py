"""Conversion: what it changes, measures, keeps on disk, and refuses."""

import copy
import json
import math
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.hooks import AlignDevicesHook
from deaths import deaths, some
from models import FAMILIES, realigned
from processes import run_two
from scipy import stats
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartModel,
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertModel,
    BertTokenizer,
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralModel,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5EncoderModel,
    ViTConfig,
    ViTForImageClassification,
    YolosConfig,
    YolosModel,
)

from hf_graphfilter import (
    AGFConfig,
    FarFieldConfig,
    GraphFilterError,
    filter_parameters,
    filter_status,
    linearize,
    load_filter,
    patch_model,
    save_filter,
    unpatch_model,
)
from hf_graphfilter.analysis.model_inputs import longest_text, name_mistakes
from hf_graphfilter.devices import device_of
from hf_graphfilter.files import locked, read_state, write_state
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.fitting import (
    ConversionReport,
    Rates,
    Speed,
    choose_heads,
    crossover,
    decoding_speed,
    load_conversion,
    save_conversion,
    speed,
    text_batches,
)
from hf_graphfilter.fitting.batches import split_holdout
from hf_graphfilter.fitting.checkpoint import fitted_to, marked
from hf_graphfilter.fitting.choice import restore
from hf_graphfilter.fitting.layer_blocks import Block, _join, find_stack
from hf_graphfilter.fitting.objectives import DISTANCES, attending, errors_by_context, filter_errors
from hf_graphfilter.fitting.probes import make_probes, problem_of
from hf_graphfilter.fitting.quality import compare, compare_embeddings
from hf_graphfilter.fitting.run import StageRun
from hf_graphfilter.fitting.speed import taken_in_turn
from hf_graphfilter.fitting.stored_inputs import Inputs
from hf_graphfilter.fitting.transfer_report import TransferReport

LLAMA = LlamaConfig(
    vocab_size=90,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=64,
)


def sharp(model):
    """With attention that is not uniform, as of a trained model."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "query", "key")):
            parameter.data *= 6
    return model


def llama():
    torch.manual_seed(0)
    return sharp(LlamaForCausalLM(LLAMA)).eval()


def bert():
    torch.manual_seed(0)
    return sharp(BertModel(FAMILIES["bert"].config)).eval()


def texts(count=10, rows=4, tokens=24):
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 90, (rows, tokens), generator=draw)} for _ in range(count)]


def run(model, data=None, **options):
    torch.manual_seed(1)
    options = {
        "budget": 2000,
        "holdout": 2,
        "window": 2,
        "evaluations": 5,
        "progress": False,
        "filter": "agf",
        **options,
    }
    return linearize(model, texts() if data is None else data, **options)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_far_field_is_the_default_and_short_models_are_told_that_it_hardly_pays(caplog):
    report = linearize(llama(), texts(), window=2, budget=200, holdout=2, evaluations=1, progress=False)
    assert report.config["filter"] == "far_field"
    assert report.config["sinks"] == 2  # at most the window
    assert report.error < report.error_before
    assert "LlamaForCausalLM takes at most 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("kind", "config", "longest"), [(BertModel, BertConfig, 14), (RobertaModel, RobertaConfig, 12)]
)
def test_positions_behind_that_of_padding_are_not_those_of_tokens(kind, config, longest):
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    model = kind(config(**sizes, max_position_embeddings=14)).eval()
    assert longest_text(model) == longest
    model(torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("train", ["filters", "lora", "all"])
def test_a_decoder_is_converted_and_saved(train, tmp_path):
    model = llama()
    before = weights(model)
    report = run(model, train=train, holdout=texts()[:2])
    assert report.error < 0.9 * report.error_before
    assert list(report.stages) == ["attention", "logits"]
    assert 2000 <= report.tokens < 2000 + 2 * 96
    assert report.parameters == sum(parameter.numel() for parameter in filter_parameters(model))
    assert report["perplexity"].original == pytest.approx(math.exp(loss_of(llama())), rel=1e-4)
    assert report["perplexity"].converted == pytest.approx(math.exp(loss_of(model)), rel=1e-4)
    assert set(report["divergence"].without) == {"window", "far"}
    names = {name for name, tensor in weights(model).items() if name not in before or not tensor.equal(before[name])}
    own = {name for name in names if "graph_filter" not in name}
    assert not any("lora" in name for name in names)
    assert bool(own) == (train != "filters")
    if train == "lora":
        assert own == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(4) for p in "qkvo"}
    ids = texts()[0]
    model.save_pretrained(tmp_path)
    loaded = realigned(AutoModelForCausalLM.from_pretrained(tmp_path))
    torch.testing.assert_close(loaded(**ids).logits, model(**ids).logits)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def loss_of(model):
    """Mean over the held-out batches, by hand."""
    with torch.no_grad():
        return sum(model(**batch, labels=batch["input_ids"]).loss.item() for batch in texts()[:2]) / 2


def test_an_encoder_is_measured_by_its_embeddings():
    report = run(bert(), layers="auto:50%")
    assert report.choose == "text"
    assert list(report.stages) == ["attention", "hidden"]
    assert {m.name for m in report.measures} == {"cosine", "rank correlation"}
    assert 0.5 < report["cosine"].converted <= 1
    shown = str(report)
    assert "without far" in shown
    assert "encoder.layer.0.attention.self" in shown
    assert json.loads(json.dumps(report.to_dict()))["error"] == report.error
    assert report.to_markdown().count("\n| --- |") == 4


def test_images_are_counted_by_the_tokens_that_attention_sees():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    images = [{"pixel_values": torch.rand(4, 3, 16, 16)} for _ in range(6)]
    report = run(ViTForImageClassification(config).eval(), images, budget=6 * 4 * 17)
    assert report.tokens in range(6 * 4 * 17, 8 * 4 * 17 + 1)
    assert {m.name for m in report.measures} == {"agreement", "divergence"}


def test_errors_by_context_are_those_of_the_tokens():
    for family, causal in (("bert", False), ("llama", True)):
        model = patch_model(FAMILIES[family].build().eval(), "agf")
        modules, batch = dict(filters_of(model)), texts(1)[0]
        batch["attention_mask"] = torch.ones(4, 24, dtype=torch.long)
        batch["attention_mask"][:2, 12:] = 0
        whole = filter_errors(model, modules, [batch])
        same, parts = errors_by_context(model, modules, [batch], [12, 100])
        assert same == whole
        assert all(math.isnan(value) for value in parts[2].values())
        if causal:  # the first twelve tokens see no more than those of a text of twelve
            short = {name: value[:, :12] for name, value in batch.items()}
            expected = filter_errors(model, modules, [short])
        else:
            expected = filter_errors(model, modules, [{name: value[:2, :12] for name, value in batch.items()}])
        assert parts[0] == pytest.approx(expected, rel=1e-4)
        assert parts[1] != pytest.approx(whole, rel=1e-4)


def test_the_layers_that_gain_most_keep_their_attention():
    model = llama()
    for layer in (0, 1, 3):  # a layer that writes nothing has nothing to gain
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    report = run(model, layers="auto:75%", budget=200, evaluations=1)
    assert report.kept == ["model.layers.2.self_attn"]
    assert report.choose == "both"
    others = {name: gain for name, gain in report.sensitivity.items() if name not in report.kept}
    assert max(others.values()) < report.sensitivity[report.kept[0]]
    assert {row.module for row in filter_status(model)} == set(report.after) == set(others)
    assert "keeps its attention" in str(report)
    assert "gain if restored (both)" in report.to_markdown()
    content = report.to_dict()
    assert ConversionReport.from_dict(json.loads(json.dumps(content))) == report
    del content["choose"]  # as earlier versions wrote it
    assert ConversionReport.from_dict(content).kept == report.kept


def test_the_gain_in_text_is_what_the_divergence_falls_by():
    data, names = texts(), [f"model.layers.{i}.self_attn" for i in range(4)]
    options = {"stages": {"attention": 1}, "budget": 100, "evaluations": 1}
    filters = run(llama(), data, layers="auto:75%", choose="text", **options)
    model = llama()
    run(model, data, **options)
    modules = dict(filters_of(model))

    def divergence(*restored):
        with attending({name: modules[name] for name in restored}):
            found = compare(
                model, lambda batch: llama()(**batch, output_hidden_states=True), held, causal=True
            ).measures
        return found["divergence"]["converted"]

    held = [{**batch, "use_cache": False} for batch in data[:2]]
    expected = {name: divergence() - divergence(name) for name in names}
    assert filters.sensitivity == pytest.approx(expected, rel=1e-2, abs=1e-7)
    assert filters.kept == [max(expected, key=expected.get)]


def test_layers_are_restored_one_by_one():
    asked = []

    def measure(restored):  # "a" or "b" finds what is far away, either is enough; "c" and "d" help a little
        asked.append(restored)
        return [
            (3 - 2 * bool({"a", "b"} & {*names}) - 0.2 * ("c" in names) - 0.1 * ("d" in names),) for names in restored
        ]

    chosen, gains = restore("dcbae", 2, measure)
    assert chosen == ["b", "c"], "the other way round, neither a nor b would be missed alone"
    assert gains == pytest.approx({"a": 0, "b": 2, "c": 0.2, "d": 0.1, "e": 0})
    assert asked == [[[]], [["d"], ["c"], ["b"], ["a"], ["e"]], [["b", name] for name in "dcae"]]
    asked.clear()
    assert restore("abcdefg", 6, measure)[0] == ["a", "c", "d", "b", "e", "f"]
    assert [len(names) for names in asked] == [1, 7, 6, 5, 4]
    assert restore("ab", 0, measure) == ([], {})


def test_losses_of_two_kinds_have_equal_spread():
    losses = {"": (9.0, 9.0), "a": (1.0, 8.9), "b": (3.0, 8.7), "c": (2.0, math.nan)}
    chosen, gains = restore("abc", 1, lambda restored: [losses["".join(names)] for names in restored])
    assert chosen == ["a"]
    assert gains["c"] == -math.inf
    assert restore("abc", 1, lambda restored: [losses["".join(names)][:1] for names in restored])[1]["b"] == 6
    broken = {**losses, "": (math.nan, 9.0)}
    assert restore("abc", 1, lambda restored: [broken["".join(names)] for names in restored])[0] == ["a"]


@pytest.mark.parametrize(("window", "longest"), [(2, 64), (2, 24), (10, 64), (300, 2000)])
def test_the_answers_of_probes_lie_beyond_the_window(window, longest):
    tokens = {64: 40, 24: 24, 2000: 900}[longest]
    held = [{**batch, "attention_mask": torch.ones(3, tokens)} for batch in texts(2, 3, tokens)]
    for batch in held:
        batch["input_ids"][:, 0] = 1  # as tokenizers begin texts
    held[0]["attention_mask"][0, 20:] = 0
    held[0]["input_ids"][0, 20:] = 99
    state = torch.get_rng_state()
    probes = make_probes(held, window, longest)
    assert torch.equal(state, torch.get_rng_state())
    again = make_probes(held, window, longest)
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(probes, again, strict=True))
    assert sum(len(batch["input_ids"]) for batch in probes) == 6
    for batch in probes:
        assert batch["input_ids"].shape[1] <= min(longest, tokens)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            assert ids[0] == 1
            assert not {1, 99} & {*ids[1:]}
            answers = [i for i, label in enumerate(labels) if label != -100]
            assert answers
            for i in answers:
                assert labels[i] == ids[i]
                earlier = [j for j in range(1, i) if ids[j - 1 : j + 1] == ids[i - 1 : i + 1]]
                assert earlier
                assert i - 1 - min(earlier) > window
    assert problem_of(held) == ""
    assert "which hold 2 different ones" in problem_of([{"input_ids": torch.tensor([[1, 2, 2]])}])


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stop", [pytest.param(3, marks=SLOW), pytest.param(9, marks=SLOW), 18])
def test_an_interrupted_conversion_goes_on(stop, tmp_path, monkeypatch):
    options = {"layers": "auto:75%", "train": "lora"}
    expected = run(llama(), checkpoint=tmp_path / "whole", **options)
    advance, steps = StageRun._advance, []

    def interrupted(self, *arguments):
        steps.append(1)
        if len(steps) == stop:
            raise KeyboardInterrupt
        return advance(self, *arguments)

    model = llama()
    before = weights(model)
    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, checkpoint=tmp_path / "parts", **options)
    assert weights(model).keys() == before.keys()
    assert all(tensor.equal(before[name]) for name, tensor in weights(model).items())
    found = run(model, checkpoint=tmp_path / "parts", **options)
    assert found.tokens == expected.tokens
    assert found.after == pytest.approx(expected.after, rel=1e-3)
    assert found["perplexity"].converted == pytest.approx(expected["perplexity"].converted, rel=1e-3)
    with pytest.raises(GraphFilterError, match=r"progress of another transfer \(choose differ\)"):
        run(llama(), checkpoint=tmp_path / "parts", choose="text", **options)
    for file in (tmp_path / "parts").rglob("*.safetensors"):  # as earlier code wrote it, by another choice of layers
        content, tensors = read_state(file)
        del content["settings"]["choose"]
        kept = found.kept[0] if file.parent.name == "logits" else "none"
        write_state(file, content, {name.replace(min(found.after), kept): x for name, x in tensors.items()})
    with pytest.warns(UserWarning, match="progress of other layers is ignored"):
        again = run(llama(), checkpoint=tmp_path / "parts", **options)
    assert again.after == pytest.approx(found.after, rel=1e-3)
    with pytest.raises(GraphFilterError, match=r"progress of another transfer \(rates differ\)"):
        run(llama(), checkpoint=tmp_path / "parts", rates=Rates(attention=1e-3), **options)


@pytest.mark.parametrize("model", [llama, pytest.param(bert, marks=SLOW)])
def test_blocks_of_layers_are_fitted_as_all_layers_at_once(model, tmp_path, monkeypatch):
    """By other texts than those of the first block, too, and after an interruption within the last block."""
    options = {"data": texts(12, rows=1), "stages": {"attention": 1}, "budget": 240, "evaluations": 1}
    expected = run(model(), **options)
    found = run(model(), blocks=3, checkpoint=tmp_path / "whole", **options)
    apart = [name for name, error in expected.after.items() if found.after[name] != pytest.approx(error, rel=1e-4)]
    assert len(apart) <= 1
    assert all(found.after[name] < expected.after[name] for name in apart), "a block has a best state of its own"
    assert found.stages["attention"].history == [
        (used, pytest.approx(error, rel=1e-3)) for used, error in expected.stages["attention"].history
    ]
    assert found.tokens == expected.tokens
    assert not [*(tmp_path / "whole").glob("inputs-*/*.safetensors")]
    advance, steps = StageRun._advance, []
    stop = expected.stages["attention"].steps * 5 // 2

    def interrupted(self, *arguments):
        steps.append(1)
        if len(steps) == stop:
            raise KeyboardInterrupt
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model(), blocks=3, checkpoint=tmp_path / "parts", **options)
    state = json.loads((tmp_path / "parts" / "inputs-train" / "inputs.json").read_text())
    state.pop("settings")  # as earlier code wrote it
    (tmp_path / "parts" / "inputs-train" / "inputs.json").write_text(json.dumps(state))
    again = run(model(), blocks=3, checkpoint=tmp_path / "parts", **options)
    assert again.after == pytest.approx(found.after, rel=1e-4)
    with pytest.raises(GraphFilterError, match=r"progress of another transfer \(blocks differ\)"):
        run(model(), blocks=2, checkpoint=tmp_path / "parts", **options)


def test_inputs_of_blocks_are_those_of_the_call(tmp_path, monkeypatch):
    """A call that died before it fitted anything leaves no batches to others."""
    options = {"stages": {"attention": 1}, "budget": 240, "evaluations": 1, "blocks": 2}

    def run_out(*arguments):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_advance", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            run(llama(), texts(12, rows=1), checkpoint=tmp_path, **options)
    assert list(tmp_path.glob("inputs-*/*.safetensors"))
    other = texts(6)
    found = run(llama(), other, checkpoint=tmp_path, **options)
    assert found.after == run(llama(), other, **options).after
    assert not [*tmp_path.glob("inputs-*/*.safetensors")], "the first call stored more batches"


def test_one_batch_is_held_while_blocks_are_left(transformers_warnings):
    """A block leaves the forward pass by an exception, which is no mistake of the model."""
    model, batch = llama(), texts(1)[0]
    layers = list(model.model.layers)
    block = Block(model, layers, 0, 1, [False] * len(layers))
    with name_mistakes(model):
        kept = weakref.ref(x := batch["input_ids"].clone())
        block(input_ids=x)
        del x
        assert kept() is None

    def fail_after_a_block():
        with name_mistakes(model):
            block(**batch)
            raise ValueError("not of the model")

    with pytest.raises(ValueError, match=r"^not of the model$"):
        fail_after_a_block()


def test_weights_on_disk_are_fitted_in_blocks(tmp_path, transformers_warnings):
    """The filters alone are saved, and fit the model in memory."""
    llama().save_pretrained(tmp_path / "model")
    options = {"stages": {"attention": 1}, "filter": "far_field", "window": 8}
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected = run(whole, **options)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    disk = {"device_map": {**places, "model.layers": "disk"}, "offload_folder": tmp_path / "weights"}
    offloaded = torch.nn.Linear(2, 2, device="meta")
    offloaded._hf_hook = AlignDevicesHook(execution_device="cpu")  # a name, or a number
    assert device_of(offloaded) == torch.device("cpu")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", **disk).eval()
    found = run(model, blocks=2, checkpoint=tmp_path / "progress", **options)
    assert found.after == pytest.approx(expected.after, rel=1e-3)
    weights = [p for name, p in model.model.layers.named_parameters() if "graph_filter" not in name]
    assert all(parameter.is_meta for parameter in weights)
    assert fitted_to(model, []) == fitted_to(whole, [])  # by their numbers, so that progress of others is refused
    other = copy.deepcopy(whole)
    other.model.layers[1].mlp.up_proj.weight.data += 1
    assert fitted_to(model, []) != fitted_to(other, [])
    save_filter(model, tmp_path / "filter")
    loaded = load_filter(LlamaForCausalLM.from_pretrained(tmp_path / "model").eval(), tmp_path / "filter")
    with torch.no_grad():
        for batch in texts(2):
            torch.testing.assert_close(loaded(**batch).logits, whole(**batch).logits, atol=1e-4, rtol=1e-4)
    transformers_warnings.clear()  # that weights are on the disk


def test_progress_that_blocks_have_lost_is_said(tmp_path, monkeypatch):
    options = {"stages": {"attention": 1}, "budget": 240, "evaluations": 1, "checkpoint": tmp_path}
    both = {**options, "stages": {"attention": 1, "logits": 1}, "checkpoint": tmp_path / "whole"}
    run(llama(), texts(12, rows=1), **both)
    with pytest.raises(GraphFilterError, match=r"progress of another transfer \(blocks differ\)"):
        run(llama(), texts(12, rows=1), blocks=2, **both)
    with monkeypatch.context() as patch:
        patch.setattr("hf_graphfilter.fitting.stored_inputs.Inputs.finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(llama(), texts(12, rows=1), blocks=2, **options)
    for file in (tmp_path / "attention-0").iterdir():
        file.unlink()
    with pytest.raises(GraphFilterError, match="lost the progress of block 0"):
        run(llama(), texts(12, rows=1), blocks=2, **options)


def test_a_call_resumes_after_a_block_that_failed(tmp_path, monkeypatch):
    options = {"stages": {"attention": 1}, "budget": 240, "evaluations": 1, "blocks": 2, "checkpoint": tmp_path}
    advance, steps = StageRun._advance, []

    def fail(self, *arguments):
        steps.append(1)
        if len(steps) == 3:  # in the first block
            self.stage.step = lambda batch: {"loss": math.nan}
        if len(steps) == 6:  # in the second
            raise KeyboardInterrupt
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_advance", fail)
        with pytest.raises(KeyboardInterrupt):
            run(llama(), texts(12, rows=1), **options)
    found = run(llama(), texts(12, rows=1), **options)
    assert found.stages["attention"].stopped == "non-finite loss at step 3, best state kept"


def test_the_report_of_all_blocks_names_the_one_that_failed():
    reports = [(TransferReport({}, history=[(0, 1.0)], stopped=text), 1) for text in (TransferReport.stopped, "failed")]
    assert _join(reports).stopped == _join(reports[::-1]).stopped == "failed"


def test_batches_of_an_iterator_that_blocks_have_read_do_not_come_again(tmp_path):
    def keep(batches, folder):
        inputs = Inputs(folder, torch.device("cpu"), {})
        inputs.keep(batches, 2, lambda batch: 1)
        return next(batches)["input_ids"]

    first, again = (keep(iter(texts(4)), tmp_path) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, texts(4)[2]["input_ids"])


def test_blocks_need_one_stack_of_layers():
    model, ids = BartModel(FAMILIES["bart"].config).eval(), torch.randint(3, 90, (2, 24))
    data = [{"input_ids": ids, "decoder_input_ids": ids}] * 4
    with pytest.raises(GraphFilterError, match=r"needs all filters in one stack of layers, .*: give stack=, or leave"):
        run(model, data, blocks=2)
    assert not list(filters_of(model))
    t5 = FAMILIES["t5"].build()
    for name, part in ((r"T5Model .*decoder\.block\.0", t5), (r"T5Stack .*block\.0\.layer, ", t5.encoder)):
        with pytest.raises(GraphFilterError, match=rf"{name}.*\.layer: leave blocks= out"):
            find_stack(part, [n for n, m in part.named_modules() if n.endswith("SelfAttention")])


SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@some(2)
def test_a_conversion_that_dies_at_a_write_ends_the_same(points, tmp_path):
    def command(folder):
        torch.manual_seed(0)
        model = sharp(BertModel(BertConfig(**SMALL))).eval()
        report = run(model, budget=600, evaluations=2, checkpoint=folder, train="lora")
        save_conversion(model, report, folder)
        return weights(model), {**report.to_dict(), "seconds": 0}

    for folder, (tensors, report) in deaths(tmp_path, points, command):
        found, other = command(folder)
        assert other == report, folder
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
        assert load_conversion(folder).to_dict() == report | {"seconds": load_conversion(folder).seconds}


def test_a_damaged_report_of_a_conversion_is_refused(tmp_path):
    model = bert()
    save_conversion(model, run(model, budget=200, evaluations=1), tmp_path)
    file = tmp_path / "conversion.json"
    content, texts = json.loads(file.read_text()), ["", "{", "[]", "3", "[" * 100_000]
    for name in content:
        texts += [json.dumps({**content, name: x}) for x in ("x", {"x": []}, [3], None, [{}], {"x": {}})]
    stage = content["stages"]["attention"]
    texts += [json.dumps({**content, "stages": {"x": {**stage, "history": x}}}) for x in ([], 3, [[1]], [["a", "b"]])]
    for text in texts:
        file.write_text(text)
        try:
            found = load_conversion(tmp_path)
        except GraphFilterError as error:
            found = str(error)
        assert "is not what a conversion wrote" in found if isinstance(found, str) else found.to_markdown(), text


def test_one_conversion_at_a_time_has_a_directory(tmp_path):
    model = bert()
    before = weights(model)
    busy = pytest.raises(GraphFilterError, match=r"another command is fitting .* is locked")
    with locked(tmp_path / ".lock", work="testing"), busy:
        run(model, checkpoint=tmp_path)
    assert weights(model).keys() == before.keys()


def test_a_failure_leaves_the_model_as_it_was():
    for train in ("filters", "lora", "all"):
        model = llama()
        before, data = weights(model), texts()

        class Failing(list):
            passes = 0

            def __iter__(self):
                Failing.passes += 1
                if Failing.passes > 2:  # in the last stage
                    yield from list.__iter__(self)
                    raise OSError("the disk is full")
                yield from list.__iter__(self)

        Failing.passes = 0
        with pytest.raises(OSError, match="the disk is full"):
            run(model, Failing(data), train=train, stages={"attention": 0.1, "logits": 0.9})
        assert weights(model).keys() == before.keys(), train
        assert all(tensor.equal(before[name]) for name, tensor in weights(model).items()), train
        assert not list(filters_of(model))


def test_gradient_checkpointing_changes_no_result():
    plain, again = llama(), llama()
    few = {"precision": "bf16", "budget": 200, "evaluations": 1}
    passes = {plain: 0, again: 0}
    for model in passes:

        def count(*_, model=model):
            passes[model] += 1

        model.model.layers[0].mlp.register_forward_pre_hook(count)
    first = run(plain, **few)
    second = run(again, **few, gradient_checkpointing=True)
    assert passes[again] > passes[plain] > 0, "activations are computed again in the backward pass"
    assert not any(getattr(module, "gradient_checkpointing", False) for module in again.modules())
    assert second.after == pytest.approx(first.after, rel=1e-3)


def test_gradient_checkpointing_lets_no_layer_drop_out():
    """Those of BART and OPT look at their own training flag, which checkpointing sets."""
    torch.manual_seed(0)
    shape = {"vocab_size": 90, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16}
    model = OPTForCausalLM(OPTConfig(**shape, num_hidden_layers=2, num_attention_heads=2, dropout=0.5)).eval()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its later name
    plain = copy.deepcopy(model)
    few = {"budget": 300, "evaluations": 2}
    first, second = run(plain, **few), run(model, **few, gradient_checkpointing=True)
    assert second.stages["logits"].history[0][1] == pytest.approx(first.stages["logits"].history[0][1], rel=1e-3)
    assert second["divergence"].converted == pytest.approx(first["divergence"].converted, rel=0.05)
    assert {layer.dropout for layer in model.model.decoder.layers} == {0.5}
    assert all(layer.gradient_checkpointing for layer in model.model.decoder.layers), "as it was"


def llava():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=copy.deepcopy(LLAMA))).eval()


def test_filters_that_no_batch_reaches_are_said_and_those_of_the_text_converted():
    model = llava()
    before = weights(model)
    with pytest.raises(GraphFilterError, match=r"reaches 2 of 6 filters, the first model.vision_tower.* with stack="):
        run(model, filter="far_field")
    assert weights(model).keys() == before.keys(), "as it was"
    report = run(model, filter="far_field", stack="decoder", layers="auto:50%", budget=300, evaluations=1)
    assert "perplexity" in {measure.name for measure in report.measures}
    assert report.choose == "both"
    assert {row.module.split(".")[1] for row in filter_status(model)} == {"language_model"}


def test_adapters_are_measured_as_their_weights_are_saved():
    """Merging rounds them to the dtype of the model, and the original is still the one before."""
    pytest.importorskip("peft")
    model = llama().bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data *= 20 if "lm_head" in name or "o_proj" in name else 1  # so that attention matters
    untouched = copy.deepcopy(model)
    options = {"rates": Rates(weights=1e-3), "train": "lora", "rank": 2, "budget": 4000}
    report = run(model, texts(1) * 10, **options)
    changed = [n for n, p in untouched.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    assert len(changed) == 4 * 4
    modules, held = dict(filters_of(model)), [{**batch, "use_cache": False} for batch in texts(1) * 2]
    with torch.no_grad():
        assert filter_errors(model, modules, held) == pytest.approx(report.after, rel=1e-6)
        found = compare(model, lambda batch: untouched(**batch), held, True).measures
    by_name = {measure.name: measure for measure in report.measures}
    for name in ("divergence", "perplexity"):
        assert found[name]["converted"] == pytest.approx(by_name[name].converted, rel=1e-6)
    assert found["perplexity"]["original"] == pytest.approx(by_name["perplexity"].original, rel=1e-6)


@pytest.mark.parametrize("kind", ["shuffling", "prepared", "subset"])
def test_rows_to_measure_on_are_never_trained_on(kind):
    rows = [{"input_ids": ids} for batch in texts(20) for ids in batch["input_ids"]]
    shown = []

    def collate(picked):
        shown.append({tuple(row["input_ids"].tolist()) for row in picked})
        return {"input_ids": torch.stack([row["input_ids"] for row in picked])}

    made = partial(torch.utils.data.DataLoader, rows, batch_size=4, collate_fn=collate)
    if kind == "subset":  # of a cross-validation, say
        allowed = range(60)
        loader = made(sampler=torch.utils.data.SubsetRandomSampler(allowed))
    else:
        allowed = range(80)
        loader = made(shuffle=True)
    if kind == "prepared":  # as the Trainer has it
        loader = prepare_data_loader(loader, device=torch.device("cpu"), num_processes=1, process_index=0)
    run(bert(), loader, budget=3300, holdout=3, evaluations=2)
    held, trained = set.union(*shown[:3]), set.union(*shown[3:])
    assert len(held) == 12
    assert not held & trained
    assert held | trained == {tuple(rows[i]["input_ids"].tolist()) for i in allowed}, "all that it draws from"
    with pytest.raises(GraphFilterError, match=r"again later \(WeightedRandomSampler\)"):
        run(bert(), made(sampler=torch.utils.data.WeightedRandomSampler([1.0] * 80, 80)), holdout=3)
    batched = torch.utils.data.DataLoader(rows, batch_sampler=[[0, 1]], collate_fn=collate)
    with pytest.raises(GraphFilterError, match=r"may show the first 3 batches again later \(list\).*give holdout="):
        run(bert(), batched, holdout=3)
    run(bert(), batched, holdout=texts(2))
    made_already = torch.utils.data.DataLoader(texts(8), batch_size=None)  # in its order, batch by batch
    run(bert(), made_already, holdout=2, budget=300, evaluations=1)
    if kind == "shuffling":
        with pytest.raises(GraphFilterError, match="no batch is left that is not held out"):
            run(bert(), loader, holdout=20)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_a_loader_keeps_its_options_where_rows_are_held_out():
    options = {"drop_last": True, "worker_init_fn": print, "pin_memory": True}
    loader = torch.utils.data.DataLoader(range(21), batch_size=4, shuffle=True, **options)
    training, held_out = split_holdout(loader, 1)
    assert [len(batch) for batch in (*held_out, *training)] == [4] * 5
    assert {name: getattr(training, name) for name in options} == options


def test_progress_is_of_one_model_and_one_set_of_texts(tmp_path):
    options = {"checkpoint": tmp_path, "budget": 300, "evaluations": 2}
    run(bert(), **options)
    other = bert()
    other.encoder.layer[0].output.dense.weight.data[0] += 1
    with pytest.raises(GraphFilterError, match=r"progress of another transfer \(model differ"):
        run(other, **options)
    assert not list(filters_of(other))
    with pytest.raises(GraphFilterError, match=r"\(held out differ"):
        run(bert(), texts(tokens=20), **options)


@pytest.mark.parametrize("model_class", [BertForQuestionAnswering, BertForPreTraining, LlamaForTokenClassification])
def test_models_without_a_language_model_s_head(model_class):
    torch.manual_seed(0)
    config = LLAMA if model_class is LlamaForTokenClassification else FAMILIES["bert"].config
    report = run(model_class(copy.deepcopy(config)), budget=500, evaluations=2)
    names = {measure.name for measure in report.measures}
    assert names == ({"agreement", "divergence"} if "Token" in model_class.__name__ else {"cosine", "rank correlation"})


def test_models_that_give_nothing_to_compare_are_refused_before_any_work():
    model = FAMILIES["clip"].build()
    before = weights(model)
    with pytest.raises(GraphFilterError, match=r"neither logits nor hidden states.*linearize one of its parts"):
        run(model, [FAMILIES["clip"].inputs() for _ in range(4)])
    assert weights(model).keys() == before.keys()


def test_a_memory_that_holds_all_of_a_text_leaves_nothing_to_fit():
    model = llama()
    with pytest.raises(GraphFilterError, match=r"which the window spans \(it reaches 27 tokens back\)"):
        run(model, filter="far_field", memory=22)
    assert not list(filters_of(model, required=False))
    run(model, filter="far_field", memory=4, budget=200)


def test_a_share_of_heads_is_written_in_per_cent():
    with pytest.raises(GraphFilterError, match="given as '20%'"):
        run(llama(), filter="far_field", keep=0.2)
    with pytest.raises(GraphFilterError, match="keep='20%' chooses heads of decoders with one stack: leave keep= out"):
        run(bert(), filter="far_field", keep="20%")
    with pytest.raises(GraphFilterError, match="no batches"):
        choose_heads(llama(), [], 0.2)


def test_a_report_names_its_measures():
    model = bert()
    report = run(model, budget=200)
    with pytest.raises(GraphFilterError, match="no measure 'perplexity': cosine, rank correlation"):
        report["perplexity"]
    with pytest.raises(GraphFilterError, match="rounds must be a whole number from 1 on, got 0"):
        report.time(model, lengths=[8], rounds=0)
    with pytest.raises(GraphFilterError, match="no folder and no reachable Hub repository 'no/such/folder'"):
        load_conversion("no/such/folder")


def test_a_card_of_others_is_kept_and_nothing_is_written(tmp_path):
    model = llama()
    report = run(model, budget=200)
    (tmp_path / "README.md").write_text("# mine")
    with pytest.raises(GraphFilterError, match="force=True"):
        save_conversion(model, report, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]
    save_conversion(model, report, tmp_path, force=True)
    assert "## Conversion" in (tmp_path / "README.md").read_text()


def test_an_iterator_may_end_before_the_last_stage():
    report = run(llama(), iter(texts(6)), budget=2000)
    assert report.stages["attention"].stopped.startswith("the batches ended")
    assert report.stages["logits"].steps == 0


def test_maps_are_compared_class_by_class():
    torch.manual_seed(0)
    draw = torch.randn(2, 6, 4, 5)
    shifted = draw.clone()
    shifted[:, 2] += 100
    found = compare(lambda **_: {"logits": shifted}, lambda batch: {"logits": draw}, [{}], False).measures
    assert found["agreement"]["converted"] == pytest.approx((draw.argmax(1) == 2).double().mean().item())
    assert DISTANCES["logits"]({"logits": shifted}, {"logits": draw}, {}) > 1


def test_perplexity_by_position_counts_the_tokens_of_the_text():
    torch.manual_seed(0)
    ids, logits = torch.randint(50, (2, 40)), torch.randn(2, 2, 40, 50)
    mask = torch.ones(2, 40)
    mask[1, :17] = 0  # padded on the left, so that no token of it has more than 22 before
    batch = {"input_ids": ids, "attention_mask": mask}
    model = torch.nn.Module()
    model.config, model.forward = LlamaConfig(vocab_size=50), lambda **_: {"logits": logits[1]}
    found = compare(model, lambda _: {"logits": logits[0]}, [batch], True)
    losses = -logits.log_softmax(-1)[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(2, -1, -1, -1))[..., 0]
    parts = {"1 to 16": (slice(0, 16), slice(17, 33)), "17 to 32": (slice(16, 32), slice(33, 39))}
    parts["33 to 64"] = (slice(32, 39), slice(0, 0))
    assert {*found.by_position} == {*parts}
    batch["attention_mask"] = 3 * mask  # as transformers reads it, any number but 0 is a token
    assert compare(model, lambda _: {"logits": logits[0]}, [batch], True) == found
    for label, rows in parts.items():
        for model, of in zip(("original", "converted"), losses, strict=True):
            mean = torch.cat([row[part] for row, part in zip(of, rows, strict=True)]).mean()
            assert found.by_position[label][model] == pytest.approx(mean.exp().item(), rel=1e-5)


def test_padding_of_each_stack_is_left_out_by_its_own_mask():
    draw = torch.randn(2, 2, 5, 7)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {"input_ids": mask, "attention_mask": torch.ones(2, 5), "decoder_input_ids": mask} | {
        "decoder_attention_mask": mask
    }
    wanted, other = draw[0], torch.where(mask[..., None].bool(), draw[0], draw[1])
    assert DISTANCES["logits"]({"logits": other}, {"logits": wanted}, batch) == pytest.approx(0, abs=1e-6)
    states = [{f"{stack}_hidden_states": (x,) for stack in ("encoder", "decoder")} for x in (other, wanted)]
    only_encoder = DISTANCES["hidden"](*states, batch)
    assert only_encoder == pytest.approx(
        0.5 * ((other - wanted).square().sum() / wanted.square().sum()).item(), rel=1e-5
    )


def test_stacks_of_different_lengths_are_both_measured_by_context():
    draw = torch.Generator().manual_seed(1)
    data = [
        {
            "input_ids": torch.randint(3, 90, (2, 40), generator=draw),
            "decoder_input_ids": torch.randint(3, 90, (2, 20), generator=draw),
        }
        for _ in range(6)
    ]
    torch.manual_seed(0)
    report = run(BartModel(FAMILIES["bart"].config), data, budget=500, evaluations=2, window=4)
    assert {*report.by_context} == {"1 to 16", "17 to 32", "33 to 64"}
    assert report.tokens >= 500


def test_sounds_are_counted_by_the_tokens_that_attention_sees():
    family = FAMILIES["wav2vec2"]
    sounds = [{"input_values": torch.randn(2, 2000)} for _ in range(6)]
    model = family.build()
    seen = model(**sounds[0], output_hidden_states=True).hidden_states[-1].shape[1]
    report = run(model, sounds, budget=5 * 2 * seen, stages={"attention": 1}, window=4)
    assert (report.tokens, report.stages["attention"].steps) == (5 * 2 * seen, 5)


def test_blocks_begin_with_what_the_model_does_between_its_layers():
    """YOLOS adds embeddings of positions after each layer."""

    def yolos():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
        model = YolosModel(YolosConfig(**sizes, image_size=[32, 32], patch_size=8, num_detection_tokens=4))
        torch.nn.init.normal_(next(p for name, p in model.named_parameters() if "mid_position" in name))
        return sharp(model).eval()

    images = [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(6)]
    expected, found = (
        run(yolos(), images, budget=400, stages={"attention": 1}, evaluations=2, blocks=blocks) for blocks in (1, 2)
    )
    assert found.after == pytest.approx(expected.after, rel=1e-3)


def test_blocks_name_an_entry_that_cannot_be_stored():
    data = [{**batch, "head_mask": [torch.ones(1)]} for batch in texts()]
    with pytest.raises(GraphFilterError, match="blocks= stores the batches, and cannot store an entry of one: "):
        run(llama(), data, stages={"attention": 1}, blocks=2)


def test_similarities_that_are_all_equal_have_no_rank_correlation():
    """Without positions, and with a filter that sees them by a window alone, texts of the same tokens are equal."""
    torch.manual_seed(0)
    model = T5EncoderModel(copy.deepcopy(FAMILIES["t5"].config)).eval()
    order = [torch.randperm(24) for _ in range(4)]
    data = [{"input_ids": torch.stack([torch.arange(5, 29)[o] for o in order])} for _ in range(4)]
    report = run(model, data, position_bias="drop", budget=200)
    assert math.isnan(report["rank correlation"].without["window"])
    assert "nan" in str(report)


def test_too_few_batches_are_named_before_the_model_changes(monkeypatch):
    monkeypatch.setattr("hf_graphfilter.fitting.linearization.patch_model", None)
    with pytest.raises(GraphFilterError, match="no batch is left that is not held out"):
        run(llama(), texts(2))
    monkeypatch.setattr("hf_graphfilter.fitting.batches.process", lambda: (0, 2))
    with pytest.raises(GraphFilterError, match="no batch is left that is not held out"):  # none for the second process
        run(llama(), texts(3))


@pytest.mark.parametrize("options", [{"K": 0}, {"K": 2}, {"layers": "auto:50%"}])
def test_half_precision_is_measured_as_it_is_saved(options):
    model = bert().to(torch.bfloat16)
    report = run(model, **options)
    modules = dict(filters_of(model))
    assert {p.dtype for f in modules.values() for n, p in f.named_parameters() if "theta" not in n} == {torch.bfloat16}
    with torch.no_grad():
        held = [{**batch, "use_cache": False} for batch in texts()[:2]]
        assert filter_errors(model, modules, held) == pytest.approx(report.after, rel=1e-6)


def test_gradients_under_autocast_are_those_of_the_ordinary_training(monkeypatch):
    seen, dtypes = [], set()
    backward = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda *a, **k: (seen.append(torch.is_autocast_enabled("cpu")), backward(*a, **k))
    )
    model = llama()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *a: dtypes.add(a[-1].dtype))
    run(model, precision="bf16", budget=300, evaluations=2)
    assert torch.bfloat16 in dtypes, "it is computed in bfloat16"
    assert seen
    assert not any(seen), "the trainer of accelerate leaves autocast before"


def test_a_small_budget_is_not_spent_on_measuring():
    few = texts(6)
    report = run(llama(), few[2:], budget=400, holdout=few[:2], evaluations=20, stages={"attention": 1})
    assert [tokens for tokens, _ in report.stages["attention"].history] == [0, 192, 384, 480]


def test_a_task_stage_reads_labels():
    data = [{**batch, "labels": batch["input_ids"]} for batch in texts()]
    report = run(llama(), data, holdout=data[:2], stages={"attention": 1, "task": 1}, train="all")
    losses = [error for _, error in report.stages["task"].history]
    assert min(losses) < losses[0]
    with pytest.raises(GraphFilterError, match="needs a model and batches with labels"):
        run(llama(), stages={"task": 1})


class Poisoned(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * math.inf
        return outputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget must be a number of tokens, at least 1, got 0"),
        ({"budget": 1e6}, "budget must be a number of tokens, at least 1, got 1000000.0"),
        ({"filter": "gfsa"}, "'gfsa' computes softmax attention"),
        ({"filter": "afg"}, "did you mean 'agf'"),
        ({"filter": AGFConfig(init="blend")}, "linearize with init='copy'"),
        ({"filter": AGFConfig(), "window": 3}, "go into the AGFConfig object"),
        ({"init": "blend"}, "linearize with init='copy'"),
        ({"windows": 2}, "has no option 'windows'"),
        ({"window": 23}, "longest held-out input has 24 tokens, which the window spans"),
        ({"stages": {}}, "stages must give shares"),
        ({"stages": {"atention": 1}}, "there is no stage 'atention'.*did you mean 'attention'"),
        ({"stages": {"attention": 0}}, "the share of 'attention' must be a number > 0, got 0"),
        ({"stages": {"logits": 1, "attention": 1}}, "stages come in the order attention, hidden, logits, task"),
        ({"layers": "auto:0%"}, "the share of layers is given as 'auto:75%'"),
        ({"layers": "auto"}, "the share of layers is given as 'auto:75%'"),
        ({"choose": "text"}, "choose='text' says how layers='auto:75%' chooses: give such a share"),
        ({"layers": "auto:50%", "choose": "all"}, "choose='all': use 'text', 'retrieval', 'both' or None"),
        ({"layers": "auto:50%", "choose": ["text"]}, r"choose=\['text'\]: use 'text', 'retrieval', 'both' or None"),
        (
            {"layers": "auto:50%", "choose": "both", "data": [{"input_ids": torch.arange(40).view(2, 20) % 9}] * 4},
            "choose='both': probes are drawn from .* 9 different ones; use choose='text'",
        ),
        ({"layers": [9]}, "9 is out of range"),
        ({"blocks": 0}, "blocks must be a number >= 1"),
        ({"blocks": 5, "window": 2}, "blocks=5, and the model has 4 layers"),
        ({"train": "everything"}, "use 'filters', 'lora', 'all'"),
        ({"precision": "fp16"}, "use 'bf16' or None"),
        ({"checkpoint": __file__}, "checkpoint must be a directory, and .* is a file"),
        ({"evaluations": 0}, "evaluations and rank are integers >= 1"),
        ({"rank": 8.5, "train": "lora"}, "evaluations and rank are integers >= 1, got 20 and 8.5"),
        ({"holdout": -1}, "holdout must be a number of batches, at least 1, got -1"),
        ({"rates": {"atention": 1e-3}}, "rates are numbers >= 0 by the names of Rates, attention, end_to_end"),
        ({"rates": {"attention": "1e-2"}}, "rates are numbers >= 0 by the names of Rates"),
        ({"rates": 1e-2}, "rates are numbers >= 0 by the names of Rates"),
        ({"data": []}, "there are 0 batches, and holdout=2 asks for more"),
        ({"data": texts(2), "window": 2}, "no batch is left that is not held out"),
        ({"data": texts(1)[0]}, "got one batch: put it into a list"),
        ({"holdout": []}, "holdout holds no batches"),
        ({"data": [{"input_ids": [[1, 2, 3]]}] * 4}, "input_ids of a batch holds no tensor: .* return_tensors='pt'"),
        (
            {"data": [*texts(), torch.full((1, 20), 10**6)], "window": 2},
            r"does not run on input_ids \(1, 20\): .* \(an id beyond the vocabulary",
        ),
    ],
)
def test_bad_arguments(options, message):
    model, data = llama(), options.get("data", texts())
    options = {name: value for name, value in options.items() if name != "data"}
    with pytest.raises(GraphFilterError, match=message):
        linearize(model, data, **{"holdout": 2, "progress": False, **options})
    assert not list(filters_of(model))


def test_the_earlier_name():
    from hf_graphfilter import convert

    options = {"window": 2, "budget": 40, "evaluations": 1, "holdout": 1, "progress": False}
    with pytest.warns(FutureWarning, match="convert is called linearize now"):
        report = convert(llama(), texts(), **options)
    assert report.after


def test_models_that_cannot_be_converted():
    model = patch_model(llama(), "agf")
    with pytest.raises(GraphFilterError, match=r"has graph filters already.*call unpatch_model first"):
        run(model)
    with pytest.raises(GraphFilterError, match=r"linearize takes a model of transformers.* got <class 'torch\.nn"):
        run(torch.nn.Linear(3, 3))
    with pytest.raises(GraphFilterError, match=r"gives NaN or infinity in torch\.float32"):
        run(Poisoned(LLAMA))
    with pytest.raises(GraphFilterError, match="'logits' needs logits, and BertModel gives none: use 'hidden'"):
        run(bert(), stages={"logits": 1})
    with pytest.raises(
        GraphFilterError, match=r"retrieval needs a decoder .*, and BertModel gives none; use choose='text'"
    ):
        run(bert(), layers="auto:50%", choose="retrieval")
    others = [{**batch, "inputs_embeds": None} for batch in texts()]
    with pytest.raises(GraphFilterError, match="the held-out batches hold inputs_embeds"):
        run(llama(), others, layers="auto:50%", choose="both")
    fixed = llama()
    fixed.supports_gradient_checkpointing = False
    with pytest.raises(GraphFilterError, match="does not support gradient checkpointing"):
        run(fixed, gradient_checkpointing=True)
    with pytest.raises(GraphFilterError, match="load the model in float32; precision='bf16'"):
        run(llama().to(torch.bfloat16), train="all")
    windowed = MistralModel(MistralConfig(**{**LLAMA.to_dict(), "sliding_window": 8, "model_type": "mistral"}))
    with pytest.raises(GraphFilterError, match=r"sees a sliding window of 8 tokens.*choose other layers"):
        run(windowed)


@pytest.mark.parametrize("options", [{}, {"layers": "all"}, {"layers": "auto:50%"}, {"keep": "20%"}])
def test_layers_with_sliding_windows_stay_as_they_are(options, transformers_warnings):
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=8, layer_types=kinds))
    report = run(model, filter="far_field", window=4, **options)
    names = [f"model.layers.{i}.self_attn" for i in (1, 3)]
    assert list(report.before) == names
    assert [name for name, _ in filters_of(model)] == [name for name in names if name not in report.kept]
    assert len(report.kept) == (1 if "auto:50%" in options.values() else 0)
    line = next(line for line in transformers_warnings if "sliding window" in line)
    assert line.startswith("2 of the 4 attention layers of Gemma3ForCausalLM see a sliding window of 8 tokens")
    transformers_warnings.clear()
    config = FarFieldConfig(window=4)
    assert {*choose_heads(unpatch_model(model), texts()[:2], 0.25, config)} <= {1, 3}
    transformers_warnings.clear()
    with pytest.raises(GraphFilterError, match="sees a sliding window of 8 tokens"):
        run(model, filter="far_field", window=4, layers=[0, 1])
    assert not list(filters_of(model, required=False))


def test_adapters_of_the_user_are_not_merged():
    model = llama()
    with warnings.catch_warnings():  # PEFT asks transformers by names that are to go
        warnings.simplefilter("ignore", FutureWarning)
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(GraphFilterError, match="would merge the adapters that this model already has"):
        run(model, train="lora")
    assert {**before}.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    run(model, train="filters")  # they are part of the original
    assert any("lora" in name for name, _ in model.named_parameters())


def test_ranks_of_similarities_share_ties():
    embeddings = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    embeddings[3:5] = embeddings[0]
    noise = 1e-9 * torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = compare_embeddings(embeddings, embeddings + noise)
    assert found["rank correlation"]["converted"] == pytest.approx(1)
    other = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    upper = torch.triu_indices(6, 6, 1)
    units = [torch.nn.functional.normalize(x) for x in (embeddings, other)]
    similar = [(x @ x.T)[*upper] for x in units]
    expected = stats.spearmanr(*(x.round(decimals=6) for x in similar)).statistic
    assert compare_embeddings(embeddings, other)["rank correlation"]["converted"] == pytest.approx(expected)
    assert "rank correlation" not in compare_embeddings(torch.eye(4), torch.eye(4)), "all pairs tie"


def test_tensors_that_cannot_be_read_have_a_mark():
    class Opaque(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.flatten:
                raise NotImplementedError("dispatch")
            return super().__torch_function__(function, types, args, kwargs or {})

    first, second = (torch.ones(shape).as_subclass(Opaque) for shape in ((2, 3), (3, 2)))
    assert marked([first]) == marked([first.clone()]) != marked([second])


def test_half_precision_models_keep_their_types():
    model = llama().to(torch.bfloat16)
    report = run(model, train="lora")
    assert report.error < report.error_before
    assert {p.dtype for n, p in model.named_parameters() if "graph_filter" not in n} == {torch.bfloat16}


def test_speed_by_length():
    model = patch_model(llama(), "agf").train()
    rows = speed(model, [16, 64, 4096], rounds=3)
    assert [row.tokens for row in rows] == [16, 64]
    assert all(row.ratio > 0 and row.original_ms > 0 for row in rows)
    assert model.training
    assert list(filters_of(model))
    fast = [Speed(n, 1.0, ratio, ratio) for n, ratio in ((1, 0.9), (2, 1.1), (4, 0.8), (8, 0.5))]
    assert crossover(fast) == 4
    assert crossover(fast[:2]) is None
    with pytest.raises(GraphFilterError, match="takes none"):
        speed(model, [10**6])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process cannot be forgotten")
def test_memory_by_length():
    calls = {"original": lambda: torch.ones(2**24), "converted": lambda: torch.ones(2**25)}  # of 4 bytes
    row = taken_in_turn(1, calls, torch.device("cpu"), 2)
    assert row.original_mb == pytest.approx(64, rel=0.1)
    assert row.converted_mb == pytest.approx(128, rel=0.1)


def test_speed_of_decoding():
    model = patch_model(llama(), "agf", window=2, sinks=1).train()
    rows = decoding_speed(model, [8, 20, 64], rounds=2, steps=2)
    assert [row.tokens for row in rows] == [8, 20], "64 and the steps are beyond its positions"
    assert all(row.ratio > 0 for row in rows)
    assert model.training


@pytest.mark.parametrize("lengths", [16, [0, 8], ["8"]])
def test_lengths_to_time_are_lists_of_integers(lengths):
    model = patch_model(llama(), "agf", window=2, sinks=1)
    for measure in (speed, decoding_speed):
        with pytest.raises(GraphFilterError, match="must be a list of integers from 1 on, got"):
            measure(model, lengths)


def test_decoding_is_timed_up_to_the_last_position():
    places = {"n_positions": 16, "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 90}
    model = patch_model(GPT2LMHeadModel(GPT2Config(**places, bos_token_id=0, eos_token_id=0)), "agf", window=2)
    assert [row.tokens for row in decoding_speed(model, rounds=2, steps=2)] == [10], "6 places for the steps"


def test_what_was_measured_is_kept_beside_the_checkpoint(tmp_path):
    model = llama()
    report = run(model, sinks=1)
    report.speed, report.decoding = [Speed(8, 1.0, 2.0, 2.0, 900.0, 1200.0)], [Speed(16, 1.0, 0.5, 0.5)]
    save_conversion(model, report, tmp_path, description="On made up texts.")
    assert str(load_conversion(tmp_path)) == str(report)
    earlier = {name: value for name, value in report.to_dict().items() if name != "decoding"}
    assert ConversionReport.from_dict(earlier).decoding == [], "as conversion.json was before"
    uncounted = {name: value for name, value in report.to_dict().items() if name != "parameters"}
    assert "parameters" not in str(ConversionReport.from_dict(uncounted)), "they are not known to be none"
    (tmp_path / "conversion.json").write_text('{"stages": 3}')
    with pytest.raises(GraphFilterError, match="remove it, or linearize again"):
        load_conversion(tmp_path)
    (tmp_path / "conversion.json").unlink()
    assert load_conversion(tmp_path) is None
    card = (tmp_path / "README.md").read_text()
    assert "| 8 | 1 | 2 | 2.000 | 900 | 1,200 |" in card
    assert "| 16 | 1 | 0.5 | 0.500 |" in card
    assert "On made up texts." in card
    assert f"({(tmp_path / 'figures' / 'conversion.png').relative_to(tmp_path)})" in card
    assert (tmp_path / "figures" / "conversion.png").stat().st_size > 5000


@pytest.mark.slow
def test_two_processes_share_the_batches(tmp_path):
    run_two(Path(__file__).with_name("convert_in_processes.py"), tmp_path)


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    return BertTokenizer(str(tmp_path / "vocab.txt"), eos_token="[SEP]")


def test_texts_come_in_batches_of_like_length(tokenizer):
    written = [" ".join("abcdefghij"[: 1 + i % 10]) for i in range(50)] + [""]
    batches = text_batches(tokenizer, written, length=8, tokens=32)
    assert sum(len(batch["input_ids"]) for batch in batches) == 51
    assert all(batch["input_ids"].numel() <= 32 for batch in batches)
    assert max(batch["attention_mask"].sum(1).max() for batch in batches) == 8
    windows = text_batches(tokenizer, written, length=8, tokens=32, packed=True)
    assert {tuple(batch["input_ids"].shape) for batch in windows[:-1]} == {(4, 8)}
    assert not any("attention_mask" in batch for batch in windows)
    again = text_batches(tokenizer, written, length=8, tokens=32)
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(batches, again, strict=True))
    assert max(batch["input_ids"].numel() for batch in text_batches(tokenizer, written, length=8)) == 8
    for bad, message in (
        ({"texts": ["a b"], "packed": True}, "the texts have 3 tokens, and a window has 8"),
        ({"texts": []}, "no text of two tokens"),
        ({"texts": ["a"], "tokens": 4}, "got length 8 and 4 tokens"),
        ({"texts": None}, "texts are a list of strings, got None"),
        ({"texts": ["a b", {"text": "a"}]}, r'text 1 is no string .*: give a column, such as dataset\["text"\]'),
        ({"texts": [["a", "b"]]}, "text 0 is no string but"),
    ):
        with pytest.raises(GraphFilterError, match=message):
            text_batches(tokenizer, **{"length": 8, "tokens": 32, **bad})
    with pytest.raises(GraphFilterError, match="the first argument is the tokenizer itself"):
        text_batches("bert-base-uncased", written)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizer_stays_as_it_was(tokenizer, side):
    """Padding is that of the tokenizer where it has some, else by its last token."""
    tokenizer.padding_side = side
    written = ["a b c", "a b c d e"]
    (batch,) = text_batches(tokenizer, written, length=8, tokens=32)
    padded = tokenizer(sorted(written, key=len), padding=True, return_tensors="pt")
    assert all(torch.equal(batch[name], padded[name]) for name in ("input_ids", "attention_mask"))
    tokenizer.pad_token = None
    (batch,) = text_batches(tokenizer, written, length=8, tokens=32)
    assert torch.equal(batch["attention_mask"], padded["attention_mask"])
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.eos_token_id).all()
    assert tokenizer.pad_token is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_stream_of_texts_is_read_as_far_as_the_budget_needs(tokenizer, packed):
    """A stream without end: each text has five words and two special tokens, or packed an end."""
    asked = []

    def stream():
        while True:
            asked.append("a b c d e")
            yield asked[-1]

    batches = text_batches(tokenizer, stream(), length=8, packed=packed, at_most=100)
    assert len(asked) == math.ceil(100 / (6 if packed else 7))
    assert 100 - 8 < sum(batch["input_ids"].numel() for batch in batches) < 100 + 8


def test_a_tokenizer_that_was_made_of_nothing_is_refused(tmp_path, transformers_warnings):
    """transformers makes one of special tokens for a checkpoint that has none: every text would be the same."""
    FAMILIES["bert"].build().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    transformers_warnings.clear()
    with pytest.raises(GraphFilterError, match=r"knows 5 special tokens and no words.* load that of the original"):
        text_batches(tokenizer, ["a text"] * 9)
    with pytest.raises(GraphFilterError, match="texts are a list of strings, got 'a text'"):
        text_batches(tokenizer, "a text")
