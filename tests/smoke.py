"""The installed package without any extra: ``python -I tests/smoke.py`` in the environment to be checked."""

import tempfile
from importlib.metadata import version

import torch
from transformers import AutoModel, BertConfig, BertModel

import hf_graphfilter
from hf_graphfilter import filter_status, patch_model, unpatch_model

assert version("hf-graphfilter") == hf_graphfilter.__version__
config = BertConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, pad_token_id=0
)
model, ids = BertModel(config).eval(), torch.arange(8)[None]
with torch.no_grad():
    plain = model(ids).last_hidden_state
    filtered = patch_model(model, "gfsa", K=3, w_K=0.1)(ids).last_hidden_state
    assert not torch.allclose(filtered, plain)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(ids).last_hidden_state, filtered)
    assert torch.equal(unpatch_model(model)(ids).last_hidden_state, plain)
print(f"hf_graphfilter {hf_graphfilter.__version__} from {hf_graphfilter.__file__}\n{filter_status(loaded)}")
