"""Measure the embeddings of an encoder on retrieval and on classification by a linear probe."""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_graphfilter.fitting.quality import embeddings

sys.path.append(str(Path(__file__).parents[1]))  # recipes


@torch.no_grad()
def embed(model: nn.Module, tokenizer: Any, texts: Sequence[str], length: int, batch: int = 8) -> Tensor:
    """Return the means of the last hidden states of texts, cut after ``length`` tokens, as unit vectors."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # texts of like length share a batch
    parts = []
    for begin in range(0, len(order), batch):
        batch_texts = [texts[i] for i in order[begin : begin + batch]]
        inputs = tokenizer(batch_texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
        inputs = dict(inputs.to(model.device))
        parts.append(embeddings(model(**inputs), inputs).cpu())
    inverse = torch.tensor(order).argsort()
    return functional.normalize(torch.cat(parts)[inverse], dim=-1)


# ---------------------------------------------------------------------------------------------------------- retrieval


class Collection(NamedTuple):
    """Documents and queries by id, and the gain of each document that is relevant to a query."""

    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, int]]


def scifact(shared: Path) -> Collection:
    """Read the test part of SciFact in BEIR's layout; a document is its title and its abstract."""
    folder = shared / "data" / "scifact"
    with gzip.open(folder / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    documents = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in rows}
    relevant: dict[str, dict[str, int]] = {}
    with (folder / "qrels" / "test.tsv").open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            relevant.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    lines = (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    queries = {row["_id"]: row["text"] for row in map(json.loads, lines) if row["_id"] in relevant}
    return Collection(documents, queries, relevant)


def ndcg(ranked: Iterable[str], relevant: Mapping[str, int], at: int = 10) -> float:
    """Return the discounted gain of the first ``at`` documents over that of the best order, as BEIR computes it."""

    def discounted(gains: Iterable[int]) -> float:
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(list(gains)[:at], 1))

    best = discounted(sorted(relevant.values(), reverse=True))
    return discounted(relevant.get(name, 0) for name in ranked) / best if best else 0.0


def rank(queries: Tensor, documents: Tensor, names: Sequence[str], at: int = 10) -> list[list[str]]:
    """Return the names of the ``at`` documents nearest to each query."""
    nearest = (queries @ documents.T).topk(min(at, len(names)), dim=1).indices
    return [[names[i] for i in row] for row in nearest.tolist()]


# ----------------------------------------------------------------------------------------------------- classification

FOLDERS = {"20newsgroups-4cat": "20newsgroups-4cat", "imdb": "imdb-subset"}  # by the name of the task


def labelled(shared: Path, task: str) -> dict[str, tuple[list[str], list[int]]]:
    """Return texts and classes by part, of documents as the recipes read them."""
    from recipes.sequence_tasks import read

    parts = read(task, str(shared / "data" / FOLDERS[task])).parts
    return {part: (list(rows["text_a"]), list(rows["label"])) for part, rows in parts.items()}


def probe(train: tuple[Tensor, list[int]], test: tuple[Tensor, list[int]], decay: float = 1e-4) -> float:
    """Return the accuracy of a logistic regression on embeddings."""
    features, labels = train[0].double(), torch.tensor(train[1])
    layer = nn.Linear(features.shape[1], int(labels.max()) + 1, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(layer(features), labels) + decay * layer.weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        optimizer.step(closure)
    with torch.no_grad():
        return (layer(test[0].double()).argmax(-1) == torch.tensor(test[1])).double().mean().item()
