"""The variants of a comparison: the unpatched model, and those of a YAML file or the points of a sweep."""

import itertools
import json
import math
from collections.abc import Collection
from typing import Any

from hf_graphfilter import GraphFilterError
from recipes.errors import note
from recipes.identities import OF_FILTERS
from recipes.settings import EPOCHS, Settings
from recipes.summary import PLAIN, name_longer, name_variant

# what must be the same for a comparison to say anything
SHARED = {"task", "data", "dataset_name", "dataset_config_name", "split", "target", "seed", "seeds", "held_out"}
SHARED |= {"validation", "max_eval_samples", "output_dir", "smoke", "stride", "normalize", "max_seconds", "too_long"}
SHARED_BY_RECIPE = {"language_modeling": {"tokenizer", "train_tokenizer"}}  # since perplexity is that of a token
FILTERS = OF_FILTERS | {"filter", "import"}
BASELINE: dict[str, dict[str, Any]] = {PLAIN: {"filter": "none"}}


def choose_variants(
    settings: Settings,
    values: dict[str, Any],
    sections: dict[str, Any],
    sweep: list[str] | None = None,
    only: list[str] | None = None,
    equal_time: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Return name to overrides, the unpatched model first.

    ``only`` selects variants of the YAML file. ``equal_time`` adds a baseline that trains for as many times the steps.
    """
    chosen = _choose(settings, values, sections, sweep, only)
    if taken := [name for name in chosen if name_variant(name) == name_variant(PLAIN)]:
        raise GraphFilterError(f"a comparison has its own baseline: give the variant {taken[0]!r} another name")
    changed = {key: name for name, overrides in chosen.items() for key in overrides}
    of_recipe = SHARED_BY_RECIPE.get(settings.recipe.name, set())
    if fixed := sorted(changed.keys() & (SHARED | of_recipe)):
        raise GraphFilterError(
            f"{changed[fixed[0]]!r} changes {fixed[0]}, which all models of a comparison share: give --{fixed[0]} for "
            "all of them"
        )
    if of_recipe and "model" in changed and not any(values.get(name) for name in of_recipe):
        raise GraphFilterError(
            f"{changed['model']!r} changes model and with it the tokenizer, which all models of a comparison share: "
            f"give one to all of them, say --tokenizer {values['model']}"
        )
    if other_settings := sorted(changed.keys() - FILTERS):
        baseline_values = ", ".join(f"{key}={(settings.defaults | values).get(key)}" for key in other_settings)
        note(f"the baseline keeps {baseline_values}: differences from it may come from these settings too")
    return BASELINE | ({} if equal_time is None else _lengthen_baseline(settings, values, sweep, equal_time)) | chosen


def _lengthen_baseline(
    settings: Settings, values: dict[str, Any], sweep: list[str] | None, factor: float
) -> dict[str, dict[str, Any]]:
    """Return the unpatched model with ``factor`` times the steps, as a variant."""
    if not 1 < factor < math.inf:
        raise GraphFilterError(
            f"--equal_time {factor:g}: give the time of a step with the filter over that of the baseline, above 1"
        )
    if sweep is not None:
        raise GraphFilterError("--equal_time does not go with --sweep: compare the point that you choose")
    current = settings.defaults | values
    if (steps := current.get("max_steps") or 0) > 0:
        longer = {"max_steps": math.ceil(steps * factor)}
    else:
        name = next(name for name in EPOCHS if name in settings.actions)
        longer = {name: round(current[name] * factor, 6)}
    return {name_longer(factor): {"filter": "none", **longer}}


def _choose(
    settings: Settings,
    values: dict[str, Any],
    sections: dict[str, Any],
    sweep: list[str] | None = None,
    only: list[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return name to overrides, of the variants or the points of the sweep."""
    if only is not None and (sweep is not None or not sections["variants"]):
        raise GraphFilterError("--variants chooses from the `variants` of a YAML file, which this comparison has not")
    if sweep is not None:
        axes = dict(axis.partition("=")[::2] for axis in sweep) or sections["sweep"]
        if len(axes) < len(sweep):
            raise GraphFilterError("--sweep names an axis twice: write all of its values in one, K=2,3,4")
        axes = {
            k: v.split(",") if isinstance(v, str) else [_as_text(x, k in settings.actions) for x in v]
            for k, v in axes.items()
        }
        if not axes or not all(v and all(v) for v in axes.values()):
            raise GraphFilterError("--sweep needs axes, K=2,3,4 layers=all,even, or a `sweep` in the YAML file")
        if values.get("filter") == "none":
            raise GraphFilterError("--sweep varies a filter, but --filter is none")
        chosen = {}
        for point in itertools.product(*axes.values()):
            point_values = dict(zip(axes, point, strict=True))
            overrides = {k: v for k, v in point_values.items() if k in settings.actions}
            if options := [f"{k}={v}" for k, v in point_values.items() if k not in settings.actions]:
                overrides["filter_options"] = options
            chosen[", ".join(f"{k}={v}" for k, v in point_values.items())] = overrides
        return chosen
    if named := sections["variants"]:
        if name := sections.get("filter"):
            raise GraphFilterError(f"--filter {name}: the `variants` of the YAML file name their filters, leave it out")
        if unknown := [name for name in only or () if name not in named]:
            raise GraphFilterError(f"--variants {unknown[0]!r}: the YAML file has {', '.join(map(repr, named))}")
        return {name: overrides or {} for name, overrides in named.items() if only is None or name in only}
    if values.get("filter") == "none":
        raise GraphFilterError("nothing to compare: --filter is none, and the YAML file has no `variants`")
    return {values.get("filter", "gfsa"): {}}


def _as_text(value: Any, is_setting: bool) -> str:
    """Return a value of a YAML file as it is written on the command line, that of an option of the filter in JSON."""
    if is_setting or isinstance(value, str):
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return json.dumps(value, separators=(",", ":"), default=str)


def drop_others(
    settings: Settings, values: Any, sections: Any, content: dict[str, Any], ignored: Collection[str] = ()
) -> list[str]:
    """Take runs with other settings than these out of the results, and return their variants.

    Differences in what is ``ignored`` do not count.
    """
    identities = {
        name: settings.identity(settings.override(values, overrides))
        for name, overrides in (BASELINE | _choose(settings, values, sections)).items()
    }
    dropped = [
        run
        for run in content["runs"]
        if run["settings"]
        and {*settings.list_differences(run["settings"], identities.get(run["variant"], run["settings"]))} - {*ignored}
    ]
    content["runs"] = [run for run in content["runs"] if run not in dropped]
    return [*dict.fromkeys(run["variant"] for run in dropped)]
