"""The settings of a run: flags over a YAML file over the recipe's own."""

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import parse_options
from hf_graphfilter.filters import get_filter, import_filters
from hf_graphfilter.filters.registry import UnknownFilterError
from recipes import machine
from recipes.arguments import RecipeArguments
from recipes.errors import nearest
from recipes.models import load_model

CONFIGS = Path(__file__).parent / "configs"
# these do not change what a run learns: a finished run is the same run whatever they are
INCIDENTAL = (
    {"output_dir", "seeds", "data", "report_to", "run_name", "project", "disable_tqdm", "log_level", "logging_steps"}
    | {"logging_strategy", "save_strategy", "save_steps", "save_total_limit", "push_to_hub", "hub_model_id"}
    | {"hub_token", "hub_private_repo", "hub_revision", "dataloader_num_workers", "dataloader_pin_memory", "use_cpu"}
    | {"per_device_eval_batch_size", "eval_accumulation_steps", "eval_batch_size", "workers", "import"}
    | {"restore_callback_states_from_checkpoint"}
)
OWN_DATA = ("text", "texts", "folder")  # tasks that are what their data are
OPTIONS_OF = {"filter_options": "filter", "from_scratch": "model"}
# of the recipes that have such flags
DEFAULTS = {
    "report_to": "none",
    "logging_steps": 50,
    "warmup_steps": 0,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "restore_callback_states_from_checkpoint": True,  # how long early stopping has waited
    "dataloader_pin_memory": torch.cuda.is_available(),
}
SMOKE = {
    "max_train_samples": 64,
    "max_eval_samples": 64,
    "max_steps": 4,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "early_stopping_patience": None,
    "logging_steps": 1,
}


@dataclass(frozen=True)
class Recipe:
    """A task family."""

    name: str  # in records and results
    metrics: dict[str, str]  # the one, as split/name, by which each task is compared
    run: Callable[..., dict[str, Any]]  # one training run: an instance of each of `arguments` to what `fit` returns
    defaults: dict[str, Any]  # settings under those of a YAML file and the flags
    description: str  # for --help
    known: Callable[[str], bool] = lambda task: False  # whether a task that is not in metrics is one (any text, say)
    arguments: tuple[type, ...] = (RecipeArguments, Seq2SeqTrainingArguments)  # the last has output_dir and seed
    smoke: dict[str, Any] = field(default_factory=dict)  # settings of --smoke, besides the general ones
    load: Callable[[Path], Any] = load_model  # a saved checkpoint
    check: Callable[..., None] = lambda *arguments: None  # refuses settings before anything is read or written

    def metric(self, task: str, held_out: bool = False) -> str:
        """Of the validation part where this is ``held_out`` of the training part, and nothing else is measured."""
        metric = self.metrics.get(task) or self.metrics["*"]
        return f"validation/{metric.partition('/')[2]}" if held_out else metric


class Settings:
    """The flags of a recipe, as a parser in which a YAML file stands under the command line."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.parser = HfArgumentParser(recipe.arguments, description=recipe.description, allow_abbrev=False)
        self.parser.add_argument("--config", help="A YAML file; flags override it.")
        modules = "Modules that register filters, by dotted name or .py file."
        self.parser.add_argument("--import", nargs="+", action="extend", type=str, help=modules)
        self.actions = {action.dest: action for action in self.parser._actions if action.dest != "help"}
        for action in self.parser._actions:  # of some flags two, --x and --no_x
            action.default, action.required = argparse.SUPPRESS, False
        fields = [f for arguments in recipe.arguments for f in dataclasses.fields(arguments)]
        self.defaults = {
            f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            for f in fields
            if f.name not in INCIDENTAL and f.name not in ("model", "task", "seed")
        }

    def parse(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(settings, sections of the YAML file that are no settings: ``variants`` and ``sweep``)."""
        namespace, unknown = self.parser.parse_known_args(list(argv))
        if unknown:
            flag = unknown[0].split("=")[0]
            raise GraphFilterError(f"unknown argument {flag}{nearest(flag.lstrip('-'), self.actions, '--')}")
        given = vars(namespace)
        config = given.pop("config", None)
        file = read_yaml(config) if config else {}
        sections = {key: file.pop(key, None) or {} for key in ("tasks", "variants", "sweep")}
        for task in sections["tasks"]:
            self._known_task(task)
        values = self.override({}, self._own(DEFAULTS) | self.recipe.defaults)
        values = self.override(values, file, f" in {config}")
        task = given.get("task", values.get("task"))
        values = self.override(values, sections["tasks"].get(task, {}), f" in {config}, task {task}")
        values = self.override(values, given)
        for name in ("model", "task"):
            if values.get(name) is None:
                raise GraphFilterError(f"no {name} given: use --{name} or a YAML file with --config")
        self._known_task(values["task"])
        if values.get("smoke"):
            smoke = self._own(SMOKE) | self.recipe.smoke
            values = self.override(values, {k: v for k, v in smoke.items() if k not in given})
        if not values.get("output_dir"):
            values["output_dir"] = f"runs/{self.recipe.name}/{Path(values['task']).name}-{values.get('filter', 'gfsa')}"
        if values.get("bf16") and "bf16" not in given and not machine.bf16_pays(values.get("use_cpu", False)):
            values["bf16"] = False
            if machine.is_main_process():
                print("this machine computes slowly in bf16, or not at all: float32 (--bf16 insists)", file=sys.stderr)
        import_filters([values["import"]] if isinstance(values.get("import"), str) else values.get("import", []))
        self.check(values)
        return values, {name: sections[name] for name in ("variants", "sweep")}

    def _own(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those that are flags of this recipe."""
        return {k: v for k, v in values.items() if k in self.actions}

    def override(self, values: dict[str, Any], changes: dict[str, Any], where: str = "") -> dict[str, Any]:
        """``values`` with ``changes`` on top; options of a filter and fields of a model are added to those
        below, unless it is another."""
        merged = dict(values)
        for key, value in changes.items():
            if key not in self.actions or key == "config":
                raise GraphFilterError(f"unknown setting {key!r}{where}{nearest(key, self.actions)}")
            value = self._typed(key, value, where)
            if owner := OPTIONS_OF.get(key):
                same = changes.get(owner, values.get(owner)) == values.get(owner)
                below = parse_options(values.get(key) or []) if same else {}
                value = _option_texts(below | parse_options(value))
            merged[key] = value
        if "filter" in changes and changes["filter"] != values.get("filter") and "filter_options" not in changes:
            merged["filter_options"] = []
        return merged

    def _typed(self, key: str, value: Any, where: str) -> Any:
        """A value of a YAML file as the flag would read it: 2e-5, for one, is text in YAML."""
        action = self.actions[key]
        if isinstance(value, dict) and action.nargs == "+":
            return _option_texts(value)
        try:
            if isinstance(value, list) and action.nargs == "+":
                return [action.type(str(v)) if action.type else v for v in value]
            if isinstance(value, (str, int)) and not isinstance(value, bool) and action.type in (int, float):
                return action.type(value)
            if action.type is float and not isinstance(value, float) and value is not None:
                raise ValueError
            if key == "layers" and isinstance(value, (list, int)):
                return ",".join(map(str, value if isinstance(value, list) else [value]))
        except (TypeError, ValueError) as error:
            raise GraphFilterError(f"the setting {key!r}{where} cannot be {value!r}") from error
        return value

    def check(self, values: dict[str, Any]) -> None:
        """What can be known to be wrong before any data is read."""
        if (name := values.get("filter", "gfsa")) != "none":
            try:
                config = get_filter(name)
            except UnknownFilterError as error:
                raise GraphFilterError(f"{error}: --import MODULE; --filter none is the plain model") from error
            config.from_options(**parse_options(values.get("filter_options", [])))
        seeds = values.get("seeds", [1])
        if not seeds or len(set(seeds)) < len(seeds):
            raise GraphFilterError(f"--seeds {seeds}: name each seed once, at least one")
        if not all(0 <= seed < 2**32 for seed in seeds):
            raise GraphFilterError(f"--seeds {seeds}: a seed is from 0 to {2**32 - 1}")
        if values.get("push_to_hub") and len(seeds) > 1:
            raise GraphFilterError("--push_to_hub pushes one checkpoint: name one seed with --seeds")
        if values.get("push_to_hub") and values.get("save_strategy") == "no":
            raise GraphFilterError("--push_to_hub needs a saved checkpoint, but save_strategy is 'no'")
        if values.get("early_stopping_patience") is not None and values.get("eval_strategy") == "no":
            raise GraphFilterError("--early_stopping_patience needs --eval_strategy epoch or steps")
        self.recipe.check(*self.arguments(values))

    def arguments(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """An instance of each of the recipe's dataclasses."""
        values = {k: v for k, v in values.items() if k != "import"}
        if values.get("bf16") and not machine.accelerated():
            values["use_cpu"] = True  # the Trainer takes bf16 on a CPU only where this is said
        try:
            return tuple(self.parser.parse_dict(values))
        except (ValueError, TypeError) as error:
            raise GraphFilterError(f"settings of the training: {error}") from error

    def differing(self, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
        """Names of the settings in which two runs differ; one that was not given has its default."""
        a, b = self.defaults | a, self.defaults | b
        ignored = INCIDENTAL - {"data"} if "data" in a and "data" in b else INCIDENTAL  # earlier records have none
        return sorted(k for k in {*a, *b} - ignored if a.get(k) != b.get(k))

    def _known_task(self, task: str) -> None:
        if task not in self.recipe.metrics and not self.recipe.known(task):
            known = [name for name in self.recipe.metrics if name != "*"]
            raise GraphFilterError(
                f"{self.recipe.name} has no task {task!r}{nearest(task, known)}; its tasks are {', '.join(known)}"
            )


def _option_texts(options: dict[str, Any]) -> list[str]:
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """The settings on which the outcome of a run depends; of a local folder, its name."""
    own = {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(values.items()) if v is not None}
    own |= {k: Path(own[k]).name for k in ("model", "tokenizer", "checkpoint") if k in own and Path(own[k]).exists()}
    kept = {k: v for k, v in own.items() if k not in INCIDENTAL and k != "seed"}
    if own.get("task") in OWN_DATA and "data" in own:
        kept["data"] = mark_of(str(own["data"]))
    return kept


@functools.cache
def mark_of(data: str) -> str:
    """By which a file or folder is known again, wherever it lies: a hash of the names and sizes of what it holds."""
    path = Path(data)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    sizes = [f"{file.relative_to(path)} {file.stat().st_size}" for file in files if file.is_file()]
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:16]


def read_yaml(name: str) -> dict[str, Any]:
    """A YAML file, by path or by its path under recipes/configs."""
    file = next((p for p in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml") if p.is_file()), None)
    if file is None:
        known = sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*.yaml"))
        raise GraphFilterError(f"no configuration {name}{nearest(name, known)}; at hand: {', '.join(known)}")
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise GraphFilterError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise GraphFilterError(f"{file} must hold settings as NAME: VALUE, found {type(content).__name__}")
    return content
