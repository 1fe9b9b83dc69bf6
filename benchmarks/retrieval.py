"""Synthetic texts whose answer lies far back, and their scores: needles, RULER's tasks, key-value pairs, copying.

The tasks of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", COLM
2024, arXiv 2404.06654) are written from the descriptions in the paper, without its code: compare scores of models that
this program has measured, not these with published ones. They need no download: niah_single_1, niah_multikey_2,
niah_multikey_3, vt, cwe, fwe. The prompts have no chat template and no worked example.
"""

from __future__ import annotations

import copy
import math
import re
import string
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist, mean
from typing import Any

import torch
from torch import Tensor, nn

from hf_graphfilter.fitting.speed import last_logits
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUALITIES = re.findall(
    r"\w+",
    """
    amber ancient bitter bold brave brief bright broken bronze calm careful clever cold copper cosmic crimson
    curious dark deep distant dusty eager early electric empty faint famous fancy fast feral fierce final flat foggy
    forest fresh frozen gentle giant golden grand green happy harsh heavy hidden hollow honest humble icy idle jolly
    keen large late lazy little lively lonely loud lucky marble mellow mighty modern narrow neat nimble noble odd
    olive pale patient plain polite proud purple quick quiet rapid rare restless round royal rusty sacred salty
    secret sharp shiny silent silver simple slow small smooth snowy solid
    """,
)
THINGS = re.findall(
    r"\w+",
    """
    acorn anchor apple arrow badge bakery banjo barrel basket beacon bottle branch bridge bucket button cabin camel
    candle canyon carpet castle cedar chapel cherry circle cloud clover coast comet copse coral corner cottage
    cradle crane crown curtain desert dolphin dragon engine falcon farmer feather fiddle finch flame flute garden
    glacier goblet grape guitar hammer harbor hazel helmet heron island jacket jungle kettle kitten ladder lantern
    lemon letter lizard magnet maple market meadow mirror monkey museum needle oasis orchid otter paddle palace
    parrot pebble pencil pepper pillow pirate planet pocket pony puzzle rabbit ribbon river rocket saddle sailor
    shovel
    """,
)


@dataclass(frozen=True)
class Sample:
    """A text and its continuation.

    Attributes:
        prompt: the tokens of the text, which ends where the answer begins.
        answer: the tokens of the answer.
        answers: words that may be answered in any order; empty if there is a single answer.
        partly: whether each token of the answer counts by itself.
    """

    prompt: list[int]
    answer: list[int]
    answers: tuple[str, ...] = ()
    partly: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


# -------------------------------------------------------------------------------------------------------------- tasks

Text = tuple[str, str, tuple[str, ...]]  # the prompt, its answer, and its parts where there are several


def draw_names(draw: Random, count: int) -> list[str]:
    """Return different names: pairs of words."""
    pairs = len(QUALITIES) * len(THINGS)
    numbers = draw.sample(range(pairs), count) if count <= pairs else []
    if not numbers:
        raise ValueError(f"there are {pairs} names, {count} are needed")
    return [f"{QUALITIES[i // len(THINGS)]}-{THINGS[i % len(THINGS)]}" for i in numbers]


def draw_words(draw: Random, count: int) -> list[str]:
    """Return different words; names where there are not as many words."""
    words = sorted({*QUALITIES, *THINGS})
    draw.shuffle(words)
    return (words if count <= len(words) else [*words, *draw_names(draw, count - len(words))])[:count]


def draw_number(draw: Random, digits: int) -> str:
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def at_least(least: int, count: int) -> int:
    if count < least:
        raise ValueError(f"{count} is less than {least}")
    return count


def insert(lines: list[str], at: Iterable[int], inserted: Iterable[str]) -> str:
    """Return all lines as one text, with each of ``inserted`` before the line of its place."""
    placed = sorted(zip(at, inserted, strict=True), key=lambda pair: pair[0])
    for place, line in reversed(placed):
        lines.insert(place, line)
    return "\n".join(lines)


def ask_number(kind: str, key: str, value: str, text: str) -> Text:
    intro = f"Some special magic {kind}s are hidden in the following text. Memorize them.\n{text}\n"
    return f"{intro}What is the special magic {kind} for {key}? The special magic {kind} for {key} is", f" {value}", ()


def say_number(kind: str, key: str, value: str) -> str:
    return f"The special magic {kind} for {key} is {value}."


def niah_single_1(draw: Random, count: int) -> Text:
    """One key with a number, in a repeated sentence of noise."""
    [key], value = draw_names(draw, 1), draw_number(draw, 7)
    text = insert([FILLER.strip()] * count, [draw.randint(0, count)], [say_number("number", key, value)])
    return ask_number("number", key, value, text)


def niah_multikey_2(draw: Random, count: int) -> Text:
    """Nothing but keys with numbers, one of which is asked for."""
    keys = draw_names(draw, at_least(2, count))
    values = [draw_number(draw, 7) for _ in keys]
    index = draw.randrange(count)
    text = "\n".join(say_number("number", *pair) for pair in zip(keys, values, strict=True))
    return ask_number("number", keys[index], values[index], text)


def niah_multikey_3(draw: Random, count: int) -> Text:
    """Nothing but pairs of UUIDs, one of which is asked for."""
    pairs = [
        tuple(str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(2)) for _ in range(at_least(2, count))
    ]
    key, value = pairs[draw.randrange(count)]
    return ask_number("uuid", key, value, "\n".join(say_number("uuid", *pair) for pair in pairs))


def vt(draw: Random, count: int) -> Text:
    """Variable tracking: a value that is passed on four times, between lines of noise."""
    names: list[str] = []
    while len(names) < 5:
        name = "".join(draw.choices(string.ascii_uppercase, k=5))
        names += [name] if name not in names else []
    value = draw_number(draw, 5)
    lines = [f"VAR {name} = {term}" for name, term in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)]
    text = insert([FILLER.strip()] * count, sorted(draw.choices(range(count + 1), k=5)), lines)
    intro = f"Memorize and track the chain of variable assignments in the following text.\n{text}\n"
    question = f"Which variables have the value {value}? The 5 variables with the value {value} are:"
    return intro + question, " " + " ".join(names), tuple(names)


def cwe(draw: Random, count: int) -> Text:
    """Make a task of common words: ten of a numbered list stand there up to 30 times, all others a tenth as often."""
    common_count = min(30, count * 3 // 40)
    rare_count = max(1, common_count // 10)
    if common_count <= rare_count:
        raise ValueError(f"a list of {count} words has no common ones")
    num_rare = -(-(count - 10 * common_count) // rare_count)
    words = draw_words(draw, 10 + num_rare)
    entries = [word for word in words[:10] for _ in range(common_count)]
    entries += [word for word in words[10:] for _ in range(rare_count)][: count - len(entries)]
    draw.shuffle(entries)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
    intro = f"In the following numbered list of words, some words stand more often than others.\n{text}\n"
    answers = sorted(words[:10], key=entries.index)
    question = "What are the 10 most common words in the list? The 10 most common words are:"
    return intro + question, " " + " ".join(answers), tuple(answers)


def fwe(draw: Random, count: int) -> Text:
    """Frequent words: coded words whose frequencies fall with the square of the rank; the first one is noise."""
    shares = [count * 6 / (math.pi * rank) ** 2 for rank in range(1, count + 1)]
    counts = [round(share) for share in shares if round(share)]
    if len(counts) < 5 or counts[3] == counts[4]:
        raise ValueError(f"of {count} words no three are more frequent than the others")
    words: list[str] = ["..."]
    while len(words) < len(counts):
        word = "".join(draw.choices(string.ascii_lowercase, k=6))
        words += [word] if word not in words else []
    coded_words = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
    draw.shuffle(coded_words)
    intro = "Read the following coded text and count how often each coded word appears. The dots are no words.\n"
    intro += " ".join(coded_words) + "\n"
    question = "What are the three most frequent coded words? The three most frequent coded words are:"
    return intro + question, " " + " ".join(words[1:4]), tuple(words[1:4])


def key_value(draw: Random, count: int) -> Text:
    """Make a task with a dictionary of numbers, one of which is asked for."""
    keys = draw.sample(range(10_000, 100_000), at_least(2, count))
    values = [draw_number(draw, 5) for _ in keys]
    index = draw.randrange(count)
    text = "\n".join(f'"{key}": "{value}",' for key, value in zip(keys, values, strict=True))
    return f'Extract the value of a key from this JSON object.\n{{\n{text}\n}}\n"{keys[index]}": "', values[index], ()


TEXTS: dict[str, Callable[[Random, int], Text]] = {
    "niah_single_1": niah_single_1,
    "niah_multikey_2": niah_multikey_2,
    "niah_multikey_3": niah_multikey_3,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
    "key-value": key_value,
}
TASKS = (*TEXTS, "copying")


def make_sample(tokenizer: Any, task: str, tokens: int, number: int) -> Sample:
    """Return a sample of a task, the longest of at most ``tokens`` tokens; ``number`` is its seed.

    Raises:
        ValueError: the task does not fit into so few tokens.
    """
    seed = f"{task} {tokens} {number}"
    if task == "copying":
        [ids] = copied_ids(tokens // 2, 1, Random(seed).getrandbits(32), len(tokenizer)).tolist()
        return Sample([*ids, ids[0]], ids[1:], partly=True)

    def build(count: int) -> Sample | None:
        try:
            prompt, answer, answers = TEXTS[task](Random(seed), count)
        except ValueError:
            return None
        return Sample([*first_ids(tokenizer), *encode(tokenizer, prompt)], encode(tokenizer, answer), answers)

    # a part of a text has one token at least; too many parts are refused or too long, too few refused or short
    fits, too_long, best = 0, tokens + 1, None
    while too_long - fits > 1:
        count = (fits + too_long) // 2
        sample = build(count)
        if sample is None and best is None and count * 4 < tokens:
            fits = count
        elif sample is not None and len(sample) <= tokens:
            fits, best = count, sample
        else:
            too_long = count
    if best is None:
        raise ValueError(f"{task} does not fit into {tokens} tokens")
    return best


def make_needle(tokenizer: Any, tokens: int, depth: float, number: int) -> Sample:
    """Return a pass key at ``depth`` (0: at the beginning, 1: at the end) of a filler, ``tokens`` tokens in all.

    Raises:
        ValueError: needle and question are longer than that.
    """
    key = draw_number(Random(f"needle {tokens} {depth:.3f} {number}"), 5)
    room = tokens - len(hide_key(tokenizer, [], key, 0))
    if room < 0:
        raise ValueError(f"a needle does not fit into {tokens} tokens")
    return hide_key(tokenizer, fill(tokenizer, room), key, round(depth * room))


def hide_key(tokenizer: Any, filler: list[int], key: str, at: int) -> Sample:
    statement = encode(tokenizer, f" The pass key is {key}. Remember it. {key} is the pass key. ")
    question = encode(tokenizer, " What is the pass key? The pass key is ")
    return Sample([*first_ids(tokenizer), *filler[:at], *statement, *filler[at:], *question], encode(tokenizer, key))


def fill(tokenizer: Any, tokens: int) -> list[int]:
    return encode(tokenizer, FILLER * (tokens // 16 + 1))[:tokens]


def copied_ids(tokens: int, count: int, seed: int, vocabulary: int) -> Tensor:
    """Return (count, tokens) random tokens."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(*((1000, 20000) if vocabulary >= 20000 else (0, vocabulary)), (count, tokens), generator=draw)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def first_ids(tokenizer: Any) -> list[int]:
    """Return the token that a tokenizer puts before every text, if any."""
    ids = tokenizer("")["input_ids"][:1]
    return ids if ids and ids[0] == tokenizer.bos_token_id else []


# -------------------------------------------------------------------------------------------------------------- score


@dataclass(frozen=True)
class Score:
    """The part of an answer that is right, and the mean log-probability of its tokens, in nats."""

    right: float
    log_probability: float


@torch.no_grad()
def score(model: nn.Module, sample: Sample, tokenizer: Any) -> Score:
    """Score a model on a sample.

    One answer is right if each of its tokens is the likeliest in turn, so that greedy generation would write it. Where
    there are several, the score is the share that the generated text contains. In copying, each token counts.
    """
    ids = torch.tensor([[*sample.prompt, *sample.answer]], device=model.device)
    count, answer = len(sample.answer), ids[0, -len(sample.answer) :]
    if sample.answers:  # one pass over the text for both
        outputs = model(input_ids=ids[:, :-count], use_cache=True, **last_logits(model))
        cache = {CACHE: copy.deepcopy(outputs[CACHE])}
        later_logits = model(input_ids=ids[:, -count:-1], **cache, use_cache=True).logits
        rows = torch.cat([outputs.logits[0, -1:], later_logits[0]]).float()
        text = tokenizer.decode(go_on(model, outputs, count + count // 2 + 4)[0])
        right = mean(bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) for word in sample.answers)
    else:
        rows = model(input_ids=ids, use_cache=False, **last_logits(model, count + 1)).logits[0, -count - 1 : -1].float()
        hits = (rows.argmax(-1) == answer).float()
        right = (hits.mean() if sample.partly else hits.min()).item()
    return Score(float(right), rows.log_softmax(-1).gather(1, answer[:, None]).mean().item())


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, tokens: int) -> Tensor:
    """Return the likeliest next ``tokens`` tokens of each row, one after another, with a cache."""
    return go_on(model, model(input_ids=ids, use_cache=True, **last_logits(model)), tokens)


def go_on(model: nn.Module, outputs: Any, tokens: int) -> Tensor:
    """Return the likeliest tokens after what gave ``outputs``, whose cache takes them in."""
    ids = [outputs.logits[:, -1:].argmax(-1)]
    for _ in range(tokens - 1):
        outputs = model(input_ids=ids[-1], **{CACHE: outputs[CACHE]}, use_cache=True)
        ids.append(outputs.logits[:, -1:].argmax(-1))
    return torch.cat(ids, 1)


def wilson(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``count`` samples."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


# ------------------------------------------------------------------------------------- as conversion.py measures them


@torch.no_grad()
def copying(model: nn.Module, tokens: int, count: int = 8) -> float:
    """Share of random tokens that are predicted right where they come a second time."""
    sequence = copied_ids(tokens, count, 0, 20000)
    hits = []
    for ids in torch.cat([sequence, sequence], 1).to(model.device).split(2):
        predicted = model(ids, use_cache=False).logits[:, tokens:-1].argmax(-1)
        hits.append((predicted == ids[:, tokens + 1 :]).float().mean())
    return torch.stack(hits).mean().item()


def needle(model: nn.Module, tokenizer: Any, tokens: int, count: int = 10) -> float:
    """Share of five-digit keys that are found again after so many tokens of filler, each digit likeliest in turn."""
    draw, hits, filler = Random(0), 0.0, fill(tokenizer, tokens)
    for _ in range(count):
        key = draw_number(draw, 5)
        sample = hide_key(tokenizer, filler, key, draw.randrange(0, len(filler) // 2))
        hits += score(model, sample, tokenizer).right
    return hits / count
