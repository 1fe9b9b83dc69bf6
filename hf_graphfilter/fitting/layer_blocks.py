"""Run a few layers of a model at a time, on inputs that are kept on disk."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

from ..devices import device_of
from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..hosts.base import locate
from .checkpoint import INPUTS
from .objectives import Batch, attending, filter_errors, regress
from .run import Stage
from .stages import Linearization
from .stored_inputs import INPUT, Inputs
from .transfer_report import TransferReport, mean


class _End(Exception):
    """A signal that all layers of a block have run; it ends the forward pass."""


def find_stack(model: nn.Module, names: Iterable[str]) -> tuple[list[nn.Module], dict[str, int]]:
    """Return the layers of the stack that holds these modules, and the number of each module's layer.

    Raises:
        GraphFilterError: the modules are in several stacks, or in none.
    """
    stacks, kinds, numbers = set(), set(), {}
    for name in names:
        kinds.add(locate(name, causal=False)[0])  # encoder or decoder
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
                stacks.add(".".join(parts[:end]))
                numbers[name] = int(parts[end])
                break
        else:
            stacks.add("")
    if len(stacks) != 1 or "" in stacks:
        remedy = "give stack=, or leave blocks= out" if 1 < len(stacks) == len(kinds) else "leave blocks= out"
        raise GraphFilterError(
            f"blocks= needs all filters in one stack of layers, and {type(model).__name__} has them in "
            f"{', '.join(sorted(filter(None, stacks))) or 'none'}: {remedy}"
        )
    layers = model.get_submodule(stacks.pop())
    return list(layers.children()), numbers


class Block:
    """Consecutive layers of a model, as a function of the model's inputs and the hidden states before these layers.

    Earlier layers are skipped, and later ones are not run. The model itself makes masks and positions.

    Args:
        model: the whole model.
        layers: all of its layers.
        first, end: the range of this block's layers.
        in_tuples: whether each layer returns its hidden states in a tuple.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], first: int, end: int, in_tuples: list[bool]):
        self.model, self.layers, self.in_tuples = model, layers, in_tuples
        self.first, self.end = first, end

    def __call__(self, **batch: Any) -> Tensor:
        """Return the hidden states that the next layer receives, or those after the last layer of all."""
        hidden: Tensor | None = batch.pop(INPUT, None)
        outputs: list[Tensor] = []

        def leave(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            outputs.append(inputs[0] if inputs else kwargs["hidden_states"])
            raise _End

        def end(layer: nn.Module, inputs: Any, output: Any) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)
            raise _End

        def enter(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return ((hidden, *inputs[1:]), kwargs) if inputs else (inputs, {**kwargs, "hidden_states": hidden})

        with contextlib.ExitStack() as exit_stack:
            if hidden is not None:
                for layer, in_tuple in zip(self.layers[: self.first], self.in_tuples, strict=False):
                    exit_stack.enter_context(_replace_forward(layer, partial(_skip_layer, in_tuple)))
                exit_stack.callback(self.layers[self.first].register_forward_pre_hook(enter, with_kwargs=True).remove)
            if self.end < len(self.layers):  # what the model does between the layers is then done (YOLOS, Qwen3-VL)
                handle = self.layers[self.end].register_forward_pre_hook(leave, with_kwargs=True)
            else:
                handle = self.layers[-1].register_forward_hook(end)
            exit_stack.callback(handle.remove)
            with contextlib.suppress(_End):
                self.model(**batch)
        return outputs[0]

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Load offloaded weights of these layers once, where accelerate would fetch them for each forward pass."""
        hooks = []
        for layer in self.layers[self.first : self.end]:
            for module in layer.modules():
                hook = getattr(module, "_hf_hook", None)
                hooks += [(module, each) for each in getattr(hook, "hooks", [hook]) if _fetches(each)]
        try:
            for module, hook in hooks:
                hook.pre_forward(module)
                hook.offload = False
            yield
        finally:
            for module, hook in hooks:
                hook.offload = True
                hook.post_forward(module, None)


def _fetches(hook: Any) -> bool:
    return isinstance(hook, AlignDevicesHook) and hook.offload


def _skip_layer(in_tuple: bool, *inputs: Any, **kwargs: Any) -> Any:
    hidden = inputs[0] if inputs else kwargs["hidden_states"]
    return (hidden,) if in_tuple else hidden


@contextlib.contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module inside the ``with`` block, then restore it (accelerate may have set one, too)."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def returns_tuples(model: nn.Module, layers: Sequence[nn.Module], batch: Batch) -> list[bool]:
    """Run the model, and return for each layer whether its output is a tuple."""
    in_tuples: dict[int, bool] = {}

    def note(number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        in_tuples[number] = isinstance(output, tuple)

    with contextlib.ExitStack() as exit_stack, torch.no_grad():
        for number, layer in enumerate(layers):
            exit_stack.callback(layer.register_forward_hook(partial(note, number)).remove)
        model(**batch)
    return [in_tuples.get(number, False) for number in range(len(layers))]


def fit_in_blocks(fit: Linearization, budget: int, count: int) -> None:
    """Run the stage "attention", a block of layers at a time; the measurements in its report are means over all layers.

    Args:
        fit: the linearization.
        budget: number of tokens; each block reads the same ones.
        count: number of blocks.

    Raises:
        GraphFilterError: there are fewer layers than blocks, or the filters are in several stacks of layers.
    """
    if count == 1:
        fit.fit_attention(budget)
        return
    fit.settings["blocks"] = count
    with contextlib.ExitStack() as exit_stack:
        folder = fit.checkpoint or Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
        fit.reports["attention"] = _fit_blocks(fit, budget, count, folder)


def _fit_blocks(fit: Linearization, budget: int, count: int, folder: Path) -> TransferReport:
    layers, numbers = find_stack(fit.model, fit.modules)
    if count > len(layers):
        raise GraphFilterError(f"blocks={count}, and the model has {len(layers)} layers: ask for at most as many")
    ends = [round(i * len(layers) / count) for i in range(count + 1)]
    in_tuples = returns_tuples(fit.model, layers, fit.batches.held_out[0])
    settings = {**fit.settings, "tokens": budget}
    train, held_out = (Inputs(folder / name, device_of(fit.model), settings) for name in INPUTS)
    train.keep(fit.batches.stream(), budget, fit.size)
    held_out.keep(fit.batches.held_out, math.inf, fit.size)
    reports: list[tuple[TransferReport, int]] = []
    for number, (first, end) in enumerate(itertools.pairwise(ends)):
        block = Block(fit.model, layers, first, end, in_tuples)
        modules = {name: fit.modules[name] for name, layer in numbers.items() if first <= layer < end}
        is_done = min(train.passed, held_out.passed) > number
        with contextlib.nullcontext() if is_done else block.resident():
            if modules:
                stage = Stage(
                    "attention",
                    budget,
                    fit.rates.groups(modules, regression=True),
                    partial(regress, block, modules),
                    partial(_mean_error, block, modules, held_out, number),
                    mean({name: fit.report.before[name] for name in modules}),
                )
                report = fit.run_stage(stage, train.read(number), f"attention-{number}")
                reports.append((report, len(modules)))
            if number + 1 < count:
                with torch.no_grad(), fit.autocast(), attending(modules):
                    train.pass_through(number, block)
                    held_out.pass_through(number, block)
    train.finish(count)
    held_out.finish(count)
    return _join(reports)


def _mean_error(block: Block, modules: dict[str, GraphFilter], held_out: Inputs, number: int) -> float:
    if held_out.passed > number:
        raise GraphFilterError(
            f"{held_out.folder.parent} has lost the progress of block {number}, whose inputs are gone: remove this "
            "directory, and start again"
        )
    return mean(filter_errors(block, modules, held_out.read(number)))


def _join(reports: list[tuple[TransferReport, int]]) -> TransferReport:
    """Join the reports of the blocks, weighted by their numbers of filters; keep the measurements that all made."""
    joined = copy.copy(reports[-1][0])
    joined.steps = max(report.steps for report, _ in reports)
    reasons = (report.stopped for report, _ in reports if report.stopped != TransferReport.stopped)
    joined.stopped = next(reasons, TransferReport.stopped)
    histories, layers = [dict(report.history) for report, _ in reports], [count for _, count in reports]
    shared = sorted(set.intersection(*map(set, histories)))
    joined.history = [(used, fmean([history[used] for history in histories], layers)) for used in shared]
    return joined
