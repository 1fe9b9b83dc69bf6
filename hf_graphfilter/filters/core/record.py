"""The record of a patch: which filter is where, as checkpoints and filter files keep it.

``{"version": 1, "model": class name, "filters": [{"config": {...}, "modules": [names]}], "imports": [modules]}``
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import GraphFilterError, shown
from .base import FilterConfig
from .build import foreign_modules
from .registry import UnknownFilterError

RECORD_VERSION = 1


def extend_record(
    record: dict[str, Any] | None, model_class: str, config: FilterConfig, names: Iterable[str]
) -> dict[str, Any]:
    """Return ``record`` (or a new one) with one more filter, which replaces earlier ones of the same modules."""
    old, names = record or {"filters": []}, [*names]
    imports = sorted({*_imports(old), *foreign_modules([config])})
    old_groups = ({**group, "modules": [m for m in group["modules"] if m not in names]} for group in old["filters"])
    groups = [*(group for group in old_groups if group["modules"]), *group_by_config((name, config) for name in names)]
    return _make_record(model_class, groups, imports)


def record_of(model_class: str, configs: Iterable[tuple[str, FilterConfig]]) -> dict[str, Any]:
    """Return the record of a model with these filters, given by the names of their modules."""
    configs = [*configs]
    return _make_record(model_class, group_by_config(configs), foreign_modules(config for _, config in configs))


def _make_record(model_class: str, groups: list[dict[str, Any]], imports: list[str]) -> dict[str, Any]:
    record = {"version": RECORD_VERSION, "model": model_class, "filters": groups}
    return {**record, "imports": imports} if imports else record


def group_by_config(configs: Iterable[tuple[str, FilterConfig]]) -> list[dict[str, Any]]:
    """Return the ``filters`` of a record from pairs of a module's name and its filter's config."""
    groups: dict[str, dict[str, Any]] = {}
    for name, config in configs:
        values = config.to_dict()  # its repr may be that of another filter, whose class has the same name
        groups.setdefault(repr(values), {"config": values, "modules": []})["modules"].append(name)
    return [*groups.values()]


def describe_record(record: dict[str, Any]) -> str:
    """Return the filters of a record in one line."""
    return "; ".join(f"{group['config']} on {len(group['modules'])} layers" for group in record["filters"])


def same_filters(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two records have the same filters in the same modules, ignoring options that need no training.

    Such options (``ReplacingConfig.untrained``) change what a filter computes, but none of its coefficients.
    """
    return _read_trained(one) == _read_trained(other)


def _read_trained(record: dict[str, Any]) -> dict[str, FilterConfig]:
    configs = {}
    for group in record["filters"]:
        config = FilterConfig.from_dict(group["config"])
        untrained_options = getattr(config, "untrained", ())
        trained_options = {name: value for name, value in config.to_dict().items() if name not in untrained_options}
        configs.update(dict.fromkeys(group["modules"], FilterConfig.from_dict(trained_options)))
    return configs


def read_groups(record: Any, source: str, part: str = "") -> list[tuple[FilterConfig, list[str]]]:
    """Return (config, names of the modules) for each filter of a record.

    Args:
        record: what was read from a file.
        source: name of the file for error messages.
        part: name of the record within the file, for error messages.
    """
    if not isinstance(record, dict) or record.get("version") != RECORD_VERSION:
        version = record.get("version") if isinstance(record, dict) else record
        raise GraphFilterError(
            f"{source}: version {shown(version)}{part} is unknown, this installation reads version {RECORD_VERSION}; "
            "install the hf_graphfilter release that wrote it"
        )
    where = part.removeprefix(" of ") or source
    groups = record.get("filters")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise GraphFilterError(f"{where} is malformed: 'filters' must be a list of filters, got {shown(groups)}")
    pairs, seen = [], set()
    for group in groups:
        try:
            config, names = FilterConfig.from_dict(group.get("config")), group.get("modules")
        except UnknownFilterError as error:
            modules = _imports(record)  # named, never imported: a checkpoint holds no code
            hint = f": import {shown(', '.join(modules))}, as was done to patch the model" if modules else ""
            raise GraphFilterError(f"{error}{hint}") from None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise GraphFilterError(f"{where} is malformed: 'modules' must be a list of names, got {shown(names)}")
        for name in names:
            if name in seen:
                raise GraphFilterError(f"{where} is malformed: it names the module {shown(name)} twice")
            seen.add(name)
        pairs.append((config, names))
    return pairs


def _imports(record: dict[str, Any]) -> list[str]:
    """Return the modules that, according to a record, register its filters."""
    modules: Any = record.get("imports")
    named = isinstance(modules, list) and all(isinstance(m, str) and m.replace(".", "").isidentifier() for m in modules)
    return modules if named else []
