"""Checks of what a filter computes: through matrices, formulas, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from ..errors import GraphFilterError
from ..filters import AttentionSite, GraphFilter
from ..filters.attached import filters_of
from ..filters.build import build_filter
from ..shift import AttentionShift, DenseShift, repeat_heads
from ..status import filter_parameters
from .trial import ALL, DoesNotApply, Failed, Family, Trial, check, equal, one_line, output, turn_on


def _calls(trial: Trial, family: Family) -> list[tuple[GraphFilter, DenseShift, Tensor, Tensor]]:
    """(filter, the shift as an explicit matrix, value, output) of each layer, for a padded batch."""
    calls: list[tuple[GraphFilter, DenseShift, Tensor, Tensor]] = []

    def hook(graph_filter: Any, args: tuple[Any, ...], out: Tensor) -> None:
        shift, value = args
        dense = shift.dense()
        seen = ("hidden", "query", "key", "scaling", "visible", "state")
        vars(dense).update({name: getattr(shift, name) for name in seen})
        calls.append((graph_filter, dense, value, out))

    model, inputs = trial.patched(family), family.inputs()
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, 6:] = 0
    hooks = [graph_filter.register_forward_hook(hook) for _, graph_filter in filters_of(model)]
    output(model, inputs)
    for registered in hooks:
        registered.remove()
    return calls


@check("explicit matrix", *ALL)
def _explicit_matrix(trial: Trial, family: Family) -> None:
    for graph_filter, dense, value, out in _calls(trial, family):
        equal(out, _on_matrix(graph_filter, dense, value), "S through the model's attention and S as a matrix differ")


def _on_matrix(graph_filter: GraphFilter, dense: DenseShift, value: Tensor) -> Tensor:
    try:
        return graph_filter(dense, value)
    except (GraphFilterError, AttributeError) as error:  # its forward on an AttentionShift did not raise
        raise DoesNotApply(f"the filter is no function of a matrix: {one_line(error)}") from error


@check("formula", *ALL)
def _formula(trial: Trial, family: Family) -> None:
    if trial.formula is None:
        raise DoesNotApply("no formula was given")
    for graph_filter, dense, value, out in _calls(trial, family):
        expected = trial.formula(dense.matrix, graph_filter.coefficients()) @ repeat_heads(value, graph_filter.heads)
        equal(out, expected, "forward and formula differ")


@check("values a head", "encoder")
def _values_a_head(trial: Trial, family: Family) -> None:
    """As tensor parallelism splits the heads."""
    if not trial.config.module.per_head:
        raise DoesNotApply("it names none (per_head), and tensor parallelism will refuse it")
    for graph_filter, dense, value, out in _calls(trial, family):
        _on_matrix(graph_filter, dense, value)
        dense.matrix = dense.matrix[:, 2:]
        own = {name: getattr(graph_filter, name)[2:] for name in graph_filter.per_head}
        half = functional_call(graph_filter, own, (dense, value[:, 2:]))
        equal(half, out[:, 2:], "half of the heads with half of the values of per_head do not give half of the output")


@check("gradients", *ALL)
def _gradients(trial: Trial, family: Family) -> None:
    model = trial.patched(family)
    if not any(p.requires_grad for p in filter_parameters(model)):
        raise DoesNotApply("it has no parameters")
    out = model(**family.inputs()).last_hidden_state
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    learns: dict[str, bool] = {}
    for _, graph_filter in filters_of(model):  # a decoder's layer may be without influence, all together are not
        for name, p in graph_filter.named_parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                raise Failed(f"the gradient of {name} is not finite")
            if p.requires_grad:
                learns[name] = learns.get(name, False) or (p.grad is not None and bool(p.grad.any()))
    if not all(learns.values()):
        raise Failed(f"{', '.join(name for name, learned in learns.items() if not learned)} gets no gradient")


@check("finite differences")
def _finite_differences(trial: Trial, _: Family) -> None:
    heads, tokens, features = 2, 4, 3
    width = heads * features
    place = nn.Linear(width, width)
    site = AttentionSite("small", place, heads, False, "encoder", "", 0, hidden_size=width, head_dim=features)
    graph_filter = build_filter(trial.config, site).double().eval()
    turn_on(graph_filter)
    torch.manual_seed(0)
    signals = [torch.randn(1, heads, tokens, features, dtype=torch.float64) for _ in range(3)]
    inputs = [*signals, torch.randn(1, tokens, width, dtype=torch.float64)]
    names = [name for name, p in graph_filter.named_parameters() if p.requires_grad]
    values = [p.detach().clone() for p in graph_filter.parameters() if p.requires_grad]

    def filtered(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *parameters: Tensor) -> Tensor:
        matrix = (query @ key.mT).softmax(-1)
        shift = AttentionShift(lambda _, signal: ((matrix @ signal).transpose(1, 2), matrix), query, key)
        shift.hidden = hidden
        return functional_call(graph_filter, dict(zip(names, parameters, strict=True)), (shift, value))

    try:
        torch.autograd.gradcheck(filtered, [x.requires_grad_() for x in (*inputs, *values)], fast_mode=True)
    except GradcheckError as error:
        raise Failed(f"its gradients are not those of its output in float64: {one_line(error)[:120]}") from error
