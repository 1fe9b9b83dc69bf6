"""The plan of a demo: its parts, the time that each is expected to take, and the time that it took. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from ..console import Console, table
from .progress import moves


@dataclass
class Part:
    """One part of the plan: its description, its expected time on two quiet cores, and the time that it took."""

    title: str
    estimate: float
    took: float | None = None


class Plan:
    """The parts of a program, shown before, during and after its work."""

    def __init__(self, console: Console, parts: Sequence[Part]):
        self.console, self.parts, self.number = console, list(parts), 0
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the plan was made."""
        return time.perf_counter() - self.started

    def estimate(self) -> float:
        """Return the seconds of all parts on two quiet cores."""
        return sum(part.estimate for part in self.parts)

    def say(self, text: str) -> None:
        """Print one line of the running part, as it is."""
        self.console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    def show(self) -> None:
        """Print the parts with their estimated times."""
        for number, part in enumerate(self.parts, 1):
            self.say(f"{number}. {part.title:<60} {part.estimate:4.0f} s")
        self.say(f"   {'Together':<60} {self.estimate():4.0f} s")

    @contextmanager
    def part(self, *, bar: bool = False) -> Iterator[None]:
        """Run the next part: print its title, a spinner unless it has a ``bar`` of its own, and the time it took."""
        part = self.parts[self.number]
        self.number += 1
        self.console.print(f"\n[bold]{self.number}/{len(self.parts)} {part.title}[/bold]", highlight=False)
        started = time.perf_counter()
        with self.console.status("working ...") if moves(self.console) and not bar else nullcontext():
            yield
        part.took = time.perf_counter() - started
        self.console.print(f"  [dim]{say_duration(part.took)}[/dim]", highlight=False)

    def report_times(self) -> None:
        """Print the planned and the measured time of each part."""
        rows = [[part.title, f"{part.estimate:.0f}", f"{part.took or 0:.0f}"] for part in self.parts]
        rows.append(["Together", f"{self.estimate():.0f}", f"{self.elapsed():.0f}"])
        self.console.print()
        self.console.print(table(["part", "plan, s", "took, s"], rows, title="Time"))


def plan_first_look(console: Console) -> Plan:
    """Print what the first look will do, with times of two quiet cores, and return the plan."""
    parts = [
        Part("Load PyTorch and Transformers", 8),
        Part("Load a small pretrained model and film reviews", 2),
        Part("Patch the model: attention becomes a graph filter", 2),
        Part("Measure the model before training, and this machine", 5),
        Part("Fine-tune the patched model", 30),
        Part("Save the model, load it again, write its model card", 2),
        Part("Fine-tune the unpatched model: the baseline", 30),
        Part("Show what the fine-tuning changed", 6),
    ]
    console.print("[bold]A first look at graph filters[/bold]", highlight=False)
    plan = Plan(console, parts)
    plan.say("The plan, with times on two quiet cores. On a busy machine it trains less.\n")
    plan.show()
    return plan


def say_duration(seconds: float) -> str:
    """Return seconds as text.

    Example:
        >>> say_duration(9.6), say_duration(95)
        ('10 s', '1 min 35 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
