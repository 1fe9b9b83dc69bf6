"""Checks of what a filter does in a model: tokens, decoding, half precision, files, copies, a compiled graph."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn

from ..checkpoints.filter_file import load_filter, save_filter
from ..patching import unpatch_model
from ..status import filter_parameters
from .trial import ALL, DECODERS, TOKENS, Failed, Family, Trial, check, equal, output, state


@check("causality", *DECODERS)
def _causality(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, 5:] = (changed[name][:, 5:] + 7) % 90 + 5
    earlier = output(model, changed)[:, :5]
    equal(earlier, output(model, inputs)[:, :5], "a later token changes the output at an earlier one")


@check("padding", "encoder", "decoder", "encoder-decoder")
def _padding(trial: Trial, family: Family) -> None:
    model, padded, short = trial.patched(family), family.inputs(), family.inputs(tokens=6)
    padded["attention_mask"][:, 6:] = 0
    if "decoder_input_ids" in padded:
        padded["decoder_input_ids"] = short["decoder_input_ids"]
    expected = output(model, short)
    equal(output(model, padded)[:, : expected.shape[1]], expected, "padding changes the output at other tokens")


@check("cached decoding", *DECODERS)
def _cached_decoding(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, others = inputs[name], {k: v for k, v in inputs.items() if k not in (name, "attention_mask")}
    expected = output(model, {**others, name: ids}, use_cache=False)
    for how, ends in (("token by token", range(1, TOKENS + 1)), ("in pieces", (4, 7, 8, TOKENS))):
        past, start, pieces = None, 0, []
        for end in ends:
            with torch.no_grad():
                step = model(**others, **{name: ids[:, start:end]}, past_key_values=past, use_cache=True)
            pieces.append(step.last_hidden_state)
            past, start = step.past_key_values, end
        equal(torch.cat(pieces, 1), expected, f"decoding {how} with a cache differs from decoding without")


@check("half precision", *ALL)
def _half_precision(trial: Trial, family: Family) -> None:
    def loss(model: Any) -> float:
        expected = output(model, family.inputs(torch.float32))
        rounded = output(model.to(torch.bfloat16), family.inputs(torch.bfloat16)).float()
        return 1 - nn.functional.cosine_similarity(rounded.flatten(), expected.flatten(), dim=0).item()

    plain, model = loss(family.build(torch.float32)), trial.patched(family, torch.float32, scale=0.1)
    patched = loss(model)
    if not patched < 0.02 + 4 * plain:
        raise Failed(f"in bfloat16 its output loses {patched:.3f} of 1, the plain model's {plain:.3f}")


@check("save and load", *ALL)
def _save_and_load(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family, torch.float32), family.inputs(torch.float32)
    folder = trial.folder / family.name
    model.save_pretrained(folder)
    loaded = family.model_class.from_pretrained(folder)
    half = family.model_class.from_pretrained(folder, dtype=torch.bfloat16)
    for again in (loaded, half):
        for name, expected in state(model).items():
            tensor = state(again).get(name)
            if tensor is None or not torch.equal(tensor, expected.to(tensor.dtype)):
                raise Failed(f"{name} is not what was saved")
    twin = copy.deepcopy(loaded)  # read from a file, tensors lie at addresses where kernels may round differently
    equal(output(twin, inputs), output(model, inputs), "the loaded model is not the one that was saved", 0)


@check("filter file", *ALL)
def _filter_file(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family, torch.float32), family.inputs(torch.float32)
    loaded = load_filter(family.build(torch.float32), save_filter(model, trial.folder / f"{family.name}-filter"))
    equal(output(loaded, inputs), output(model, inputs), "load_filter does not give what save_filter saved", 0)


@check("unpatching", *ALL)
def _unpatching(trial: Trial, family: Family) -> None:
    plain, model, inputs = family.build(), trial.patched(family), family.inputs()
    output(model, inputs)
    unpatch_model(model)
    if [*model.state_dict()] != [*plain.state_dict()]:
        raise Failed("unpatch_model leaves other parameters than the model had")
    equal(output(model, inputs), output(plain, inputs), "unpatch_model does not give the original again", 0)


@check("copies", *ALL)
def _copies(trial: Trial, family: Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    expected = output(model, inputs)
    for how, twin in (("deepcopy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
        equal(output(twin, inputs), expected, f"a copy made by {how} gives other outputs", 0)
        with torch.no_grad():
            for parameter in filter_parameters(twin):
                parameter.add_(1)
        equal(output(model, inputs), expected, f"a copy made by {how} shares its parameters with the model", 0)


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
