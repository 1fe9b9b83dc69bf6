"""The ordinary Trainer on a patched model."""

import json
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from models import FAMILIES, checkpointed, turn_on
from test_pipelines import TEXTS, tokenizer
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    EncoderDecoderModel,
    GPT2LMHeadModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_graphfilter import (
    BlendSchedule,
    CoefficientCallback,
    FilterTrainingArguments,
    GraphFilterError,
    OrthogonalityCallback,
    RegularizerCallback,
    SmoothingCallback,
    filter_optimizer,
    filter_parameters,
    filter_status,
    parameter_groups,
    patch_model,
    set_blend,
    unpatch_model,
)


class Toy(Dataset):
    """Whether token 7 occurs; enough to have gradients."""

    def __init__(self, rows=64):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 20, (rows, 10), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int((self.ids[i] == 7).any())}


def model(K=3):
    set_seed(0)
    config = BertConfig(
        **{**FAMILIES["bert"].config.to_dict(), "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    )
    return patch_model(BertForSequenceClassification(config), K=K)


def trainer(path, patched=None, train_dataset=None, **options):
    options = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 8, **options}
    args = TrainingArguments(
        output_dir=str(path),
        learning_rate=1e-3,
        weight_decay=0.1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        **options,
    )
    optimizer = filter_optimizer(args, filter_lr=0.05)
    data = train_dataset or Toy()
    return Trainer(
        patched or model(), args, train_dataset=data, eval_dataset=Toy(16), optimizer_cls_and_kwargs=optimizer
    )


def state(m):
    return {k: v.clone() for k, v in m.state_dict().items()}


def test_filter_gets_its_own_learning_rate_and_no_decay(tmp_path):
    t = trainer(tmp_path)
    t.train()
    groups = t.optimizer.param_groups
    assert [g["initial_lr"] for g in groups] == [1e-3, 1e-3, 0.05]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.0]
    assert {id(p) for p in groups[2]["params"]} == {id(p) for p in filter_parameters(t.model)}
    moved = torch.stack([row.coefficients["w_K"].abs().max() for row in filter_status(t.model)])
    assert (moved > 0.02).all(), "with the model's rate it would stay within 0.006"


def test_groups_cover_every_parameter_once():
    m = model()
    groups = parameter_groups(m, lr=1e-3, weight_decay=0.1)
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in m.parameters())
    m.requires_grad_(False)
    for p in filter_parameters(m):
        p.requires_grad_(True)
    assert [len(g["params"]) for g in parameter_groups(m, lr=1e-3)] == [3]
    with pytest.raises(GraphFilterError, match="has no filter parameters"):
        parameter_groups(FAMILIES["bert"].build(), lr=1e-3)


def test_distributed_tensors_have_groups_of_their_own():
    """No fused kernel takes them together with others, or with those of another mesh."""
    m = model()
    experts = [p for n, p in m.named_parameters() if "intermediate.dense" in n]
    for p in experts:
        p.device_mesh = "of the experts"  # as a DTensor has
    before, groups = parameter_groups(model(), lr=1e-3), parameter_groups(m, lr=1e-3)
    assert len(groups) == len(before) + 2, "weights and biases"
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in m.parameters())
    for group in groups:
        assert len({hasattr(p, "device_mesh") for p in group["params"]}) == 1
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in filter_parameters(m)}


def test_embeddings_keep_32_bits(tmp_path):
    """As the Trainer sees to where it builds the optimizer itself."""
    pytest.importorskip("bitsandbytes")
    t = trainer(tmp_path, optim="adamw_bnb_8bit", max_steps=1)
    t.model.get_input_embeddings().weight = torch.nn.Parameter(torch.randn(200, 32))  # smaller ones have 32 bits anyway
    t.train()
    assert t.optimizer.state[t.model.get_input_embeddings().weight]["state1"].dtype == torch.float32


@pytest.mark.parametrize("optim", ["galore_adamw", "apollo_adamw", "lomo"])
def test_an_optimizer_with_groups_of_its_own_is_said_at_once(optim, tmp_path):
    args = TrainingArguments(tmp_path, report_to="none", use_cpu=True, optim=optim)
    with pytest.raises(GraphFilterError, match=f"optim='{optim}' makes parameter groups of its own"):
        filter_optimizer(args)


@pytest.mark.parametrize("rate", ["1e-2", None, -1, float("inf"), True])
def test_a_rate_that_is_none_is_said_at_once(rate, tmp_path):
    """YAML reads 1e-2 as text."""
    args = TrainingArguments(tmp_path, report_to="none", use_cpu=True)
    for call, name in (
        (lambda: filter_optimizer(args, rate), "filter_lr must be a finite"),
        (lambda: parameter_groups(model(), 1e-3, filter_lr=rate), "filter_lr must be a finite"),
        (lambda: parameter_groups(model(), rate), "lr must be a finite"),
        (lambda: set_blend(model(), rate), "the gate of a blend is between"),
        (lambda: BlendSchedule(end=rate), "0 <= start < end <= 1"),
        (lambda: OrthogonalityCallback("x" if rate is None else rate), "gamma must be >= 0"),
        (lambda: SmoothingCallback([], every=rate), "every is a number of steps"),
        (lambda: SmoothingCallback(["text"]), "got str: hf_graphfilter.fitting.text_batches makes"),
        (lambda: SmoothingCallback({"input_ids": torch.ones(1, 3)}), "got one batch: put it into a list"),
        (lambda: RegularizerCallback(0.1), "weights are numbers by the name of a loss, got 0.1"),
        (lambda: filter_optimizer(model()), "takes the arguments of the Trainer, got"),
    ):
        with pytest.raises(GraphFilterError, match=name):
            call()


@pytest.mark.feature("Training: Trainer, resumed bit for bit", filter="gfsa", family="bert")
def test_resume_is_bit_identical(tmp_path):
    whole = trainer(tmp_path / "a")
    whole.train()
    resumed = trainer(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    expected, found = state(whole.model), state(resumed.model)
    assert all(torch.equal(found[k], v) for k, v in expected.items())
    files = {f.name for f in (tmp_path / "a" / "checkpoint-3").iterdir()}
    assert "model.safetensors" in files
    assert not any(name.startswith("pytorch_model") for name in files)


def test_a_run_does_not_resume_with_another_filter(tmp_path):
    trainer(tmp_path / "a").train()
    checkpoint = str(tmp_path / "a" / "checkpoint-3")
    other = model(K=5)  # whose tensors have the same shapes
    before = state(other)
    resumed = trainer(tmp_path / "b", other)
    with pytest.raises(GraphFilterError, match=r"checkpoint-3 was trained with .*K=3.* the model has .*K=5"):
        resumed.train(resume_from_checkpoint=checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(other).items())


def test_a_run_without_a_filter_does_not_resume_with_one(tmp_path):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    args = TrainingArguments(tmp_path / "a", max_steps=3, save_steps=3, **quiet)
    Trainer(unpatch_model(model()), args, train_dataset=Toy()).train()
    patched = model()
    before = state(patched)
    with pytest.raises(GraphFilterError, match=r"checkpoint-3 was trained without a filter, .* begin a new run"):
        trainer(tmp_path / "b", patched).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(patched).items())


@pytest.mark.parametrize("name", ["gfsa", "linear_transformer"])  # the second has no tensors
@pytest.mark.parametrize("layers", [None, [0]])
def test_a_run_with_a_filter_does_not_resume_in_fewer_layers(layers, name, tmp_path):
    whole, less = (BertForSequenceClassification(FAMILIES["bert"].config) for _ in range(2))
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    args = FilterTrainingArguments(tmp_path / "a", max_steps=3, save_steps=3, **quiet)
    Trainer(patch_model(whole, name), args, train_dataset=Toy()).train()
    if layers:
        patch_model(less, name, layers=layers)
    resumed = Trainer(less, FilterTrainingArguments(tmp_path / "b", max_steps=6, **quiet), train_dataset=Toy())
    message = "checkpoint-3 was trained with .*, and the model has none: patch it as it was"
    with pytest.raises(GraphFilterError, match=message):
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))


@pytest.mark.parametrize("only_model", [True, False])
def test_a_run_does_not_resume_with_more_layers(only_model, tmp_path):
    few, many = (BertForSequenceClassification(FAMILIES["bert"].config) for _ in range(2))
    trainer(tmp_path / "a", patch_model(few, layers=[0, 2]), save_only_model=only_model).train()
    resumed = trainer(tmp_path / "b", patch_model(many))
    name = "bert.encoder.layer.1.attention.self"
    with pytest.raises(GraphFilterError, match=f"checkpoint-3 was trained with no filter at {name}, and the model has"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_run_resumes_if_a_part_was_patched_before(tmp_path, transformers_warnings):
    """The record is then in the config of the part."""
    patch_model(FAMILIES["bert"].build(), K=3).save_pretrained(tmp_path / "encoder")
    config = BertConfig(**{**FAMILIES["bert"].config.to_dict(), "is_decoder": True, "add_cross_attention": True})
    BertLMHeadModel(config).save_pretrained(tmp_path / "decoder")

    def build():
        composite = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder")
        composite.config.decoder_start_token_id, composite.config.pad_token_id = 1, 0
        return composite

    trainer(tmp_path / "a", whole := build(), train_dataset=Text(), save_steps=3).train()
    checkpoint = str(tmp_path / "a" / "checkpoint-3")
    assert "graph_filter" not in json.loads(Path(checkpoint, "config.json").read_text())
    trainer(tmp_path / "b", resumed := build(), train_dataset=Text()).train(resume_from_checkpoint=checkpoint)
    assert all(torch.equal(tensor, state(whole)[name]) for name, tensor in state(resumed).items())
    patch_model(FAMILIES["bert"].build(), K=5).save_pretrained(tmp_path / "encoder")
    with pytest.raises(GraphFilterError, match=r"with .*K=3.* at encoder.encoder.layer.0.* the model has .*K=5"):
        trainer(tmp_path / "c", build(), train_dataset=Text()).train(resume_from_checkpoint=checkpoint)
    transformers_warnings.clear()  # about deprecated losses


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("encoders", [0, 2])
def test_a_sentence_transformer_without_exactly_one_encoder_resumes(encoders, tmp_path, transformers_warnings):
    """The filter of two encoders is in the first."""
    package = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    FAMILIES["bert"].build().save_pretrained(tmp_path / "encoder")
    tokenizer().save_pretrained(tmp_path / "encoder")

    def build_road():
        return [modules.Transformer(str(tmp_path / "encoder")), modules.Pooling(32)]

    def train(folder, resume=None):
        set_seed(0)
        if encoders:
            module = modules.Router.for_query_document(build_road(), build_road())
            patch_model(module.sub_modules["query"][0].model)
        else:
            module = modules.StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=8)
        sentences = package.SentenceTransformer(modules=[module], device="cpu")
        args = package.SentenceTransformerTrainingArguments(
            str(tmp_path / folder),
            max_steps=2,
            save_steps=1,
            per_device_train_batch_size=4,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            router_mapping={"anchor": "query", "positive": "document"} if encoders else {},
        )
        data = datasets.Dataset.from_dict({"anchor": TEXTS[:1] * 8, "positive": TEXTS[1:2] * 8})
        loss = losses.MultipleNegativesRankingLoss(sentences)
        package.SentenceTransformerTrainer(sentences, args, data, loss=loss).train(resume_from_checkpoint=resume)
        return state(sentences)

    whole, resumed = train("a"), train("b", str(tmp_path / "a" / "checkpoint-1"))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())
    transformers_warnings.clear()  # the rate of the filter, and the use of the package


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_run_does_not_resume_with_other_groups_of_the_optimizer(tmp_path, forgotten):
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_steps": 3,
    }
    kinds = {"with": FilterTrainingArguments, "without": partial(TrainingArguments, learning_rate=1e-2)}
    began, resumed = (kinds["with"], kinds["without"]) if forgotten else (kinds["without"], kinds["with"])
    Trainer(model(), began(tmp_path / "a", max_steps=3, **quiet), train_dataset=Toy()).train()
    again = Trainer(model(), resumed(tmp_path / "b", max_steps=6, **quiet), train_dataset=Toy())
    with pytest.raises(GraphFilterError, match=r"checkpoint-3 was trained with other parameter groups .* filter_lr"):
        again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))


@pytest.mark.feature("Training: load_best_model_at_end", filter="gfsa", family="bert")
def test_load_best_model_at_end(tmp_path):
    t = trainer(tmp_path, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
    t.train()
    best = BertForSequenceClassification.from_pretrained(t.state.best_model_checkpoint)
    assert all(torch.equal(v, t.model.state_dict()[k]) for k, v in best.state_dict().items())


class Text(Toy):
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


@pytest.mark.feature("Training: gradient accumulation", filter="gfsa", family="gpt2")
def test_gradient_accumulation_gives_the_same_step(tmp_path, transformers_warnings):
    # a causal model: for classifiers the Trainer of transformers itself does not average over the steps
    found = []
    for batch, steps in [(8, 1), (4, 2)]:
        set_seed(0)
        m = turn_on(patch_model(GPT2LMHeadModel(FAMILIES["gpt2"].config).double()))
        t = trainer(
            tmp_path / str(steps),
            m,
            train_dataset=Text(),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=2,
        )
        t.train()
        found.append(state(t.model))
    transformers_warnings.clear()  # about loss_type
    for k, v in found[0].items():
        torch.testing.assert_close(found[1][k], v, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, transformers_warnings):
    found = []
    for checkpointing in (False, True):
        m = model().double().train()
        if checkpointing:
            checkpointed(m, reentrant)
        set_seed(1)
        ids = torch.stack([Toy()[i]["input_ids"] for i in range(8)])
        m(ids, labels=torch.tensor([0, 1] * 4)).loss.backward()
        found.append(torch.cat([p.grad for p in filter_parameters(m)]))
    transformers_warnings.clear()  # use_cache is switched off
    torch.testing.assert_close(found[1], found[0])
    assert found[0].abs().sum() > 0


class Reporter(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("bar", [True, False])
def test_coefficients_go_to_the_reporters_and_not_to_the_console(bar, tmp_path, capsys):
    t = trainer(tmp_path, max_steps=2)
    t.remove_callback(PrinterCallback)
    early, late = Reporter(), Reporter()
    for callback in (early, ProgressCallback() if bar else PrinterCallback(), CoefficientCallback(), late):
        t.callback_handler.callbacks.append(callback)
    t.train()
    t.train()  # and again
    printed = "".join(capsys.readouterr())
    assert "'loss'" in printed
    assert "filter/" not in printed
    names = {f"filter/{i}/w_K" for i in range(3)}
    for logs in (early.logs, late.logs, t.state.log_history):
        assert all(names <= entry.keys() for entry in logs if "loss" in entry)
        assert sum("loss" in entry for entry in logs) >= 2


def test_two_callbacks_stay_off_the_console_however_often_it_trains(tmp_path, capsys):
    class Other(CoefficientCallback):
        """Two callbacks that both keep their numbers to the reporters."""

    t = trainer(tmp_path, max_steps=1)
    for callback in (CoefficientCallback(), Other()):
        t.add_callback(callback)
    (printer,) = (c for c in t.callback_handler.callbacks if isinstance(c, PrinterCallback))
    depths = []
    for _ in range(3):
        t.train()
        chain = [printer.on_log]
        while hasattr(chain[-1], "other"):
            chain.append(chain[-1].on_log)
        depths.append(len(chain) - 1)
    assert depths == [2, 2, 2]
    printed = "".join(capsys.readouterr())
    assert "'loss'" in printed
    assert "filter/" not in printed
