"""The filter's own learning rate: given, or said to be forgotten, whoever makes the optimizer."""

import copy
import gc
import subprocess
import sys
import weakref
from dataclasses import dataclass

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DummyOptim
from datasets import Dataset
from models import FAMILIES, turn_on
from test_pipelines import TEXTS, WORDS, tokenizer
from test_trainer import Toy, model
from torch import nn
from transformers import (
    BertForSequenceClassification,
    BertModel,
    HfArgumentParser,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_graphfilter import (
    FilterArgumentsMixin,
    FilterTrainingArguments,
    GraphFilterError,
    filter_optimizer,
    filter_parameters,
    filter_status,
    parameter_groups,
    patch_model,
    unpatch_model,
)
from hf_graphfilter.training.learning_rate import VARIABLE, rate_from_environment, split_filter_groups

QUIET = {
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
LITTLE = {**QUIET, "max_steps": 2, "learning_rate": 2e-5}
SHARED = "share the learning rate of the weights, 2e-05, which moves them by at most about 4e-05 in 2 steps"


def plain():
    return BertForSequenceClassification(FAMILIES["bert"].config)


def adapted(**options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model(), peft.LoraConfig(target_modules=["query"], **options))


def train(trained, args, kind=Trainer, **options):
    trainer = kind(trained, args, train_dataset=options.pop("train_dataset", None) or Toy(), **options)
    trainer.train()
    return trainer


def rates(optimizer, trained):
    """(peak rates of the coefficients, of everything else)."""
    own = {id(p) for p in filter_parameters(trained)}
    found = {True: set(), False: set()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[id(parameter) in own].add(group.get("initial_lr", group["lr"]))
    return found[True], found[False]


def before_patching():
    """An optimizer of the unpatched model, and the model, patched since."""
    made = unpatch_model(model())
    optimizer = torch.optim.AdamW(made.parameters(), lr=2e-5)
    return patch_model(made), {"optimizers": (optimizer, None)}


FORGOTTEN = {
    "no filter_optimizer": (lambda: (model(), {}), SHARED),
    "the optimizer was made before patching": (before_patching, "3 of 3 parameters of the graph filter are not in the"),
    "LoRA without modules_to_save": (lambda: (adapted(), {}), "the graph filter is frozen at its start values"),
    "all else is frozen": (lambda: (only_the_filter(model()), {}), SHARED),
}


def only_the_filter(trained):
    trained.requires_grad_(False)
    for parameter in filter_parameters(trained):
        parameter.requires_grad_(True)
    return trained


@pytest.mark.feature("Training: a forgotten learning rate is said", filter="gfsa", family="bert")
@pytest.mark.parametrize("case", FORGOTTEN)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_forgotten_rate_is_one_line(case, tmp_path, transformers_warnings):
    make, line = FORGOTTEN[case]
    trained, options = make()
    train(trained, TrainingArguments(tmp_path, **LITTLE), **options)
    (found,) = transformers_warnings
    assert line in found
    transformers_warnings.clear()


def frozen_after_training():
    return turn_on(adapted()), {}


GOOD = {
    "filter_optimizer": lambda args: (model(), {"optimizer_cls_and_kwargs": filter_optimizer(args)}),
    "LoRA that holds the filter": lambda args: (
        adapted(modules_to_save=["graph_filter"]),
        {"optimizer_cls_and_kwargs": filter_optimizer(args)},
    ),
    "parameter_groups": lambda args: with_groups(model()),
    "a filter that is kept as it was trained": lambda args: frozen_after_training(),
    "no filter": lambda args: (plain(), {}),
    "no learned coefficients": lambda args: (patch_model(plain(), w_K=0.1, learn=()), {}),
}


def with_groups(trained):
    return trained, {"optimizers": (torch.optim.AdamW(parameter_groups(trained, 2e-5)), None)}


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_good_run_says_nothing(case, tmp_path):
    args = TrainingArguments(tmp_path, **LITTLE)
    trained, options = GOOD[case](args)
    train(trained, args, **options)


def test_a_fast_rate_for_all_says_nothing(tmp_path):
    """As in training from scratch."""
    train(model(), TrainingArguments(tmp_path, **{**LITTLE, "learning_rate": 1e-2}))


@pytest.mark.feature("Training: FilterTrainingArguments", filter="gfsa", family="bert")
@pytest.mark.parametrize("patched", [True, False])
def test_the_arguments_give_the_rate(patched, tmp_path):
    trained = model() if patched else plain()
    trainer = train(trained, FilterTrainingArguments(tmp_path, **LITTLE, filter_lr=0.05))
    assert rates(trainer.optimizer, trained) == ({0.05} if patched else set(), {2e-5})
    trainer.train()  # and again
    assert rates(trainer.optimizer, trained) == ({0.05} if patched else set(), {2e-5})


def test_the_arguments_are_parsed_and_checked(tmp_path):
    parser = HfArgumentParser(FilterTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--filter_lr", "3e-2", "--use_cpu", "--output_dir", str(tmp_path)])
    assert args.filter_lr == 3e-2
    with pytest.raises(GraphFilterError, match="filter_lr must be a finite learning rate >= 0, got 'x'"):
        FilterTrainingArguments(tmp_path, filter_lr="x")
    with pytest.raises(GraphFilterError, match="optim='galore_adamw' makes parameter groups of its own"):
        train(model(), FilterTrainingArguments(tmp_path, **LITTLE, optim="galore_adamw"))


@pytest.mark.parametrize("ours", [True, False])
def test_a_hyperparameter_search_varies_the_rate(ours, tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    args = FilterTrainingArguments(tmp_path, **LITTLE)
    options = {"optimizer_cls_and_kwargs": filter_optimizer(args)} if ours else {}
    trainer = Trainer(None, args, model_init=lambda: model(), train_dataset=Toy(), eval_dataset=Toy(8), **options)
    found = []

    def objective(metrics):
        found.append(rates(trainer.optimizer, trainer.model)[0])
        return metrics["eval_loss"]

    trainer.hyperparameter_search(
        lambda trial: {"filter_lr": trial.suggest_float("filter_lr", 0.02, 0.05, step=0.03)},
        objective,
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"filter_lr": [0.02, 0.05]}),
    )
    assert {0.02, 0.05} == set.union(*found)
    assert all(len(rate) == 1 for rate in found)


class Own(Trainer):
    """Makes its optimizer without the help of transformers, as many do."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD([{"params": [p], "lr": 2e-5} for p in self.model.parameters()])
        return self.optimizer


class OwnWithoutResult(Own):
    """Returns nothing, as the Trainer does not ask for it."""

    def create_optimizer(self, model=None):
        super().create_optimizer(model)


class TensorRate(torch.optim.SGD):
    """Keeps its rates as tensors, as optimizers of torchao do."""

    def add_param_group(self, group):
        super().add_param_group(group)
        group["lr"] = torch.tensor(group["lr"])


class Decaying(Trainer):
    """Decays nothing but the embeddings, and trains a parameter that is none of the model's."""

    extra = nn.Parameter(torch.zeros(()))

    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters() if "embeddings" in name]

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        kind, options = super().get_optimizer_cls_and_kwargs(args, model)
        return kind, {**options, "params": [*self.decayed(model), {"params": [self.extra], "lr": 0.3}]}

    def decayed(self, model):
        names = self.get_decay_parameter_names(model)
        named = {True: [], False: []}
        for name, parameter in model.named_parameters():
            named[name in names].append(parameter)
        return [{"params": named[True], "weight_decay": 0.2}, {"params": named[False], "weight_decay": 0.0}]


@pytest.mark.parametrize("ours", [True, False])
def test_the_groups_of_a_trainer_of_your_own_are_kept(ours, tmp_path):
    trained, args = model(), FilterTrainingArguments(tmp_path, **LITTLE, filter_lr=0.05)
    options = {"optimizer_cls_and_kwargs": filter_optimizer(args, 0.05)} if ours else {}
    trainer = train(trained, args, Decaying, **options)
    found = [(g["initial_lr"], g["weight_decay"], len(g["params"])) for g in trainer.optimizer.param_groups]
    coefficients, all_of_them = len([*filter_parameters(trained)]), len([*trained.parameters()])
    decayed = sum("embeddings" in name for name, _ in trained.named_parameters())
    assert found == [
        (2e-5, 0.2, decayed),
        (2e-5, 0.0, all_of_them - decayed - coefficients),
        (0.3, 0.01, 1),  # the default of AdamW
        (0.05, 0.0, coefficients),
    ]


def test_a_trainer_that_makes_its_optimizer_alone(tmp_path, transformers_warnings):
    trained = model()
    trainer = train(trained, FilterTrainingArguments(tmp_path, **LITTLE, filter_lr=0.05), Own)
    assert rates(trainer.optimizer, trained) == ({0.05}, {2e-5})
    trained = model()
    trainer = train(trained, FilterTrainingArguments(tmp_path, **LITTLE, filter_lr=0.05), OwnWithoutResult)
    assert rates(trainer.optimizer, trained) == ({0.05}, {2e-5})
    args = TrainingArguments(tmp_path, **LITTLE)
    train(model(), args, Own, optimizer_cls_and_kwargs=filter_optimizer(args))  # which nobody reads
    (line,) = transformers_warnings
    assert SHARED in line
    transformers_warnings.clear()


def test_rates_that_are_tensors_stay_tensors():
    trained = model()
    optimizer = TensorRate(trained.parameters(), lr=2e-5)
    split_filter_groups(optimizer, trained, 0.05)
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([2e-5, 0.05])


def test_names_stay_with_their_parameters():
    trained = model()
    optimizer = torch.optim.AdamW(trained.named_parameters(), lr=2e-5)
    split_filter_groups(optimizer, trained, 0.05)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert all(trained.get_parameter(n) is p for n, p in zip(group["param_names"], group["params"], strict=True))


@pytest.mark.parametrize("in_arguments", [True, False])
def test_an_optimizer_of_the_deepspeed_file_is_refused(in_arguments, tmp_path):
    """The Trainer then holds a stand-in of accelerate, and makes none itself."""
    args = FilterTrainingArguments(tmp_path, **LITTLE, **({"filter_lr": 0.05} if in_arguments else {}))
    options = {} if in_arguments else {"optimizer_cls_and_kwargs": filter_optimizer(args, 0.05)}
    trainer = Trainer(model(), args, **options)
    trainer.optimizer = DummyOptim([])
    with pytest.raises(GraphFilterError, match="the DeepSpeed file names an optimizer"):
        trainer.create_optimizer()


def test_a_fitted_filter_may_be_frozen(tmp_path, transformers_warnings):
    """It has no coefficients: all its tensors show that it is not at its start."""
    fitted = patch_model(plain(), "far_field", window=4)
    with torch.no_grad():
        for parameter in filter_parameters(fitted):
            parameter.add_(0.01)
    fitted.requires_grad_(False).classifier.requires_grad_(True)
    train(fitted, TrainingArguments(tmp_path, **LITTLE))
    assert not transformers_warnings


class Distilled(nn.Module):
    """A model of your own, in which a filter is kept as it is."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = plain(), model().requires_grad_(False)

    def forward(self, input_ids, labels):
        output = self.student(input_ids=input_ids, labels=labels)
        wanted = self.teacher(input_ids=input_ids).logits
        return {"loss": output.loss + (output.logits - wanted).square().mean(), "logits": output.logits}


def test_a_frozen_filter_in_a_module_of_your_own(tmp_path, transformers_warnings):
    both = Distilled()
    train(both, TrainingArguments(tmp_path, **LITTLE))
    assert ["the graph filter is frozen at its start values" in message for message in transformers_warnings] == [True]
    transformers_warnings.clear()
    turn_on(both.teacher)
    train(both, TrainingArguments(tmp_path, **LITTLE))  # was trained, and is kept
    inner, outer = filter_status(both.teacher), filter_status(both)
    assert [row.module for row in outer] == [f"teacher.{row.module}" for row in inner]
    assert str(outer).count("teacher.") == len(inner) + len(outer._describe_others())
    with pytest.raises(GraphFilterError, match=r"cannot patch a torch\.nn"):
        filter_status(nn.Linear(1, 1))


def test_a_slow_rate_that_was_asked_for_says_nothing_where_no_weights_are_trained(tmp_path):
    train(only_the_filter(model()), FilterTrainingArguments(tmp_path, **LITTLE, filter_lr=5e-4))


@pytest.mark.parametrize("rate", [2e-5, 1e-3])
def test_an_optimizer_that_was_passed_has_no_filter_lr(rate, tmp_path, transformers_warnings):
    patched = model()
    optimizer = torch.optim.AdamW(patched.parameters(), lr=rate)
    train(patched, FilterTrainingArguments(tmp_path, **LITTLE), optimizers=(optimizer, None))
    said = "filter_lr=0.01 is not applied to the optimizer that was passed to the Trainer"
    assert [said in message for message in transformers_warnings] == [True]
    transformers_warnings.clear()
    optimizer = torch.optim.AdamW(parameter_groups(patched, lr=rate, filter_lr=1e-2))
    train(patched, FilterTrainingArguments(tmp_path, **LITTLE), optimizers=(optimizer, None))


@pytest.mark.parametrize("arguments", [TrainingArguments, FilterTrainingArguments])
@pytest.mark.parametrize("make", [plain, model])
def test_a_trainer_and_its_model_are_freed_at_once(make, arguments, tmp_path, transformers_warnings):
    """Without waiting for the collection of garbage, until which a GPU would hold the weights of the run before."""
    gc.collect()
    gc.disable()
    try:
        trainer = train(make(), arguments(tmp_path, **LITTLE))
        held = [weakref.ref(trainer), weakref.ref(trainer.model)]
        del trainer
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()
    transformers_warnings.clear()  # of the rate


def test_filter_optimizer_is_for_a_trainer(tmp_path):
    factory, _ = filter_optimizer(TrainingArguments(tmp_path, **QUIET))
    with pytest.raises(GraphFilterError, match="filter_optimizer is for a Trainer; in a loop of your own use"):
        factory()(model())


@pytest.fixture
def encoder(tmp_path):
    package = pytest.importorskip("sentence_transformers")
    config = FAMILIES["bert"].config
    BertModel(type(config)(**{**config.to_dict(), "vocab_size": 5 + len(WORDS)})).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return patch_model(package.SentenceTransformer(str(tmp_path / "model"), device="cpu"), "gfsa")


@pytest.mark.feature("Training: SentenceTransformerTrainer", filter="gfsa", family="bert")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["forgotten", "arguments", "filter_optimizer"])
def test_sentence_transformers(how, encoder, tmp_path, transformers_warnings):
    """The weights of the loss, and the rates that the arguments map to names, stay in the optimizer."""
    import sentence_transformers as s
    from sentence_transformers.sentence_transformer import losses

    @dataclass
    class Arguments(FilterArgumentsMixin, s.SentenceTransformerTrainingArguments):
        pass

    kind = Arguments if how == "arguments" else s.SentenceTransformerTrainingArguments
    args = kind(tmp_path, **LITTLE, learning_rate_mapping={r"classifier": 5e-2})
    loss = losses.SoftmaxLoss(encoder, 32, 3)
    data = Dataset.from_dict({"premise": TEXTS * 2, "hypothesis": TEXTS[::-1] * 2, "label": [0, 1, 2, 0]})
    ours = {"optimizer_cls_and_kwargs": filter_optimizer(args)} if how == "filter_optimizer" else {}
    trainer = s.SentenceTransformerTrainer(encoder, args, data, loss=loss, **ours)
    trainer.train()
    found = {id(p): g["initial_lr"] for g in trainer.optimizer.param_groups for p in g["params"]}
    wanted = 2e-5 if how == "forgotten" else 1e-2
    assert {found[id(p)] for p in filter_parameters(encoder)} == {wanted}
    assert {found[id(p)] for p in loss.classifier.parameters()} == {5e-2}
    assert [SHARED in line for line in transformers_warnings] == [True] * (how == "forgotten")
    transformers_warnings.clear()


@pytest.mark.feature("Training: SFTTrainer of TRL", filter="gfsa", family="llama")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("given", [True, False])
def test_trl(given, tmp_path, transformers_warnings):
    trl = pytest.importorskip("trl")

    @dataclass
    class Arguments(FilterArgumentsMixin, trl.SFTConfig):
        pass

    config = FAMILIES["llama"].config
    trained = patch_model(LlamaForCausalLM(type(config)(**{**config.to_dict(), "vocab_size": 5 + len(WORDS)})))
    words = tokenizer()
    words.eos_token = "[SEP]"
    args = (Arguments if given else trl.SFTConfig)(str(tmp_path), **LITTLE, bf16=False, max_length=16)
    data = Dataset.from_dict({"text": TEXTS * 4})
    trainer = train(trained, args, trl.SFTTrainer, train_dataset=data, processing_class=words)
    assert rates(trainer.optimizer, trained) == ({1e-2 if given else 2e-5}, {2e-5})
    assert sum(SHARED in line for line in transformers_warnings) == (not given)
    transformers_warnings.clear()  # of TRL, about tokens


@pytest.mark.feature("Training: a loop with accelerate", filter="gfsa", family="bert")
@pytest.mark.parametrize("apart", [True, False])
def test_accelerate(apart, monkeypatch, transformers_warnings):
    """Prepared together or one after the other; with our groups, without, and with the rate of the environment."""

    def prepare(trained, optimizer):
        accelerator = Accelerator(cpu=True)
        if apart:
            accelerator.prepare(trained)
            return accelerator.prepare(optimizer)
        return accelerator.prepare(trained, optimizer)[1]

    trained = model()
    prepare(trained, torch.optim.AdamW(parameter_groups(trained, 2e-5)))
    prepare(bare := plain(), torch.optim.AdamW(bare.parameters(), lr=2e-5))
    assert not transformers_warnings
    prepare(trained, torch.optim.AdamW(trained.parameters(), lr=2e-5))
    assert "share the learning rate of the weights, 2e-05, which barely moves them" in transformers_warnings.pop()
    monkeypatch.setenv(VARIABLE, "0.02")
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-5)
    assert rates(prepare(trained, optimizer), trained) == ({0.02}, {2e-5})
    for rate in (2e-5, 1e-2):
        scheduled = torch.optim.AdamW(trained.parameters(), lr=rate)
        torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)  # has read the groups already
        prepare(trained, scheduled)
        assert "filter_lr=0.02 is not applied to the optimizer that" in transformers_warnings.pop()
    scheduled = torch.optim.AdamW(parameter_groups(trained, rate, filter_lr=0.03))
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)
    prepare(trained, scheduled)
    assert not transformers_warnings


def test_two_optimizers_train_a_part_each(monkeypatch, transformers_warnings):
    trained, another = model(), torch.nn.Linear(2, 2)
    head = [p for name, p in trained.named_parameters() if "classifier" in name]
    body = [p for name, p in trained.named_parameters() if "classifier" not in name]

    def prepare():
        optimizers = [torch.optim.AdamW(part, lr=2e-2) for part in (body, head, another.parameters())]
        Accelerator(cpu=True).prepare(trained, *optimizers)
        return optimizers[0]

    prepare()
    assert not transformers_warnings
    monkeypatch.setenv(VARIABLE, "0.03")
    assert rates(prepare(), trained) == ({0.03}, {2e-2})


PROGRAM = """
import sys
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

model = BertForSequenceClassification.from_pretrained(sys.argv[1])
rows = [{"input_ids": [5, 6, 7], "labels": 0}] * 4
args = TrainingArguments(sys.argv[2], max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
print([group["initial_lr"] for group in trainer.optimizer.param_groups])
"""


def test_run_gives_the_rate_to_a_program_that_does_not_know_of_it(tmp_path):
    model().save_pretrained(tmp_path / "model")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "hf_graphfilter", "run", "--filter-lr", "3e-2", tmp_path / "train.py"]
    done = subprocess.run(
        [*command, tmp_path / "model", tmp_path / "runs"], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[5e-05, 5e-05, 0.03]"], done.stderr
    assert "learning rate" not in done.stderr
    done = subprocess.run([*command[:5], "-1", "true"], capture_output=True, text=True, check=False)
    assert "filter_lr must be a finite learning rate >= 0, got -1" in done.stderr


def test_a_variable_that_is_no_rate(monkeypatch):
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(GraphFilterError, match=f"{VARIABLE} must be a number, got 'fast'"):
        rate_from_environment()


def test_the_weight_decay_of_the_optimizer_reaches_the_weights():
    trained = model()
    groups = torch.optim.AdamW(parameter_groups(trained, 1e-3), weight_decay=0.1).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    groups = torch.optim.AdamW(parameter_groups(trained, 1e-3, weight_decay=0.0), weight_decay=0.1).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0, 0.0]


def test_status_says_what_moved_and_what_is_not_trained():
    trained = patch_model(plain(), "gfsa", w_K=0.25, learn=("w_0", "w_K"), layers=[0])
    (row,) = filter_status(trained)
    assert row.moved == 0
    assert row.trained == {"w_0", "w_K"}
    with torch.no_grad():
        next(p for n, p in trained.named_parameters() if n.endswith("w_K")).add_(0.5)
    before = torch.get_rng_state()
    (row,) = status = filter_status(trained)
    assert torch.equal(torch.get_rng_state(), before)
    assert row.moved == 0.25, "a mean over w_0 and w_K"
    header, (cells,) = status.table()
    assert dict(zip(header, cells, strict=True)) == {
        "module": "bert.encoder.layer.0.attention.self",
        "filter": "gfsa",
        "w_0": "0.0000",
        "w_K": "0.7500",
        "w_1": "1.0000 (fixed)",
        "moved": "0.2500",
        "backend": "sdpa",
    }
    trained.requires_grad_(False)
    assert filter_status(trained)[0].trained == set()
    (gated,) = filter_status(patch_model(plain(), "gated", layers=[0]))
    assert gated.moved is None, "it has no coefficients"


@pytest.mark.parametrize(
    ("name", "options", "frozen", "trained"),
    [
        ("ppr", {}, "rate", {"g"}),
        ("ppr", {"kernel": "heat"}, "rate", {"g"}),
        ("ppr", {}, "g", {"alpha"}),
        ("arma", {"order": 2}, "shift_of_pole", {"r_1", "r_2"}),
        ("arma", {"order": 2}, "residue", {"b_1", "b_2"}),
        ("gfsa", {"learn": ("w_0", "w_K")}, "w_K", {"w_0"}),
    ],
)
def test_status_says_what_is_frozen_under_the_name_that_it_shows(name, options, frozen, trained):
    model = patch_model(plain(), name, layers=[0], **options)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.endswith(f"graph_filter.{frozen}"))
    assert filter_status(model)[0].trained == trained


def test_small_conveniences():
    bert = FAMILIES["bert"].build()
    assert len(filter_status(patch_model(copy.deepcopy(bert), "gfsa", learn="w_K", layers="all"))) == 3
    wrapped = nn.DataParallel(patch_model(copy.deepcopy(bert)))
    assert unpatch_model(wrapped) is wrapped
    assert len(filter_status(wrapped)) == 0
