"""The findings of a report, as sentences with numbers."""

from __future__ import annotations

from ..observing import Layer
from ..results import Measured
from .measurements import Measurements


def sentences(measured: Measurements, reference: Measurements | None) -> list[str]:
    lines = []
    for stack in dict.fromkeys(layer.stack for layer in measured.smoothing.layers()):
        layers = measured.smoothing.layers(stack)
        first, last = layers[0], layers[-1]
        where = f" of the {stack}" if len(measured.smoothing.layers()) > len(layers) else ""

        def compare(part: str, layer: Layer, name: str, form: str = ".2f") -> str:
            texts = []
            for measurements, label in ((measured, ""), (reference, "reference ")):
                result: Measured | None = getattr(measurements, part) if measurements else None
                if result is not None and (layer, name) in result.bands:
                    texts.append(f"{label}{result.bands[layer, name].mean.item():{form}}")
            return ", ".join(texts)

        lines.append(
            f"Tokens{where}: mean cosine of two tokens {compare('smoothing', first, 'cosine')} before the first layer, "
            f"{compare('smoothing', last, 'cosine')} after the last."
        )
        lines.append(
            f"Share of the energy off the mean token{where}: {compare('smoothing', first, 'high_frequency')} before, "
            f"{compare('smoothing', last, 'high_frequency')} after."
        )
        lines.append(
            f"Effective rank of the tokens{where}: {compare('spectrum', first, 'effective_rank', '.1f')} before, "
            f"{compare('spectrum', last, 'effective_rank', '.1f')} after."
        )
        name = "high_to_low"
        if calls := [layer for layer in measured.response.layers(stack) if (layer, name) in measured.response.bands]:
            lines.append(
                f"Gain of self-attention off frequency 0, of that at 0{where}: "
                f"{compare('response', calls[0], name)} in "
                f"{'the first layer' if calls[0].index == 0 else calls[0]}, {compare('response', calls[-1], name)} in "
                f"{'the last' if calls[-1].index == last.index else calls[-1]}."
            )
    largest = max(measured.taylor.bands.items(), key=lambda item: item[1].mean.item() / int(item[0][1][2:]))
    (layer, name), band = largest
    bound = 2 * int(name[2:])
    share = f"{band.mean.item() / bound:.0%}"
    lines.append(f"Error of GFSA's approximation of A^K: at most {share} of its bound 2K ({name}, {layer}).")
    cost = measured.cost
    against = f", reference {reference.cost.seconds:.3g} s" if reference else ""
    lines.append(
        f"{cost.parameters:,} parameters, {cost.filter_parameters:,} of filters; a forward pass of the first batch "
        f"took {cost.seconds:.3g} s on {cost.device}{against}."
    )
    return lines
