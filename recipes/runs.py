"""The command line of a recipe: a run for every seed, its record, a table of them, and what goes to the Hub.

Read it from ``main`` on, which stands first.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from transformers.integrations import unset_hf_deepspeed_config

from hf_graphfilter import GraphFilterError, create_model_card, filter_status
from hf_graphfilter.analysis.comparison import mean_and_sd
from hf_graphfilter.console import Console, table
from hf_graphfilter.files import check_content, write_text
from hf_graphfilter.hosts import host_of
from hf_graphfilter.packages import version_of
from hf_graphfilter.text import markdown_text
from recipes import SCRIPTS, records
from recipes.checkpoints import last_checkpoint
from recipes.errors import NETWORK_ERRORS, OtherSettingsError, is_main_process, line, one_line_errors
from recipes.ranks import check_ranks
from recipes.records import RECORD, RUN, commit, get_value, lock, name_machine, tell, try_read, write_json
from recipes.settings import Recipe, Settings
from recipes.summary import as_comparison, summarise

CONFIG = "config.yaml"
IDENTITY = "begun.json"  # of an unfinished run, its data as they were
# of no use to others
LOCAL_FILES = ("checkpoint-*", "pretrained/*", "runs/*", "training_args.bin", "config.yaml", "*.part", "*.lock")


def silence_libraries() -> None:
    """Turn off progress bars and news of the libraries; the Trainer's own bar stays."""
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Run a recipe from the command line: every seed, then a table."""
    silence_libraries()
    console = Console(quiet=not is_main_process())
    with one_line_errors(f"{SCRIPTS.get(recipe.name, recipe.name)}.py"):
        settings = Settings(recipe)
        values, _ = settings.parse(sys.argv[1:] if argv is None else argv)
        folder = Path(values["output_dir"])
        seeds = values.get("seeds", [1])
        for run_folder in (folder / f"seed-{seed}" for seed in seeds):
            if values.get("save_strategy") == "no" or not (run_folder / RECORD).is_file():
                continue
            if not keeps_checkpoint(run_folder):
                raise GraphFilterError(
                    f"{run_folder} was run with --save_strategy no and has no checkpoint: delete it to train it again, "
                    "choose another --output_dir, or ask for --save_strategy no"
                )
        if values.get("push_to_hub") and is_main_process():
            values["hub_model_id"] = create_repository(values)
        tell(console, f"plan: {count(len(seeds), 'run')}, in {folder}")
        outcomes = [run_seed(settings, values, seed, folder / f"seed-{seed}", console) for seed in seeds]
        if is_main_process():
            names = [n for n in outcomes[0]["metrics"] if not n.endswith("loss")]
            rows = [[n, mean_and_sd([get_value(r, n) for r in outcomes])] for n in names]
            changed = {name for outcome in outcomes for name, change in outcome.get("moved", {}).items() if change}
            changes = {name: mean_and_sd([r["moved"].get(name, 0.0) for r in outcomes]) for name in sorted(changed)}
            rows += [[f"{name}, mean change", change] for name, change in changes.items()]
            model, filter_name = Path(values["model"]).name, values.get("filter", "gfsa")
            title = f"{model} on {values['task']}, {filter_name}, {count(len(outcomes), 'seed')}"
            console.print(table(["metric", "value"], rows, title=title))
            for outcome in outcomes:
                tell(console, f"saved: {folder}/seed-{outcome['seed']}")
            if values.get("push_to_hub"):
                address = push(settings, folder / f"seed-{outcomes[0]['seed']}", outcomes[0], values)
                console.print(f"pushed to {address}", highlight=False)


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def run_seed(settings: Settings, values: dict[str, Any], seed: int, folder: Path, console: Console) -> dict[str, Any]:
    """Return the record of one run in ``folder``: found finished, resumed from its last checkpoint, or begun.

    Raises:
        GraphFilterError: another command is at work on the same run, or it was run with other settings.
    """
    with lock(folder / ".lock", work="training this"):
        finished = read_record(settings, values, folder)
        if finished is None:
            return train_seed(settings, values, seed, folder)
        console.print(f"seed {seed}: finished before, in {folder}", highlight=False)
        return finished


def read_record(settings: Settings, values: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the record of a run that is finished, None of another.

    Raises:
        OtherSettingsError: the folder holds a run with other settings, finished or not.
    """
    record = try_read(folder / RECORD, seed=int, **RUN)
    traces = ("checkpoint-*", "*/checkpoint-*", f"*/{RECORD}")  # self-pretraining has a folder of its own
    identity = record["settings"] if record else None
    if record is None and (folder / CONFIG).is_file() and any(any(folder.glob(pattern)) for pattern in traces):
        identity = try_read(folder / IDENTITY)
        if identity is None:  # earlier versions wrote the configuration alone
            identity = settings.identity(read_config(folder))
    if identity is not None and (changed := settings.list_differences(identity, settings.identity(values))):
        raise OtherSettingsError(
            f"{folder} holds a run with other settings ({', '.join(changed)} differ): choose another --output_dir, or "
            "delete it"
        )
    return record


def train_seed(settings: Settings, values: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Train one seed, from its last checkpoint where there is one, and write its card and record."""
    run_values = {**values, "output_dir": str(folder), "seed": seed, "seeds": [seed]}
    run_values |= {"push_to_hub": False, "hub_token": None}  # pushed after the run; a token is written to no file
    if is_main_process():
        resume_values = run_values | {"output_dir": str(folder.parent)}  # below which the seed has its folder
        config = {k: v for k, v in resume_values.items() if v is not None and k != "seed"}
        write_text(folder / CONFIG, yaml.safe_dump(config))
        write_json(folder / IDENTITY, settings.identity(values))
    arguments = settings.arguments(run_values)
    identity, checkpoint = settings.identity(values), last_checkpoint(folder)
    check_ranks(cpu=bool(values.get("use_cpu")), settings=identity, checkpoint=checkpoint and Path(checkpoint).name)
    record = {
        "recipe": settings.recipe.name,
        "task": values["task"],
        "seed": seed,
        **settings.recipe.run(*arguments),
        "settings": identity,
        "date": date.today().isoformat(),
        "machine": name_machine(arguments[-1]),
        "versions": {n: version_of(n) for n in ("torch", "transformers", "hf_graphfilter")},
        "commit": commit(),
    }
    if is_main_process():
        if values.get("save_strategy") != "no":
            write_card(settings, folder, record, values)
        write_json(folder / RECORD, record)  # last: with it the run is finished
        (folder / IDENTITY).unlink()
    return record


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings that a run was begun with.

    Raises:
        GraphFilterError: their file is damaged.
    """
    try:
        content = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise GraphFilterError(f"{folder / CONFIG} cannot be read ({line(error)}): delete {folder}") from error
    return check_content(content, folder / CONFIG)


def keeps_checkpoint(folder: Path) -> bool:
    """Return whether a finished run was to keep its checkpoint."""
    return not (folder / CONFIG).is_file() or read_config(folder).get("save_strategy") != "no"


# ------------------------------------------------------------------------------------------------ what goes to the Hub


def write_card(settings: Settings, folder: Path, record: dict[str, Any], values: dict[str, Any]) -> None:
    """Write the model card of a saved run: its metrics, and how its setting compared with the unpatched model."""
    unset_hf_deepspeed_config()  # under ZeRO-3, all processes would have to load; the next run sets it again
    model = settings.recipe.load(folder)
    host = host_of(model)
    tag = host.pipeline_tag(model) or record.get("task_type")  # transformers does not know the pooling head
    task = {"task_type": tag, "dataset_type": record["task"], "dataset_name": record["task"]}
    scores = [(*key.split("/", 1), value) for key, value in record["metrics"].items() if not key.endswith("/loss")]
    results = [EvalResult(**task, dataset_split=part, metric_type=name, metric_value=v) for part, name, v in scores]
    comparison = describe_comparison(settings, record, values)
    values = settings.defaults | values
    from_scratch = settings.recipe.from_scratch or values.get("from_scratch") or values.get("pretrained") is False
    method = "Trained from scratch" if from_scratch and not values.get("checkpoint") else "Fine-tuned"
    summary = f"{method} on {markdown_text(record['task'])} with seed {record['seed']}"
    description = f"## Training\n\n{summary}; every setting and number is in `{records.RECORD}`.{comparison}"
    base = None if from_scratch or Path(values["model"]).exists() else values["model"]
    name = values.get("hub_model_id") or str(folder)
    if filter_status(model):
        card = create_model_card(model, repo_id=name, results=results, description=description, base_model=base)
    else:
        title = name.rpartition("/")[2]
        data = ModelCardData(library_name=host.LIBRARY, eval_results=results, model_name=title, base_model=base)
        text = f"# {markdown_text(title)}\n\n{type(model).__name__}, without a graph filter.\n\n{description}\n"
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")
    card.save(folder / "README.md")


def describe_comparison(settings: Settings, record: dict[str, Any], values: dict[str, Any]) -> str:
    """Say what recipes/compare.py found for these settings: here, or in the results that are shipped."""
    places = ((records.results_folder(values), ""), (records.RESULTS, " (measured by the authors of the recipes)"))
    for folder, origin in places:
        content = records.read_results(folder / records.name_results(record), **records.RUN)
        summary = summarise(content) if content.get("summary") else {}  # the one kept may be of earlier code
        for run in content["runs"]:
            difference = summary.get(run["variant"], {}).get("difference")
            if difference and not settings.list_differences(run["settings"], record["settings"]):
                return f" Compared with the baseline, {content['metric']}: {as_comparison(difference)}{origin}."
    return ""


@contextmanager
def hub(values: dict[str, Any], kept: str) -> Iterator[HfApi]:
    """Yield the Hub's API; turn what it refuses into one line that says what is kept."""
    api = HfApi(token=values.get("hub_token"))
    try:
        yield api
    except HFValidationError as error:
        raise GraphFilterError(f"--hub_model_id {values.get('hub_model_id')}: {line(error)}; {kept}") from error
    except NETWORK_ERRORS as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = "refused the token (hf auth login, or --hub_token)" if status in (401, 403) else line(error)
        raise GraphFilterError(f"the Hub at {api.endpoint}: {reason}; {kept}: run the same command again") from error


def create_repository(values: dict[str, Any]) -> str:
    """Make the repository before any training, so that a wrong token costs no time; return its full name."""
    default = f"{Path(values['model']).name}-{Path(values['task']).name}-{values.get('filter', 'gfsa')}"
    name = values.get("hub_model_id") or re.sub(r"[^\w.-]+", "-", default, flags=re.ASCII)
    with hub(values, "nothing is lost") as api:
        return api.create_repo(name, private=values.get("hub_private_repo"), exist_ok=True).repo_id


def push(settings: Settings, folder: Path, record: dict[str, Any], values: dict[str, Any]) -> str:
    """Push checkpoint, tokenizer, card and numbers of one run as one commit; return the address."""
    write_card(settings, folder, record, values)  # that of a run that was not to be pushed names its folder
    with hub(values, f"the checkpoint is kept in {folder}") as api:
        api.upload_folder(
            repo_id=values["hub_model_id"],
            folder_path=folder,
            ignore_patterns=[*LOCAL_FILES],
            commit_message=f"{record['task']}, {values.get('filter', 'gfsa')}",
        )
        return f"{api.endpoint}/{values['hub_model_id']}"
