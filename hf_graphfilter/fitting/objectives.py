"""Compute what a fit minimises: the distance between filters (students) and the attention they replace (teachers)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..analysis.model_inputs import mask_of
from ..errors import GraphFilterError
from ..filters import GraphFilter
from ..shift.attention import AttentionShift

Batch = dict[str, Any]
Outputs = Mapping[str, Any]


class Squares(NamedTuple):
    """Sums of squares per token, each (batch, tokens), zero for padding.

    Attributes:
        error: of the difference between filter and attention.
        wanted: of the output of attention.
        context: number of tokens that the token sees.
        scale: factor of a loss that keeps its gradient within the range of float16.
    """

    error: Tensor
    wanted: Tensor
    context: Tensor
    scale: float


Run = Callable[..., Any]  # a model, or a part of one
Original = Callable[[Batch], Outputs]
Distance = Callable[[Outputs, Outputs, Batch], Tensor]


@contextlib.contextmanager
def attending(
    modules: dict[str, GraphFilter], observe: Callable[[str, Squares], None] | None = None, fit: bool = False
) -> Iterator[None]:
    """Let the modules compute their original attention.

    ``observe(name, squares)`` receives the errors of the filters, with gradients if ``fit``.
    """

    def attend(name: str, graph_filter: GraphFilter, shift: AttentionShift, value: Tensor) -> Tensor:
        shift_copy = copy.copy(shift)
        with torch.no_grad():
            attention = shift(value)
        if observe is not None:
            with torch.set_grad_enabled(fit):
                observe(name, _squares(shift_copy, graph_filter.approximate(shift_copy, value), attention))
            shift_copy.earlier.detach()  # each layer is fitted by itself
        return attention

    with contextlib.ExitStack() as exit_stack:
        for name, graph_filter in modules.items():
            attributes = vars(graph_filter)
            earlier = attributes.get("forward")  # set by an enclosing context of this kind
            attributes["forward"] = partial(attend, name, graph_filter)
            exit_stack.callback(
                attributes.pop if earlier is None else attributes.__setitem__, "forward", *filter(None, [earlier])
            )
        yield


def _squares(shift: AttentionShift, approximation: Tensor, target: Tensor) -> Squares:
    error, target = ((x.square().sum((1, 3))) for x in (approximation.float() - target.float(), target.float()))
    causal, keys = shift.visible()
    is_token = torch.ones_like(target) if keys is None else keys[:, -target.shape[1] :].to(target.dtype)
    is_token = is_token.expand_as(target)
    context = is_token.cumsum(1) if causal else is_token.sum(1, keepdim=True) * is_token
    scale = 2.0**12 if approximation.dtype == torch.float16 else 1.0  # constant: the moments of AdamW average batches
    return Squares(error * is_token, target * is_token, context, scale)


def regress(model: Run, modules: dict[str, GraphFilter], batch: Batch) -> dict[str, float]:
    """Compute the gradients of all filters on one batch, each right after its module has run; return the errors."""
    losses: dict[str, Tensor] = {}

    def observe(name: str, squares: Squares) -> None:
        loss = squares.error.sum() / squares.wanted.sum().clamp(min=1e-12)
        backward(loss * squares.scale)  # AdamW divides by the size of gradients, and this loss is not clipped
        losses[name] = loss.detach()

    with torch.no_grad(), attending(modules, observe, fit=True):
        model(**batch)
    return {name: loss.sqrt().item() for name, loss in losses.items()}


def filter_errors(model: Run, modules: dict[str, GraphFilter], batches: Iterable[Batch]) -> dict[str, float]:
    """Return the error of each filter over all batches: ``|filter - attention| / |attention|``."""
    errors, _ = errors_by_context(model, modules, batches, [])
    return errors


@torch.no_grad()
def errors_by_context(
    model: Run, modules: dict[str, GraphFilter], batches: Iterable[Batch], bounds: list[int]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the errors of the filters, and the same errors by the number of tokens that a token sees.

    Each part ends at a bound; the last part holds the tokens that see more than the last bound.

    Raises:
        GraphFilterError: no batch reaches one of the filters.
    """
    edges = torch.tensor(bounds)
    # the last entry sums all tokens directly, so that it is the same bit for bit whatever the bounds are
    sums = {name: torch.zeros(2, len(bounds) + 2, dtype=torch.float64) for name in modules}

    def observe(name: str, squares: Squares) -> None:
        bins = torch.bucketize(squares.context.cpu().flatten(), edges)
        for sum_, square in zip(sums[name], squares[:2], strict=True):
            flat = square.cpu().double().flatten()
            sum_.index_add_(0, bins, flat)
            sum_[-1] += flat.sum()

    with attending(modules, observe):
        for batch in batches:
            model(**batch)
    if missed := [name for name, (_, norm) in sums.items() if not norm[-1]]:
        raise GraphFilterError(
            f"no held-out batch reaches {len(missed)} of {len(sums)} filters, the first {missed[0]}: give batches that "
            "use all parts of the model, or leave these out with stack= or layers="
        )
    ratios = {name: (error / norm).sqrt().tolist() for name, (error, norm) in sums.items()}
    *parts, errors = [{name: values[i] for name, values in ratios.items()} for i in range(len(bounds) + 2)]
    return errors, parts


def original_of(model: nn.Module, modules: dict[str, GraphFilter]) -> Original:
    """Return a function that runs the model with attention in place of the filters."""

    @torch.no_grad()
    def run(batch: Batch) -> Outputs:
        with attending(modules):
            outputs: Outputs = model(**batch, output_hidden_states=True)
        return outputs

    return run


def always(outputs: Outputs) -> Original:
    """Return a function that returns these outputs of the original model, instead of running it again."""
    return lambda batch: outputs


def fit_end_to_end(model: nn.Module, original: Original, of: str, batch: Batch) -> dict[str, float]:
    """Compute the gradients of one batch, with the distance between filtered and original outputs as the loss."""
    target = original(batch)
    output = model(**batch, output_hidden_states=True)
    loss = DISTANCES[of](output, target, batch)
    hidden = next(filter(None, map(output.get, ("hidden_states", "decoder_hidden_states"))), [loss[None]])
    backward_through(model, loss, hidden[-1].shape[:-1].numel())
    return {"loss": loss.item()}


def backward_through(model: nn.Module, loss: Tensor, tokens: int) -> None:
    """Compute the gradients of a loss that is a mean over ``tokens``; they must be zero before.

    In float16 the gradients of single tokens would vanish, so the loss is scaled while they are computed.
    """
    if not loss.requires_grad:
        return
    in_half = any(p.dtype == torch.float16 for p in model.parameters())
    scale = float(min(tokens, 2**15)) if in_half else 1.0  # float16 ends at 2**16
    backward(loss.float() * scale)
    if scale != 1:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad /= scale


def backward(loss: Tensor) -> None:
    """Compute the gradients, if there are any, outside autocast, which would also narrow float32 backward passes."""
    if loss.requires_grad:
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()


def logits_of(outputs: Outputs) -> Tensor:
    """Return the logits in float32 with the classes last; segmentation maps are (batch, classes, height, width)."""
    logits: Tensor = outputs["logits"].float()
    return logits.movedim(1, -1) if logits.dim() == 4 else logits


def mask_of_logits(batch: Batch, outputs: Outputs) -> Tensor | None:
    """Return the mask of the tokens that the logits belong to, or None."""
    by_decoder = "labels" in batch and "encoder_last_hidden_state" in outputs
    return mask_of(batch, "decoder" if by_decoder or "decoder_input_ids" in batch else "")


@torch.no_grad()
def mean_loss(fit: Callable[[Batch], dict[str, float]], batches: list[Batch]) -> float:
    """Return the mean loss over the batches."""
    return sum(fit(batch)["loss"] for batch in batches) / len(batches)


def _hidden_distance(output: Outputs, target: Outputs, batch: Batch) -> Tensor:
    pairs = []
    for stack in ("", "encoder", "decoder"):
        name = f"{stack}_hidden_states" if stack else "hidden_states"
        if output.get(name) is not None:
            pairs += [(f, t, mask_of(batch, stack)) for f, t in zip(output[name], target[name], strict=True)]
    if not pairs:
        raise GraphFilterError(
            "the model returns no hidden states to compare: fit its logits instead, or one of its parts by itself"
        )
    losses = []
    for f, t, mask in pairs:
        f, t = f.float(), t.float()
        weight = mask[..., None].to(f.dtype) if mask is not None and mask.shape == f.shape[:2] else 1
        losses.append(((f - t) * weight).square().sum() / (t * weight).square().sum().clamp(min=1e-12))
    return torch.stack(losses).mean()


def _logits_distance(output: Outputs, target: Outputs, batch: Batch) -> Tensor:
    if "logits" not in output:
        raise GraphFilterError("end_to_end='logits': the model returns no logits; use 'hidden'")
    f, t = (logits_of(x).log_softmax(-1) for x in (output, target))
    divergence, mask = (t.exp() * (t - f)).sum(-1), mask_of_logits(batch, output)
    if mask is not None and mask.shape == divergence.shape:
        return (divergence * mask).sum() / mask.sum().clamp(min=1)
    return divergence.mean()


DISTANCES: dict[str, Distance] = {"hidden": _hidden_distance, "logits": _logits_distance}
