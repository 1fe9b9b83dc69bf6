"""The model of clones: each function alone, whichever the model."""

import pytest
import torch
import transformers

from hf_graphfilter import patch_model
from recipes.glue import label_fields
from recipes.pairs import PairClassifier
from recipes.source_code import load_pairs

SMALL = {"vocab_size": 30, "pad_token_id": 0, "eos_token_id": 2, **label_fields(("0", "1"))}
T5 = {"d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 2, "decoder_start_token_id": 0}
BART = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
BERT = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
CONFIGS = {
    "bert": transformers.BertConfig(**SMALL, **BERT),
    "t5": transformers.T5Config(**SMALL, **T5),
    "bart": transformers.BartConfig(**SMALL, **BART, bos_token_id=1, decoder_start_token_id=2),
    "plbart": transformers.PLBartConfig(**SMALL, **BART, bos_token_id=1),  # names no start
}
FIRST = torch.tensor([[5, 6, 7, 2, 0, 0], [8, 9, 5, 6, 7, 2]])
SECOND = torch.tensor([[9, 2, 0], [5, 6, 2]])


def inputs(first=FIRST, second=SECOND):
    masks = {"attention_mask": (first != 0).long(), "attention_mask_2": (second != 0).long()}
    return {"input_ids": first, "input_ids_2": second, **masks}


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return PairClassifier.from_config(CONFIGS[request.param]).eval()


def test_padding_and_the_other_pairs_do_not_matter(model):
    both = model(**inputs()).logits
    one = model(**inputs(FIRST[:1, :4], SECOND[:1, :2])).logits
    torch.testing.assert_close(one[0], both[0])
    swapped = model(**inputs(SECOND, FIRST)).logits
    assert (swapped - both).abs().max() > 1e-5


def test_the_vector_of_a_text_sees_all_of_it(model):
    changed = FIRST.clone()
    changed[:, 0] = 11
    mask = (FIRST != 0).long()
    assert ((model.vector(changed, mask) - model.vector(FIRST, mask)).abs().amax(1) > 1e-5).all()


def test_text_after_the_end_is_not_read_by_a_decoder():
    """As PLBART's, whose texts end in the name of their language."""
    model = PairClassifier.from_config(CONFIGS["bart"]).eval()
    last = model.vector(torch.tensor([[5, 6, 2, 20]]), torch.ones(1, 4, dtype=torch.long))
    hidden = model.base_model(
        input_ids=torch.tensor([[5, 6, 2, 20]]), decoder_input_ids=torch.tensor([[2, 5, 6, 2]])
    ).last_hidden_state
    torch.testing.assert_close(last, hidden[:, 2])


def test_it_trains_and_is_saved_with_its_filter(model, tmp_path):
    patch_model(model, "gfsa", w_0=0.1)
    out = model(**inputs(), labels=torch.tensor([0, 1]))
    out.loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if name.endswith("w_K")]
    assert len(gradients) == {"bert": 1, "t5": 4, "bart": 2, "plbart": 2}[model.config.model_type]
    assert all(gradient is not None for gradient in gradients)
    model.save_pretrained(tmp_path)
    again = load_pairs(tmp_path).eval()
    assert isinstance(again, PairClassifier)
    torch.testing.assert_close(again(**inputs()).logits, out.logits)


@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
def test_pretrained_weights_are_found(name, tmp_path, transformers_warnings):
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForSeq2SeqLM
    pretrained = auto.from_config(CONFIGS[name])
    pretrained.save_pretrained(tmp_path)
    model = PairClassifier.from_pretrained(tmp_path, num_labels=2)
    transformers_warnings.clear()  # of the heads
    weights = (pretrained if name == "t5" else pretrained.base_model).state_dict()
    loaded = model.base_model.state_dict()
    shared = loaded.keys() & weights.keys()
    assert len(shared) == len(loaded)
    assert all(torch.equal(weights[key], loaded[key]) for key in shared)
