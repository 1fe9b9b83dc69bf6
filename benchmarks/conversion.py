"""Pretrained models converted to linear time, and what that costs: ``python benchmarks/conversion.py --only NAME ...``.

Every case is one call of ``linearize`` with a budget of tokens, and measures of the model before and after: MiniLM on
film reviews of 256 to 512 tokens by filter and window, DeiT-Tiny on 20 classes of Tiny ImageNet, SmolLM2-135M on
WikiText-2 with its perplexity, copying and retrieval from a long context, Flan-T5-small's encoder; LoLCATs' recipe (the
Hedgehog feature map, a window of 64, adapters trained on the next token) beside ours.

Data and weights are read from --shared (see its READMEs). Fits compute in bf16 if the processor supports it, else in
float32. An interrupted case resumes. A finished case is not run again: its model is in --runs, its results are in
benchmarks/results/conversion/NAME.json. --list shows all cases; --cards times the finished ones that have a card, and
writes model_cards/.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
from measure import RESULTS, hardware
from pages.long_texts import long_of_filter
from real import TinyImages, perplexity, weights, wikitext
from retrieval import copying, needle
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    set_seed,
)

from hf_graphfilter import linearize, load_filter, save_filter
from hf_graphfilter.demo import pretrained_path
from hf_graphfilter.fitting import ConversionReport, Rates, save_conversion, text_batches
from hf_graphfilter.tables import markdown_table

sys.path.append(str(Path(__file__).parents[1]))
from recipes.identities import hash_files
from recipes.settings import bf16_pays

ROOT = Path(__file__).parents[1]


@dataclass
class Task:
    """A pretrained model, what it is converted with, and what is measured of it."""

    name: str
    shared: Path
    windows: int = 1  # of text in a batch
    seed: int = 0  # of the order of SmolLM2's texts, the first of which are held out
    base: ClassVar[str] = ""  # id on the Hub
    tokenizer: Any = None  # of texts, once data() was called

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self) -> Iterable[Any]:
        raise NotImplementedError

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Beside what ``linearize`` measures on held-out batches."""
        return {}


class Reviews(Task):
    """MiniLM on whole film reviews of 256 to 512 tokens."""

    base = "sentence-transformers/all-MiniLM-L6-v2"

    def model(self) -> nn.Module:
        return AutoModel.from_pretrained(pretrained_path())

    def data(self) -> Iterable[Any]:
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained_path())
        files = sorted((self.shared / "data" / "imdb-subset").rglob("*.txt"))
        texts = [file.read_text(errors="ignore") for file in files]
        long_texts = [text for text in texts if len(text.split()) > 200]
        return text_batches(self.tokenizer, long_texts)


class Images(Task):
    """DeiT-Tiny on photographs of twenty classes; its accuracy of these, on a thousand others."""

    base = "facebook/deit-tiny-patch16-224"

    def model(self) -> nn.Module:
        return AutoModelForImageClassification.from_pretrained(self.shared / "weights" / "deit-tiny-patch16-224")

    def data(self) -> Iterable[Any]:
        self.images = TinyImages(self.shared, self.model().config.id2label)
        return [{"pixel_values": x} for x, _ in self.images.batches("train", 2, 2000)]

    def measure(self, model: nn.Module) -> dict[str, float]:
        return {"accuracy": self.images.accuracy(model, 1000)}


class Text(Task):
    """SmolLM2-135M on WikiText-2, in windows of 512 tokens."""

    base = "HuggingFaceTB/SmolLM2-135M-Instruct"

    def model(self) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(weights("smollm2"), dtype=torch.float32)

    def data(self) -> Iterable[Any]:
        self.tokenizer = AutoTokenizer.from_pretrained(weights("smollm2"))
        path, tokens = argparse.Namespace(shared=self.shared), 512
        self.test = wikitext(path, self.tokenizer, "test", tokens, 2)[:40]
        train = wikitext(path, self.tokenizer, "train", tokens, self.windows)
        random.Random(self.seed).shuffle(train)
        return [{"input_ids": ids, "labels": ids} for ids in train]

    def measure(self, model: nn.Module) -> dict[str, float]:
        with torch.autocast(model.device.type, torch.bfloat16):
            scores = {"perplexity": perplexity(model, self.test)}
            for tokens in (32, 128, 512):
                scores[f"copying, {tokens} tokens"] = copying(model, tokens)
            for tokens in (64, 256, 1024):
                scores[f"needle, {tokens} tokens"] = needle(model, self.tokenizer, tokens)
        return scores


class Translation(Task):
    """Flan-T5-small: its encoder, on film reviews of at most 256 tokens."""

    def model(self) -> nn.Module:
        return AutoModelForSeq2SeqLM.from_pretrained(weights("flan-t5-small"))

    def data(self) -> Iterable[Any]:
        self.tokenizer = AutoTokenizer.from_pretrained(weights("flan-t5-small"))
        files = sorted((self.shared / "data" / "imdb-subset").rglob("*.txt"))
        batches = text_batches(self.tokenizer, [f.read_text(errors="ignore") for f in files], length=256)
        for batch in batches:
            batch["decoder_input_ids"] = batch["input_ids"][:, :64]
        return batches


@dataclass
class Case:
    task: str
    budget: int
    options: dict[str, Any] = field(default_factory=dict)
    windows: int = 1  # of text in a step


TASKS = {"reviews": Reviews, "images": Images, "text": Text, "translation": Translation}
BRIEF, SHORT, LONG = 150_000, 1_000_000, 4_000_000
HALF_HOUR = 2_300_000  # of MiniLM's first stage, on two cores
ADAPTED = {"train": "lora", "stages": {"attention": 0.5, "logits": 0.5}}
GPU = {"budget": 3_000_000, "windows": 16}  # steps that keep it busy
LATE = {"train": "lora", "stages": {"attention": 0.3, "logits": 0.7}}
NEXT_TOKEN = {"train": "lora", "stages": {"attention": 0.5, "task": 0.5}}  # as LoLCATs has it
CASES = {
    **{f"reviews-agf-{w}": Case("reviews", SHORT, {"window": w}) for w in (0, 4, 16, 32, 64, 128)},
    "reviews-agf-128-attention": Case("reviews", HALF_HOUR, {"window": 128, "stages": {"attention": 1}}),
    "reviews-auto-128": Case("reviews", HALF_HOUR, {"window": 128, "layers": "auto:83%"}),  # five of six layers
    "reviews-agf-64-no-sinks": Case("reviews", SHORT, {"window": 64, "sinks": 0}),
    "reviews-hedgehog-64": Case("reviews", SHORT, {"filter": "hedgehog", "sinks": 4}),
    "reviews-hedgehog-64-no-sinks": Case("reviews", SHORT, {"filter": "hedgehog"}),  # as LoLCATs has it
    "reviews-singularformer-64": Case("reviews", SHORT, {"filter": "singularformer", "r": 128, "window": 64}),
    "reviews-kernelution-64": Case("reviews", SHORT, {"filter": "kernelution", "window": 64}),
    "reviews-agf-64-long": Case("reviews", LONG, {"window": 64}),
    "images-12": Case("images", LONG, {"window": 16}),  # of 197 tokens; the usual 64 would span most of them
    "images-6": Case("images", SHORT, {"window": 16, "layers": slice(6, 12)}),
    "images-auto": Case("images", SHORT, {"window": 16, "layers": "auto:50%"}),
    "images-auto-long": Case("images", LONG, {"window": 16, "layers": "auto:50%"}),
    "text-all": Case("text", 3_000_000, ADAPTED),
    "text-half": Case("text", BRIEF, {"layers": "odd", **ADAPTED}),
    "text-auto": Case("text", BRIEF, {"layers": "auto:50%", **ADAPTED}),
    "text-agf": Case("text", BRIEF, ADAPTED),
    "text-agf-no-singular-values": Case("text", BRIEF, {"K": 0, **ADAPTED}),
    "text-far-field": Case("text", BRIEF, {"filter": "far_field", **ADAPTED}),
    "text-far-field-filters": Case("text", BRIEF, {"filter": "far_field"}),  # the base weights stay: model_cards/
    "text-far-field-keep": Case("text", BRIEF, {"filter": "far_field", "keep": "20%"}),
    "text-far-field-late": Case("text", BRIEF, {"filter": "far_field", **LATE}),
    "text-far-field-auto": Case("text", BRIEF, {"filter": "far_field", "layers": "auto:80%", **ADAPTED}),
    "reviews-far-field": Case("reviews", SHORT, {"filter": "far_field"}),
    "reviews-far-field-128": Case("reviews", SHORT, {"filter": "far_field", "window": 128}),
    "text-far-field-128": Case("text", BRIEF, {"filter": "far_field", "window": 128, **ADAPTED}),
    "text-agf-no-sinks": Case("text", BRIEF, {"sinks": 0, **ADAPTED}),
    "text-hedgehog-sinks": Case("text", BRIEF, {"filter": "hedgehog", "sinks": 4, **ADAPTED}),
    "text-lolcats": Case("text", BRIEF, {"filter": "hedgehog", **NEXT_TOKEN}),
    "text-agf-long": Case("text", options=ADAPTED, **GPU),
    "text-far-field-long": Case("text", options={"filter": "far_field", **ADAPTED}, **GPU),
    "text-far-field-filters-long": Case("text", options={"filter": "far_field"}, **GPU),
    "text-far-field-keep-long": Case("text", options={"filter": "far_field", "keep": "20%"}, **GPU),
    "text-far-field-auto-long": Case("text", options={"filter": "far_field", "layers": "auto:80%", **ADAPTED}, **GPU),
    "text-lolcats-long": Case("text", options={"filter": "hedgehog", **NEXT_TOKEN}, **GPU),
    "text-agf-next-token": Case("text", BRIEF, NEXT_TOKEN),
    **{
        f"translation-{bias}": Case("translation", BRIEF, {"stack": "encoder", "position_bias": bias, "window": 64})
        for bias in ("drop", "window")
    },
}


CARDS = {
    "reviews-agf-64": "minilm-reviews",
    "images-12": "deit-tiny-images",
    "text-agf": "smollm2-wikitext-2",
    "text-far-field-filters": "smollm2-far-field",
    "text-far-field-filters-long": "smollm2-far-field-long",
    "text-far-field-keep": "smollm2-far-field-keep",
    "reviews-far-field": "minilm-far-field",
    "reviews-far-field-128": "minilm-far-field-128",
}
LOADING = """## The filter alone

This folder holds the filters, {size} in bfloat16. No weight of the base changed, so they go into the base model."""
ROUNDED = """

They were fitted to weights of this model that had been rounded to four bits, so `load_filter` warns of the difference.
With the published weights they have not been measured."""
ALL_LAYERS = """

All layers were converted, so this model finds no fact from more than about 128 tokens before. With
`patch_model(model, "far_field", memory=64)` before `load_filter`, it finds most single facts in texts of up to about
1,024 tokens."""
KEPT = """

18 of the 90 key heads keep their attention, so this model still finds what is far away. Its cache holds a fifth of the
keys and values of the original."""
MEASURES = """

*Needle* is the share of five-digit keys that are found again after so much filler text. *Copying* is the share of
random tokens that are predicted right when they come a second time."""
LONG_TEXTS = "## Long texts"
VARIANTS = """The model whose name ends in `-memory-64` was patched with `memory=64`. The one that ends in `-keep-20`
keeps a fifth of the key heads, which `choose_heads(model, batches, 0.2)` chose. Nothing was fitted after that."""
WITH_FILTER = {  # cards beside their filter
    "text-far-field-filters": LOADING + ROUNDED + ALL_LAYERS + MEASURES,
    "text-far-field-filters-long": LOADING + ROUNDED + ALL_LAYERS + MEASURES,
    "text-far-field-keep": LOADING + ROUNDED + KEPT + MEASURES,
    **dict.fromkeys(("reviews-far-field", "reviews-far-field-128"), LOADING),
}


def play(name: str, options: argparse.Namespace) -> None:
    case = CASES[name]
    run_name = f"{name}-seed-{options.seed}" if options.seed else name
    run_name += f"-budget-{options.budget}" * bool(options.budget)  # a trial, and not the case
    file, folder = options.output / f"{run_name}.json", options.runs / run_name
    if file.is_file():
        return
    task = TASKS[case.task](case.task, options.shared, case.windows, options.seed)
    set_seed(options.seed)
    model, data = task.model().to(options.device), task.data()
    before = task.measure(model)
    budget = options.budget or case.budget
    defaults: dict[str, Any] = {"holdout": 32, "rates": Rates(attention=5e-3)}
    if case.task == "text":  # takes long, so that its steps are few
        few = case.windows > 1  # and large
        defaults = {"holdout": 2 if few else 8, "evaluations": 5 if few else 10, "rates": Rates(attention=2e-2)}
    start_time = time.process_time()
    precision = "bf16" if options.device != "cpu" or bf16_pays(use_cpu=True) else None
    settings = {"filter": "agf", "precision": precision, "checkpoint": folder / "progress", **defaults, **case.options}
    report = linearize(model, data, budget=budget, progress=options.progress, **settings)
    model.save_pretrained(folder / "model")
    if task.tokenizer is not None:
        task.tokenizer.save_pretrained(folder / "model")
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "name": run_name,
        "task": case.task,
        "seed": options.seed,
        "about": (type(task).__doc__ or "").strip(),
        "options": {key: str(value) for key, value in case.options.items()},
        "date": date.today().isoformat(),
        "device": hardware(options.device),
        "torch": torch.__version__,
        "precision": precision or "float32",
        "cpu_seconds": round(time.process_time() - start_time),  # of the last process, where it was interrupted
        "before": before,
        "after": task.measure(model),
        "report": report.to_dict(),
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(name, report, {**content["before"]}, {**content["after"]}, sep="\n", flush=True)


def write_card(name: str, options: argparse.Namespace) -> None:
    """From the saved model and the results of a case, which get its speed."""
    case, file = CASES[name], options.output / f"{name}.json"
    task, content = TASKS[case.task](case.task, options.shared), json.loads(file.read_text())
    base, saved, shipped = task.model(), options.runs / name / "model", ROOT / "model_cards" / CARDS[name]
    renewed = saved.is_dir() or name not in WITH_FILTER
    model = (type(base).from_pretrained(saved) if renewed else load_filter(base, shipped)).eval()
    report = ConversionReport.from_dict(content["report"])
    if model.main_input_name == "input_ids" and not report.speed and not options.untimed:
        report.time(model, rounds=3)
    content["report"] = report.to_dict()
    file.write_text(json.dumps(content, indent=1) + "\n")
    rows = [[metric, f"{content['before'][metric]:.4g}", f"{after:.4g}"] for metric, after in content["after"].items()]
    paragraphs = [f"{content['about']} {content['device']}, torch {content['torch']}, {content['date']}."]
    if rows:
        paragraphs += [markdown_table(["on the test part", "original", "converted"], rows)]
    folder = options.cards / CARDS[name]
    if name in WITH_FILTER:
        if long_texts := long_of_filter(hash_files(str(shipped))):
            paragraphs += [LONG_TEXTS, *[VARIANTS] * ("-keep-20" in long_texts), long_texts]
        size = f"{2 * report.parameters / 1e6:.1f} MB"
        paragraphs.insert(0, WITH_FILTER[name].format(size=size))
    card = {"repo_id": f"model_cards/{CARDS[name]}" if name in WITH_FILTER else CARDS[name], "base_model": task.base}
    card |= {"description": "\n\n".join(paragraphs), "filter_only": name in WITH_FILTER}
    save_conversion(model, report, folder, **card)
    (folder / "conversion.json").unlink()  # the results, which lie with the others
    if name in WITH_FILTER and (renewed or folder != shipped):
        save_filter(model.to(torch.bfloat16), folder, base_model=task.base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="the cases, and which are finished")
    parser.add_argument(
        "--cards", nargs="?", type=Path, const=ROOT / "model_cards", help="write the cards, into this folder"
    )
    parser.add_argument("--untimed", action="store_true", help="cards without times, which take some minutes")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of data/ and weights/")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "conversion", help="folder for models and progress"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "conversion", help="folder for the results")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--seed", type=int, default=0, help="of random start values and of the order of SmolLM2's texts"
    )
    parser.add_argument("--budget", type=int, help="instead of each case's own, to try it out")
    parser.add_argument("--progress", action="store_true", help="show bars")
    options = parser.parse_args()
    for name in options.only:
        finished = (options.output / f"{name}.json").is_file()
        if options.list:
            print(name, "finished" if finished else "")
        elif options.cards and name in CARDS and finished:
            write_card(name, options)
        elif options.cards:
            continue
        else:
            play(name, options)


if __name__ == "__main__":
    main()
