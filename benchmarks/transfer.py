"""Compare starts of filters that replace pretrained attention: ``python benchmarks/transfer.py --only SECTION``.

Sections:

minilm: attention transfer on a real encoder, by options of AGF, and a longer transfer for the chosen options.
singular: the same for Singularformer, and for Kernelution with and without a window.
mixed: the same on long windows and on the short texts of the task, then end to end.
finetune: this encoder, fine-tuned on movie-review snippets and SST-2 from each start, including the filters that the
    three sections before have fitted.
gpt2: perplexity of a small GPT-2, trained from scratch on WikiText-2.
smollm2: perplexity of SmolLM2-135M.
deit: DeiT-Tiny on 20 classes of Tiny ImageNet, with L layers patched.

Data and weights are read from --shared (see its READMEs). Every section writes
benchmarks/results/transfer-DEVICE-SECTION.csv after each run, one measured value per row, so that an interrupted
section keeps its results.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from measure import make_parser, stamp
from real import TinyImages, perplexity, reviews, weights, wikitext
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
    Trainer,
    set_seed,
)

from hf_graphfilter import (
    BlendSchedule,
    drop_blend,
    filter_optimizer,
    load_filter,
    parameter_groups,
    patch_model,
    save_filter,
    set_blend,
    transfer_attention,
)
from hf_graphfilter.demo import Snippets, load_snippets, pretrained_path, quiet_arguments

AGF = {"theta": "per_head", "correction": True, "window": 4}
LR, COEFFICIENT_LR = 1e-2, 3e-2
FIELDS = ["date", "device", "section", "task", "variant", "stage", "seed", "metric", "value", "steps", "seconds"]


class Table:
    """A CSV file that is complete after every row."""

    def __init__(self, options: argparse.Namespace, section: str):
        name = f"transfer-{options.device}-{section}.csv"
        self.file = options.output / name
        self.common = stamp(options.device) | {"section": section}
        self.rows = list(csv.DictReader(self.file.open())) if options.append and self.file.is_file() else []

    def has(self, task: str, variant: str, seed: int | str) -> bool:
        return any((r["task"], r["variant"], str(r.get("seed", ""))) == (task, variant, str(seed)) for r in self.rows)

    def add(self, task: str, variant: str, stage: str, metric: str, value: float, **more: object) -> None:
        row = {"task": task, "variant": variant, "stage": stage, "metric": metric, "value": f"{value:.4f}", **more}
        self.rows.append({**self.common, **row})
        print(" ".join(str(v) for v in row.values()), flush=True)
        with self.file.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(self.rows)

    def add_report(self, task: str, variant: str, report: object, stage: str = "after transfer") -> None:
        costs = {"steps": report.steps, "seconds": round(report.seconds)}
        if stage == "after transfer":
            self.add(task, variant, "before transfer", "relative error", report.mean_before)
        self.add(task, variant, stage, "relative error", report.mean_after, **costs)
        for module, error in report.after.items():
            self.add(task, variant, f"{stage}: {module}", "relative error", error)


# ---------------------------------------------------------------------------------------------------- an encoder


ABLATION = {
    "paper's form": {"theta": "shared"},
    "theta per head": {"theta": "per_head"},
    "correction": {"theta": "per_head", "correction": True},
    "correction, Chebyshev": {"theta": "per_head", "correction": True, "basis": "chebyshev"},
    "window 4": {"theta": "per_head", "window": 4},
    "correction, window 2": {**AGF, "window": 2},
    "correction, window 4": AGF,
    "correction, window 4, theta shared": {**AGF, "theta": "shared"},
    "correction, window 8": {**AGF, "window": 8},
}


def fit_filter(
    options: argparse.Namespace, batches: list[dict], filter: str, config: dict, steps: int, lr: float = LR
) -> tuple:
    """(MiniLM with the filter, the report) after attention transfer."""
    set_seed(0)
    model = patch_model(AutoModel.from_pretrained(pretrained_path()).to(options.device), filter, **config)
    rates = {"lr": lr, "filter_lr": COEFFICIENT_LR}
    return model, transfer_attention(model, batches, steps=steps, holdout=8, eval_every=100, progress=False, **rates)


def minilm(options: argparse.Namespace) -> None:
    table = Table(options, "minilm")
    batches = reviews(options, AutoTokenizer.from_pretrained(pretrained_path()))
    model, report = fit_filter(options, batches, "agf", AGF, options.steps or 1000)
    table.add_report("MiniLM-L6", "correction, window 4: longer", report)
    save_filter(model, options.runs / "minilm-agf")
    for variant, config in ABLATION.items():
        table.add_report("MiniLM-L6", variant, fit_filter(options, batches, "agf", config, 200)[1])


SINGULAR = {
    f"Singularformer, r = {r}{text}": {"r": r, **more}
    for text, more in (("", {}), (", window 4", {"window": 4}), (", window 8", {"window": 8}))
    for r in (32, 64, 128)
} | {
    "Singularformer, r = 128, window 16": {"r": 128, "window": 16},
    "Singularformer, r = 128, window 8, residual": {"r": 128, "window": 8, "residual": True},
}


def singular(options: argparse.Namespace) -> None:
    """Fit Singularformer by rank and window beside AGF, and Kernelution, all as long as AGF's options were.

    The best of them is fitted longer.
    """
    table = Table(options, "singular")
    batches = reviews(options, AutoTokenizer.from_pretrained(pretrained_path()))
    fits = [("AGF, correction, window 4", "agf", AGF)]
    fits += [(variant, "singularformer", config) for variant, config in SINGULAR.items()]
    fits += [("Kernelution", "kernelution", {}), ("Kernelution, window 8", "kernelution", {"window": 8})]
    for variant, filter, config in fits:
        if not table.has("MiniLM-L6", variant, ""):
            table.add_report("MiniLM-L6", variant, fit_filter(options, batches, filter, config, 200)[1])
    errors = {row["variant"]: float(row["value"]) for row in table.rows if row["stage"] == "after transfer"}
    best = min(SINGULAR, key=lambda variant: errors[variant])
    variant, lr = f"{best}, lr 3e-2: longer", 3e-2  # also better than 1e-2 and 200 steps
    if not table.has("MiniLM-L6", variant, "") or not (options.runs / "minilm-singularformer").is_dir():
        model, report = fit_filter(options, batches, "singularformer", SINGULAR[best], options.steps or 1000, lr)
        table.add_report("MiniLM-L6", variant, report)
        save_filter(model, options.runs / "minilm-singularformer")


def mixed(options: argparse.Namespace) -> None:
    """Transfer on long windows and on the short texts of the task in turn, then end to end on the hidden states."""
    table, source = Table(options, "mixed"), pretrained_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    train, _, _, _ = snippets_task(options, tokenizer)
    collate = DataCollatorWithPadding(tokenizer)
    short = [collate([{"input_ids": ids} for ids in train.encoded[i : i + 32]]) for i in range(0, len(train), 32)]
    long = reviews(options, tokenizer)
    batches = [batch for pair in zip(long, itertools.cycle(short[4:]), strict=False) for batch in pair]
    set_seed(0)
    model = patch_model(AutoModel.from_pretrained(source).to(options.device), "agf", **AGF)
    held_out = [*long[:4], *short[:4]]
    rates = {"lr": LR, "filter_lr": COEFFICIENT_LR, "progress": False, "eval_every": 100}
    task, variant = "MiniLM-L6", "correction, window 4: windows and snippets"
    report = transfer_attention(model, batches[8:], steps=options.steps or 800, holdout=held_out, **rates)
    table.add_report(task, variant, report)
    end_to_end = {"steps": 0, "end_to_end": "hidden", "end_to_end_steps": 200, "end_to_end_lr": 1e-3}
    report = transfer_attention(model, batches[8:], holdout=held_out, **rates, **end_to_end)
    table.add_report(task, variant, report, "end to end")
    save_filter(model, options.runs / "minilm-agf-mixed")


def snippets_task(options: argparse.Namespace, tokenizer: object) -> tuple:
    rows = load_snippets()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = ([rows[i] for i in part] for part in (order[:2000], order[2000:4000]))

    def score(predicted: Tensor, labels: Tensor) -> float:
        return ((predicted[:, 0] > 0) == (labels > 0)).float().mean().item()

    return Snippets(train, tokenizer), Snippets(test, tokenizer), 1, score


def sst2_task(options: argparse.Namespace, tokenizer: object) -> tuple:
    def rows(name: str) -> list[tuple[int, str]]:
        lines = (options.shared / "data" / "glue" / "SST-2" / name).read_text().splitlines()[1:]
        return [(int(label), text) for text, label in (line.rsplit("\t", 1) for line in lines)]

    train = random.Random(0).sample(rows("train.tsv"), 2500)

    def score(predicted: Tensor, labels: Tensor) -> float:
        return (predicted.argmax(-1) == labels).float().mean().item()

    return Snippets(train, tokenizer), Snippets(rows("dev.tsv"), tokenizer), 2, score


TASKS = {"movie-snippets": snippets_task, "SST-2": sst2_task}


STARTS = ("original", "transfer", "transfer, mixed", "blend", "copy", "Singularformer, transfer")


def start(model: nn.Module, variant: str, runs: Path) -> nn.Module:
    """Patch ``model`` by one of the starts that are compared, of AGF where no other filter is named."""
    if variant == "original":
        return model
    if "transfer" in variant:
        fitted = {"transfer": "agf", "transfer, mixed": "agf-mixed", "Singularformer, transfer": "singularformer"}
        return load_filter(model, runs / f"minilm-{fitted[variant]}")
    init = {"init": "blend"} if variant == "blend" else {}
    return patch_model(model, "agf", **AGF, **init)


def finetune(options: argparse.Namespace) -> None:
    table, source = Table(options, "finetune"), pretrained_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    for task, make in TASKS.items():
        train, test, classes, score = make(options, tokenizer)
        for seed in range(1, options.seeds + 1):
            for variant in STARTS:
                if table.has(task, variant, seed):
                    continue
                set_seed(seed)
                model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=classes)
                model = start(model, variant, options.runs)
                args = quiet_arguments(options.runs / "trainer", seed)
                trainer = Trainer(
                    model,
                    args,
                    train_dataset=train,
                    data_collator=DataCollatorWithPadding(tokenizer),
                    callbacks=[BlendSchedule(end=0.5)] if variant == "blend" else None,
                    optimizer_cls_and_kwargs=None if variant == "original" else filter_optimizer(args),
                )
                trainer.remove_callback(transformers.PrinterCallback)
                start_time = time.perf_counter()
                trainer.train()
                seconds = round(time.perf_counter() - start_time)
                if variant == "blend":
                    drop_blend(model)
                predicted = torch.as_tensor(trainer.predict(test).predictions)
                accuracy = score(predicted, torch.tensor(test.ratings))
                table.add(task, variant, "fine-tuned", "accuracy", accuracy, seed=seed, seconds=seconds)


# ------------------------------------------------------------------------------------------------ causal models


def fit(
    model: nn.Module,
    batches: list[Tensor],
    steps: int,
    lr: float,
    groups: list | None = None,
    before: Callable[[int], object] = lambda step: None,
) -> None:
    """Language modelling; AdamW, warm-up and cosine. ``before`` is called with the number of each step."""
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=lr, weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, max(1, steps // 20), steps)
    model.train()
    order = list(range(len(batches)))
    random.Random(0).shuffle(order)
    for step, i in enumerate(itertools.islice(itertools.cycle(order), steps)):
        before(step)
        ids = batches[i].to(model.device)
        model(ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def raise_gate(model: nn.Module, rise: int, step: int) -> None:
    """Raise the gate of a blend over the first ``rise`` steps, and drop the blend after them."""
    if step < rise:
        set_blend(model, (step + 1) / rise)
    elif step == rise:
        drop_blend(model)


def causal(
    table: Table,
    task: str,
    build: Callable[[], nn.Module],
    train: list[Tensor],
    test: list[Tensor],
    *,
    transfer_steps: int,
    tune_steps: int,
    tune_lr: float,
    variants: tuple[str, ...] = ("original", "transfer", "copy", "blend"),
    **selection: object,
) -> None:
    """Perplexity of the original, after each start, after transfer, and of all after fine-tuning."""

    def add_score(model: nn.Module, variant: str, stage: str, **more: object) -> None:
        table.add(task, variant, stage, "perplexity", perplexity(model, test), **more)

    def run_transfer(model: nn.Module, variant: str, stage: str, **options: object) -> None:
        report = transfer_attention(
            model, unlabelled, holdout=4, eval_every=25, filter_lr=COEFFICIENT_LR / 2, progress=False, **options
        )
        table.add_report(task, variant, report, stage)
        add_score(model, variant, stage, steps=report.steps, seconds=round(report.seconds))

    unlabelled = [{"input_ids": ids} for ids in train]
    for variant in variants:
        set_seed(0)
        model = build()
        if variant == "original":
            add_score(model, variant, "at the start")
        else:
            init = {"init": "blend"} if variant == "blend" else {}
            patch_model(model, "agf", **AGF, **init, **selection)
        if variant in ("copy", "blend"):
            add_score(model, variant, "at the start")
        if variant == "transfer":
            run_transfer(model, variant, "after transfer", steps=transfer_steps, lr=LR / 2)
            end_to_end = {
                "steps": 0,
                "end_to_end": "logits",
                "end_to_end_steps": transfer_steps // 2,
                "end_to_end_lr": 1e-3,
            }
            run_transfer(model, variant, "after end to end", **end_to_end)
        if tune_steps:
            groups = None if variant == "original" else parameter_groups(model, tune_lr, 0.01)
            begin = time.perf_counter()
            if variant == "blend":
                fit(model, train, tune_steps, tune_lr, groups, partial(raise_gate, model, max(1, tune_steps // 2)))
            else:
                fit(model, train, tune_steps, tune_lr, groups)
            add_score(model, variant, "fine-tuned", steps=tune_steps, seconds=round(time.perf_counter() - begin))


def gpt2(options: argparse.Namespace) -> None:
    table = Table(options, "gpt2")
    folder = options.shared / "weights" / "gpt2-tokenizer"
    tokenizer = GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    train, test = (wikitext(options, tokenizer, part, 128, 8) for part in ("train", "test"))
    checkpoint = options.runs / "gpt2-wikitext-2"
    if not checkpoint.is_dir():
        set_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_head=4, n_embd=256, n_positions=256)).to(options.device)
        fit(model, train, options.steps or 500, 1e-3)
        model.save_pretrained(checkpoint)
    causal(
        table,
        "GPT-2, 6 layers, d 256",
        lambda: GPT2LMHeadModel.from_pretrained(checkpoint).to(options.device),
        train,
        test[:20],
        transfer_steps=100,
        tune_steps=60,
        tune_lr=3e-4,
    )


def smollm2(options: argparse.Namespace) -> None:
    table = Table(options, "smollm2")
    folder = weights("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, test = (wikitext(options, tokenizer, part, 256, 2) for part in ("train", "test"))

    def build() -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(options.device)

    starts = ("original", "transfer", "copy", "blend")
    for name, layers, variants in (
        ("all 30 layers", None, starts),
        ("every second layer", "odd", ("transfer", "copy")),
    ):
        causal(
            table,
            f"SmolLM2-135M, {name}",
            build,
            train,
            test[:20],
            transfer_steps=options.steps or 60,
            tune_steps=0 if options.device == "cpu" else 300,
            tune_lr=1e-4,
            variants=variants,
            layers=layers,
        )


# ------------------------------------------------------------------------------------------------------- vision


def deit(options: argparse.Namespace) -> None:
    table, folder = Table(options, "deit"), options.shared / "weights" / "deit-tiny-patch16-224"
    build = lambda: AutoModelForImageClassification.from_pretrained(folder).to(options.device)  # noqa: E731
    images = TinyImages(options.shared, build().config.id2label)
    table.add("DeiT-Tiny", "original", "at the start", "accuracy", images.accuracy(build()))
    unlabelled = [{"pixel_values": x} for x, _ in images.batches("train", 16, 64)]
    for count in (1, 3, 6, 12):
        layers = list(range(12 - count, 12))
        set_seed(0)
        model = patch_model(build(), "agf", layers=layers, **AGF)
        variant = f"last {count} of 12 layers"
        table.add("DeiT-Tiny", variant, "copied", "accuracy", images.accuracy(model))
        report = transfer_attention(
            model,
            unlabelled,
            steps=options.steps or 80,
            lr=LR,
            filter_lr=COEFFICIENT_LR,
            end_to_end="logits",
            end_to_end_lr=1e-3,
            end_to_end_steps=(options.steps or 80) // 2,
            eval_every=20,
            progress=False,
        )
        table.add_report("DeiT-Tiny", variant, report)
        costs = {"steps": report.steps, "seconds": round(report.seconds)}
        table.add("DeiT-Tiny", variant, "after transfer", "accuracy", images.accuracy(model), **costs)


SECTIONS = {f.__name__: f for f in (minilm, singular, mixed, finetune, gpt2, smollm2, deit)}


def main() -> None:
    parser = make_parser(__doc__, SECTIONS, "transfer")
    parser.add_argument("--steps", type=int, help="of the section's main training, instead of its default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--append", action="store_true", help="keep the rows that a file has; finetune makes the rest")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    for section, run in SECTIONS.items():
        if options.only in (None, section):
            run(options)


if __name__ == "__main__":
    main()
