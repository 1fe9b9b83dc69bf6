"""Observation of a running model: the tokens, the shift operator and the filter of every self-attention module."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import device_of
from ..errors import GraphFilterError
from ..filters import AttentionSite, FilterConfig, GraphFilter
from ..filters.core.attached import CHILD, active_filter
from ..hosts import host_of, unwrapped
from ..hosts.base import is_numbered
from ..ops.explicit import matrix_of
from ..ops.spectral import to_float32
from ..shift.attention import AttentionShift
from ..shift.earlier_layers import EarlierLayers
from ..shift.operator import ShiftOperator
from .model_inputs import Padding, check_batches, cut_batch, evaluate, name_mistakes, to_device


@dataclass(frozen=True)
class Layer:
    """A layer of a stack.

    Attributes:
        stack: ``"encoder"``, ``"decoder"``, or the path of a tower.
        index: the place in the order in which layers run, from 0; -1 stands for the input embeddings.
    """

    stack: str
    index: int

    def __str__(self) -> str:
        return f"{self.stack} {self.index}"


@dataclass(frozen=True)
class Call:
    """One call of a self-attention module with a batch.

    Attributes:
        layer: layer of the module.
        shift: the shift operator, before its first application.
        value: values, (batch, key heads, tokens, features).
        graph_filter: filter of the module; None if it has none.
        is_token: bool (batch, tokens), true for tokens that are no padding.
        earlier: layers before this one, for a filter that reads them.
    """

    layer: Layer
    shift: AttentionShift
    value: Tensor
    graph_filter: GraphFilter | None
    is_token: Tensor
    earlier: EarlierLayers | None = None

    @cached_property
    def attention(self) -> Tensor:
        """The matrix A, (batch, heads, tokens, tokens), in float32 or wider."""
        return to_float32(matrix_of(self.shift.restart(), self.shift.key))

    @property
    def is_matrix(self) -> bool:
        """Whether ``filtered`` exists: the output of a filter need not be a matrix times the values."""
        return self.graph_filter is None or self.graph_filter.linear

    @cached_property
    def filtered(self) -> Tensor:
        """The matrix that the module applies to its values: A, or what the filter makes of it.

        Raises:
            GraphFilterError: the output of the filter is not a matrix times the values.
        """
        graph_filter = self.graph_filter
        if graph_filter is None:
            return self.attention
        if not self.is_matrix:
            raise GraphFilterError(
                f"{graph_filter.site_name}: {graph_filter.config.filter!r} is no matrix times values and has no map; "
                "filtered=False gives the map of attention"
            )

        def apply(columns: Tensor) -> Tensor:
            earlier = None if self.earlier is None else self.earlier.copy()
            return type(graph_filter).forward(graph_filter, self.shift.restart(earlier), columns)

        return to_float32(matrix_of(apply, self.shift.key))

    def each(self, matrices: Tensor) -> Iterator[Tensor]:
        """Yield the matrix of each sequence without padding, (heads, tokens, tokens)."""
        for matrix, is_token in zip(matrices, self.is_token, strict=True):
            yield matrix[:, is_token][:, :, is_token]


class Reader:
    """A receiver of what happens in a running model; a subclass keeps what it needs.

    Attributes:
        matrices: whether the reader uses the matrices of calls. If so, batches are cut so that these fit into memory.
    """

    matrices: bool = False

    def attention(self, call: Call) -> None:
        """Read a call of a self-attention module, after it ran."""

    def tokens(self, layer: Layer, tokens: Tensor, is_token: Tensor) -> None:
        """Read the output of a layer, (batch, tokens, features), and the mask of its tokens, bool (batch, tokens)."""

    def outputs(self, outputs: Any, batch: Any) -> None:
        """Read the output of the model for a batch."""


@dataclass(frozen=True)
class _WatchConfig(FilterConfig):
    pass


class _Watch(GraphFilter):
    """A filter for modules that have none, which leaves their attention as it is."""

    def forward(self, shift: ShiftOperator, value: Tensor) -> Tensor:
        return shift(value)


def observe(
    model: nn.Module,
    batches: Iterable[Any],
    readers: Iterable[Reader],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> None:
    """Run ``model`` on ``batches``, and pass its attention calls, tokens and outputs to the ``readers``.

    The model is left as it was, also after an error.

    Args:
        model: model of transformers, timm or PyTorch, with or without filters, on any device.
        batches: dicts of the model's arguments (the output of a tokenizer), or tensors. They may come from an iterator;
            only one batch is held at a time.
        readers: receivers of calls, tokens and outputs.
        progress: wraps the batches, as a progress bar does. Default: no bar.

    Raises:
        GraphFilterError: the model has no self-attention that can be read or does not run on a batch, no batch has two
            tokens of one text, a mask fits no layer, or a layer gives numbers that are not finite.
    """
    readers = list(readers)
    model = unwrapped(model)
    host = host_of(model)
    sites, refused = host.find(model)
    if not sites:
        names = ", ".join(f"{name} ({reason})" for name, reason in list(refused.items())[:3]) or "none"
        raise GraphFilterError(
            f"{type(model).__name__} has no self-attention that can be read; attention found: {names}"
        )
    check_batches(batches)
    observer = _Observer(model, sites, readers)
    unpatched_sites = [site for site in sites if CHILD not in site.module._modules]
    device = device_of(model)
    runs_whole_batches = not any(reader.matrices for reader in readers) or any(site.tokens_first for site in sites)
    heads = 0 if runs_whole_batches else max(site.heads for site in sites)
    with contextlib.ExitStack() as undo:
        undo.enter_context(evaluate(model))
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # of PyTorch's encoder, whose layers pass no tensors on
        watched: list[nn.Module] = []
        undo.callback(host.detach, model, watched)
        for site in unpatched_sites:
            host.attach(site, _Watch(_WatchConfig(), site))
            watched.append(site.module)
        observer.look(undo)
        undo.enter_context(name_mistakes(model))
        undo.enter_context(torch.no_grad())
        for batch in progress(batches):
            for part in cut_batch(to_device(batch, device), heads, lambda: observer.tokens):
                observer.begin(part)
                outputs = model(**part) if isinstance(part, Mapping) else model(part)
                observer.padding.check()
                for reader in readers:
                    reader.outputs(outputs, part)
    if not observer.sequences:
        raise GraphFilterError("there are no batches with a token, so that nothing was measured: check the inputs")


class _Observer:
    """The hooks of an observation, and their state during a batch."""

    def __init__(self, model: nn.Module, sites: list[AttentionSite], readers: list[Reader]):
        self.model, self.sites, self.readers, self.stacks = model, sites, readers, stacks_of(model, sites)
        self.sequences = self.tokens = 0

    def begin(self, batch: Any) -> None:
        self.padding = Padding(self.model, self.sites, batch)
        self.entries, self.layers = Counter[str](), Counter[str]()

    def look(self, undo: contextlib.ExitStack) -> None:
        """Register the hooks, and have ``undo`` remove them."""
        for site in self.sites:
            graph_filter = active_filter(site.module)
            undo.callback(site.module.register_forward_pre_hook(partial(self._count_entry, site)).remove)
            undo.callback(graph_filter.register_forward_pre_hook(self._keep_earlier).remove)
            undo.callback(graph_filter.register_forward_hook(partial(self._read_filter, site)).remove)
        for name, site in layer_modules(self.sites).items():
            module = self.model.get_submodule(name)
            undo.callback(module.register_forward_pre_hook(partial(self._read_inputs, site), with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(partial(self._read_outputs, site)).remove)

    def _count_entry(self, site: AttentionSite, *_: Any) -> None:
        self.entries[self.stacks[site.name]] += 1  # a module may call its filter once per image (Qwen2-VL)

    def _keep_earlier(self, graph_filter: Any, arguments: tuple[AttentionShift, Tensor]) -> None:
        self.earlier = arguments[0].earlier.copy() if graph_filter.reads_earlier else None

    def _read_filter(self, site: AttentionSite, graph_filter: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        shift, value = arguments
        layer = Layer(stack := self.stacks[site.name], self.entries[stack] - 1)
        self.tokens = max(self.tokens, value.shape[2])
        is_token = self.padding.find_tokens(site, value.shape[0], value.shape[2], value.device)
        self.sequences += int(is_token.any(1).sum())  # also where the tokens of all images are one matrix
        module_filter = None if isinstance(graph_filter, _Watch) else graph_filter
        call = Call(layer, shift, value, module_filter, is_token, self.earlier)
        for reader in self.readers:
            reader.attention(call)

    def _read_inputs(self, site: AttentionSite, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self.layers[self.stacks[site.name]]:
            self._send_tokens(site, -1, kwargs.get("hidden_states", next(iter([*args, *kwargs.values()]), None)))

    def _read_outputs(self, site: AttentionSite, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = self.stacks[site.name]
        self._send_tokens(site, self.layers[stack], output)
        self.layers[stack] += 1

    def _send_tokens(self, site: AttentionSite, index: int, output: Any) -> None:
        tokens = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(tokens, Tensor) or tokens.dim() not in (3, 4):
            return
        if site.tokens_first and tokens.dim() == 3:
            tokens = tokens.transpose(0, 1)
        tokens = to_float32(tokens.flatten(1, -2))  # with windows, images are (batch, height, width, features)
        layer = Layer(self.stacks[site.name], index)
        is_token = self.padding.find_tokens(site, tokens.shape[0], tokens.shape[1], tokens.device)
        if not tokens[is_token].isfinite().all():
            raise GraphFilterError(f"the output of layer {layer} has numbers that are not finite (NaN or infinity)")
        self.sequences += int(is_token.any(1).sum())
        for reader in self.readers:
            reader.tokens(layer, tokens, is_token)


def stacks_of(model: nn.Module, sites: list[AttentionSite]) -> dict[str, str]:
    """Return the name of the stack for the name of each site.

    It is ``"encoder"`` or ``"decoder"``, or a path if several kinds of models have such a stack (the towers of CLIP).
    """
    kinds: dict[str, set[type]] = {}
    for site in sites:
        kinds.setdefault(site.stack, set()).add(host_of(model).kind(site.module))
    return {site.name: site.stack if len(kinds[site.stack]) == 1 else site.group for site in sites}


def layer_modules(sites: list[AttentionSite]) -> dict[str, AttentionSite]:
    """Return the site in each layer, by the name of the layer's module.

    The layer of a site is the largest numbered module around it that contains no other site.
    """
    layers = {}
    for site in sites:
        parts = site.name.split(".")
        blocks = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if is_numbered(part)]
        own_blocks = [name for name in blocks if sum(other.name.startswith(f"{name}.") for other in sites) == 1]
        layers[own_blocks[0] if own_blocks else site.name] = site
    return layers
