"""The report of a transfer, or of one stage of a linearization."""

from __future__ import annotations

from dataclasses import dataclass, field


def mean(errors: dict[str, float]) -> float:
    """Return the mean over the modules."""
    return sum(errors.values()) / len(errors)


@dataclass
class TransferReport:
    """What ``transfer_attention`` did; prints as a table.

    Attributes:
        before, after: relative L2 error ``|filter - attention| / |attention|`` of each module on the held-out batches.
        steps: number of steps, both stages together.
        seconds: wall-clock time.
        stopped: why it ended: ``"all steps made"``, ``"no improvement"``, or a sentence on batches that ended or on a
            number that became non-finite.
        history: pairs of the step (in a linearization, the number of tokens) and the mean held-out error at that point.
    """

    before: dict[str, float]
    after: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    stopped: str = "all steps made"
    history: list[tuple[int, float]] = field(default_factory=list)

    @property
    def mean_before(self) -> float:
        """The mean of ``before``."""
        return mean(self.before)

    @property
    def mean_after(self) -> float:
        """The mean of ``after``."""
        return mean(self.after)

    def __str__(self) -> str:
        width = max(map(len, [*self.after, "module"]))
        rows = [f"{name:<{width}}  {self.before[name]:6.3f}  {error:6.3f}" for name, error in self.after.items()]
        means = f"{'mean':<{width}}  {self.mean_before:6.3f}  {self.mean_after:6.3f}"
        head = f"{'module':<{width}}  before   after"
        return "\n".join([head, *rows, means, f"{self.steps} steps, {self.seconds:.0f} s, {self.stopped}"])
