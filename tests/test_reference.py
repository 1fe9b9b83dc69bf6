"""The reference model of TRL's trainers has the filters of the model that is trained, or a warning says so."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from filters import filters
from models import FAMILIES, turn_on
from test_pipelines import WORDS, tokenizer
from transformers import LlamaForCausalLM

from hf_graphfilter import patch_model, set_blend
from hf_graphfilter.training.reference import check_reference


@pytest.fixture
def plain():
    return LlamaForCausalLM(FAMILIES["llama"].config)


def trainer(model, reference, step=0):
    return SimpleNamespace(model=model, ref_model=reference, state=SimpleNamespace(global_step=step))


def patched(model, *args, **options):
    return patch_model(copy.deepcopy(model), *args, **options)


def test_a_reference_without_the_filter_is_named(plain):
    model = patched(plain, "gfsa", w_K=0.1)
    assert check_reference(trainer(model, plain)) == (
        "the model that is trained has {'filter': 'gfsa', 'version': 1, 'K': 3, 'w_0': 0.0, 'w_1': 1.0, 'w_K': 0.1, "
        "'learn': ['w_K'], 'approximation': 'taylor'} on 3 layers, and the reference model has no graph filter: pass "
        "ref_model=copy.deepcopy(model), or save the patched model and load it from there, as TRL loads the reference"
    )
    assert "has no graph filter, and the reference model has {" in check_reference(trainer(plain, model))
    other = patched(plain, "gfsa", K=7, w_K=0.1)
    assert "'K': 7" in check_reference(trainer(model, other))
    wrapped = torch.nn.DataParallel(model)
    assert check_reference(trainer(wrapped, plain)) == check_reference(trainer(model, plain))


def test_nothing_is_said_of_a_good_reference(plain):
    model = turn_on(patched(plain, "gfsa", w_K=0.1))
    assert check_reference(trainer(model, copy.deepcopy(model))) is None
    assert check_reference(trainer(model, None)) is None
    assert check_reference(trainer(model, plain, step=1)) is None, "said when the run began"
    assert check_reference(trainer(plain, copy.deepcopy(plain))) is None
    assert check_reference(SimpleNamespace(model=model)) is None


@filters(lambda entry: not entry.encoders_only, quick=lambda entry: True)
def test_a_filter_that_is_still_the_original_makes_no_difference(entry, plain):
    model = patched(plain, entry.config)
    state = torch.random.get_rng_state()
    assert (check_reference(trainer(model, plain)) is None) == entry.config.starts_as_original
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "no graph filter" in check_reference(trainer(turn_on(model), plain))


def test_a_blend_counts_once_it_has_begun(plain):
    model = patched(plain, "agf", init="blend")
    assert check_reference(trainer(model, plain)) is None
    set_blend(model, 0.5)
    assert "no graph filter" in check_reference(trainer(model, plain))
    assert "no graph filter" in check_reference(trainer(patched(plain, "agf"), plain))


@pytest.mark.feature("Training: DPOTrainer of TRL, its reference model", filter="gfsa", family="llama")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("handed_in", [False, True])
def test_dpo_says_that_its_reference_has_no_filter(handed_in, tmp_path, transformers_warnings):
    """TRL loads the reference from the folder of the base. With one filter in both, the first loss is log 2."""
    trl = pytest.importorskip("trl")
    config = type(FAMILIES["llama"].config)(**{**FAMILIES["llama"].config.to_dict(), "vocab_size": 5 + len(WORDS)})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    words = tokenizer()
    words.eos_token = "[SEP]"
    words.save_pretrained(tmp_path / "base")
    model = turn_on(patch_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), "gfsa", w_K=3.0))
    rows = {"prompt": ["attention is", "deep layer"], "chosen": [" a filter", " token"], "rejected": [" text", " is"]}
    quiet = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = trl.DPOConfig(str(tmp_path / "runs"), beta=1.0, max_steps=1, logging_steps=1, learning_rate=1e-2, **quiet)
    reference = copy.deepcopy(model) if handed_in else None
    trainer = trl.DPOTrainer(model, reference, args, train_dataset=Dataset.from_dict(rows), processing_class=words)
    trainer.train()
    said = [line for line in transformers_warnings if "the reference model has no graph filter" in line]
    transformers_warnings.clear()  # of TRL
    assert len(said) == (not handed_in)
    loss = trainer.state.log_history[0]["loss"]
    assert (loss == pytest.approx(math.log(2), abs=1e-3)) == handed_in
