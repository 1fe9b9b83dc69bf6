"""Bars that move on a terminal, and lines of progress elsewhere. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..console import Console


@contextmanager
def show_bar(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of ``total`` steps.

    On a terminal a bar moves. In a pipe or a file, one line appears after the first step and after each tenth.
    """
    if moves(console):
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(title, total=total)
            yield lambda: bars.advance(task)
        return
    started, done = time.perf_counter(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == 1 or done * 10 // total > (done - 1) * 10 // total:
            elapsed = time.perf_counter() - started
            left = elapsed / done * (total - done)
            console.print(f"  {title}: {done} of {total}, {elapsed:.0f} s, about {left:.0f} s left", highlight=False)

    yield advance


def moves(console: Console) -> bool:
    """Return whether the console is a terminal, where a bar can be redrawn."""
    return console.is_terminal and not console.is_dumb_terminal
