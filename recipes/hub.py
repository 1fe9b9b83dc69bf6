"""What goes to the Hub: a run's model card, its checkpoint and its numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

from hf_graphfilter import GraphFilterError, create_model_card, filter_status
from hf_graphfilter.analysis.comparison import PairedComparison
from hf_graphfilter.hosts import host_of
from hf_graphfilter.text import markdown_text
from recipes import records
from recipes.errors import NETWORK_ERRORS, line
from recipes.settings import Settings

# of no use to others
OURS = ("checkpoint-*", "pretrained/*", "runs/*", "training_args.bin", "config.yaml", "*.part", "*.lock")


def write_card(settings: Settings, folder: Path, record: dict[str, Any], values: dict[str, Any]) -> None:
    """The model card of a saved run: its metrics, and how its setting compared with the plain model."""
    model = settings.recipe.load(folder)
    host = host_of(model)
    tag = host.pipeline_tag(model) or record.get("task_type")  # transformers does not know the pooling head
    task = {"task_type": tag, "dataset_type": record["task"], "dataset_name": record["task"]}
    scores = [(*key.split("/", 1), value) for key, value in record["metrics"].items() if not key.endswith("/loss")]
    results = [EvalResult(**task, dataset_split=part, metric_type=name, metric_value=v) for part, name, v in scores]
    comparison = compared(settings, record, values)
    values = settings.defaults | values
    fresh = values.get("from_scratch") or values.get("pretrained") is False
    how = "Trained from scratch" if fresh and not values.get("checkpoint") else "Fine-tuned"
    trained = f"{how} on {markdown_text(record['task'])} with seed {record['seed']}"
    description = f"## Training\n\n{trained}; every setting and number is in `{records.RECORD}`.{comparison}"
    base = None if fresh or Path(values["model"]).exists() else values["model"]
    name = values.get("hub_model_id") or str(folder)
    if filter_status(model):
        card = create_model_card(model, repo_id=name, results=results, description=description, base_model=base)
    else:
        title = name.rpartition("/")[2]
        data = ModelCardData(library_name=host.LIBRARY, eval_results=results, model_name=title, base_model=base)
        text = f"# {markdown_text(title)}\n\nThe plain {type(model).__name__}.\n\n{description}\n"
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")
    card.save(folder / "README.md")


def compared(settings: Settings, record: dict[str, Any], values: dict[str, Any]) -> str:
    """What recipes/compare.py found for these settings: here, or in the results that are shipped."""
    places = ((records.own_results(values), ""), (records.RESULTS, " (measured by the authors of the recipes)"))
    for folder, where in places:
        content = {"summary": {}, **records.read_results(folder / records.results_name(record), **records.RUN)}
        for run in content["runs"]:
            difference = content["summary"].get(run["variant"], {}).get("difference")
            if difference and not settings.differing(run["settings"], record["settings"]):
                return f" Against the plain model, {content['metric']}: {PairedComparison(**difference)}{where}."
    return ""


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
    own = f"{Path(values['model']).name}-{Path(values['task']).name}-{values.get('filter', 'gfsa')}"
    name = values.get("hub_model_id") or own
    with hub(values, "nothing is lost") as api:
        return api.create_repo(name, private=values.get("hub_private_repo"), exist_ok=True).repo_id


def push(settings: Settings, folder: Path, record: dict[str, Any], values: dict[str, Any]) -> str:
    """Checkpoint, tokenizer, card and numbers of one run, as one commit; the address."""
    write_card(settings, folder, record, values)  # that of a run that was not to be pushed names its folder
    with hub(values, f"the checkpoint is kept in {folder}") as api:
        api.upload_folder(
            repo_id=values["hub_model_id"],
            folder_path=folder,
            ignore_patterns=[*OURS],
            commit_message=f"{record['task']}, {values.get('filter', 'gfsa')}",
        )
        return f"{api.endpoint}/{values['hub_model_id']}"
