"""The settings of a run: flags over a YAML file over the recipe's own."""

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import parse_options
from hf_graphfilter.errors import has_type, nearest
from hf_graphfilter.filters import get_filter, import_filters
from hf_graphfilter.filters.core.registry import UnknownFilterError
from hf_graphfilter.patching.layers import parse_layers
from recipes.arguments import ALIASES, DEFAULTS, SMOKE, RecipeArguments
from recipes.checks import check_training, check_values
from recipes.errors import is_main_process
from recipes.identities import INCIDENTAL, ROWS, identity, list_differences
from recipes.models import load_model
from recipes.precision import bf16_pays, has_accelerator
from recipes.records import lower_is_better

CONFIGS = Path(__file__).parent / "configs"
EPOCHS = ("num_train_epochs", "epochs")  # of the Trainer, and of the recipe for images
OPTIONS_OF = {"filter_options": "filter", "from_scratch": "model"}


@dataclass(frozen=True)
class Recipe:
    """A task family."""

    name: str  # in records and results
    metrics: dict[str, str]  # the one, as split/name, by which each task is compared
    run: Callable[..., dict[str, Any]]  # one training run: an instance of each of `arguments` to what `fit` returns
    defaults: dict[str, Any]  # settings under those of a YAML file and the flags
    description: str  # for --help
    known: Callable[[str], bool] = lambda task: False  # whether a task that is not in metrics is one (any text, say)
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)  # folders or tables of tasks, below --data
    from_scratch: bool = False  # whether every run trains a new model
    arguments: tuple[type, ...] = (RecipeArguments, Seq2SeqTrainingArguments)  # the last has output_dir and seed
    smoke: dict[str, Any] = field(default_factory=dict)  # settings of --smoke, besides the general ones
    load: Callable[[Path], Any] = load_model  # a saved checkpoint
    check: Callable[..., None] = lambda *arguments: None  # refuses settings before anything is read or written

    def metric(self, task: str, held_out: bool = False) -> str:
        """Return the metric of a task; that of the validation part where this is ``held_out`` of the training part."""
        metric = self.metrics.get(task) or self.metrics["*"]
        return f"validation/{metric.partition('/')[2]}" if held_out else metric


class Settings:
    """The flags of a recipe, as a parser in which a YAML file stands under the command line."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.parser = HfArgumentParser(
            recipe.arguments, description=recipe.description, allow_abbrev=False, exit_on_error=False
        )
        self.parser.add_argument("--config", help="A YAML file; flags override it.")
        modules = "Modules that register filters, by dotted name or .py file."
        self.parser.add_argument("--import", nargs="+", action="extend", type=str, help=modules)
        self.actions = {action.dest: action for action in self.parser._actions if action.dest != "help"}
        for action in self.parser._actions:  # of some flags two, --x and --no_x
            action.default, action.required = argparse.SUPPRESS, False
        fields = [f for arguments in recipe.arguments for f in dataclasses.fields(arguments)]
        self.own = typing.get_type_hints(recipe.arguments[0])
        self.optional = {name for name, hint in self.own.items() if type(None) in typing.get_args(hint)}
        self.defaults = {
            f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            for f in fields
            if f.name not in INCIDENTAL and f.name not in ("model", "task", "seed")
        }

    def parse(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (settings, ``variants`` and ``sweep`` of the YAML file, with the ``filter`` if the flags name one)."""
        try:
            namespace, unknown = self.parser.parse_known_args([self._resolve_alias(word) for word in argv])
        except argparse.ArgumentError as error:
            self.parser.error(str(error))
        if unknown:
            flag = unknown[0].split("=")[0]
            raise GraphFilterError(f"unknown argument {flag}{nearest(flag.lstrip('-'), self.actions, '--')}")
        flags = vars(namespace)
        config = flags.pop("config", None)
        file = read_yaml(config) if config else {}
        sections = {key: file.pop(key, None) or {} for key in ("tasks", "variants", "sweep")}
        for key, section in sections.items():
            kind, kind_name = (list | str, "list") if key == "sweep" else (dict, "dict")
            if not has_type(section, dict[str, kind | None]):
                raise GraphFilterError(f"`{key}` in {config} must hold, by names, a {kind_name} each: {section!r}")
        for task in sections["tasks"]:
            self._check_task(task)
        values = self.override({}, self._select_flags(DEFAULTS) | self.recipe.defaults)
        values = self.override(values, file, f" in {config}")
        task = flags.get("task", values.get("task"))
        values = self.override(values, sections["tasks"].get(task, {}), f" in {config}, task {task}")
        values = self.override(values, flags)
        for name in ("model", "task"):
            if values.get(name) is None:
                raise GraphFilterError(f"no {name} given: use --{name} or a YAML file with --config")
        self._check_task(values["task"])
        if values.get("smoke"):
            smoke = self._select_flags(SMOKE) | self.recipe.smoke
            explicit = flags | (file if file.get("smoke") else {})  # as a run wrote them
            values = self.override(values, {k: v for k, v in smoke.items() if k not in explicit})
        if not values.get("output_dir"):
            name = f"{Path(values['task']).name}-{values.get('filter', 'gfsa')}" + "-smoke" * bool(values.get("smoke"))
            values["output_dir"] = f"runs/{self.recipe.name}/{name}"
        if values.get("bf16") and "bf16" not in flags and not bf16_pays(values.get("use_cpu", False)):
            values["bf16"] = False
            if is_main_process():
                print("this machine computes slowly in bf16, or not at all: float32 (--bf16 insists)", file=sys.stderr)
        self.check(values)
        named = {"filter": flags["filter"]} if "filter" in flags else {}
        return values, {name: sections[name] for name in ("variants", "sweep")} | named

    def _resolve_alias(self, word: str) -> str:
        """Return a flag under the name that this recipe has for it; anything else as it is."""
        name, sign, value = word.removeprefix("--").partition("=")
        is_alias = word.startswith("--") and name not in self.actions and ALIASES.get(name) in self.actions
        return f"--{ALIASES[name]}{sign}{value}" if is_alias else word

    def _select_flags(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return those that are flags of this recipe."""
        return {k: v for k, v in values.items() if k in self.actions}

    def override(self, values: dict[str, Any], changes: dict[str, Any], where: str = "") -> dict[str, Any]:
        """Return ``values`` with ``changes`` on top.

        Options of a filter and fields of a model are added to those below, unless it is another. A number of epochs
        replaces one of steps.
        """
        merged, current = dict(values), self.defaults | values
        for key, value in changes.items():
            if key not in self.actions or key == "config":
                raise GraphFilterError(f"unknown setting {key!r}{where}{nearest(key, self.actions)}")
            value = self._read(key, value, where)
            if owner := OPTIONS_OF.get(key):
                same_owner = changes.get(owner, current.get(owner)) == current.get(owner)
                base_options = parse_options(values.get(key) or []) if same_owner else {}
                value = _format_options(base_options | parse_options(value))
            merged[key] = value
        for options, owner in OPTIONS_OF.items():
            owner_changed = owner in changes and changes[owner] != current.get(owner)
            typed = owner == "model" and changes.get(owner) in CONFIG_MAPPING  # without weights of its own
            if owner_changed and not typed and values.get(options) and options not in changes:
                merged[options] = []
        has_epochs = not {*EPOCHS}.isdisjoint(changes)
        if has_epochs and "max_steps" not in changes and not values.get("smoke"):
            merged.pop("max_steps", None)  # which would take precedence over these epochs
        return merged

    def _read(self, key: str, value: Any, where: str) -> Any:
        """Return what the command line reads if it is given a value of a YAML file, where 2e-5, say, is text."""
        action, default = self.actions[key], self.defaults.get(key)
        takes_list = action.nargs == "+"
        if value is None and default is None:
            return None
        if key in self.optional and (value is None or (value is False and action.type is str)):
            return ""
        if takes_list and not isinstance(value, str | int | float):
            value = _format_options(value) if isinstance(value, dict) else value
            if not value:
                return []
        elif isinstance(value, list | dict) and action.type is str and key not in self.own:
            return value  # of the Trainer, which takes more than a flag can say
        elif isinstance(value, list) and key == "layers":
            value = ",".join(map(str, value))
        values = value if takes_list and isinstance(value, list) else [value]
        texts = ["no" if item is False else str(item) for item in values]
        try:
            if any(item is None or isinstance(item, list | dict) for item in values):
                raise argparse.ArgumentError(action, "one value is needed")
            return vars(self.parser.parse_args([f"--{key}", *texts] if takes_list else [f"--{key}={texts[0]}"]))[key]
        except argparse.ArgumentError as error:
            raise GraphFilterError(f"the setting {key!r}{where} cannot be {value!r}") from error

    def check(self, values: dict[str, Any]) -> None:
        """Import the filters of others, and raise for what can be known to be wrong before any data is read."""
        import_filters(values.get("import", []))
        if (name := values.get("filter", "gfsa")) != "none":
            try:
                config = get_filter(name)
            except UnknownFilterError as error:
                raise GraphFilterError(f"{error}: --import MODULE; --filter none is the baseline") from error
            config.from_options(**parse_options(values.get("filter_options", [])))
            parse_layers(values.get("layers", "all"))
        check_values(values)
        if size := values.get("train_tokenizer"):
            if not values.get("from_scratch") and issubclass(self.recipe.arguments[0], RecipeArguments):
                raise GraphFilterError("--train_tokenizer needs --from_scratch: pretrained weights know their tokens")
            if (name := values.get("tokenizer") or "words") != "words":
                raise GraphFilterError(f"--train_tokenizer {size} and --tokenizer {name} exclude each other: use one")
        arguments = self.arguments(values)
        for training in arguments:
            if isinstance(training, TrainingArguments):
                check_training(training)
        self.recipe.check(*arguments)

    def arguments(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Return an instance of each of the recipe's dataclasses."""
        values = {k: v for k, v in values.items() if k != "import"}
        if lower_is_better(values.get("metric_for_best_model") or ""):
            values.setdefault("greater_is_better", False)  # the Trainer knows this of losses alone
        if values.get("bf16") and not has_accelerator():
            values["use_cpu"] = True  # the Trainer takes bf16 on a CPU only where this is said
        try:
            return tuple(self.parser.parse_dict(values))
        except (ValueError, TypeError) as error:
            raise GraphFilterError(f"settings of the training: {error}") from error

    def list_differences(self, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
        """Return the names of the settings in which two runs differ; one that was not given has its default."""
        return list_differences(self.defaults | a, self.defaults | b)

    def identity(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the identity of a run, see ``identities``."""
        rows = {k: v for k, v in self.defaults.items() if k == ROWS}
        return identity(rows | values, self.recipe.places.get(values["task"], ()))

    def _check_task(self, task: str) -> None:
        if task not in self.recipe.metrics and not self.recipe.known(task):
            tasks = [name for name in self.recipe.metrics if name != "*"]
            raise GraphFilterError(
                f"{self.recipe.name} has no task {task!r}{nearest(task, tasks)}; its tasks are {', '.join(tasks)}"
            )


def _format_options(options: dict[str, Any]) -> list[str]:
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]


def read_yaml(name: str, folder: Path = CONFIGS) -> dict[str, Any]:
    """Return the content of a YAML file, by its path or by its path within ``folder``."""
    file = next((p for p in (Path(name), folder / name, folder / f"{name}.yaml") if p.is_file()), None)
    if file is None:
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.yaml"))
        raise GraphFilterError(f"no configuration {name}{nearest(name, names)}; at hand: {', '.join(names)}")
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise GraphFilterError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise GraphFilterError(f"{file} must hold settings as NAME: VALUE, found {type(content).__name__}")
    return content
