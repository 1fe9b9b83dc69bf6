"""The findings of a report as sentences with numbers: a verdict, a list, and the headings of the charts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from ...packages import version_of
from ..observing import Layer
from ..response import measure_change
from ..results import Measured
from .drawing import uses_gfsa
from .measurements import ConversionCost, Measurements
from .scale import load_references


def verdict(measured: Measurements, reference: Measurements | None) -> list[str]:
    """Return a sentence per stack: whether its tokens grow alike, and whether that is usual."""
    values = [round(value.cosine, 2) for value in load_references()]
    lines = []
    for stack, layers in _stacks(measured):
        first, last = (_numbers(measured, None, "smoothing", layer, "cosine") for layer in (layers[0], layers[-1]))
        reference_last = reference and _numbers(reference, None, "smoothing", layers[-1], "cosine")
        end = f"{last} (reference: {reference_last})" if reference_last else last
        if float(last) > float(first):
            change = f"grow alike{stack}: the mean cosine of two tokens rises from {first} to {end}"
        elif float(last) < float(first):
            change = f"do not grow alike{stack}: the mean cosine of two tokens falls from {first} to {end}"
        else:
            change = f"do not grow alike{stack}: the mean cosine of two tokens stays at {end}"
        comparison = "more than" if float(last) > max(values) else "less than" if float(last) < min(values) else ""
        lines.append(f"Tokens {change}, which is {f'{comparison} usual' if comparison else 'usual'}")
    scale = ", ".join(f"{value.model} {value.cosine:.2f}" for value in load_references())
    return [f"{line}." for line in lines[:-1]] + [f"{lines[-1]}: {scale}."]


def sentences(
    measured: Measurements, reference: Measurements | None, conversion: ConversionCost | None = None
) -> list[str]:
    """Return all sentences: the verdict on a conversion, the verdict on the tokens, then one per finding."""
    lines = [conversion.verdict] if conversion else []
    lines += verdict(measured, reference)
    for stack, layers in _stacks(measured):
        first, last = layers[0], layers[-1]
        for part, quantity, form, name in (
            ("smoothing", "high_frequency", ".2f", "Share of the energy off the mean token"),
            ("spectrum", "effective_rank", ".1f", "Effective rank of the tokens"),
        ):
            start, end = (_numbers(measured, reference, part, layer, quantity, form) for layer in (first, last))
            lines.append(f"{name}{stack}: {start} before the first layer, {end} after the last.")
        calls = [layer for layer in layers if (layer, "high_to_low") in measured.response.bands]
        if calls:
            start, end = (
                _numbers(measured, reference, "response", layer, "high_to_low") for layer in (calls[0], calls[-1])
            )
            lines.append(
                f"Gain of self-attention off frequency 0, as a share of the gain at 0{stack}: "
                f"{start} in layer {calls[0].index}, {end} in layer {calls[-1].index}."
            )
    if uses_gfsa(measured, reference):
        layer, K, share = _largest_error(measured)
        lines.append(f"Error of GFSA's approximation of A^K: at most {share:.0%} of its bound 2K (K={K}, {layer}).")
    cost = measured.cost
    reference_time = f" (reference: {reference.cost.seconds:.3g} s)" if reference else ""
    lines.append(
        f"The model has {cost.parameters:,} parameters, {cost.filter_parameters:,} of them in filters. A forward pass "
        f"of the first batch took {cost.seconds:.3g} s on {cost.device}{reference_time}."
    )
    return lines


def headings(
    measured: Measurements, reference: Measurements | None, conversion: ConversionCost | None
) -> dict[str, str]:
    """Return a sentence for each figure, by its name, that says what the figure shows."""
    stack, layers = [*_stacks(measured)][-1]
    ranks = [measured.spectrum.bands[layer, "effective_rank"].mean.item() for layer in (layers[0], layers[-1])]
    titles = {
        "smoothing": verdict(measured, reference)[-1].partition(":")[0],
        "spectrum": f"Tokens{stack} use {ranks[1]:.0f} dimensions after all layers, {ranks[0]:.0f} before the first",
        "response": "Attention passes the mean of all tokens, and of other frequencies this share",
    }
    gains = [band.mean.item() for (_, name), band in measured.response.bands.items() if name == "high_to_low"]
    if gains:
        titles["response"] = (
            f"Frequencies other than 0 pass with {min(gains):.2f} to {max(gains):.2f} of the gain at 0, by layer"
        )
    if uses_gfsa(measured, reference):
        titles["taylor"] = (
            f"GFSA's approximation of A^K is off by at most {_largest_error(measured)[2]:.0%} of its bound"
        )
    if measured.curves:
        largest_change = max(map(measure_change, measured.curves.values()))
        titles["curves"] = f"The responses of the filters are up to {largest_change:.2f} from the dashed line"
    distances = [row.moved for row in measured.status if row.moved is not None]
    titles["coefficients"] = "No coefficient is learned"
    if distances:
        mean = sum(distances) / len(distances)
        titles["coefficients"] = (
            f"The learned coefficients are {mean:.2g} from their start values (mean over the modules)"
        )
    if conversion:
        crossing = conversion.crossing
        titles["conversion"] = f"The linearized model is {crossing}" if crossing else "What the conversion cost"
    return titles


def facts(measured: Measurements, reference: Measurements | None) -> dict[str, str]:
    """Return the facts about the measurement: model, filters, inputs, time and versions."""
    filters = [row.filter.filter for row in measured.status]
    names = ("hf_graphfilter", "torch", "transformers")
    return {
        "Model": f"{measured.smoothing.model}, {measured.cost.parameters:,} parameters",
        "Filters": ", ".join(f"{name} in {filters.count(name)} modules" for name in dict.fromkeys(filters)) or "none",
        **({"Reference": reference.smoothing.model} if reference else {}),
        "Inputs": str(measured.inputs),
        "Time": f"{measured.seconds + (reference.seconds if reference else 0):.3g} s on {measured.cost.device}",
        "Date": date.today().isoformat(),
        "Versions": ", ".join(f"{name} {version_of(name)}" for name in names),
    }


def _stacks(measured: Measurements) -> Iterator[tuple[str, list[Layer]]]:
    """Yield (text, layers) for each stack; the text is " in the decoder", or empty for a single stack."""
    stacks = list(dict.fromkeys(layer.stack for layer in measured.smoothing.layers()))
    for stack in stacks:
        yield f" in the {stack}" if len(stacks) > 1 else "", measured.smoothing.layers(stack)


def _numbers(
    measured: Measurements,
    reference: Measurements | None,
    part: str,
    layer: Layer,
    name: str,
    form: str = ".2f",
) -> str:
    """Return the number of the model, and in brackets that of the reference."""
    texts = []
    for measurements in (measured, reference):
        result: Measured | None = getattr(measurements, part) if measurements else None
        if result is not None and (layer, name) in result.bands:
            texts.append(f"{result.bands[layer, name].mean.item():{form}}")
    return texts[0] if len(texts) == 1 else f"{texts[0]} (reference: {texts[1]})"


def _largest_error(measured: Measurements) -> tuple[Layer, int, float]:
    """Return (layer, K, the error as a share of its bound 2K) where the share is largest."""
    shares = ((layer, int(name[2:]), band.mean.item()) for (layer, name), band in measured.taylor.bands.items())
    return max(((layer, K, error / (2 * K)) for layer, K, error in shares), key=lambda item: item[2])
