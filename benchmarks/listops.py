"""Measure how well simple rules answer ListOps without computing the value: ``python benchmarks/listops.py``.

Expressions as recipes/generate.py makes them, short ones (50 to 200 tokens) and those of the Long Range Arena (500 to
2,000). Each rule answers with what was most frequent in 10,000 expressions; its accuracy is that on 2,000 others.
Writes benchmarks/results/listops.csv.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from itertools import islice
from pathlib import Path

from measure import RESULTS, write

sys.path.append(str(Path(__file__).parents[1]))
from recipes.sequence_tasks.expressions import Expressions

TRAIN, TEST = 10_000, 2_000
LENGTHS = {"50 to 200 tokens": (50, 200), "500 to 2,000 tokens": (500, 2_000)}


def read_top_digits(tokens: list[str]) -> tuple[str, str | None]:
    """Return the outermost operator, and the largest (smallest) digit directly under it, where it asks for that."""
    depth, digits = 0, []
    for token in tokens:
        depth += token.startswith("[") - (token == "]")
        digits += [token] if depth == 1 and token.isdigit() else []
    extremes = {"[MAX": max, "[MIN": min}
    return tokens[0], extremes[tokens[0]](digits) if digits and tokens[0] in extremes else None


RULES: dict[str, Callable[[list[str]], Hashable]] = {
    "the same answer always": lambda tokens: None,
    "by the outermost operator": lambda tokens: tokens[0],
    "by it and the digits directly under it": read_top_digits,
}


def main() -> None:
    rows = []
    for name, lengths in LENGTHS.items():
        stream = Expressions(10, 10, *lengths).generate(0)
        examples = [([t for t in text.split() if t not in "()"], value) for text, value in islice(stream, TRAIN + TEST)]
        for rule, key in RULES.items():
            value_counts: dict[Hashable, Counter] = defaultdict(Counter)
            for tokens, value in examples[:TRAIN]:
                value_counts[key(tokens)][value] += 1
            answers = {feature: counts.most_common(1)[0][0] for feature, counts in value_counts.items()}
            correct = sum(answers.get(key(tokens)) == value for tokens, value in examples[TRAIN:])
            rows.append({"lengths": name, "rule": rule, "accuracy": f"{correct / TEST:.3f}"})
            print(*rows[-1].values())
    write(rows, RESULTS / "listops.csv", ["lengths", "rule", "accuracy"])


if __name__ == "__main__":
    main()
