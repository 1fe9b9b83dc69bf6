"""The losses that filters declare, and the blend, under the plain Trainer."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import FAMILIES, checkpointed, turn_on
from processes import run_two
from test_trainer import Toy, state
from torch.utils.data import IterableDataset
from transformers import (
    BartForConditionalGeneration,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_graphfilter import (
    BlendSchedule,
    GraphFilterError,
    OrthogonalityCallback,
    RegularizerCallback,
    collect_penalties,
    filter_status,
    functional,
    orthogonality_loss,
    patch_model,
)
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.training.loss_gradients import GradientAdder

GAMMA = 0.5


def model(name="bert", model_class=BertForSequenceClassification, **options):
    torch.manual_seed(0)
    built = dataclasses.replace(FAMILIES[name], model_class=model_class).build().double()
    return turn_on(patch_model(built, "agf", **options))


class Padded(Toy):
    """Rows of one length, some of them with padding."""

    def __init__(self, rows=16, causal=False):
        super().__init__(rows)
        self.causal = causal

    def __getitem__(self, i):
        item = super().__getitem__(i)
        mask = torch.ones(10, dtype=torch.long)
        mask[10 - i % 4 :] = 0
        labels = item["input_ids"] if self.causal else item["labels"]
        return {"input_ids": item["input_ids"], "attention_mask": mask, "labels": labels}


def batch_of(rows, causal=False):
    data = Padded(causal=causal)
    return {k: torch.stack([torch.as_tensor(data[i][k]) for i in rows]) for k in data[0]}


def train(path, patched, *, gamma=GAMMA, data=None, callbacks=(), compute_loss_func=None, trainer=Trainer, **options):
    """SGD with rate 1: the change of the parameters is minus the gradient."""
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no", **options}
    args = TrainingArguments(
        output_dir=str(path),
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        **options,
    )
    added = [] if gamma is None else [OrthogonalityCallback(gamma)]
    t = trainer(
        patched,
        args,
        train_dataset=data or Padded(),
        eval_dataset=Padded(4),
        callbacks=[*callbacks, *added],
        compute_loss_func=compute_loss_func,
    )
    before = state(patched)
    t.train()
    return {k: before[k] - v for k, v in state(patched).items() if v.is_floating_point()}, t


def by_hand(patched, batch, gamma=GAMMA, norm="mean_abs"):
    patched.train()
    with collect_penalties(patched, {"orthogonality": gamma}, {"orthogonality": {"norm": norm}}) as penalties:
        loss = patched(**batch).loss
    (loss + penalties.total()).backward()
    return {n: p.grad for n, p in patched.named_parameters() if p.grad is not None}


def assert_equal(found, expected):
    assert any("graph_filter" not in n for n in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-10, rtol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("norm", ["mean_abs", "frobenius"])
def test_the_loop_by_hand_is_equation_12(norm):
    patched, batch, seen = model().train(), batch_of(range(8)), []
    for row in filter_status(patched):
        module = patched.get_submodule(row.module)
        module.key.register_forward_hook(lambda _, __, out: seen.append(out))
        module.query.register_forward_hook(lambda _, __, out: seen.append(out))
    with collect_penalties(patched, options={"orthogonality": {"norm": norm}}) as penalties:
        patched(**batch)
    split = [x.unflatten(-1, (4, 8)).transpose(1, 2) for x in seen]  # query, key of every layer
    losses = [
        functional.orthogonality_loss(u, v, batch["attention_mask"], norm=norm)
        for u, v in zip(split[::2], split[1::2], strict=True)
    ]
    torch.testing.assert_close(penalties.losses()["orthogonality"], torch.stack(losses).mean())
    torch.testing.assert_close(penalties.total(), 1e-2 * torch.stack(losses).mean())


def test_the_callback_adds_the_same_gradient(tmp_path):
    found, t = train(tmp_path, model())
    assert_equal(found, by_hand(model(), batch_of(range(8))))
    plain, _ = train(tmp_path, model(), gamma=None)
    assert any((found[n] - plain[n]).abs().max() > 1e-4 for n in found), "it adds nothing"
    assert all(graph_filter.recorder is None for _, graph_filter in filters_of(t.model))


class Interrupted(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 1 and not hasattr(self, "interrupted"):
            self.interrupted = True
            raise KeyboardInterrupt
        return loss


def test_nothing_is_added_after_an_interruption(tmp_path):
    patched, batch = model(), batch_of(range(8))
    trainers = []

    class Kept(Interrupted):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, patched, trainer=Kept, max_steps=3)
    assert all(graph_filter.recorder is None for _, graph_filter in filters_of(patched))
    (trainer,), before = trainers, state(patched)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "ortho_loss" in trainer.state.log_history[0], "the same Trainer goes on with it"
    assert all(graph_filter.recorder is None for _, graph_filter in filters_of(patched))
    assert not torch.equal(state(patched)["classifier.weight"], before["classifier.weight"])
    assert trainer.training_step(patched.train(), batch).isfinite(), "the Trainer's own again"
    assert trainer.training_step.__func__ is Trainer.training_step


def test_the_weight_of_the_config(tmp_path):
    found, _ = train(tmp_path, model(gamma=0.25), gamma=None, callbacks=[OrthogonalityCallback()])
    assert_equal(found, by_hand(model(), batch_of(range(8)), gamma=0.25))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_without_gradients_are_not_counted(tmp_path, checkpointing):
    """As a loss makes them that looks up what the model itself, with dropout, would say."""

    def prepared():
        return checkpointed(model(), False) if checkpointing else model()

    class Asking(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            with torch.no_grad():
                model(**inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    expected, _ = train(tmp_path, prepared())
    found, _ = train(tmp_path, prepared(), trainer=Asking)
    assert_equal(found, expected)


def test_a_pass_of_a_reference_is_no_part_of_the_mean():
    """It runs the same model without gradients, with checkpointing switched off."""
    layer = torch.nn.Linear(2, 2)
    added, config = GradientAdder({"loss": 1.0}, {}, [layer]), SimpleNamespace(config=SimpleNamespace(penalties={}))
    for layer.gradient_checkpointing in (False, True):
        with torch.no_grad():
            added(config, torch.ones(1), {"loss": lambda: torch.ones(())})
    assert (dict(added.applications), dict(added.others)) == ({"loss": 1}, {"loss": 1})


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_once(tmp_path, reentrant, transformers_warnings):
    found, t = train(tmp_path, checkpointed(model(), reentrant))
    transformers_warnings.clear()  # use_cache is switched off
    assert_equal(found, by_hand(model(), batch_of(range(8))))
    _, whole = train(tmp_path, model())
    assert t.state.log_history[0]["ortho_loss"] == pytest.approx(whole.state.log_history[0]["ortho_loss"])


def nothing(outputs, labels, num_items_in_batch=None):
    return 0.0 * outputs.logits.sum()


@pytest.mark.parametrize("rows", [16, 12])
def test_accumulation_averages(tmp_path, rows):
    """Only the orthogonality loss; with 12 rows an epoch ends with a single batch of 4."""
    found = []
    for batch, steps in ((8, 1), (4, 2)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 2}
        found.append(train(tmp_path, model(), data=Padded(rows), compute_loss_func=nothing, **options)[0])
    assert_equal(*found)


def test_a_stream_that_ends_within_an_accumulation(tmp_path):
    """Its last batch counts as the Trainer counts it in the loss."""

    class Stream(IterableDataset):
        def __iter__(self):
            return map(Padded(12).__getitem__, range(12))

    batches, weights = set(), set()

    class Weighing(Trainer):
        def training_step(self, *args, **kwargs):
            callback = next(c for c in self.callback_handler.callbacks if isinstance(c, OrthogonalityCallback))
            batches.add(self.current_gradient_accumulation_steps)
            weights.add(callback.added.scale * self.current_gradient_accumulation_steps)
            return super().training_step(*args, **kwargs)

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    train(tmp_path, model(), data=Stream(), trainer=Weighing, **options)
    assert (batches, weights) == ({1, 2}, {1.0})


def test_accumulation_with_a_causal_model(tmp_path, transformers_warnings):
    found = []
    for batch, steps in ((8, 1), (4, 2)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 2}
        found.append(train(tmp_path, model("gpt2", GPT2LMHeadModel), data=Padded(causal=True), **options)[0])
    transformers_warnings.clear()  # about loss_type
    assert_equal(*found)


def test_label_smoothing_and_a_loss_of_ones_own(tmp_path):
    ortho = by_hand_ortho()
    for options in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": nothing}):
        with_it, plain = (train(tmp_path, model(), gamma=g, **options)[0] for g in (GAMMA, None))
        assert_equal({n: with_it[n] - plain[n] for n in ortho}, ortho)


def by_hand_ortho():
    patched = model().train()
    with collect_penalties(patched, {"orthogonality": GAMMA}) as penalties:
        patched(**batch_of(range(8)))
    penalties.total().backward()
    return {n: p.grad for n, p in patched.named_parameters() if p.grad is not None}


def test_encoder_decoder(tmp_path, transformers_warnings):
    found, _ = train(tmp_path, model("bart", BartForConditionalGeneration), data=Padded(causal=True))
    assert_equal(found, by_hand(model("bart", BartForConditionalGeneration), batch_of(range(8), causal=True)))
    transformers_warnings.clear()


def test_shared_layers_are_averaged():
    """ALBERT runs one module three times: the mean is over the runs, by hand and by the callback."""
    patched = turn_on(patch_model(FAMILIES["albert"].build().double(), "agf")).train()
    ((_, graph_filter),) = filters_of(patched)
    weight, inputs, gradients = patched.encoder.embedding_hidden_mapping_in.weight, FAMILIES["albert"].inputs(), []
    with collect_penalties(patched, {"orthogonality": 1.0}) as penalties:
        patched(**inputs)
    penalties.total().backward()
    gradients.append(weight.grad.clone())
    patched.zero_grad()
    graph_filter.recorder = GradientAdder({"orthogonality": 1.0}, {})
    (0 * patched(**inputs).last_hidden_state.sum()).backward()
    assert graph_filter.recorder.counts == {"orthogonality": 3}
    torch.testing.assert_close(weight.grad, *gradients)


def test_bf16(tmp_path):
    torch.manual_seed(0)
    patched = patch_model(BertForSequenceClassification(FAMILIES["bert"].config), "agf")
    found, t = train(tmp_path, patched, bf16=True)
    assert all(g.isfinite().all() for g in found.values())
    assert t.state.log_history[0]["ortho_loss"] > 0


def test_the_gradient_is_scaled_as_the_loss_is():
    """With float16 a GradScaler multiplies the loss; the optimizer divides the gradients by the same."""

    class Optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    callback, args = OrthogonalityCallback(), TrainingArguments(report_to="none", gradient_accumulation_steps=4)
    Optimizer.scaler.scale(torch.ones(1))
    callback.on_step_begin(args, type("S", (), {"global_step": 0}), None, optimizer=Optimizer())
    assert callback.added.scale == 256.0


class Reporter(TrainerCallback):
    """Stands in the list before the callback, as every reporter does."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_it_is_logged_where_the_loss_is(tmp_path):
    reporter = Reporter()
    _, t = train(tmp_path, model(), callbacks=[reporter], max_steps=3)
    for logged in (t.state.log_history, reporter.seen):
        assert ["ortho_loss" in entry for entry in logged] == [True, True, True, False]
    patched = model().train()
    with collect_penalties(patched) as penalties:
        patched(**batch_of(range(8)))
    assert t.state.log_history[0]["ortho_loss"] == pytest.approx(penalties.losses()["orthogonality"].item())


def test_a_filter_that_takes_no_part_has_no_loss():
    """Within its window, where the text goes through the attention itself; a longer text has one again."""
    trained, batch = model(window=16, far="beyond").train(), batch_of([4])
    with collect_penalties(trained) as penalties:
        loss = trained(**batch).loss
    assert penalties.losses() == {}
    (loss + penalties.total()).backward()
    ids = torch.randint(5, 99, (2, 20))
    with collect_penalties(trained) as penalties:
        trained(input_ids=ids)
    assert penalties.total() > 0


def test_a_weight_of_zero_has_no_part_in_the_mean(tmp_path):
    """By hand and by the callback: two of three layers count."""

    def make():
        torch.manual_seed(0)
        built = dataclasses.replace(FAMILIES["bert"], model_class=BertForSequenceClassification).build().double()
        patch_model(built, "agf", gamma=GAMMA, layers=[0, 2])
        return turn_on(patch_model(built, "agf", gamma=0.0, layers=[1]))

    by_trainer, trainer = train(tmp_path, make(), gamma=None, callbacks=[OrthogonalityCallback()])
    patched = make().train()
    with collect_penalties(patched) as penalties:
        loss = patched(**batch_of(range(8))).loss
    (loss + penalties.total()).backward()
    assert_equal(by_trainer, {n: p.grad for n, p in patched.named_parameters() if p.grad is not None})
    logged = trainer.state.log_history[0]["ortho_loss"]
    assert logged == pytest.approx(penalties.losses()["orthogonality"].item())
    with pytest.raises(GraphFilterError, match="declare has weight 0"), collect_penalties(model(gamma=0.0)):
        pass


def test_nothing_is_kept_where_nobody_asks(monkeypatch):
    monkeypatch.setattr(functional, "orthogonality_loss", lambda *a, **k: pytest.fail("it was computed"))
    patched = model().train()
    before = [dict(vars(graph_filter)) for _, graph_filter in filters_of(patched)]
    loss = patched(**batch_of(range(8))).loss
    assert [dict(vars(graph_filter)) for _, graph_filter in filters_of(patched)] == before
    loss.backward()


def test_evaluation_costs_nothing(tmp_path, monkeypatch):
    calls = []
    original = functional.orthogonality_loss
    monkeypatch.setattr(functional, "orthogonality_loss", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    _, t = train(tmp_path, model(), eval_strategy="steps", eval_steps=1)
    assert len(calls) == 3  # one a layer, for the only training batch
    t.evaluate()
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OrthogonalityCallback(gamma=-1.0), "gamma must be >= 0, got -1.0"),
        (lambda: RegularizerCallback({"diagonal": math.nan}), "the weight of diagonal must be a number >= 0, got nan"),
        (lambda: RegularizerCallback({"diagonal": "1"}), "the weight of diagonal must be a number >= 0, got '1'"),
        (lambda: RegularizerCallback({"diagonal": True}), "the weight of diagonal must be a number >= 0, got True"),
        (
            lambda: collect_penalties(model(), {"orthogonality": -1.0}).__enter__(),
            "collect_penalties: the weight of or",
        ),
        (lambda: collect_penalties(model(), options={"sparsity": {}}).__enter__(), "declares a loss 'sparsity'"),
        (lambda: OrthogonalityCallback(norm="l1"), "norm='l1': use 'mean_abs' or 'frobenius'"),
        (lambda: BlendSchedule(start=0.5, end=0.5), "0 <= start < end <= 1"),
        (lambda: BlendSchedule(shape="step"), "shape='step': use 'linear' or 'cosine'"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(GraphFilterError, match=message):
        make()


def test_what_cannot_be_counted_right_is_refused(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(GraphFilterError, match="BertModel has no filter that declares a loss"):
        OrthogonalityCallback().on_train_begin(args, None, None, model=FAMILIES["bert"].build())
    args.deepspeed = "zero.json"
    with pytest.raises(GraphFilterError, match="DeepSpeed scales the loss"):
        OrthogonalityCallback().on_train_begin(args, None, None, model=model())
    args.deepspeed, args.deepspeed_plugin = None, SimpleNamespace()  # as `accelerate launch` sets it
    with pytest.raises(GraphFilterError, match="DeepSpeed scales the loss"):
        OrthogonalityCallback().on_train_begin(args, None, None, model=model())
    args.deepspeed_plugin, args._n_gpu = None, 2
    with pytest.raises(GraphFilterError, match="DataParallel is not supported"):
        OrthogonalityCallback().on_train_begin(args, None, None, model=model())
    args._n_gpu = 1
    with pytest.raises(GraphFilterError, match=r"every loss that the filters of .* declare has weight 0"):
        OrthogonalityCallback().on_train_begin(args, None, None, model=model(gamma=0.0))
    with pytest.raises(GraphFilterError, match="has no blended layer"):
        BlendSchedule().on_train_begin(args, TrainerState(max_steps=1), None, model=model())


def test_a_trainer_takes_one_callback_for_all_losses(tmp_path, transformers_warnings):
    """Each would replace the other in the filters, so that its losses were left out silently."""
    with pytest.raises(GraphFilterError, match="pass one RegularizerCallback with the weights of all losses"):
        train(tmp_path, model(), callbacks=[RegularizerCallback({"orthogonality": 1.0})])
    transformers_warnings.clear()  # transformers' own, if both have one class


class Interruption(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_a_callback_that_is_removed_after_an_interruption_adds_nothing(tmp_path):
    callback, interruption = OrthogonalityCallback(GAMMA), Interruption()
    patched, options = model(), {"gamma": None, "callbacks": [callback, interruption]}
    trainers = []

    class Kept(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, patched, trainer=Kept, **options)
    trainers[0].remove_callback(callback)
    trainers[0].remove_callback(interruption)
    patched.load_state_dict(model().state_dict())
    before = state(patched)
    trainers[0].train()
    expected, _ = train(tmp_path, model(), gamma=None)
    assert_equal({name: before[name] - tensor for name, tensor in state(patched).items()}, expected)
    assert "ortho_loss" not in trainers[0].state.log_history[0]


def test_the_loop_by_hand_says_what_is_missing(transformers_warnings):
    patched, batch = model(), batch_of(range(8))
    with pytest.raises(GraphFilterError, match=r"orthogonality_loss\(model\) was removed.*with collect_penalties"):
        orthogonality_loss(patched)
    with collect_penalties(patched) as penalties:
        patched(**batch)
    with pytest.raises(GraphFilterError, match="saw no training forward pass"):
        penalties.total()
    with collect_penalties(checkpointed(patched.train(), reentrant=True)) as penalties:
        patched(**batch)
    transformers_warnings.clear()  # use_cache is switched off
    with pytest.raises(GraphFilterError, match="use_reentrant=False or RegularizerCallback"):
        penalties.losses()
    with (
        pytest.raises(GraphFilterError, match="declares a loss 'sparsity'; declared are: orthogonality"),
        collect_penalties(patched, {"sparsity": 1.0}),
    ):
        pass
    with pytest.raises(GraphFilterError, match="no filter of BertModel declares a loss 'orthogonality'"):
        OrthogonalityCallback(1.0).on_train_begin(TrainingArguments(), None, None, model=FAMILIES["bert"].build())


def test_a_filter_names_its_losses_in_its_config():
    patched = model().train()
    ((_, graph_filter), *_) = filters_of(patched)
    with (
        collect_penalties(patched),
        pytest.raises(GraphFilterError, match=r"AGF penalises 'size', but AGFConfig.penalties gives weights for ortho"),
    ):
        graph_filter.penalised(torch.ones(1), size=lambda: torch.ones(1))


DDP = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_penalties import Padded, model, nothing, train
options = {{"max_steps": 2, "per_device_train_batch_size": 4, "ddp_backend": "gloo"}}
found, t = train({path!r}, model(), data=Padded(16), compute_loss_func=nothing, **options)
if t.args.process_index == 0:
    torch.save({{k: v for k, v in found.items()}}, {path!r} + "/found.pt")
"""


@pytest.mark.slow
def test_ddp_on_two_processes(tmp_path):
    """Two processes with batches of 4: the gradients of one with batches of 8 (of the orthogonality loss alone, since
    transformers itself counts the loss of a classifier twice there)."""
    script = tmp_path / "job.py"
    script.write_text(DDP.format(tests=str(Path(__file__).parent), path=str(tmp_path)))
    run_two(script, PYTHONWARNINGS="ignore")
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    expected, _ = train(tmp_path, model(), data=Padded(16), compute_loss_func=nothing, max_steps=2)
    assert_equal(found, expected)


# ------------------------------------------------------------------------------------------------------- the blend


def test_the_best_of_a_blend_is_without_attention(tmp_path):
    """The loss is made to rise from step to step, so that the first checkpoint would win."""
    steps = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 10}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "rising", "greater_is_better": False}
    seen = []

    class Rising(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_rising"] = float(state.global_step)
            seen.append(state.best_metric)

    callbacks = [Rising(), EarlyStoppingCallback(2), BlendSchedule(end=0.6)]
    patched = model(init="blend")
    _, t = train(tmp_path, patched, gamma=None, callbacks=callbacks, **steps, **best)
    assert seen == [None, None, None, 6.0, 6.0], "the gate is 1 after 6 steps of 10"
    assert t.state.best_model_checkpoint.endswith("checkpoint-6")
    assert filter_status(patched)[0].coefficients["gate"][0] == 1


def test_blend_schedule(tmp_path):
    gates = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            gates.append(filter_status(model)[0].coefficients["gate"][0].item())

    schedule = BlendSchedule(start=0.2, end=0.6)
    _, t = train(tmp_path, model(init="blend"), gamma=None, callbacks=[schedule, Watch()], max_steps=10)
    assert gates == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1])
    assert [e["blend_gate"] for e in t.state.log_history[:10]] == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    cosine = BlendSchedule(end=1.0, shape="cosine")
    patched = model(init="blend")
    cosine._set(patched, type("S", (), {"global_step": 5, "max_steps": 10}))
    assert cosine.gate == pytest.approx(0.5)
