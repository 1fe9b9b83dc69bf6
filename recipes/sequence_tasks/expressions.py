"""ListOps: nested lists of digits with an operator each (Nangia and Bowman, 2018), as the Long Range Arena has them.

A node of the tree is a digit with probability 3/4, on the last level always, else one of four operators with 2 to
``max_args`` arguments. Trees are drawn until one is long enough and not too long: operators, digits and closing
brackets count, the parentheses do not.
"""

import hashlib
import random
from collections.abc import Iterator

import numpy as np

from hf_graphfilter import GraphFilterError

OPERATOR = 0.25  # probability
MOST_TREES = 1e8  # that may have to be drawn


def median(values: list[int]) -> int:
    values, middle = sorted(values), len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


OPERATORS = (("[MIN", min), ("[MAX", max), ("[MED", median), ("[SM", lambda values: sum(values) % 10))
DIGITS = [(str(digit), digit) for digit in range(10)]


class TooLong(Exception):
    """Of the tree that is being drawn."""


class Expressions:
    """Expressions with more than ``min_length`` and less than ``max_length`` tokens."""

    def __init__(self, max_depth: int = 10, max_args: int = 10, min_length: int = 500, max_length: int = 2000):
        self.max_depth, self.max_args = max_depth, max_args
        self.min_length, self.max_length = min_length, max_length

    def __str__(self) -> str:
        return (
            f"expressions of more than {self.min_length} and less than {self.max_length} tokens, of at most "
            f"{self.max_depth} levels and {self.max_args} arguments"
        )

    def share(self) -> tuple[float, float]:
        """Return the share of drawn trees that are kept, and how many different ones there are, 1e30 for more."""
        chances, numbers = np.zeros((2, self.max_length))
        chances[1:2], numbers[1:2] = 1, 10
        leaf = chances * (1 - OPERATOR), numbers.copy()
        for _ in range(self.max_depth - 1):
            inner = []
            for child, weight in ((chances, OPERATOR / (self.max_args - 1)), (numbers, len(OPERATORS))):
                children, total = child, np.zeros_like(child)
                for _ in range(2, self.max_args + 1):
                    children = np.minimum(np.convolve(children, child)[: self.max_length], 1e30)
                    total += children
                inner.append(np.r_[0, 0, total[:-2] * weight])
            chances, numbers = leaf[0] + inner[0], np.minimum(leaf[1] + inner[1], 1e30)
        allowed = slice(self.min_length + 1, None)
        return float(chances[allowed].sum()), float(numbers[allowed].sum())

    def check(self, count: int) -> None:
        """Whether so many different ones can be drawn in an hour."""
        if self.max_length - self.min_length < 2:
            raise GraphFilterError(f"there are no {self}: no length lies between")
        share, numbers = self.share()
        if not numbers:
            raise GraphFilterError(f"there are no {self}")
        if 2 * count > numbers:
            raise GraphFilterError(f"there are {numbers:.0f} different {self}: at most half as many can be drawn")
        if count > share * MOST_TREES:
            raise GraphFilterError(
                f"of the trees that are drawn a share of {share:.1g} are {self}: {count} of them would take too long"
            )

    def generate(self, seed: int) -> Iterator[tuple[str, int]]:
        """Different expressions without end, in the form of the official files, and their values."""
        draw, seen = random.Random(seed), set()
        while True:
            self.random, self.left = draw.random, self.max_length
            try:
                text, value = self.tree(1)
            except TooLong:
                continue
            if self.max_length - self.left > self.min_length:
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield text, value

    def tree(self, level: int) -> tuple[str, int]:
        random = self.random
        if level == self.max_depth or random() > OPERATOR:
            self.left -= 1
            if self.left <= 0:
                raise TooLong
            return DIGITS[int(random() * 10)]
        self.left -= 2
        count = 2 + int(random() * (self.max_args - 1))
        symbol, apply = OPERATORS[int(random() * 4)]
        arguments = [self.tree(level + 1) for _ in range(count)]
        texts = " ) ".join([text for text, _ in arguments])
        return f"{'( ' * (count + 1)}{symbol} {texts} ) ] )", apply([value for _, value in arguments])
