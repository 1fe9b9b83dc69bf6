"""Filters in models of PyTorch, trained by accelerate, by the Trainer, and by a loop of one's own."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch_models import SIZES
from transformers import Trainer, TrainingArguments

from hf_graphfilter import (
    CoefficientCallback,
    RegularizerCallback,
    collect_penalties,
    filter_optimizer,
    filter_status,
    parameter_groups,
    patch_model,
)


class Classifier(nn.Module):
    """A model as users write it: PyTorch's encoder, a head, and a loss if there are labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES, batch_first=True), 2)
        self.head = nn.Linear(SIZES["d_model"], 2)

    def forward(self, x, labels=None):
        logits = self.head(self.encoder(x).mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


ROWS = [{"x": torch.randn(5, SIZES["d_model"]), "labels": i % 2} for i in range(8)]
BATCH = {"x": torch.stack([row["x"] for row in ROWS]), "labels": torch.tensor([row["labels"] for row in ROWS])}


def moved(model):
    return [row.moved for row in filter_status(model)]


@pytest.mark.parametrize("name", ["gfsa", "agf"])
def test_accelerate(name):
    accelerator = Accelerator(cpu=True)
    model = patch_model(Classifier(), name)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, filter_lr=1e-2))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        loss = model(**BATCH)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert all(moved(accelerator.unwrap_model(model)))


def test_penalties_in_a_loop_of_ones_own():
    model = patch_model(Classifier(), "agf", gamma=0.1).train()
    with collect_penalties(model) as penalties:
        loss = model(**BATCH)["loss"]
    assert penalties.total() > 0
    (loss + penalties.total()).backward()


@pytest.mark.parametrize("name", ["gfsa", "agf"])
def test_the_trainer_with_callbacks(name, tmp_path):
    model = patch_model(Classifier(), name)
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), logging_steps=1, disable_tqdm=True, use_cpu=True, **options)
    callbacks = [CoefficientCallback(), *([RegularizerCallback()] if name == "agf" else [])]
    optimizer = filter_optimizer(args, 1e-2)
    trainer = Trainer(model, args, train_dataset=ROWS, callbacks=callbacks, optimizer_cls_and_kwargs=optimizer)
    trainer.train()
    assert all(moved(model))
    assert any("theta" in key or "w_K" in key for log in trainer.state.log_history for key in log)


def test_lora_beside_the_filter():
    """Adapters in the feed-forward network; PEFT has one for nn.MultiheadAttention too, which replaces its module."""
    model = patch_model(Classifier(), "gfsa")
    adapted = get_peft_model(model, LoraConfig(target_modules=["linear1"], modules_to_save=["graph_filter"]))
    adapted(**BATCH)["loss"].backward()
    learned = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert any("lora_A" in name for name in learned)
    assert any("graph_filter" in name for name in learned)
