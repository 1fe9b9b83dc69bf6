"""How alike the attention of Singularformer and of softmax models is: ``python benchmarks/likeness.py``.

After Singularformer's Figures 8 and 9. Small classifiers of BBC news from scratch (recipes/configs/sequences/small.yaml
on all of the training part, so that all read the same words) are compared by ``attention_correlation`` on texts of the
test part. Two references: softmax models that differ in their seed or in the place of their norms show how alike
similar models are, and models after one step show how alike models are without training. Models that are not in --runs
are trained (40 minutes on one core). Numbers go to benchmarks/results/likeness-DEVICE.csv.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from gallery import trained
from measure import make_parser, stamp, write
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_graphfilter.analysis import attention_correlation
from hf_graphfilter.analysis.results import pick_some
from recipes.sequence_tasks import load
from recipes.sequences import load_model

TEXTS, TOKENS = 200, 256
COMMON = "--config sequences/small.yaml --task bbc --use_cpu --validation none --eval_strategy no"
COMMON += " --load_best_model_at_end false"
SIZES = "hidden_size=128 num_hidden_layers=2 num_attention_heads=4 intermediate_size=512 attention_probs_dropout_prob=0"
PRE_NORM = f"--filter none --model roberta-prelayernorm --from_scratch {SIZES} max_position_embeddings=258"
KINDS = {"softmax": "--filter none", "softmax, norm first": PRE_NORM, "Singularformer": ""}
PAIRS = [
    (("softmax", 1), ("softmax", 2)),
    (("softmax", 1), ("softmax, norm first", 1)),
    (("Singularformer", 1), ("Singularformer", 2)),
    (("softmax", 1), ("Singularformer", 1)),
    (("softmax", 2), ("Singularformer", 2)),
]
TRAINING = {"trained": "", "after one step": "--max_steps 1"}
QUANTITIES = ["mean", "low", "median", "high"]
COLUMNS = ["date", "device", "torch", "transformers", "training", "model", "other", "texts", *QUANTITIES]


def classifier(
    options: argparse.Namespace, training: str, kind: str, seed: int
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    data = ["--data", str(options.shared / "data" / "bbc-news")]
    flags = [*COMMON.split(), *data, *TRAINING[training].split(), *KINDS[kind].split()]
    folder = trained(options, "sequences", f"bbc-{kind}-{training}".replace(",", ""), flags, seed)
    return load_model(folder).to(options.device), AutoTokenizer.from_pretrained(folder)


def compare(options: argparse.Namespace, training: str, one: tuple[str, int], two: tuple[str, int]) -> dict[str, Any]:
    """Return how alike two classifiers are: mean, median and the outer tenths over the texts."""
    (model, tokenizer), (other, _) = (classifier(options, training, *choice) for choice in (one, two))
    texts = pick_some(list(load("bbc", options.shared / "data" / "bbc-news").parts["test"]["text_a"]), TEXTS)
    batches = [tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt") for text in texts]
    correlation = attention_correlation(model, other, batches)
    low, *_, high = statistics.quantiles(correlation.values, n=10)
    values = [float(correlation.band.mean), low, statistics.median(correlation.values), high]
    names = [f"{kind}, seed {seed}" for kind, seed in (one, two)]
    row = {"training": training, "model": names[0], "other": names[1], "texts": len(texts)}
    row |= {name: f"{value:.3f}" for name, value in zip(QUANTITIES, values, strict=True)}
    print(row, flush=True)
    return row


def main() -> None:
    options = make_parser(__doc__, TRAINING, "likeness").parse_args()
    common = stamp(options.device, "torch", "transformers")
    trainings = [options.only] if options.only else list(TRAINING)
    rows = [common | compare(options, training, *pair) for training in trainings for pair in PAIRS]
    write(rows, options.output / f"likeness-{options.device}.csv", COLUMNS)


if __name__ == "__main__":
    main()
