"""The lines that say what was patched, loaded and resumed, under transformers' switches."""

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertModel, Trainer
from transformers.utils import logging as transformers_logging

from hf_graphfilter import (
    FilterTrainingArguments,
    load_filter,
    patch_model,
    save_filter,
    transfer_attention,
    unpatch_model,
)

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
IDS = {"input_ids": [2, 5, 7, 3], "labels": 0}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if record.name == "hf_graphfilter":
            self.lines.append(record.getMessage())


@pytest.fixture
def lines():
    before, handler = transformers_logging.get_verbosity(), Lines()
    transformers_logging.set_verbosity_info()
    transformers_logging.add_handler(handler)
    yield handler.lines
    transformers_logging.remove_handler(handler)
    transformers_logging.set_verbosity(before)


def build(model_class=BertModel):
    return model_class(BertConfig(num_hidden_layers=3, **SIZES))


def test_patching_is_one_line(lines):
    unpatch_model(patch_model(build(), "gfsa", layers=[0, 2]))
    assert lines == [
        "patched 2 of 3 attention modules of BertModel with gfsa",
        "removed the graph filters from 2 attention modules of BertModel",
    ]


def test_nothing_is_said_by_default(lines):
    transformers_logging.set_verbosity_warning()
    patch_model(build())
    assert lines == []


def test_loading_is_one_line(lines, tmp_path):
    build().save_pretrained(tmp_path / "base")
    base = BertModel.from_pretrained(tmp_path / "base")
    assert lines == []
    patch_model(BertModel.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "whole")
    del lines[:]
    model = BertModel.from_pretrained(tmp_path / "whole")
    load_filter(base, save_filter(model, tmp_path / "filter"))
    assert lines == [
        f"loaded BertModel with gfsa in 3 attention modules from {tmp_path / 'whole'}",
        f"loaded the filter of BertModel with gfsa in 3 attention modules from {tmp_path / 'filter'}",
    ]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_loading_an_adapter_is_one_line(lines, tmp_path):
    config = LoraConfig(target_modules=["query"], modules_to_save=["graph_filter"])
    get_peft_model(patch_model(build()), config).save_pretrained(tmp_path)
    del lines[:]
    PeftModel.from_pretrained(build(), tmp_path)
    assert lines == ["loaded an adapter into BertModel with gfsa in 3 attention modules"]


def test_resuming_is_one_line(lines, tmp_path):
    def train(steps, resume=None):
        args = FilterTrainingArguments(
            str(tmp_path), filter_lr=1e-2, max_steps=steps, save_steps=1, report_to=[], use_cpu=True
        )
        model = patch_model(build(BertForSequenceClassification))
        Trainer(model, args, train_dataset=Dataset.from_list([IDS] * 4)).train(resume_from_checkpoint=resume)

    train(1)
    del lines[:]
    train(2, str(tmp_path / "checkpoint-1"))
    source = tmp_path / "checkpoint-1"
    assert f"resumed BertForSequenceClassification with gfsa in 3 attention modules from {source}" in lines


def test_a_fit_that_resumes_is_one_line(lines, tmp_path):
    batches = [torch.tensor([IDS["input_ids"]])] * 8
    model = patch_model(build(), "agf")
    for fitted in (copy.deepcopy(model), model):
        transfer_attention(fitted, batches, steps=4, holdout=2, checkpoint=tmp_path)
    assert [line for line in lines if line.startswith("resumed")] == [
        f"resumed the stage 'attention' at step 4 from {tmp_path}"
    ]


def test_the_environment_decides_too():
    program = f"""
import hf_graphfilter, transformers
hf_graphfilter.patch_model(transformers.BertModel(transformers.BertConfig(num_hidden_layers=3, **{SIZES})))
"""
    environment = {"TRANSFORMERS_VERBOSITY": "info", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert "patched 3 of 3 attention modules of BertModel with gfsa" in done.stderr
