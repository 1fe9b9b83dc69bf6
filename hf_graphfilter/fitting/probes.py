"""Make retrieval probes: sequences whose last tokens can only be predicted from tokens far before them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .objectives import Batch

COUNT = 2  # probes of each kind
LONGEST = 384  # length of a probe in tokens, or four times the reach of the window if that is more
PAIRS = 50
FEWEST = 32  # different token ids, below which random sequences repeat themselves
TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "use_cache"}


def problem_of(held_out: list[Batch]) -> str:
    """Return why no probes can be made of these batches, or an empty text if they can."""
    if others := sorted({name for batch in held_out for name in batch} - TEXT):
        return f"probes hold nothing but token ids, and the held-out batches hold {', '.join(others)}"
    if not held_out:
        return "there are no batches to make probes of"
    count = len(torch.cat(_texts(held_out)).unique())
    if count < FEWEST:
        return f"probes are drawn from the token ids of the held-out batches, which hold {count} different ones"
    return ""


def make_probes(held_out: list[Batch], window: int, longest: int) -> list[Batch]:
    """Return batches of probes with labels, which are -100 except for the answers.

    The probes are made of the token ids of the held-out batches, so that no tokenizer is needed. There are three kinds:

    - a dictionary: pairs of two random tokens, followed by the first tokens of some of the pairs;
    - pass keys: the same with few pairs, which are scattered over text of the batches;
    - copying: random tokens, followed by the same tokens again.

    All answers lie further back than the window. The random numbers are the same in each call, and do not change the
    global generator.

    Args:
        held_out: batches of token ids, for which ``problem_of`` is empty.
        window: the number of tokens before each token that a filter attends to exactly.
        longest: the longest input that the model takes.
    """
    generator, texts = torch.Generator().manual_seed(0), _texts(held_out)
    stream, first = torch.cat(texts), texts[0][:1]
    if all(text[0] == first for text in texts):  # a special token
        start, stream = first, stream[stream != first]
    else:
        start = first[:0]
    ids = stream.unique()
    length = min(max(map(len, texts)), longest, max(LONGEST, 4 * window)) - len(start)

    def random_pieces(count: int, size: int) -> list[Tensor]:
        cycles = [ids[torch.randperm(len(ids), generator=generator)] for _ in range(count * size // len(ids) + 1)]
        return list(torch.cat(cycles)[: count * size].split(size))

    def text_piece(size: int) -> Tensor:
        offset = int(torch.randint(len(stream), (1,), generator=generator))
        return stream.roll(-offset)[:size]

    def dictionary() -> tuple[Tensor, Tensor]:
        questions = max(1, length // 12)
        pairs = min(length // 4 - questions, max(PAIRS, window // 2))
        return _make_probe(random_pieces(pairs, 4), stream[:0], 2, questions, window, generator)

    def pass_keys() -> tuple[Tensor, Tensor]:
        pairs = max(1, min(4, length // 24))
        return _make_probe(random_pieces(pairs, 6), text_piece(length - 12 * pairs), 2, pairs, window, generator)

    def copying() -> tuple[Tensor, Tensor]:
        size = max(2, min(length // 2, length - window - 2))
        (piece,) = random_pieces(1, length - size)
        return _make_probe(list(piece.split([size, len(piece) - size])), stream[:0], 1, 1, window, generator)

    rows = max(1, len(held_out[0]["input_ids"]))  # as many as the device takes
    batches: list[Batch] = []
    for kind, min_length in ((dictionary, 12), (pass_keys, 18), (copying, 5)):
        if length < min_length:
            continue
        probes = [kind() for _ in range(COUNT)]
        for group in (probes[i : i + rows] for i in range(0, COUNT, rows)):
            inputs, labels = (torch.stack(tensors) for tensors in zip(*group, strict=True))
            starts = start.expand(len(inputs), -1)
            labels = torch.cat([torch.full_like(starts, -100), labels], 1)
            if (labels != -100).any():
                batches.append({"input_ids": torch.cat([starts, inputs], 1), "labels": labels})
    return batches


def _make_probe(
    facts: list[Tensor], filler: Tensor, key: int, questions: int, window: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return facts among filler, followed by some of the facts again, and labels for the values of the latter."""
    first_filler, *fillers = filler.tensor_split(len(facts) + 1)
    pieces, starts, length = [first_filler], [], len(first_filler)
    for fact, text in zip(facts, fillers, strict=True):
        starts.append(length)
        pieces += [fact, text]
        length += len(fact) + len(text)
    far_facts = [fact for fact, start in zip(facts, starts, strict=True) if length - 1 - start > window]
    queries = [far_facts[i] for i in torch.randperm(len(far_facts), generator=generator)[:questions].tolist()]
    context = torch.cat(pieces)
    answers = [torch.cat([torch.full_like(fact[:key], -100), fact[key:]]) for fact in queries]
    return torch.cat([context, *queries]), torch.cat([torch.full_like(context, -100), *answers])


def _texts(held_out: Iterable[Batch]) -> list[Tensor]:
    """Return the token ids of each row without padding, on the CPU."""
    texts = []
    for batch in held_out:
        ids: Tensor = batch["input_ids"].cpu()
        mask: Any = batch.get("attention_mask")
        is_token = torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            is_token = mask.cpu().bool()
        texts += [row[keep] for row, keep in zip(ids, is_token, strict=True) if keep.any()]
    return texts
