r"""Measure a model on long texts, beside its original: ``python benchmarks/long.py MODEL``.

MODEL is ``smollm2`` or ``minilm`` (the originals), or the folder of a model, converted or not. --filter patches the
model first, without training; --load reads the coefficients of a filter file, and --keep chooses key heads that keep
their attention, by probes made of the validation part of WikiText-2. --without far then leaves only the window
and the sinks of a replacement filter:

    python benchmarks/long.py smollm2
    python benchmarks/long.py smollm2 --filter hedgehog --set window=64 sinks=4 --without far --name smollm2-window-64
    python benchmarks/long.py smollm2 --filter far_field --set memory=64 --load model_cards/smollm2-far-field-long \
        --name smollm2-far-field-memory-64
    python benchmarks/long.py smollm2 --filter far_field --keep 20% --load model_cards/smollm2-far-field-long \
        --name smollm2-far-field-keep-20
    python benchmarks/long.py runs/conversion/text-agf/model --name smollm2-text-agf

| --what    | decoders                                               | encoders                             |
|-----------|--------------------------------------------------------|--------------------------------------|
| quality   | perplexity by position and divergence on WikiText-2,   | cosine with the original, accuracy   |
|           | agreement of greedy generation, repetition             | of linear probes                     |
| retrieval | needle by depth, RULER's tasks, key-value pairs,       | nDCG@10 on SciFact                   |
|           | copying: accuracy and log-probability                  |                                      |
| speed     | prefill, first token, decoding by context and batch;   | forward pass                         |
|           | the original has a dynamic and a static cache          |                                      |
| growth    | forward pass of 4,096 and 65,536 tokens; if asked for  | the same                             |

Growth is a row of its own where the process keeps its memory, with ``MALLOC_MMAP_THRESHOLD_=4000000000`` and
``MALLOC_TRIM_THRESHOLD_=8000000000`` before the command.

All forms are timed in turn, and ratios are taken within a round; memory is the peak beyond what was in use before. The
original whose attention computes nothing is timed too: no filter is faster than that.
Every finished measurement is written at once into benchmarks/results/long/NAME.json, and the same command resumes. A
measurement with other settings (--samples, --precision, --threads) is made again. Data are read from --shared.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from decoding import MOST, fill_cache, one_token
from encoders import FOLDERS, embed, labelled, ndcg, probe, rank, scifact
from measure import RESULTS, ROOT, percentiles, stamp
from real import weights, windows
from retrieval import TASKS, Sample, generate, make_needle, make_sample, score, wilson
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_graphfilter import filter_parameters, load_filter, patch_model
from hf_graphfilter.analysis.branches import switch_off
from hf_graphfilter.demo import pretrained_path
from hf_graphfilter.files import write_text
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.filters.core.registry import get_filter
from hf_graphfilter.fitting import choose_heads
from hf_graphfilter.fitting.head_choice import parse_heads
from hf_graphfilter.fitting.quality import compare_embeddings, compare_logits
from hf_graphfilter.fitting.speed import last_logits, time_in_turn
from recipes.identities import hash_files

NAMES: dict[str, Callable[[], Path]] = {"smollm2": lambda: weights("smollm2"), "minilm": pretrained_path}
WHAT = ("quality", "retrieval", "speed", "growth")
GROWTH = (4096, 65536)  # tokens
LENGTHS, PREFILL, CONTEXTS = (256, 512, 1024, 2048), tuple(2**i for i in range(8, 15)), (128, 1024, 4096, 16384)
STATIC, BARE = "plain, static cache", "no attention"  # two of the forms that are timed
DEPTHS = tuple(i / 9 for i in range(10))
ENDS = (128, 512, 1024, 2048)  # of the parts of a text, each with its perplexity
GENERATED, ROWS = 64, 8  # tokens, and texts at a time
FILLED = 256  # tokens that are run before a context is taken for as long as it is wanted
STEPS = 8  # of decoding in a round
PROBED, PROBES = 512, 8  # tokens and texts that heads are chosen by
COMPARED = 500  # documents whose embeddings are compared with the original's

Measurement = tuple[dict[str, Any], dict[str, Any], Callable[[], dict[str, Any]]]  # what, settings, call


@dataclass
class Subject:
    """The model that is measured, its original, and the command line."""

    model: PreTrainedModel
    original_path: Path | None  # None where the model is the original
    tokenizer: Any
    options: argparse.Namespace

    @cached_property
    def original(self) -> PreTrainedModel:
        if self.original_path is None:
            return self.model
        original = load(self.original_path).to(self.options.device)
        sizes, original_sizes = (
            [getattr(m.config, n) for n in ("vocab_size", "hidden_size", "num_hidden_layers")]
            for m in (self.model, original)
        )
        if sizes != original_sizes:
            raise SystemExit(f"--original: {self.original_path.name} is another model: name the original of this one")
        return original

    @cached_property
    def bare(self) -> PreTrainedModel:
        """The original with attention that computes nothing: no filter can be faster than this."""
        assert self.original_path is not None
        bare = load(self.original_path).to(self.options.device)
        bare.set_attn_implementation(NOTHING)
        return bare

    @property
    def is_original(self) -> bool:
        return self.original_path is None

    @property
    def is_decoder(self) -> bool:
        return is_decoder(self.model.config)

    def lengths(self, usual: tuple[int, ...]) -> list[int]:
        """Return the lengths that the model has positions for."""
        max_positions = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        lengths = [n for n in self.options.lengths or usual if n <= max_positions]
        if not lengths:
            raise SystemExit(f"--lengths: the model knows {max_positions} positions")
        return lengths

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with (
            torch.no_grad(),
            torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.precision == "bf16"),
        ):
            yield


def attend_nothing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Any, None]:
    batch, heads, tokens, _ = query.shape
    return value.new_zeros(batch, tokens, heads, value.shape[-1]), None


NOTHING = "attend_nothing"
AttentionInterface.register(NOTHING, attend_nothing)


def is_decoder(config: Any) -> bool:
    return (config.architectures or [""])[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def load(path: Path) -> PreTrainedModel:
    model_class = AutoModelForCausalLM if is_decoder(AutoConfig.from_pretrained(path)) else AutoModel
    return model_class.from_pretrained(path, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------------------------ quality


def measure_quality(subject: Subject) -> Iterator[Measurement]:
    samples, lengths = subject.options.samples, subject.lengths(LENGTHS)
    if not subject.is_decoder:
        if not subject.is_original:
            yield {"what": "embeddings"}, {"documents": COMPARED}, lambda: nearness(subject)
        for task in FOLDERS:
            yield {"what": task, "tokens": max(lengths)}, {}, partial(classification, subject, task, max(lengths))
        return
    tokens = min(ENDS[-1], max(lengths))
    yield {"what": "perplexity", "tokens": tokens}, {"samples": samples}, lambda: by_position(subject, tokens)
    for n in lengths:
        yield {"what": "generation", "tokens": n}, {"samples": samples}, partial(generation, subject, n)


def texts(subject: Subject, tokens: int) -> Tensor:
    """Return windows of the test part of WikiText-2, spread over it."""
    token_windows = windows(subject.tokenizer, subject.options.shared / "data" / "wikitext-2" / "test.txt", tokens)
    step = max(1, len(token_windows) // subject.options.samples)
    return token_windows[::step][: subject.options.samples].to(subject.model.device)


def by_position(subject: Subject, tokens: int) -> dict[str, Any]:
    """Return perplexity by the number of tokens before, and divergence and agreement with the original."""
    sums: dict[str, Tensor] = {}
    for ids in texts(subject, tokens).split(1):
        with subject.computing():
            logits = subject.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            rows = {"loss": functional.cross_entropy(logits[0], ids[0, 1:], reduction="none")}
            if not subject.is_original:
                original_logits = subject.original(input_ids=ids, use_cache=False).logits[:, :-1].float()
                rows["original"] = functional.cross_entropy(original_logits[0], ids[0, 1:], reduction="none")
                rows["agreement"], rows["divergence"] = (x[0] for x in compare_logits(original_logits, logits))
        for name, row in rows.items():
            sums[name] = sums.get(name, 0) + row.double().cpu()
    count, values = len(texts(subject, tokens)), {}
    begin = 0
    for end in ENDS:
        if begin < tokens - 1:
            means = {name: (row[begin : end - 1].mean() / count).item() for name, row in sums.items()}
            part = {"perplexity": math.exp(means.pop("loss"))}
            if "original" in means:
                part["original"] = math.exp(means.pop("original"))
            values[f"{begin + 1} to {min(end, tokens) - 1}"] = part | means
        begin = end - 1
    return {"by tokens before": values, "all": {name: (row.mean() / count).item() for name, row in sums.items()}}


def generation(subject: Subject, tokens: int) -> dict[str, Any]:
    """Return how many tokens of greedy generation agree with the original's, and how much is repeated."""
    agreements, repeated = [], {"repeated": [], "repeated by the original": []}
    for ids in texts(subject, tokens).split(ROWS):
        with subject.computing():
            output = generate(subject.model, ids, GENERATED)
            original_output = output if subject.is_original else generate(subject.original, ids, GENERATED)
        agreements += [int((a == b).int().cumprod(0).sum()) for a, b in zip(output, original_output, strict=True)]
        for rows, name in ((output, "repeated"), (original_output, "repeated by the original")):
            repeated[name] += [repetition(row.tolist()) for row in rows]
    values: dict[str, Any] = {"generated": GENERATED, **{name: mean(rates) for name, rates in repeated.items()}}
    if subject.is_original:
        return {"generated": GENERATED, "repeated": values["repeated"]}
    return values | {"agree, median": median(agreements), "agree, mean": mean(agreements)}


def repetition(tokens: list[int], n: int = 4) -> float:
    """Return the share of n-grams that stood before in the same text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def nearness(subject: Subject) -> dict[str, Any]:
    names = list(scifact(subject.options.shared).documents.values())[:COMPARED]
    with subject.computing():
        pair = (
            embed(m, subject.tokenizer, names, max(subject.lengths(LENGTHS))) for m in (subject.original, subject.model)
        )
    return {name: value["converted"] for name, value in compare_embeddings(*(x.double() for x in pair)).items()}


def classification(subject: Subject, task: str, tokens: int) -> dict[str, Any]:
    parts = labelled(subject.options.shared, task)
    with subject.computing():
        train, test = (
            (embed(subject.model, subject.tokenizer, parts[p][0], tokens), parts[p][1]) for p in ("train", "test")
        )
    accuracy = probe(train, test)
    return {"accuracy": accuracy, "interval": wilson(accuracy, len(test[1])), "samples": len(test[1])}


# ---------------------------------------------------------------------------------------------------------- retrieval


def measure_retrieval(subject: Subject) -> Iterator[Measurement]:
    samples, lengths, tokenizer = subject.options.samples, subject.lengths(LENGTHS), subject.tokenizer
    if not subject.is_decoder:
        yield {"what": "scifact", "tokens": max(lengths)}, {}, lambda: documents_found(subject, max(lengths))
        return
    for n in lengths:
        for task in subject.options.tasks:
            cells = [({"what": task, "tokens": n}, samples, partial(make_sample, tokenizer, task, n))]
            if task == "needle":
                count = subject.options.needles or samples
                cells = [
                    ({"what": task, "tokens": n, "depth": round(d, 3)}, count, partial(make_needle, tokenizer, n, d))
                    for d in DEPTHS
                ]
            for cell, count, make in cells:
                yield cell, {"samples": count}, partial(retrieved, subject, make, count)


def retrieved(subject: Subject, make: Callable[[int], Sample], count: int) -> dict[str, Any]:
    """Return the score of so many samples of a task."""
    try:
        samples = [make(number) for number in range(count)]
    except ValueError as error:
        return {"refused": str(error)}
    with subject.computing():
        scores = [score(subject.model, sample, subject.tokenizer) for sample in samples]
    accuracy, logs = mean(s.right for s in scores), [s.log_probability for s in scores]
    return {
        "accuracy": accuracy,
        "interval": wilson(accuracy, count),
        "log-probability": mean(logs),
        "standard error": stdev(logs) / math.sqrt(count) if count > 1 else None,
    }


def documents_found(subject: Subject, tokens: int) -> dict[str, Any]:
    """Return nDCG@10 of the test queries of SciFact."""
    documents, queries, relevant = scifact(subject.options.shared)
    with subject.computing():
        query_vectors, document_vectors = (
            embed(subject.model, subject.tokenizer, list(source.values()), tokens) for source in (queries, documents)
        )
    ranked = rank(query_vectors, document_vectors, list(documents))
    gains = [ndcg(names, relevant[query]) for query, names in zip(queries, ranked, strict=True)]
    error = stdev(gains) / math.sqrt(len(gains))
    return {"nDCG@10": mean(gains), "standard error": error, "queries": len(gains), "documents": len(documents)}


# -------------------------------------------------------------------------------------------------------------- speed


def measure_speed(subject: Subject) -> Iterator[Measurement]:
    options = subject.options
    settings = {"threads": torch.get_num_threads(), "rounds": options.rounds}
    positions = getattr(subject.model.config, "max_position_embeddings", None) or math.inf
    if subject.is_decoder and hasattr(subject.model.config, "rope_parameters"):
        positions = math.inf  # no table: what lies beyond the positions that were trained takes the same time
    for n in [n for n in options.lengths or PREFILL if n <= positions]:
        yield {"what": "prefill", "tokens": n}, settings, partial(prefill, subject, n, False)
        if subject.is_decoder:
            yield {"what": "first token", "tokens": n}, settings, partial(prefill, subject, n, True)
    for n in options.lengths or CONTEXTS:
        for batch in options.batches if subject.is_decoder else ():
            if n + STEPS * options.rounds + 2 <= positions and fits_into_memory(subject, n, batch):
                cell = {"what": "decoding", "tokens": n, "batch": batch}
                yield cell, settings, partial(decoding, subject, n, batch)


def forms(subject: Subject) -> dict[str, PreTrainedModel]:
    variants = {} if subject.is_original else {"converted": subject.model, BARE: subject.bare}
    return {"plain": subject.original, **variants}


def measure_growth(subject: Subject) -> Iterator[Measurement]:
    lengths = sorted(subject.options.lengths or GROWTH)
    settings = {"threads": torch.get_num_threads(), "rounds": subject.options.rounds}
    memory = "kept" if "MALLOC_TRIM_THRESHOLD_" in os.environ else "returned"
    yield {"what": "growth", "tokens": lengths[-1], "memory": memory}, settings, partial(growth, subject, lengths)


def growth(subject: Subject, lengths: list[int]) -> dict[str, Any]:
    """Return the exponent by which time grows between the first and the last length, with and without attention."""
    models = {"model": subject.model} | ({} if subject.is_original else {BARE: subject.bare})
    calls = {}
    for n in lengths:
        for name, model in models.items():
            options = {"use_cache": False} if subject.is_decoder else {}
            calls[f"{name} {n}"] = partial(model, input_ids=random_ids(subject, n), **options, **last_logits(model))
    with torch.no_grad():
        for name in models:
            calls[f"{name} {lengths[0]}"]()
        durations, _ = time_in_turn(calls, subject.model.device, subject.options.rounds, memory=False)
    rows = {}
    for name in models:
        ms = {n: median(durations[f"{name} {n}"]) for n in lengths}
        exponent = math.log(ms[lengths[-1]] / ms[lengths[0]]) / math.log(lengths[-1] / lengths[0])
        rows[name] = {"exponent": round(exponent, 3), "median_ms": {str(n): round(ms[n], 1) for n in lengths}}
    return {**rows.pop("model"), **rows}


def random_ids(subject: Subject, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, subject.model.config.vocab_size, (1, tokens), generator=draw)
    return ids.to(subject.model.device)


def prefill(subject: Subject, tokens: int, cached: bool) -> dict[str, Any]:
    """Time the logits of the last token of a text, with a cache for those that follow or without."""
    ids, calls = random_ids(subject, tokens), {}
    for name, model in forms(subject).items():
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        options = {"use_cache": cached and name != BARE} if takes_cache else {}
        calls[name] = partial(model, input_ids=ids, **options, **last_logits(model))
    return timed(calls, subject)


def decoding(subject: Subject, tokens: int, batch: int) -> dict[str, Any]:
    """Time a step after contexts, of the original with both kinds of cache and without attention."""
    kinds = [(name, model, "dynamic") for name, model in forms(subject).items() if name != BARE]
    kinds.insert(1, (STATIC, subject.original, "static"))
    device = subject.options.device
    with torch.no_grad():
        calls = {
            name: one_token(model, fill_cache(model, tokens, kind, device, batch, min(FILLED, tokens)), device, batch)
            for name, model, kind in kinds
        }
        if not subject.is_original:
            token = torch.ones(batch, 1, dtype=torch.long, device=device)
            calls[BARE] = partial(subject.bare, token, use_cache=False)
    return timed(calls, subject, STEPS)


def timed(calls: dict[str, Callable[[], object]], subject: Subject, times: int = 1) -> dict[str, Any]:
    with torch.no_grad():
        for call in calls.values():
            call()
        durations, mb = time_in_turn(calls, subject.model.device, subject.options.rounds, times)
    rows = {name: {**percentiles(ms, durations["plain"]), "peak_mb": mb[name]} for name, ms in durations.items()}
    if "converted" in durations and STATIC in durations:
        ratios = [value / static for value, static in zip(durations["converted"], durations[STATIC], strict=True)]
        rows["converted"]["ratio_to_static"] = round(median(ratios), 3)
    return rows


def fits_into_memory(subject: Subject, tokens: int, batch: int) -> bool:
    """Return whether three caches of the original (dynamic, static, a copy while it grows) fit into half the memory."""
    config = subject.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    needed = 3 * 2 * 4 * config.num_hidden_layers * heads * width * tokens * batch
    if needed <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2:
        return True
    print(f"decoding after {tokens} tokens, batch {batch}: left out, needs {needed / 2**30:.0f} GB", flush=True)
    return False


# ------------------------------------------------------------------------------------------------------------ results

SECTIONS = {
    "quality": measure_quality,
    "retrieval": measure_retrieval,
    "speed": measure_speed,
    "growth": measure_growth,
}


class Results:
    """A file of measurements, written after each of them."""

    def __init__(self, file: Path, about: dict[str, Any], device: str = "cpu"):
        self.file, self.device = file, device
        self.content = json.loads(file.read_text()) if file.is_file() else {**about, "measurements": []}
        if any(self.content.get(name, value) != value for name, value in about.items()):
            raise SystemExit(f"{file.name} holds results of another model: choose another --name")

    def measure(self, what: dict[str, Any], settings: dict[str, Any], call: Callable[[], dict[str, Any]]) -> None:
        """Call unless the measurement is there."""
        other_measurements = [m for m in self.content["measurements"] if any(m.get(k) != v for k, v in what.items())]
        previous = [m for m in self.content["measurements"] if m not in other_measurements]
        if previous and previous[0]["settings"] == settings:
            return
        values = call()
        self.content["measurements"] = [
            *other_measurements,
            {**what, "settings": settings, "values": values, **stamp(self.device, "torch", "transformers")},
        ]
        write_text(self.file, json.dumps(self.content, indent=1) + "\n")
        print(*what.values(), json.dumps(values), flush=True)


def parse(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, minilm, or a folder")
    parser.add_argument("--original", help="the same, of the original; smollm2 or minilm if not given")
    parser.add_argument("--filter", help="patch the model with this filter, without training")
    parser.add_argument("--set", nargs="+", type=parse, default=[], metavar="NAME=VALUE", help="options of the filter")
    parser.add_argument("--keep", type=parse_heads, metavar="SHARE", help="of the key heads that keep their attention")
    parser.add_argument("--load", type=Path, help="folder of the filter's coefficients")
    parser.add_argument("--without", help="a part of the filters that is switched off: window, far ...")
    parser.add_argument("--name", help="of the results; the model's if not given")
    parser.add_argument(
        "--what", nargs="+", choices=WHAT, help="all but growth if not given; with --without without speed"
    )
    parser.add_argument("--tasks", nargs="+", choices=("needle", *TASKS), default=("needle", *TASKS), metavar="TASK")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of tokens, for all that is asked for")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8, 32), help="texts that are decoded at once")
    parser.add_argument("--samples", type=int, default=50, help="of each task and length, texts of quality")
    parser.add_argument("--needles", type=int, help="of each depth and length, if not as --samples")
    parser.add_argument("--rounds", type=int, default=5, help="of each time")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="of quality and retrieval")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of data/")
    parser.add_argument("--output", type=Path, default=RESULTS / "long", help="folder for the results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.without and {"speed", "growth"} & {*(options.what or ())}:
        parser.error(
            "--without: a part that is switched off takes its time all the same: leave speed and growth out of --what"
        )
    options.what = options.what or ["quality", "retrieval", *["speed"] * (not options.without)]
    if "speed" in options.what and options.rounds * STEPS + 2 > MOST:
        parser.error(f"--rounds: a static cache has room for {(MOST - 2) // STEPS}")
    subject, description = prepare(options)
    filters = [graph_filter for _, graph_filter in filters_of(subject.model, required=False)]
    if options.without and not (filters and all(options.without in f.branches() for f in filters)):
        parser.error(f"--without: the filters of the model, if it has any, have no part {options.without}")
    results = Results(options.output / f"{description['name']}.json", description, options.device)
    with switch_off(options.without, filters) if options.without else contextlib.nullcontext():
        for section in options.what:
            for cell, settings, call in SECTIONS[section](subject):
                precision = {} if section in ("speed", "growth") else {"precision": options.precision}
                results.measure(cell, {**settings, **precision}, call)


def kept(model: nn.Module, path: Path, options: argparse.Namespace) -> dict[str, list[int]]:
    """Return the key heads that keep their attention, as JSON has them."""
    valid = options.shared / "data" / "wikitext-2" / "valid.txt"
    held_out = windows(AutoTokenizer.from_pretrained(path), valid, PROBED)[:PROBES]
    config = get_filter(options.filter).for_conversion(**dict(options.set))
    heads_by_layer = choose_heads(model, [{"input_ids": row[None]} for row in held_out], options.keep, config)
    return {str(layer): list(heads) for layer, heads in heads_by_layer.items()}


def prepare(options: argparse.Namespace) -> tuple[Subject, dict[str, Any]]:
    """Load the model, and return it with what the results say of it."""
    path = NAMES[options.model]() if options.model in NAMES else Path(options.model)
    model: nn.Module = load(path)
    default_name = "smollm2" if is_decoder(model.config) else "minilm"
    if options.filter:
        if options.keep:
            options.set = [*options.set, ("keep", kept(model, path, options))]
        torch.manual_seed(0)
        patch_model(model, options.filter, **dict(options.set))
    if options.load:
        load_filter(model, options.load)
    added = sum(p.numel() for p in filter_parameters(model)) if filters_of(model, required=False) else 0
    source = options.original or (options.model if options.filter else default_name)
    original = None if not added and not options.original else NAMES[source]() if source in NAMES else Path(source)
    name = options.name or (options.model if options.model in NAMES else path.name)
    description = {
        "name": name,
        "kind": "decoder" if is_decoder(model.config) else "encoder",
        "original": None if original is None else source if source in NAMES else original.name,
        "filter": None if not options.filter else {"filter": options.filter, **dict(options.set)},
        "without": options.without,
        "loaded": hash_files(str(options.load)) if options.load else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "added": added,
    }
    model.to(options.device)
    return Subject(model, original, AutoTokenizer.from_pretrained(path), options), description


if __name__ == "__main__":
    main()
