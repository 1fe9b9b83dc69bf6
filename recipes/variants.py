"""What a comparison compares: the plain model, and the variants of a YAML file or the points of a sweep."""

import itertools
from typing import Any

from hf_graphfilter import GraphFilterError
from recipes.settings import Settings
from recipes.summary import PLAIN


def choose_variants(
    settings: Settings,
    values: dict[str, Any],
    sections: dict[str, Any],
    sweep: list[str] | None = None,
    only: list[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return name to overrides, the plain model first; ``only`` names some of the YAML file's."""
    plain = {PLAIN: {"filter": "none"}}
    if only is not None and (sweep is not None or not sections["variants"]):
        raise GraphFilterError("--variants chooses from the `variants` of a YAML file, which this comparison has not")
    if sweep is not None:
        axes = dict(axis.partition("=")[::2] for axis in sweep) or sections["sweep"]
        axes = {k: v.split(",") if isinstance(v, str) else [str(x) for x in v] for k, v in axes.items()}
        if "seeds" in axes:
            raise GraphFilterError("--sweep varies settings, all of them with the same seeds: give these with --seeds")
        if not axes or not all(all(v) for v in axes.values()):
            raise GraphFilterError("--sweep needs axes, K=2,3,4 layers=all,even, or a `sweep` in the YAML file")
        if values.get("filter") == "none":
            raise GraphFilterError("--sweep varies a filter, but --filter is none")
        chosen = {}
        for point in itertools.product(*axes.values()):
            at = dict(zip(axes, point, strict=True))
            overrides = {k: v for k, v in at.items() if k in settings.actions}
            if options := [f"{k}={v}" for k, v in at.items() if k not in settings.actions]:
                overrides["filter_options"] = options
            chosen[", ".join(f"{k}={v}" for k, v in at.items())] = overrides
        return plain | chosen
    if named := sections["variants"]:
        if unknown := [name for name in only or () if name not in named]:
            raise GraphFilterError(f"--variants {unknown[0]!r}: the YAML file has {', '.join(map(repr, named))}")
        return plain | {name: overrides or {} for name, overrides in named.items() if only is None or name in only}
    if values.get("filter") == "none":
        raise GraphFilterError("nothing to compare: --filter is none, and the YAML file has no `variants`")
    return plain | {values.get("filter", "gfsa"): {}}
