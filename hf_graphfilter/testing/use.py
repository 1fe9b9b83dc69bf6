"""Checks of what a filter computes and does in a model.

They cover matrices, formulas, gradients, tokens, decoding, half precision, files, copies and a compiled graph.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from ..checkpoints.filter_file import load_filter, save_filter
from ..errors import GraphFilterError
from ..filters import AttentionSite, GraphFilter
from ..filters.core.attached import filters_of
from ..filters.core.build import build_filter
from ..filters.core.replacing import ReplacingFilter
from ..hosts.transformers.cache import NAME as CACHE
from ..ops.heads import repeat_heads
from ..patching.patch import unpatch_model
from ..patching.status import filter_parameters
from ..shift.attention import AttentionCall, AttentionShift
from ..shift.operator import DenseShift
from .trial import ALL, PRETRAINED, DoesNotApply, Failed, Family, Trial, check, equal, one_line, output, state, turn_on

DECODERS = ("decoder", "encoder-decoder")


def _calls(trial: Trial, family: Family) -> list[tuple[GraphFilter, DenseShift, Tensor, Tensor]]:
    """Run a padded batch, and return (filter, shift as an explicit matrix, value, output) for each layer."""
    calls: list[tuple[GraphFilter, DenseShift, Tensor, Tensor]] = []

    def hook(graph_filter: Any, args: tuple[Any, ...], out: Tensor) -> None:
        shift, value = args
        dense = shift.dense()
        names = ("hidden", "query", "key", "scaling", "visible", "state")
        vars(dense).update({name: getattr(shift, name) for name in names})
        calls.append((graph_filter, dense, value, out))

    model, inputs = trial.patched(family), family.inputs()
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, 6:] = 0
    hooks = [graph_filter.register_forward_hook(hook) for _, graph_filter in filters_of(model)]
    output(model, inputs)
    for handle in hooks:
        handle.remove()
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


@check("values per head", "encoder")
def _values_per_head(trial: Trial, family: Family) -> None:
    """Check values split by heads, as tensor parallelism splits them."""
    if not trial.config.module.per_head:
        raise DoesNotApply("it names none (per_head), and tensor parallelism will refuse it")
    for graph_filter, dense, value, out in _calls(trial, family):
        _on_matrix(graph_filter, dense, value)
        dense.matrix = dense.matrix[:, 2:]
        parameters = {name: getattr(graph_filter, name)[2:] for name in graph_filter.per_head}
        half = functional_call(graph_filter, parameters, (dense, value[:, 2:]))
        equal(half, out[:, 2:], "half of the heads with half of the values of per_head do not give half of the output")


@check("gradients", *ALL)
def _gradients(trial: Trial, family: Family) -> None:
    model = trial.patched(family)
    if not any(p.requires_grad for p in filter_parameters(model)):
        raise DoesNotApply("it has no parameters")
    out = model(**family.inputs()).last_hidden_state
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    learns: dict[str, bool] = {}
    for _, graph_filter in filters_of(model):  # one layer of a decoder may have no influence, but not all of them
        for name, p in graph_filter.named_parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                raise Failed(f"the gradient of {name} is not finite")
            if p.requires_grad:
                learns[name] = learns.get(name, False) or (p.grad is not None and bool(p.grad.any()))
    if idle := ", ".join(name for name, learned in learns.items() if not learned):
        spans = [f.span for _, f in filters_of(model) if isinstance(f, ReplacingFilter) and f.config.far == "beyond"]
        if max(spans, default=0) >= (tokens := out.shape[1]):
            raise DoesNotApply(
                f"{idle} act beyond {max(spans)} tokens, and the models here read {tokens}: choose a smaller window"
            )
        raise Failed(f"{idle} gets no gradient")


@check("finite differences")
def _finite_differences(trial: Trial, _: Family) -> None:
    heads, tokens, features = 2, 4, 3
    width = heads * features
    module = nn.Linear(width, width)
    site = AttentionSite(
        "small", module, heads, False, "encoder", "", 0, hidden_size=width, head_dim=features, stack_module=module
    )
    graph_filter = build_filter(trial.config, site).double().eval()
    turn_on(graph_filter)
    torch.manual_seed(0)
    signals = [torch.randn(1, heads, tokens, features, dtype=torch.float64) for _ in range(3)]
    inputs = [*signals, torch.randn(1, tokens, width, dtype=torch.float64)]
    start = {name: p.detach().clone() for name, p in graph_filter.named_parameters() if p.requires_grad}

    def filtered(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *parameters: Tensor) -> Tensor:
        matrix = (query @ key.mT).softmax(-1)
        call = AttentionCall(lambda _, signal: ((matrix @ signal).transpose(1, 2), matrix), query, key, hidden=hidden)
        arguments = AttentionShift(call), value
        return functional_call(graph_filter, dict(zip(start, parameters, strict=True)), arguments)

    try:
        torch.autograd.gradcheck(filtered, [x.requires_grad_() for x in (*inputs, *start.values())], fast_mode=True)
    except GradcheckError as error:
        raise Failed(f"its gradients are not those of its output in float64: {one_line(error)[:120]}") from error


@check("causality", *DECODERS)
def _causality(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, 5:] = (changed[name][:, 5:] + 7) % 90 + 5
    earlier_output = output(model, changed)[:, :5]
    equal(earlier_output, output(model, inputs)[:, :5], "a later token changes the output at an earlier one")


@check("padding", "encoder", "decoder", "encoder-decoder", "module")
def _padding(trial: Trial, family: Family) -> None:
    model, padded, short = trial.patched(family), family.inputs(), family.inputs(tokens=6)
    padded["attention_mask"][:, 6:] = 0
    if "decoder_input_ids" in padded:
        padded["decoder_input_ids"] = short["decoder_input_ids"]
    expected = output(model, short)
    equal(output(model, padded)[:, : expected.shape[1]], expected, "padding changes the output at other tokens")


@check("cached decoding", *DECODERS)
def _cached_decoding(trial: Trial, family: Family) -> None:
    """Check decoding with a cache, and training in pieces whose gradients pass through the cache."""
    model, inputs = trial.patched(family), family.inputs()
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, other_inputs = inputs[name], {k: v for k, v in inputs.items() if k not in (name, "attention_mask")}
    tokens, expected = ids.shape[1], model(**other_inputs, **{name: ids}, use_cache=False).last_hidden_state
    for mode, ends in (("token by token", range(1, tokens + 1)), ("in pieces", (4, 7, 8, tokens))):
        past, start, pieces = None, 0, []
        for end in ends:
            with torch.set_grad_enabled(mode == "in pieces"):
                step = model(**other_inputs, **{name: ids[:, start:end]}, **{CACHE: past}, use_cache=True)
            pieces.append(step.last_hidden_state)
            past, start = step[CACHE], end
        decoded = torch.cat(pieces, 1)
        equal(decoded.detach(), expected.detach(), f"decoding {mode} with a cache differs from decoding without")
    output_gradient, parameters = torch.randn(expected.shape, dtype=expected.dtype), [*model.parameters()]
    by_cache, at_once = (
        torch.cat([g.flatten() for g in torch.autograd.grad(out, parameters, output_gradient, materialize_grads=True)])
        for out in (decoded, expected)
    )
    equal(by_cache, at_once, "gradients through a cache differ from those of one pass (is its state detached?)")


@check("half precision", *ALL)
def _half_precision(trial: Trial, family: Family) -> None:
    def loss(model: Any) -> float:
        expected = output(model, family.inputs(torch.float32))
        rounded = output(model.to(torch.bfloat16), family.inputs(torch.bfloat16)).float()
        return 1 - nn.functional.cosine_similarity(rounded.flatten(), expected.flatten(), dim=0).item()

    baseline, patched = loss(family.build(torch.float32)), loss(trial.patched(family, torch.float32, scale=0.1))
    if not patched < 0.02 + 4 * baseline:
        raise Failed(f"in bfloat16 its output loses {patched:.3f} of 1, the unpatched model's {baseline:.3f}")


@check("save and load", *PRETRAINED)
def _save_and_load(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family, torch.float32), family.inputs(torch.float32)
    folder = trial.folder / family.name
    model.save_pretrained(folder)
    loaded = family.model_class.from_pretrained(folder)
    half = family.model_class.from_pretrained(folder, dtype=torch.bfloat16)
    for reloaded in (loaded, half):
        for name, expected in state(model).items():
            tensor = state(reloaded).get(name)
            if tensor is None or not torch.equal(tensor, expected.to(tensor.dtype)):
                raise Failed(f"{name} is not what was saved")
    twin = copy.deepcopy(loaded)  # tensors from a file may be aligned differently, so that kernels round differently
    equal(output(twin, inputs), output(model, inputs), "the loaded model is not the one that was saved", 0)


@check("filter file", *ALL)
def _filter_file(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family, torch.float32), family.inputs(torch.float32)
    loaded = load_filter(family.build(torch.float32), save_filter(model, trial.folder / f"{family.name}-filter"))
    equal(output(loaded, inputs), output(model, inputs), "load_filter does not give what save_filter saved", 0)


@check("unpatching", *ALL)
def _unpatching(trial: Trial, family: Family) -> None:
    original, model, inputs = family.build(), trial.patched(family), family.inputs()
    output(model, inputs)
    unpatch_model(model)
    if [*model.state_dict()] != [*original.state_dict()]:
        raise Failed("unpatch_model leaves other parameters than the model had")
    equal(output(model, inputs), output(original, inputs), "unpatch_model does not give the original again", 0)


@check("copies", *ALL)
def _copies(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    expected = output(model, inputs)
    for method, twin in (("deepcopy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
        equal(output(twin, inputs), expected, f"a copy made by {method} gives other outputs", 0)
        with torch.no_grad():
            for parameter in filter_parameters(twin):
                parameter.add_(1)
        equal(output(model, inputs), expected, f"a copy made by {method} shares its parameters with the model", 0)


@check("compiling", "encoder")
def _compiling(trial: Trial, family: Family) -> str | None:
    model, inputs, note = trial.patched(family), family.inputs(), None
    expected = output(model, inputs)
    torch.compiler.reset()
    try:
        compiled = output(torch.compile(model, backend="eager", fullgraph=True), inputs)
    except torch._dynamo.exc.Unsupported as error:
        note = f"in more than one graph: {str(error).splitlines()[0]}"
        torch.compiler.reset()
        compiled = output(torch.compile(model, backend="eager"), inputs)
    equal(compiled, expected, "the compiled model gives other outputs")
    return note
