"""What the recipes share: settings from YAML and flags, data files, the Trainer, one run a seed, and the Hub."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from datasets import Dataset, DatasetDict
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console
from safetensors import SafetensorError
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    EarlyStoppingCallback,
    GPT2TokenizerFast,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    RobertaTokenizerFast,
    Seq2SeqTrainingArguments,
    Trainer,
    set_seed,
)
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from hf_graphfilter import (
    CoefficientCallback,
    GraphFilterError,
    OrthogonalityCallback,
    create_model_card,
    filter_optimizer,
    filter_parameters,
    filter_status,
    patch_model,
)
from hf_graphfilter.analysis.comparison import PairedComparison, mean_and_sd
from hf_graphfilter.console import parse_layers, parse_options, table
from hf_graphfilter.filters import get_filter, import_filters
from hf_graphfilter.filters.base import UnknownFilterError
from hf_graphfilter.hosts import host_of
from hf_graphfilter.patching import FilterStatus
from hf_graphfilter.training.optimizer import FILTER_LR

CONFIGS = Path(__file__).parent / "configs"
RESULTS = Path(__file__).parent / "results"  # shipped: what the tables of the documents are written from
RECORD = "record.json"
FILES = {"train": "train", "validation": "valid", "test": "test"}  # the parts, and how official files call them
# these do not change what a run learns: a finished run is the same run whatever they are
INCIDENTAL = (
    {"output_dir", "seeds", "data", "report_to", "run_name", "project", "disable_tqdm", "log_level", "logging_steps"}
    | {"logging_strategy", "save_strategy", "save_steps", "save_total_limit", "push_to_hub", "hub_model_id"}
    | {"hub_token", "hub_private_repo", "hub_revision", "dataloader_num_workers", "dataloader_pin_memory", "use_cpu"}
    | {"per_device_eval_batch_size", "eval_accumulation_steps", "eval_batch_size", "workers"}
    | {"import"}
)
NETWORK_ERRORS = HfHubHTTPError.__bases__  # OSError, and HTTPError of whichever client the installed version has


@dataclass
class FilterArguments:
    """What every recipe takes."""

    model: str = field(metadata={"help": "Hub id or folder; with --from_scratch also a model type such as gpt2."})
    task: str = field(metadata={"help": "The task, see the top of this help."})
    data: str | None = field(
        default=None, metadata={"help": "Folder with local files in the official format, instead of the Hub."}
    )
    filter: str = field(default="gfsa", metadata={"help": "A registered graph filter, or none."})
    filter_options: list[str] = field(
        default_factory=list, metadata={"help": 'Options of the filter, NAME=VALUE: K=4 \'learn=["w_0","w_K"]\'.'}
    )
    filter_lr: float = field(default=FILTER_LR, metadata={"help": "Learning rate of the filter coefficients."})
    layers: str = field(default="all", metadata={"help": "Layers to patch: all, even, odd, 0,2,-1 or 2:8."})
    seeds: list[int] = field(default_factory=lambda: [1], metadata={"help": "One run a seed."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Only the first ones after a shuffle."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Only the first ones of each evaluated part."})
    smoke: bool = field(default=False, metadata={"help": "A few rows and steps, to see that everything works."})


@dataclass
class RecipeArguments(FilterArguments):
    """What a recipe of text takes besides the flags of the Trainer."""

    tokenizer: str | None = field(default=None, metadata={"help": "Hub id or folder, if not the model's."})
    train_tokenizer: int | None = field(
        default=None, metadata={"help": "Train a byte-level BPE with so many entries on the training part."}
    )
    from_scratch: list[str] = field(
        default_factory=list,
        metadata={"help": "No pretrained weights; fields of the model's config as NAME=VALUE: n_layer=6 n_embd=320."},
    )
    max_length: int = field(default=128, metadata={"help": "Tokens; longer texts are cut."})
    early_stopping_patience: int | None = field(default=None, metadata={"help": "Evaluations without improvement."})
    stride: int | None = field(
        default=None,
        metadata={"help": "Language models: step of the sliding window; half of --max_length if not given."},
    )


SMOKE = {
    **{"max_train_samples": 64, "max_eval_samples": 64, "max_steps": 4, "eval_strategy": "no", "save_strategy": "no"},
    **{"load_best_model_at_end": False, "early_stopping_patience": None, "logging_steps": 1},
}
DEFAULTS = {
    "report_to": "none",
    "logging_steps": 50,
    "warmup_steps": 0,
    "save_total_limit": 1,
    "dataloader_pin_memory": torch.cuda.is_available(),
}


@dataclass(frozen=True)
class Recipe:
    """A task family.

    Attributes:
        name: of the script.
        metrics: the metric, as ``split/name``, by which each task is compared.
        run: one training run: the arguments, an instance of each of ``arguments``, to what ``fit`` returns.
        defaults: settings under those of a YAML file and the flags.
        known: whether a task that is not in ``metrics`` is one (any text data set, say).
        arguments: dataclasses whose fields are the flags; the last has ``output_dir`` and ``seed``.
        smoke: settings of ``--smoke``.
        load: a saved checkpoint.
        task_type: as the Hub names it; told from the model's class if empty.
        description: for ``--help``.
    """

    name: str
    metrics: dict[str, str]
    run: Callable[..., dict[str, Any]]
    defaults: dict[str, Any]
    description: str
    known: Callable[[str], bool] = lambda task: False
    arguments: tuple[type, ...] = (RecipeArguments, Seq2SeqTrainingArguments)
    smoke: dict[str, Any] = field(default_factory=lambda: SMOKE)
    load: Callable[[Path], Any] = lambda folder: load_model(folder)
    task_type: str = ""

    def metric(self, task: str) -> str:
        return self.metrics.get(task) or self.metrics["*"]


# ------------------------------------------------------------------------------------------------------- settings


class Settings:
    """The flags of a recipe, as a parser in which a YAML file stands under the command line."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.parser = HfArgumentParser(recipe.arguments, description=recipe.description, allow_abbrev=False)
        self.parser.add_argument("--config", help="A YAML file; flags override it.")
        self.parser.add_argument(
            "--import",
            nargs="+",
            action="extend",
            type=str,
            help="Modules that register filters, by dotted name or .py file.",
        )
        self.actions = {}
        for action in self.parser._actions:
            if action.dest != "help":
                action.default, action.required = dataclasses.MISSING, False
                self.actions[action.dest] = action
        self.actions["import"].default = None  # given several times, the names add up
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
        given = {k: v for k, v in vars(namespace).items() if v is not dataclasses.MISSING and v is not None}
        config = given.pop("config", None)
        file = self.read(config) if config else {}
        sections = {key: file.pop(key, None) or {} for key in ("tasks", "variants", "sweep")}
        for task in sections["tasks"]:
            self._known_task(task)
        values = self.override({}, {k: v for k, v in DEFAULTS.items() if k in self.actions} | self.recipe.defaults)
        values = self.override(values, file, f" in {config}")
        task = given.get("task", values.get("task"))
        values = self.override(values, sections["tasks"].get(task, {}), f" in {config}, task {task}")
        values = self.override(values, given)
        for name in ("model", "task"):
            if values.get(name) is None:
                raise GraphFilterError(f"no {name} given: use --{name} or a YAML file with --config")
        self._known_task(values["task"])
        if values.get("smoke"):
            values = self.override(values, {k: v for k, v in self.recipe.smoke.items() if k not in given})
        if not values.get("output_dir"):
            values["output_dir"] = f"runs/{self.recipe.name}/{Path(values['task']).name}-{values.get('filter', 'gfsa')}"
        if values.get("bf16") and "bf16" not in given and not bf16_pays(values.get("use_cpu", False)):
            values["bf16"] = False
            if is_main_process():
                print("this machine computes slowly in bf16, or not at all: float32 (--bf16 insists)", file=sys.stderr)
        import_filters([values["import"]] if isinstance(values.get("import"), str) else values.get("import", []))
        self.check(values)
        return values, {name: sections[name] for name in ("variants", "sweep")}

    def override(self, values: dict[str, Any], changes: dict[str, Any], where: str = "") -> dict[str, Any]:
        """``values`` with ``changes`` on top; options of a filter are added to those below, unless it is another."""
        merged = dict(values)
        for key, value in changes.items():
            if key not in self.actions or key == "config":
                raise GraphFilterError(f"unknown setting {key!r}{where}{nearest(key, self.actions)}")
            value = self._typed(key, value, where)
            if key == "filter_options":
                same = changes.get("filter", values.get("filter")) == values.get("filter")
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

    def read(self, name: str) -> dict[str, Any]:
        """A YAML file, by path or by its path under recipes/configs."""
        found = next((p for p in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml") if p.is_file()), None)
        if found is None:
            known = sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*.yaml"))
            raise GraphFilterError(f"no configuration {name}{nearest(name, known)}; at hand: {', '.join(known)}")
        try:
            content = yaml.safe_load(found.read_text()) or {}
        except yaml.YAMLError as error:
            raise GraphFilterError(f"{found} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise GraphFilterError(f"{found} must hold settings as NAME: VALUE, found {type(content).__name__}")
        return content

    def check(self, values: dict[str, Any]) -> None:
        """What can be known to be wrong before any data is read."""
        if (name := values.get("filter", "gfsa")) != "none":
            try:
                config = get_filter(name)
            except UnknownFilterError as error:
                raise GraphFilterError(f"{error}: --import MODULE; --filter none is the plain model") from error
            config.from_options(**parse_options(values.get("filter_options", [])))
        if not values.get("seeds", [1]) or len(set(values.get("seeds", [1]))) < len(values.get("seeds", [1])):
            raise GraphFilterError(f"--seeds {values['seeds']}: name each seed once, at least one")
        if values.get("push_to_hub") and len(values.get("seeds", [1])) > 1:
            raise GraphFilterError("--push_to_hub pushes one checkpoint: name one seed with --seeds")
        if values.get("push_to_hub") and values.get("save_strategy") == "no":
            raise GraphFilterError("--push_to_hub needs a saved checkpoint, but save_strategy is 'no'")
        if values.get("early_stopping_patience") is not None and values.get("eval_strategy") == "no":
            raise GraphFilterError("--early_stopping_patience needs --eval_strategy epoch or steps")
        self.arguments(values)

    def arguments(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """An instance of each of the recipe's dataclasses."""
        values = {k: v for k, v in values.items() if k != "import"}
        if values.get("bf16") and not accelerated():
            values["use_cpu"] = True  # the Trainer takes bf16 on a CPU only where this is said
        try:
            return tuple(self.parser.parse_dict(values))
        except (ValueError, TypeError) as error:
            raise GraphFilterError(f"settings of the training: {error}") from error

    def differing(self, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
        """Names of the settings in which two runs differ; one that was not given has its default."""
        a, b = (self.defaults | found for found in (a, b))
        return sorted(k for k in {*a, *b} - INCIDENTAL if a.get(k) != b.get(k))

    def _known_task(self, task: str) -> None:
        if task not in self.recipe.metrics and not self.recipe.known(task):
            known = [name for name in self.recipe.metrics if name != "*"]
            raise GraphFilterError(
                f"{self.recipe.name} has no task {task!r}{nearest(task, known)}; its tasks are {', '.join(known)}"
            )


def _option_texts(options: dict[str, Any]) -> list[str]:
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]


def accelerated() -> bool:
    """Whether the Trainer finds anything else than the CPU."""
    return torch.accelerator.is_available() or is_torch_xla_available()


def bf16_pays(use_cpu: bool) -> bool:
    """Whether bf16 is at hand; a CPU without instructions for it takes many times as long as in float32."""
    if accelerated() and not use_cpu:
        return is_torch_bf16_gpu_available() or is_torch_xla_available()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``" (did you mean ...?)"``, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """The settings on which the outcome of a run depends; of a local folder, its name."""
    found = {k: v for k, v in sorted(values.items()) if k not in INCIDENTAL and v is not None}
    local = {
        k: Path(found[k]).name for k in ("model", "tokenizer", "checkpoint") if k in found and Path(found[k]).exists()
    }
    return {k: list(v) if isinstance(v, tuple) else v for k, v in (found | local).items() if k != "seed"}


# ----------------------------------------------------------------------------------------------------------- data


def read_rows(file: Path, header: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows of an official file: TSV (unquoted; ``header`` where the file has none), JSON, JSON lines or text lines."""
    text = file.read_text(encoding="utf-8-sig")
    try:
        if file.suffix == ".tsv":
            lines = csv.reader(text.split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
            filled = [line for line in lines if line]
            names = list(header) if header else filled.pop(0) if filled else []
            return [dict(itertools.zip_longest(names, line[: len(names)])) for line in filled]
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        if file.suffix == ".json":
            rows = json.loads(text)
            return list(rows.values()) if isinstance(rows, dict) else rows
        return [{"text": line.rstrip("\r")} for line in text.removesuffix("\n").split("\n")] if text else []
    except (json.JSONDecodeError, csv.Error) as error:
        raise GraphFilterError(f"{file} cannot be read as {file.suffix[1:]}: {error}") from error


def first_file(folder: Path, names: Sequence[str]) -> Path:
    """The first of ``names`` that is in ``folder``."""
    if not folder.is_dir():
        raise GraphFilterError(f"--data: there is no folder {folder}")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    there = ", ".join(sorted(p.name for p in folder.iterdir())[:12])
    raise GraphFilterError(f"--data: {folder} has no {' or '.join(names)}; it holds: {there or 'nothing'}")


def table_of(rows: list[dict[str, Any]], columns: dict[str, Sequence[str]], source: object) -> Dataset:
    """A data set with the columns ``{new name: names that the source may use}``; others are dropped."""
    if not rows:
        raise GraphFilterError(f"{source} holds no rows")
    chosen = choose(columns, list(rows[0]), source)
    for number, row in enumerate(rows, 1):
        if any(row.get(c) is None for c in chosen.values()):
            there = sum(value is not None for value in row.values())
            raise GraphFilterError(f"{source}: row {number} has {there} columns, {len(rows[0])} were expected")
    return Dataset.from_dict({name: [row[c] for row in rows] for name, c in chosen.items()})


def choose(columns: dict[str, Sequence[str]], there: list[str], source: object) -> dict[str, str]:
    """Which of the names that the source may use it does use."""
    chosen = {}
    for name, candidates in columns.items():
        found = next((c for c in candidates if c in there), None)
        if found is None:
            raise GraphFilterError(
                f"{source} has no column {' or '.join(candidates)}; its columns are {', '.join(map(str, there))}"
            )
        chosen[name] = found
    return chosen


def labels_of(data: Dataset, labels: Sequence[str] | None, source: object) -> Dataset:
    """The column ``label`` as class numbers (names, or numbers already), or as floats where ``labels`` is None."""
    numbers: list[float] = []
    for number, value in enumerate(data["label"], 1):
        try:
            if labels is None:
                numbers.append(float(value))
            elif str(value) in labels:
                numbers.append(labels.index(str(value)))
            elif int(value) in range(len(labels)):
                numbers.append(int(value))
            else:
                raise ValueError
        except (TypeError, ValueError) as error:
            expected = "a number" if labels is None else " or ".join(labels)
            raise GraphFilterError(f"{source}: row {number} has the label {value!r}, expected {expected}") from error
    return data.remove_columns("label").add_column("label", numbers)


def from_hub(
    name: str, columns: dict[str, Sequence[str]], config: str | None = None, **options: Any
) -> dict[str, Dataset]:
    """The parts of a data set of the Hub with these columns (as in ``table_of``), or one clear line."""
    try:
        data = datasets.load_dataset(name, config, **options)
    except Exception as error:  # whatever the library or the network raises, the way out is the same
        raise GraphFilterError(
            f"the data set {name} cannot be loaded ({type(error).__name__}: {line(error)}); check the connection, or "
            "name a folder of local files with --data"
        ) from error
    chosen = choose(columns, next(iter(data.values())).column_names, name)
    renamed = {found: new for new, found in chosen.items() if found != new}
    return {part: rows.select_columns([*chosen.values()]).rename_columns(renamed) for part, rows in data.items()}


def cut(data: DatasetDict, args: RecipeArguments) -> DatasetDict:
    """At most as many rows of each part as asked for."""
    parts = {}
    for name, part in data.items():
        if not len(part):
            raise GraphFilterError(f"the part {name!r} of {args.task} is empty")
        limit = args.max_train_samples if name == "train" else args.max_eval_samples
        if name == "train" and limit is not None and limit < len(part):
            part = part.shuffle(seed=0)
        parts[name] = part if limit is None else part.select(range(min(limit, len(part))))
    return DatasetDict(parts)


# ------------------------------------------------------------------------------------------------ model and tokenizer


def load_tokenizer(args: RecipeArguments, texts: Callable[[], Iterator[str]]) -> Any:
    """The model's tokenizer, another one, or a byte-level BPE trained on ``texts()``."""
    if args.train_tokenizer:
        return train_bpe(texts(), args.train_tokenizer)
    source = args.tokenizer or args.model
    with loading(source):
        if Path(source, "vocab.json").is_file() and not Path(source, "tokenizer_config.json").is_file():
            # a bare byte-level BPE does not say whose it is; its special tokens do
            roberta = "<s>" in json.loads(Path(source, "vocab.json").read_text())
            tokenizer = (RobertaTokenizerFast if roberta else GPT2TokenizerFast).from_pretrained(source)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_bpe(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with RoBERTa's special tokens, trained on ``texts``."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, min_frequency=2, special_tokens=special, show_progress=False)
    bpe._tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, cls_token="<s>", sep_token="</s>", **names, model_input_names=INPUTS
    )


INPUTS = ["input_ids", "attention_mask"]


def model_config(args: RecipeArguments, **config: Any) -> Any:
    """The configuration of the model; of one from scratch, with the fields that were asked for."""
    if not args.from_scratch:
        with loading(args.model):
            return AutoConfig.from_pretrained(args.model)
    asked = parse_options(args.from_scratch)
    known = CONFIG_MAPPING[args.model]().to_dict() if args.model in CONFIG_MAPPING else {}
    for name in asked if known else ():
        if name not in known:
            raise GraphFilterError(f"--from_scratch: a {args.model} config has no field {name!r}{nearest(name, known)}")
    if known:
        return AutoConfig.for_model(args.model, **config, **asked)
    with loading(args.model):
        return AutoConfig.from_pretrained(args.model, **config, **asked)


@contextmanager
def loading(source: str) -> Iterator[None]:
    """What transformers says of a model or tokenizer that cannot be loaded, as one line that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise GraphFilterError(f"{source} cannot be loaded: {line(error)}") from error


def build_model(
    args: RecipeArguments, training: Seq2SeqTrainingArguments, auto_class: Any, tokenizer: Any, **config: Any
) -> PreTrainedModel:
    """The model, the same for every filter with the same seed, and patched with the filter."""
    set_seed(training.seed)
    if args.from_scratch:
        config |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        fresh = model_config(args, **config)
        if fresh.is_encoder_decoder and getattr(fresh, "decoder_start_token_id", None) is None:
            fresh.decoder_start_token_id = tokenizer.pad_token_id
        model = auto_class.from_config(fresh)
    else:
        with loading(args.model):
            model = auto_class.from_pretrained(args.model, **config)
        if model.config.get_text_config().pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
    patch(args, model)
    return model


def patch(args: FilterArguments, model: Any) -> None:
    """The model with the filter that was asked for."""
    if args.filter != "none":
        patch_model(model, args.filter, layers=parse_layers(args.layers), **parse_options(args.filter_options))


# ------------------------------------------------------------------------------------------------------- training


def make_trainer(
    args: RecipeArguments,
    training: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    *,
    trainer_class: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """An ordinary Trainer, with the filter in an optimizer group of its own and its coefficients logged."""
    learned = any(True for _ in filter_parameters(model))
    trainer = trainer_class(
        model=model,
        args=training,
        callbacks=[CoefficientCallback()] if learned else [],
        **options,
    )
    if learned:  # an attribute, since Seq2SeqTrainer does not take the argument
        trainer.optimizer_cls_and_kwargs = filter_optimizer(training, args.filter_lr)
    if any(getattr(row.filter, "gamma", 0) for row in filter_status(model)):
        trainer.add_callback(OrthogonalityCallback())
    if args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
    if training.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
    return trainer


def fit(
    args: RecipeArguments, training: Seq2SeqTrainingArguments, trainer: Trainer, parts: dict[str, Any]
) -> dict[str, Any]:
    """Train, going on from the last checkpoint in the folder, evaluate each of ``parts``, and save.

    Returns:
        ``metrics`` (``split/name`` to value), ``train_seconds``, ``steps``, ``filter_parameters``, ``coefficients``
        (mean over heads, by patched layer) and ``moved`` (mean distance of each kind from its start).
    """
    start = filter_status(trainer.model)
    begun = time.perf_counter()
    trainer.train(resume_from_checkpoint=last_checkpoint(Path(training.output_dir)))
    seconds = time.perf_counter() - begun
    metrics = {}
    for part, data in parts.items():
        found = trainer.evaluate(data, metric_key_prefix=part)
        for key, value in found.items():
            name = key.removeprefix(f"{part}_")
            if name not in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch"):
                metrics[f"{part}/{name}"] = value
    if training.save_strategy != "no":
        trainer.save_model()
    model = trainer.accelerator.unwrap_model(trainer.model)
    coefficients, moved = movement(start, filter_status(model))
    return {
        "metrics": metrics,
        "train_seconds": round(seconds, 1),
        "steps": trainer.state.global_step,
        "filter_parameters": sum(p.numel() for p in filter_parameters(model)),
        "coefficients": coefficients,
        "moved": moved,
    }


def movement(start: FilterStatus, end: FilterStatus) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The coefficients at the end (mean over heads, by patched layer), and how far each kind went from its start."""
    found: dict[str, list[float]] = {}
    moved: dict[str, list[float]] = {}
    for before, after in zip(start, end, strict=True):
        for name, value in after.coefficients.items():
            found.setdefault(name, []).append(round(value.mean().item(), 6))
            moved.setdefault(name, []).append((value - before.coefficients[name]).abs().mean().item())
    return found, {name: round(sum(v) / len(v), 6) for name, v in moved.items()}


def last_checkpoint(folder: Path, written_last: str = "trainer_state.json") -> str | None:
    """The newest checkpoint that is whole: the state of the Trainer is what it writes last."""
    whole = [file.parent for file in folder.glob(f"checkpoint-*/{written_last}")]
    return str(max(whole, key=lambda found: int(found.name.partition("-")[2]))) if whole else None


def load_model(folder: Path) -> Any:
    """A checkpoint of transformers as the class that was saved."""
    return getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0]).from_pretrained(folder)


def write_card(settings: Settings, folder: Path, record: dict[str, Any], values: dict[str, Any]) -> None:
    """The model card of a saved run: its metrics, and how its setting compared with the plain model."""
    model = settings.recipe.load(folder)
    results = [
        EvalResult(
            task_type=settings.recipe.task_type
            or TASK_TYPES.get(type(model).__name__.partition("For")[2], "text-generation"),
            dataset_type=record["task"],
            dataset_name=record["task"],
            dataset_split=key.partition("/")[0],
            metric_type=key.partition("/")[2],
            metric_value=value,
        )
        for key, value in record["metrics"].items()
        if not key.endswith("/loss")
    ]
    trained = f"Fine-tuned on {record['task']} with seed {record['seed']}; every setting and number is in `{RECORD}`."
    description = f"## Training\n\n{trained}{compared(settings, record, values)}"
    values = settings.defaults | values
    local = values.get("from_scratch") or values.get("pretrained") is False or Path(values["model"]).exists()
    common: dict[str, Any] = {"base_model": None if local else values["model"]}
    name = values.get("hub_model_id") or str(folder)
    if filter_status(model):
        card = create_model_card(model, repo_id=name, results=results, description=description, **common)
    else:
        title = name.rpartition("/")[2]
        data = ModelCardData(library_name=host_of(model).LIBRARY, eval_results=results, model_name=title, **common)
        card = ModelCard(
            f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nThe plain {type(model).__name__}.\n\n{description}\n"
        )
    card.save(folder / "README.md")


def compared(settings: Settings, record: dict[str, Any], values: dict[str, Any]) -> str:
    """What recipes/compare.py found for these settings: here, or in the results that are shipped."""
    for folder, where in ((own_results(values), ""), (RESULTS, " (measured by the authors of the recipes)")):
        content = read_results(folder / results_name(record))
        for run in content["runs"]:
            found = content["summary"][run["variant"]].get("difference")
            if found and not settings.differing(run["settings"], record["settings"]):
                return f" Against the plain model, {content['metric']}: {PairedComparison(**found)}{where}."
    return ""


def own_results(values: dict[str, Any]) -> Path:
    """Where comparisons go: beside the folders of the runs."""
    return Path(values["output_dir"]).parent


def results_name(made: dict[str, Any], suffix: str = "") -> str:
    return f"{made['recipe']}-{Path(made['task']).name}{suffix}.json"


def read_results(file: Path) -> dict[str, Any]:
    """A results file of recipes/compare.py; without runs where there is none."""
    if not file.is_file():
        return {"runs": []}
    try:
        content = json.loads(file.read_text())
        runs = content["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise GraphFilterError(f"{file} is no results file of compare.py: {line(error)}") from error
    return {**content, "runs": runs}


TASK_TYPES = {"SequenceClassification": "text-classification", "ConditionalGeneration": "text2text-generation"}


# ------------------------------------------------------------------------------------------------------------ runs


def run_seed(settings: Settings, values: dict[str, Any], seed: int, folder: Path, console: Console) -> dict[str, Any]:
    """The record of one run in ``folder``: found finished, gone on with from its last checkpoint, or begun."""
    file, config = folder / RECORD, folder / "config.yaml"
    found = json.loads(file.read_text()) if file.is_file() else None
    before = found["settings"] if found else None
    if found is None and any(folder.glob("checkpoint-*")) and config.is_file():
        before = identity(yaml.safe_load(config.read_text()))
    if before is not None and (changed := settings.differing(before, identity(values))):
        raise GraphFilterError(
            f"{folder} holds a run with other settings ({', '.join(changed)} differ): choose another --output_dir, or "
            "delete it"
        )
    if found is not None:
        console.print(f"seed {seed}: finished before, in {folder}", highlight=False)
        return found
    run_values = {**values, "output_dir": str(folder), "seed": seed, "seeds": [seed]}
    run_values |= {"push_to_hub": False, "hub_token": None}  # pushed after the run; a token is written to no file
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(yaml.safe_dump({k: v for k, v in run_values.items() if v is not None}))
    arguments = settings.arguments(run_values)
    record = {
        "recipe": settings.recipe.name,
        "task": values["task"],
        "seed": seed,
        **settings.recipe.run(*arguments),
        "settings": identity(values),
        "date": date.today().isoformat(),
        "machine": machine(arguments[-1]),
        "versions": {n: metadata.version(n) for n in ("torch", "transformers", "hf_graphfilter")},
    }
    if is_main_process():
        write_json(file, record)
        if values.get("save_strategy") != "no":
            write_card(settings, folder, record, values)
    return record


def is_main_process() -> bool:
    """Whether this is the process that writes, under torchrun or accelerate launch; without them it is."""
    return os.environ.get("RANK", "0") == "0"


def machine(arguments: Any) -> str:
    if torch.cuda.is_available() and not arguments.use_cpu:
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


@contextmanager
def hub(values: dict[str, Any], kept: str) -> Iterator[HfApi]:
    """The Hub's API; what it refuses becomes one line that says what is kept."""
    api = HfApi(token=values.get("hub_token"))
    try:
        yield api
    except NETWORK_ERRORS as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = "refused the token (hf auth login, or --hub_token)" if status in (401, 403) else line(error)
        raise GraphFilterError(f"the Hub at {api.endpoint}: {reason}; {kept}: run the same command again") from error


def create_repository(values: dict[str, Any]) -> str:
    """The full name of the repository, made before any training, so that a wrong token costs no time."""
    name = f"{Path(values['model']).name}-{Path(values['task']).name}-{values.get('filter', 'gfsa')}"
    with hub(values, "nothing is lost") as api:
        made = api.create_repo(
            values.get("hub_model_id") or name, private=values.get("hub_private_repo"), exist_ok=True
        )
        return made.repo_id


def push(settings: Settings, folder: Path, record: dict[str, Any], values: dict[str, Any]) -> str:
    """Checkpoint, tokenizer, card and numbers of one run, as one commit; the address."""
    write_card(settings, folder, record, values)  # that of a run that was not to be pushed names its folder
    with hub(values, f"the checkpoint is kept in {folder}") as api:
        api.upload_folder(
            repo_id=values["hub_model_id"],
            folder_path=folder,
            ignore_patterns=["checkpoint-*", "runs/*", "training_args.bin", "config.yaml", "*.part"],
            commit_message=f"{record['task']}, {values.get('filter', 'gfsa')}",
        )
        return f"{api.endpoint}/{values['hub_model_id']}"


# ----------------------------------------------------------------------------------------------------- command line


@contextmanager
def one_line_errors(program: str, command: str = "the same command") -> Iterator[None]:
    """User mistakes and what the machine refuses: one line on stderr, exit code 1; 130 when interrupted."""
    again = f"; finished seeds and checkpoints are kept: run {command} again to go on"
    try:
        yield
    except (GraphFilterError, SafetensorError, *NETWORK_ERRORS) as error:
        hint = again if isinstance(error, SafetensorError) or getattr(error, "errno", None) in (27, 28, 122) else ""
        code, message = 1, line(error) + hint
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        code, message = 1, f"cannot write a checkpoint ({line(error)})" + again
    except KeyboardInterrupt:
        code, message = 130, "interrupted" + again
    else:
        return
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(code)


def line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def quiet() -> None:
    """No progress bars and news of the libraries; the Trainer's own bar stays."""
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """The command line of a recipe: every seed, then a table."""
    quiet()
    console = Console(quiet=not is_main_process())
    with one_line_errors(f"{recipe.name}.py"):
        settings = Settings(recipe)
        values, _ = settings.parse(sys.argv[1:] if argv is None else argv)
        folder = Path(values["output_dir"])
        if values.get("push_to_hub") and is_main_process():
            values["hub_model_id"] = create_repository(values)
        seeds = values.get("seeds", [1])
        records = [run_seed(settings, values, seed, folder / f"seed-{seed}", console) for seed in seeds]
        if is_main_process():
            names = [n for n in records[0]["metrics"] if not n.endswith("loss")]
            rows = [[n, mean_and_sd([r["metrics"][n] for r in records])] for n in names]
            title = f"{values['model']} on {values['task']}, {values.get('filter', 'gfsa')}, {len(records)} seeds"
            console.print(table(["metric", "value"], rows, title=title))
            if values.get("push_to_hub"):
                address = push(settings, folder / f"seed-{records[0]['seed']}", records[0], values)
                console.print(f"pushed to {address}", highlight=False)
