"""The first look: patch a pretrained model, fine-tune it for a minute, and show what the filter changed."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DataCollatorWithPadding, PreTrainedModel

from ..console import Console, table
from ..errors import GraphFilterError, is_number, require, shown
from ..patching.patch import patch_model
from ..patching.status import filter_parameters
from ..training.optimizer import filter_optimizer
from .changes import Changes, measure_similarity, read_coefficients
from .fine_tuning import StepCallback, build_model, count_batches, fine_tune, quiet_arguments, save_checkpoint
from .plan import Plan, plan_first_look, say_duration
from .progress import show_bar
from .snippets import Snippets, load_snippets, pretrained_path

BATCH = 16
TEST_ROWS = 512
MEASURED_ROWS = 64
FEWEST_STEPS = 12
SEED = 1
# time of a run outside its training steps (evaluation, similarity of the tokens), counted in steps
BESIDE_TRAINING = 15
STEP_WITH_OPTIMIZER = 1.15  # time of a step, in units of a forward and backward pass


def run_first_look(
    output: str | Path = "runs/first-look",
    *,
    rows: int = 1024,
    K: int = 3,
    filter_lr: float = 1e-2,
    minutes: float = 2.5,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Show on a real model what a graph filter is, and write checkpoint, card, figure and numbers to ``output``.

    The training gets shorter on a slow or busy machine.

    Args:
        output: directory.
        rows: training snippets at most.
        K: order of the filter.
        filter_lr: learning rate of the filter coefficients.
        minutes: time that the training should take. After twice that time the baseline is left out.
        plan: a plan that is already shown, and whose first part (the imports) is done. Default: a new plan.

    Returns:
        The content of ``first_look.json``.

    Raises:
        GraphFilterError: the extra ``demo`` is not installed, there are too few rows, or the rate or ``minutes`` is
            invalid.
    """
    if rows < 2 * BATCH:
        raise GraphFilterError(f"the demo needs rows >= {2 * BATCH}, got rows={rows}")
    if not is_number(minutes):
        raise GraphFilterError(f"the demo needs a finite number of minutes >= 0, got minutes={shown(minutes)}")
    require("matplotlib", "demo", "the demo")
    filter_optimizer(quiet_arguments(Path(output), SEED), filter_lr)  # raises before the work begins
    if plan is None:
        plan = plan_first_look(Console())
        with plan.part():
            pass  # this module has imported them
    look = FirstLook(Path(output), plan, rows=rows, K=K, filter_lr=filter_lr, seconds=minutes * 60)
    with plan.part():
        look.load()
    with plan.part():
        look.patch()
    with plan.part():
        look.measure()
    with plan.part(bar=True):
        look.fine_tune()
    with plan.part():
        look.save()
    with plan.part(bar=True):
        look.fine_tune_baseline()
    with plan.part():
        look.show()
    plan.report_times()
    look.say_what_next()
    return look.write()


class FirstLook:
    """One run of the first look; its methods are the parts of the plan, in order."""

    changes: Changes
    filtered: dict[str, float]
    baseline: dict[str, float] | None = None
    baseline_model: PreTrainedModel | None = None

    def __init__(self, output: Path, plan: Plan, *, rows: int, K: int, filter_lr: float, seconds: float):
        self.output, self.plan, self.rows, self.K = output, plan, rows, K
        self.filter_lr, self.seconds = filter_lr, seconds

    def load(self) -> None:
        """Load the encoder and the snippets."""
        self.source = pretrained_path()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.source)
        snippets = load_snippets()
        order = torch.randperm(len(snippets), generator=torch.Generator().manual_seed(0)).tolist()
        subset = [snippets[i] for i in order[: TEST_ROWS + self.rows]]
        self.test, self.train = (Snippets(part, self.tokenizer) for part in (subset[:TEST_ROWS], subset[TEST_ROWS:]))
        self.args = self._arguments(1)
        self.model = self._build()
        layers, heads = self.model.config.num_hidden_layers, self.model.config.num_attention_heads
        self.plan.say(f"Model: all-MiniLM-L6-v2, {layers} layers with {heads} attention heads each.")
        self.plan.say("Task: predict the rating that people gave to a line of a film review.")

    @torch.no_grad()
    def patch(self) -> None:
        """Patch the model, and compare its outputs before and after bit for bit."""
        (batch,) = self._batches(32)
        before = self.model.eval()(**batch).logits
        patch_model(self.model, "gfsa", K=self.K)
        if not torch.equal(before, self.model(**batch).logits):
            raise GraphFilterError("patching changed the outputs of the model: please report this")
        added = sum(p.numel() for p in filter_parameters(self.model))
        self.plan.say(f'patch_model(model, "gfsa", K={self.K}) added {added} numbers: one weight w_K per head.')
        self.plan.say("Attention is a matrix A that averages tokens. It becomes the graph filter")
        power = "A" if self.K == 1 else f"A^{self.K}"
        approximation = f", with {power} approximated" if self.K > 2 else ""
        self.plan.say(f"A + w_K {power}{approximation}. At the start w_K is 0, so the outputs")
        self.plan.say(f"for {len(before)} texts are the same before and after: equal, bit for bit.")

    def measure(self) -> None:
        """Measure the similarity of the tokens and the time of a step, and choose the number of training steps."""
        self.measured = self._batches(MEASURED_ROWS)
        before = measure_similarity(self.model, self.measured)
        self.changes = Changes(read_coefficients(self.model), before, before)
        self.plan.say("In deep models the tokens of a text become alike: over-smoothing. The mean")
        self.plan.say(
            f"cosine of two tokens here is {before[0]:.2f} after layer 1 and {before[-1]:.2f} after the last one."
        )
        seconds = STEP_WITH_OPTIMIZER * self._time_step()
        overhead = 2 * BESIDE_TRAINING * seconds
        affordable_steps = int((self.seconds - self.plan.elapsed() - overhead) / (2 * seconds))
        steps = min(max(affordable_steps, FEWEST_STEPS), len(self.train) // BATCH)
        self.args = self._arguments(steps)
        self.plan.say(f"A training step takes {seconds:.2f} s here now, so each model gets {steps} steps.")
        self.plan.say(f"The demo should end in about {say_duration(2 * seconds * steps + overhead)}.")

    def fine_tune(self) -> None:
        """Fine-tune the patched model; stop early if the machine has become slow."""
        deadline = 1.2 * self.seconds
        optimizer = filter_optimizer(self.args, self.filter_lr)
        self.filtered = self._train(self.model, "with filter", optimizer, lambda step: self.plan.elapsed() > deadline)
        self.changes.coefficients = read_coefficients(self.model)
        largest = max(float(w.abs().max()) for w in self.changes.coefficients)
        self.plan.say(
            f"{self.filtered['steps']} steps are done. Every w_K began at 0; the largest is now {largest:.3f} in size."
        )

    def save(self) -> None:
        """Save the patched model with its card, and load it again."""
        description = (
            f"A first look: {self.filtered['steps']} steps of {BATCH} snippets, seed {SEED}. One short run of one seed "
            "does not show whether the filter helps."
        )
        folder = self.output / "checkpoint"
        save_checkpoint(self.model, self.tokenizer, folder, self.filtered, self.test, description)
        self.plan.say("Saved and loaded again: the outputs are equal, bit for bit.")
        self.plan.say(f"Checkpoint: {folder}")
        self.plan.say(f"Model card: {folder / 'README.md'}")

    def fine_tune_baseline(self) -> None:
        """Fine-tune the unpatched model for the same steps on the same snippets, or leave it out if time is up."""
        steps, deadline = self.filtered["steps"], 2 * self.seconds
        if self.plan.elapsed() + self.filtered["seconds"] > deadline:
            self.plan.say("This machine is busy, and the time is up: the baseline is left out.")
            return
        model = self._build()
        scores = self._train(model, "baseline", None, lambda step: step >= steps or self.plan.elapsed() > deadline)
        if scores["steps"] < steps:
            self.plan.say("This machine became busy, and the time is up: the baseline is left out.")
            return
        self.baseline_model, self.baseline = model, scores
        self.plan.say("It had the same start, the same snippets and the same number of steps.")

    def show(self) -> None:
        """Print the table of what changed, and draw the figure."""
        self.changes.filtered = measure_similarity(self.model, self.measured)
        if self.baseline_model is not None:
            self.changes.baseline = measure_similarity(self.baseline_model, self.measured)
        figure = self.changes.draw(self.output / "first_look.png")
        self.plan.console.print(table(*self.changes.table(), title="What the fine-tuning changed"))
        self.plan.say("w_K: the weights of the filter, one per head; mean and range of a layer.")
        self.plan.say("alike: mean cosine of two tokens of a text; 1 means that all tokens are alike.")
        self.plan.say(f"The same as a figure: {figure}")
        scores = f"{self.filtered['pearson']:.2f} with the filter"
        if self.baseline:
            scores += f", {self.baseline['pearson']:.2f} in the baseline"
        self.plan.say(f"Correlation with people's ratings of {len(self.test)} other lines of reviews:")
        self.plan.say(f"{scores}.")
        self.plan.say("One short run of one seed shows what changed. It does not show what is better.")

    def say_what_next(self) -> None:
        """Print three lines that say what to do next."""
        command = command_name()
        self.plan.console.print("\n[bold]What next[/bold]")
        self.plan.say("Your own model:     from hf_graphfilter import patch_model; patch_model(model)")
        self.plan.say(f"Other filters:      {command} filters")
        self.plan.say(f"A fair comparison:  {command} demo --seeds 3  (about 8 minutes)")

    def write(self) -> dict[str, Any]:
        """Write the numbers to ``first_look.json`` and return them."""
        settings = {
            "steps": self.args.max_steps,
            "batch": BATCH,
            "seed": SEED,
            "K": self.K,
            "filter_lr": self.filter_lr,
        }
        results = {
            "settings": settings,
            "scores": {"filtered": self.filtered, "baseline": self.baseline},
            "layers": self.changes.to_dict(),
            "seconds": {part.title: part.took for part in self.plan.parts},
        }
        (self.output / "first_look.json").write_text(json.dumps(results, indent=2) + "\n")
        return results

    def _arguments(self, steps: int) -> Any:
        return quiet_arguments(self.output / "trainer", SEED, per_device_train_batch_size=BATCH, max_steps=steps)

    def _build(self) -> PreTrainedModel:
        model: Any = build_model(self.source, "plain", SEED, self.K)
        return model.to(self.args.device)

    def _batches(self, rows: int) -> list[Any]:
        """Return the first test snippets without labels, in padded batches on the device."""
        inputs = [{"input_ids": row["input_ids"]} for row in self.test[:rows]]
        return [self._collate(inputs[i : i + 32]) for i in range(0, len(inputs), 32)]

    def _collate(self, rows: list[Any]) -> Any:
        batch: Any = DataCollatorWithPadding(self.tokenizer)(rows)
        return batch.to(self.args.device)

    def _time_step(self) -> float:
        """Return the seconds of a forward and backward pass: the median of three, after one to warm up."""
        batch = self._collate(self.train[:BATCH])
        times = []
        for _ in range(4):
            started = time.perf_counter()
            self.model.train()(**batch).loss.backward()
            times.append(time.perf_counter() - started)
        self.model.zero_grad()
        return statistics.median(times[1:])

    def _train(self, model: Any, title: str, optimizer: Any, stop: Callable[[int], bool]) -> dict[str, float]:
        with show_bar(self.plan.console, title, count_batches(self.args, self.train, self.test)) as advance:
            callback = StepCallback(advance, stop)
            return fine_tune(model, self.args, self.train, self.test, self.tokenizer, optimizer, callback)


def command_name() -> str:
    """Return how the command of this package is called from here."""
    name = "hf-graphfilter"
    if shutil.which(name):
        return name
    return sys.argv[0] if Path(sys.argv[0]).name == name else "python -m hf_graphfilter"
