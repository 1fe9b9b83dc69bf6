"""Attention transfer: what it changes, what it leaves, how it stops and goes on."""

import copy
import dataclasses
import json
import math
import re
import signal
import warnings

import pytest
import torch
from deaths import deaths, some
from models import FAMILIES, TOKENS, output, realigned, turn_on
from safetensors.torch import save_file
from transformers import BartForConditionalGeneration, BertModel, GPT2LMHeadModel, T5ForConditionalGeneration

from hf_graphfilter import (
    AGFConfig,
    GFSAConfig,
    GraphFilterError,
    drop_blend,
    filter_parameters,
    filter_status,
    patch_model,
    set_blend,
    transfer_attention,
    unpatch_model,
)
from hf_graphfilter.files import locked, read_state
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.fitting import fit as call
from hf_graphfilter.fitting.checkpoint import EARLIER_FILE, LOCK, STATE_FILE, Checkpoint
from hf_graphfilter.fitting.objectives import DISTANCES, filter_errors, fit_end_to_end, original_of, regress
from hf_graphfilter.fitting.run import MOST_SKIPPED, StageRun
from hf_graphfilter.fitting.weights import only_filters

AGF = AGFConfig(correction=True, theta="per_head", position_bias="drop")


def patched(name="bert", config=AGF, model_class=None):
    torch.manual_seed(0)
    family = FAMILIES[name]
    return patch_model(
        dataclasses.replace(family, model_class=model_class or family.model_class).build().double(), config
    )


def batches(name="bert", count=6, padded=True):
    made = []
    for i in range(count):
        inputs = FAMILIES[name].inputs(torch.float64)
        for key in ("input_ids", "decoder_input_ids"):
            if key in inputs:
                inputs[key] = (inputs[key] * (i + 3) + i) % 90 + 5
        if padded and "attention_mask" in inputs:
            inputs["attention_mask"][1, -2:] = 0
        made.append(inputs)
    return made


def run(model, data, **options):
    options = {"steps": 30, "holdout": 2, "eval_every": 10, "progress": False, **options}
    return transfer_attention(model, data, **options)


def parameters(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


# attention of a random Llama is nearly uniform, that of a random T5 nearly one-hot: nothing could be gained
SHARPER = {"llama": ("q_proj.weight", 9.0), "t5": ("Attention.q.weight", 0.05)}


@pytest.mark.parametrize(
    ("name", "init"),
    [
        pytest.param(name, init, marks=[pytest.mark.slow] * (init == "blend" and name != "bert"))
        for name in ("bert", "albert", "gpt2", "llama", "bart", "t5", "vit", "clip")
        for init in ("copy", "blend")
    ],
)
def test_only_filters_change_and_they_come_closer(name, init):
    model = patched(name, AGFConfig(correction=True, window=1, init=init, position_bias="drop")).train()
    queries, factor = SHARPER.get(name, ("none", 1.0))
    for key, parameter in model.named_parameters():
        parameter.data *= factor if key.endswith(queries) else 1.0
    before, inputs = parameters(model), FAMILIES[name].inputs(torch.float64)
    original = output(unpatch_model(copy.deepcopy(model)).eval(), inputs)
    report = run(model, batches(name))
    assert report.mean_after < (1.0 if name in ("llama", "t5") else 0.9) * report.mean_before
    assert set(report.after) == {row.module for row in filter_status(model)}
    assert report.steps == 30
    assert report.stopped == "all steps made"
    assert [step for step, _ in report.history] == [0, 10, 20, 30]
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all("graph_filter" in k and not k.endswith("gate") for k in changed)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    if init == "blend":
        assert torch.equal(output(model.eval(), inputs), original)
    assert torch.equal(output(unpatch_model(model).eval(), inputs), original)


def test_a_polynomial_can_be_fitted_too():
    model = turn_on(patched("llama", GFSAConfig(learn=("w_0", "w_K"))))
    report = run(model, batches("llama"))
    assert report.mean_after < 0.9 * report.mean_before


def test_the_report_is_what_the_model_does():
    """The error against explicit attention, measured by hand on one module."""
    model, data = patched(), batches(padded=False)
    report = run(model, data)
    text = str(report)
    assert "encoder.layer.0.attention.self" in text
    assert f"{report.mean_after:.3f}" in text
    name = "encoder.layer.0.attention.self"
    plain = unpatch_model(copy.deepcopy(model))
    found, wanted = [], []
    for m, kept in ((model, found), (plain, wanted)):
        m.get_submodule(name).register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[0]))
        with torch.no_grad():
            for batch in data[:2]:
                m.eval()(**batch)
    found, wanted = torch.cat(found), torch.cat(wanted)
    assert ((found - wanted).norm() / wanted.norm()).item() == pytest.approx(report.after[name], rel=1e-5)


def test_padding_is_not_counted():
    model, data = patched(), batches()
    garbled = [{**b, "input_ids": b["input_ids"].clone()} for b in data]
    for b in garbled:
        b["input_ids"][1, -2:] = 7
    for b in data:
        b["input_ids"][1, -2:] = 42
    assert run(copy.deepcopy(model), data).after == pytest.approx(run(model, garbled).after, rel=1e-3)


def test_kinds_of_batches():
    tensors = [b["input_ids"] for b in batches()]
    labelled = [{"input_ids": t, "labels": torch.zeros(2)} for t in tensors]
    reports = [run(patched(), data, steps=10) for data in (tensors, labelled, (t for t in 2 * tensors))]
    assert reports[0].after == reports[1].after
    short = run(patched(), (t for t in tensors), steps=10)
    assert short.stopped == "the batches ended at step 4 (an iterator gives them once)"
    assert short.mean_after < short.mean_before
    assert reports[2].stopped == "all steps made"
    held = run(patched(), tensors[2:], steps=10, holdout=tensors[:2])
    assert held.after == reports[0].after


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"there are 0 batches, and holdout=2 asks for more"),
        ([torch.ones(1, 4, dtype=torch.long)] * 2, "no batch is left that is not held out"),
        ([{"labels": torch.zeros(2)}] * 6, r"a batch holds \['labels'\] and no input of the model"),
        ([["text"]] * 6, "got list: hf_graphfilter.fitting.text_batches makes"),
        (["text"] * 6, "got str: hf_graphfilter.fitting.text_batches makes"),
        ([3] * 6, "a batch is a dict of the model's arguments or a tensor, got int$"),
        ([{"x": 1}] * 6, "BertModel does not run on a batch without tensors: "),
    ],
)
def test_bad_data(data, message):
    model = patched()
    before = parameters(model)
    with pytest.raises(GraphFilterError, match=message):
        run(model, data)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_bad_arguments():
    with pytest.raises(GraphFilterError, match="has no graph filter"):
        run(FAMILIES["bert"].build(), batches())
    with pytest.raises(GraphFilterError, match="steps must be a whole number >= 1, got 0"):
        run(patched(), batches(), steps=0)
    second = {"end_to_end": "hidden", "end_to_end_steps": -1}
    for options in ({"steps": 2.5}, {"steps": "3"}, {"eval_every": 0}, {"eval_every": "9"}, second):
        with pytest.raises(GraphFilterError, match=f"{[*options][-1]} must be a "):
            run(patched(), batches(), **options)
    for rate in ("1e-2", -1, None, float("nan")):
        with pytest.raises(GraphFilterError, match="lr must be a finite learning rate >= 0"):
            run(patched(), batches(), lr=rate)
    with pytest.raises(GraphFilterError, match="patience must be a number of measurements >= 1 or None, got '2'"):
        run(patched(), batches(), patience="2")
    with pytest.raises(GraphFilterError, match=r"checkpoint must be a directory, and .* is a file"):
        run(patched(), batches(), checkpoint=__file__)
    with torch.inference_mode(), pytest.raises(GraphFilterError, match="cannot be fitted inside torch"):
        run(patched(), batches())
    legal = {"steps": 2.0, "filter_lr": 0, "eval_every": float("inf"), "end_to_end_lr": None}
    assert run(patched(), batches(), **legal).steps == 2
    only_second = run(patched(), batches(), steps=0, end_to_end="hidden", end_to_end_steps=3)
    assert only_second.steps == 3
    with pytest.raises(GraphFilterError, match="end_to_end='probabilities': use 'hidden', 'logits' or None"):
        run(patched(), batches(), end_to_end="probabilities")
    with pytest.raises(GraphFilterError, match="returns no logits; use 'hidden'"):
        run(patched(), batches(), end_to_end="logits")
    exhausted = iter(batches())
    list(exhausted)
    with pytest.raises(GraphFilterError, match="no batch is left"):
        run(patched(), exhausted, holdout=batches())
    with pytest.raises(GraphFilterError, match="no parameters that could be fitted"):
        run(patched("bert", AGFConfig(K=0)), batches())


def test_nan_keeps_the_best_state_so_far():
    poison = patched("vit")
    images = [{"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)} for _ in range(20)]
    images[16]["pixel_values"][:] = torch.nan
    report = run(poison, images, steps=40, eval_every=5)
    assert report.stopped == "non-finite loss at step 15, best state kept"
    assert report.mean_after < report.mean_before
    assert all(p.isfinite().all() for p in filter_parameters(poison))
    diverged = patched()
    report = run(diverged, batches(), lr=1e30, filter_lr=1e30)
    assert report.mean_after <= report.mean_before
    assert all(p.isfinite().all() for p in filter_parameters(diverged))


@pytest.mark.parametrize("count", [1, 12])
def test_a_step_with_an_infinite_gradient_is_skipped(count, monkeypatch, transformers_warnings):
    regress, steps = call.regress, []

    def overflow(model, modules, batch):
        errors = regress(model, modules, batch)
        steps.append(1)
        if 3 <= len(steps) < 3 + count:
            next(filter_parameters(model)).grad.view(-1)[0] = math.inf
        return errors

    monkeypatch.setattr(call, "regress", overflow)
    model = patched()
    report = run(model, batches())
    ended = count >= MOST_SKIPPED
    assert report.stopped == ("non-finite gradients up to step 12, best state kept" if ended else "all steps made")
    assert report.steps == (12 if ended else 30)
    assert report.mean_after < report.mean_before
    assert len(transformers_warnings) == min(count, MOST_SKIPPED)
    assert transformers_warnings[0] == "step 3 of the stage 'attention' is skipped: its gradients are not finite"
    transformers_warnings.clear()


def test_early_stop():
    slow = {"lr": 1e-12, "filter_lr": 1e-12, "patience": 2}
    report = run(patched(), batches(), steps=500, **slow)
    assert report.stopped == "no improvement"
    assert report.steps == 20
    report = run(patched(), batches(), steps=500, **slow, end_to_end="hidden", end_to_end_steps=5)
    assert report.stopped == "all steps made", "the second stage made them"


@torch.no_grad()
def test_gradients_may_be_switched_off_around_a_transfer():
    report = run(patched(), batches(), end_to_end="hidden")
    assert report.history[3][1] < report.history[0][1]
    assert report.history[-1][1] < report.history[4][1]


class Once:
    """Batches that can be read once, of a class that is no iterator."""

    def __init__(self, data):
        self.data = iter(data)

    def __iter__(self):
        return self.data


def test_batches_that_can_be_read_once_end():
    assert run(patched(), Once(batches()), holdout=batches()[:2]).stopped.startswith("the batches ended at step 6")


def test_progress_counts_also_where_batches_reach_some_filters_only(tmp_path, monkeypatch, ctrl_c):
    """AdamW then counts fewer steps than the fit."""

    class Either(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

        def forward(self, x, which):
            return self.parts[which](x, x, x, need_weights=False)

    def build():
        torch.manual_seed(0)
        return patch_model(Either().double(), "agf", correction=True)

    data = [{"x": torch.randn(2, 6, 16, dtype=torch.float64), "which": i % 2} for i in range(8)]
    expected, advance = run(build(), data, steps=10), StageRun._advance

    def stop(self, *arguments):
        if self.step == 7:
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_advance", stop)
        with pytest.raises(KeyboardInterrupt):
            run(build(), data, steps=10, checkpoint=tmp_path)
    assert run(build(), data, steps=10, checkpoint=tmp_path).history == expected.history


class Interrupted(Exception):
    pass


def until(data, count):
    """Batches in a list that fails after some."""

    class Failing(list):
        def __iter__(self):
            for i, batch in enumerate(list.__iter__(self)):
                if i >= count:
                    raise Interrupted
                yield batch

    return Failing(data)


@pytest.mark.parametrize("stop", [10, 47, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (25, 36))])
def test_an_interrupted_transfer_goes_on(tmp_path, stop):
    data, options = batches(count=60), {"end_to_end": "hidden", "end_to_end_steps": 20, "checkpoint": tmp_path / "a"}
    whole = patched()
    expected = run(whole, data, **{**options, "checkpoint": tmp_path / "b"})
    first = patched()
    source = batches(count=60)
    if stop < 30:  # within the first stage
        with pytest.raises(Interrupted):
            run(first, until(source, stop + 2), **options)
    else:  # within the second, which begins with the first batch again

        class Second(list):
            passes = 0

            def __iter__(self):
                Second.passes += 1
                return iter(until(source, stop - 28) if Second.passes > 3 else source)

        with pytest.raises(Interrupted):
            run(first, Second(source), **options)
    second = patched()
    found = run(second, data, **options)
    assert found.after == pytest.approx(expected.after, rel=1e-5)
    assert found.before == expected.before
    assert found.history == [(s, pytest.approx(e, rel=1e-5)) for s, e in expected.history]
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize(("dtype", "stop"), [(torch.float32, 10), (torch.bfloat16, 27)])
def test_an_error_leaves_the_model_as_it_was(dtype, stop):
    model = patched().to(dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Interrupted):
        run(model, until(batches(count=60), stop))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    assert all(p.requires_grad for p in model.parameters())


@some(3)
def test_a_transfer_that_dies_at_a_write_is_fitted_to_the_same_end(points, tmp_path):
    options = {"steps": 5, "eval_every": 2, "end_to_end": "hidden", "end_to_end_steps": 2, "filter_lr": 0.1}

    def command(folder):
        model = patched()
        report = run(model, batches(), checkpoint=folder, **options)
        return parameters(model), report.history, report.after, report.before, report.steps

    for folder, (weights, *report) in deaths(tmp_path, points, command):
        found, *other = command(folder)
        assert other == report, folder
        assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


def damaged_progress(folder):
    """Ways to damage the progress in a folder, of this code and of earlier code, with what is said of each."""
    file = folder / STATE_FILE
    data, (content, tensors) = file.read_bytes(), read_state(file)
    for size in (0, 7, 40, len(data) // 2, len(data) - 1):
        yield lambda size=size: file.write_bytes(data[:size])
    place = len(data) - 100
    yield lambda: file.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    yield lambda: file.write_bytes(data.replace(b'\\"step\\": 4', b'\\"step\\": 9'))
    earlier = folder / EARLIER_FILE
    texts = ["", "{", "[]", "null", '{"a":' * 100_000]
    for name in content:
        others = [None, -3, 10**9, 10**400, math.nan, "x", [[]], {"x": []}, [1, 2], [[1, 2, 3]], True]
        texts += [json.dumps({**content, name: x}) for x in others if name not in ("best", "stopped") or not x]
        texts.append(json.dumps({k: v for k, v in content.items() if k != name}))
    for text in texts:
        yield lambda text=text: (save_file(tensors, file), earlier.write_text(text))
    yield lambda: (save_file(tensors, file), earlier.unlink(missing_ok=True))
    yield lambda: (file.unlink(), earlier.write_text(json.dumps(content)))


def test_damaged_progress_is_ignored_and_named(tmp_path):
    data, options = batches(), {"steps": 4, "eval_every": 2, "checkpoint": tmp_path}
    expected = run(patched(), data, **options)
    kept = Checkpoint(tmp_path, read_state(tmp_path / STATE_FILE)[0]["settings"])
    ways = [*damaged_progress(tmp_path)]
    for damage in ways:
        damage()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                whole = kept.read()
            except GraphFilterError as error:
                whole = str(error)
        if whole is None:
            assert len(said) == 1
            assert re.match(r"progress is ignored, and the fit begins again: .*transfer", str(said[0].message))
        assert not isinstance(whole, str) or "progress of another transfer" in whole
    ways[0]()
    with pytest.warns(UserWarning, match="progress is ignored, and the fit begins again"):
        found = run(patched(), data, **options)
    assert found.history == expected.history


def test_one_call_at_a_time_has_a_directory(tmp_path):
    model = patched()
    before = parameters(model)
    busy = pytest.raises(GraphFilterError, match=r"another command is fitting .* is locked")
    with locked(tmp_path / LOCK, work="testing"), busy:
        run(model, batches(), checkpoint=tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in parameters(model).items())
    run(model, batches(), steps=2, checkpoint=tmp_path)


def test_progress_that_earlier_code_wrote_goes_on(tmp_path):
    """It counted steps only."""
    data = batches(count=60)
    expected = run(patched(), data)
    with pytest.raises(Interrupted):
        run(patched(), until(data, 27), checkpoint=tmp_path)
    progress, tensors = read_state(tmp_path / STATE_FILE)
    assert progress.pop("used") == progress["step"] == 20
    assert progress.pop("before_it") == progress["earlier_steps"] == 0
    (tmp_path / EARLIER_FILE).write_text(json.dumps(progress))  # in a file of its own
    save_file(tensors, tmp_path / STATE_FILE)
    found = run(patched(), data, checkpoint=tmp_path)
    assert found.history == [(s, pytest.approx(e, rel=1e-5)) for s, e in expected.history]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(patched(), batches(), checkpoint=tmp_path)
    other = patched()
    other.encoder.layer[0].output.dense.weight.data[0] += 1
    runs = {
        "lr": (patched(), batches(), {"lr": 1e-4}),
        "filters": (patched(config=dataclasses.replace(AGF, basis="chebyshev")), batches(), {}),
        "model": (other, batches(), {}),
        "held out": (patched(), batches()[::-1], {}),
    }
    for setting, (model, data, options) in runs.items():
        with pytest.raises(GraphFilterError, match=rf"progress of another transfer \({setting} differ\)"):
            run(model, data, checkpoint=tmp_path, **options)
    assert read_state(tmp_path / STATE_FILE)[0]["step"] == 30


def test_a_finished_stage_leaves_its_batches_behind(tmp_path, monkeypatch):
    """An iterator gives each batch once: what comes after an interruption is what would have come."""
    options = {"holdout": batches(count=2), "steps": 10, "end_to_end": "hidden", "end_to_end_steps": 5, "patience": 1}

    def fit(**more):
        shown = []

        def data():
            for batch in batches(count=20):
                shown.append(batch["input_ids"])
                yield batch

        report = run(patched(), data(), **options, **more)
        return report, shown

    expected, whole = fit()

    class Stopped(StageRun):
        def fit(self, *arguments):
            if self.stage.name == "end to end":
                raise Interrupted
            return super().fit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(call, "StageRun", Stopped)
        with pytest.raises(Interrupted):
            fit(checkpoint=tmp_path)
    found, shown = fit(checkpoint=tmp_path)
    assert len(shown) == len(whole)
    assert found.after == pytest.approx(expected.after, rel=1e-5)
    assert (found.steps, found.stopped) == (expected.steps, expected.stopped)


@pytest.mark.parametrize("of", ["logits", "hidden"])
def test_tokens_that_labels_leave_out_are_not_counted(of):
    """The decoder's tokens are made of the labels, and a mask of the encoder's says nothing of them."""
    model = patched("t5", AGF, T5ForConditionalGeneration)
    labels = torch.randint(5, 99, (2, TOKENS))
    labels[0, 3:] = -100
    batch = {**batches("t5")[0], "labels": labels}
    del batch["decoder_input_ids"]
    original = original_of(model, dict(filters_of(model)))
    wanted, found = original(batch), dict(model(**batch, output_hidden_states=True))
    distance = DISTANCES[of](found, wanted, batch)
    at = "logits" if of == "logits" else "decoder_hidden_states"
    outputs = found[at] if of == "hidden" else (found[at],)
    for states in outputs:
        states.data[0, 3:] += torch.randn_like(states[0, 3:])
    assert torch.equal(DISTANCES[of](found, wanted, batch), distance)
    outputs[-1].data[1, -1] += torch.randn_like(outputs[-1][1, -1])
    assert not torch.equal(DISTANCES[of](found, wanted, batch), distance)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_decoder_reads_what_the_model_makes_of_labels(name):
    kinds = {"t5": T5ForConditionalGeneration, "bart": BartForConditionalGeneration}
    model, seen = patched(name, AGF, kinds[name]), []
    embed = model.get_decoder().embed_tokens
    labels = torch.full((2, 4), 7)
    labels[1, 2:] = -100
    data = [{k: v for k, v in b.items() if not k.startswith("decoder")} | {"labels": labels} for b in batches(name)]
    model.eval()(**data[0])
    wanted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    transfer_attention(model, data, steps=1, holdout=2, progress=False)
    assert any(x.shape == wanted.shape and torch.equal(x, wanted) for x in seen)
    assert all(torch.equal(x, wanted) for x in seen if x.shape == wanted.shape)


def test_what_the_second_stage_lacks_is_said_before_the_first():
    model = patched()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GraphFilterError, match="returns no logits; use 'hidden'"):
        transfer_attention(model, batches(), steps=4, holdout=2, end_to_end="logits", progress=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    blend = patched(config=dataclasses.replace(AGF, init="blend"))
    with pytest.raises(GraphFilterError, match=r"all gates of this blend are 0: open them with set_blend\("):
        run(blend, batches(), end_to_end="hidden")
    assert run(set_blend(blend, 0.5), batches(), steps=0, end_to_end="hidden", end_to_end_steps=1).steps == 1
    with pytest.raises(GraphFilterError, match=r"BertModel does not run on input_ids \(1, 900\)"):
        transfer_attention(model, [{"input_ids": torch.ones(1, 900).long()}] * 3, steps=1, holdout=1, progress=False)


def test_end_to_end():
    for model_class, name, kind in ((GPT2LMHeadModel, "gpt2", "logits"), (GPT2LMHeadModel, "gpt2", "hidden")):
        model = patched(name, AGF, model_class)
        before = parameters(model)
        report = run(model, batches(name), end_to_end=kind, end_to_end_steps=30, end_to_end_lr=1e-3)
        second = [error for step, error in report.history[4:]]
        assert second[-1] < second[0]
        assert report.steps == 60
        changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
        assert all("graph_filter" in k for k in changed)


def test_gradients_of_the_whole_model_survive_float16():
    """Those of one token in many thousands would be zero."""
    ids, gradients = torch.randint(1, 90, (8, 512)), {}
    config = copy.deepcopy(FAMILIES["bert"].config)
    config.max_position_embeddings = 512
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model = patch_model(BertModel(config), AGF).eval().to(dtype)
        modules, frozen = dict(filters_of(model)), model.embeddings.word_embeddings.weight
        frozen.grad = torch.ones_like(frozen)  # of the user
        with only_filters(model, modules):
            fit_end_to_end(model, original_of(model, modules), "hidden", {"input_ids": ids})
            gradients[dtype] = torch.cat([p.grad.flatten() for f in modules.values() for p in f.parameters()])
        assert frozen.grad.eq(1).all()
    assert torch.cosine_similarity(*gradients.values(), dim=0) > 0.95


def test_a_batch_counts_the_same_in_float16_whatever_its_size():
    model, ids, gradients = patched().half(), torch.randint(1, 90, (2, TOKENS)), []
    modules = dict(filters_of(model))
    for rows in (ids, torch.cat([ids] * 4)):
        with only_filters(model, modules):
            regress(model, modules, {"input_ids": rows})
            gradients.append([p.grad for p in filter_parameters(model)])
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02 * max(g.abs().max() for g in gradients[0]).item())


def test_half_precision_models():
    model = patched().to(torch.bfloat16)
    types = {k: v.dtype for k, v in model.state_dict().items()}
    data = batches()
    report = run(model, data)
    assert report.mean_after < 0.9 * report.mean_before
    modules = dict(filters_of(model))
    assert report.after == filter_errors(model.eval(), modules, data[:2]), "after the filters were rounded"
    assert {k: v.dtype for k, v in model.state_dict().items()} == types


def test_blend_is_saved_at_any_gate_and_dropped_at_one(tmp_path):
    family = FAMILIES["bert"]
    model = patched("bert", AGFConfig(init="blend"))
    inputs = family.inputs()
    original = output(model, inputs)
    for gate in (0.0, 0.3, 1.0):
        expected = output(set_blend(model, gate), inputs)
        model.save_pretrained(tmp_path)
        loaded = realigned(type(model).from_pretrained(tmp_path))
        assert torch.equal(output(loaded, inputs), expected)
        assert filter_status(loaded)[0].coefficients["gate"].unique().tolist() == [pytest.approx(gate)]
    set_blend(model, 0.5)
    with pytest.raises(GraphFilterError, match=r"its gate is 0\.5, not 1"):
        drop_blend(model)
    set_blend(model, 1.0)
    torch.testing.assert_close(output(drop_blend(model), inputs), expected)
    assert "gate" not in filter_status(model)[0].coefficients
    model.save_pretrained(tmp_path)
    loaded = realigned(type(model).from_pretrained(tmp_path))
    assert torch.equal(output(loaded, inputs), output(model, inputs))
    with pytest.raises(GraphFilterError, match=r"has no blended layer; .* agf, .*kernelution, .*singularformer"):
        drop_blend(loaded)
    assert torch.equal(output(unpatch_model(loaded), inputs), original)


@pytest.mark.parametrize("stop", [10, 13, 29])
def test_ctrl_c_keeps_the_step_that_it_interrupts(tmp_path, stop, monkeypatch, ctrl_c):
    data, expected, steps = batches(), run(patched(), batches()), []
    advance = StageRun._advance

    def interrupted(self, *arguments):
        if self.step == stop:
            signal.raise_signal(signal.SIGINT)
        steps.append(self.step)
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(patched(), data, checkpoint=tmp_path)
    assert steps[-1] == stop, "the step was finished"
    assert read_state(tmp_path / STATE_FILE)[0]["step"] == stop + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    found = run(patched(), data, checkpoint=tmp_path)
    assert found.history == [(s, pytest.approx(e, rel=1e-5)) for s, e in expected.history]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_that_equal_their_attention_are_refused(backend, dtype):
    config = GFSAConfig(learn=("w_0", "w_1", "w_K"))
    model = patch_model(FAMILIES["bert"].build(backend), config).to(dtype)
    with pytest.raises(GraphFilterError, match=r"nothing to fit: every filter \(gfsa\) equals the attention"):
        run(model, batches())
    with pytest.raises(GraphFilterError, match="nothing to fit"):
        run(model, batches(), steps=0, end_to_end="hidden")
    mixed = patch_model(patch_model(FAMILIES["bert"].build(), config, layers=[0]), AGF, layers=[1, 2])
    assert run(mixed, batches()).mean_after < 0.9
