"""Train Graphormer on graphs and molecules, with a graph filter in its self-attention.

    python recipes/graphs.py --config graphs/graphormer-slim.yaml --task zinc --data DATA/zinc12k
    python recipes/graphs.py --config graphs/small.yaml --task esol --data DATA/moleculenet --seeds 1 2 3
    python recipes/graphs.py --config graphs/small.yaml --task molecules --data mine.csv --target solubility

Tasks: zinc (12,000 graphs) and zinc-full (of the Hub); pcqm4m and pcqm4mv2 (OGB's data.csv.gz); qm9-gap, esol, aqsoldb
and hiv; molecules and molecule-classes for any table with a column smiles and a --target; graphs and graph-classes for
a folder with train.jsonl, valid.jsonl and test.jsonl, whose lines hold node_features, edge_index, edge_features and
labels. Regressions report mean absolute error and root mean squared error, classes ROC-AUC. Shortest paths are found
once and cached.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

from functools import partial

import numpy as np
from torch.utils.data import SequentialSampler
from transformers import Seq2SeqTrainingArguments, Trainer, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import parse_options
from hf_graphfilter.graphs import GraphCollator
from hf_graphfilter.models.graphormer.modeling import GraphormerForGraphPrediction
from recipes import metrics, runs
from recipes.arguments import GraphArguments
from recipes.data import cut
from recipes.errors import note
from recipes.graph_data import TASKS, load
from recipes.models import model_config, patch
from recipes.settings import Recipe
from recipes.training import fit

SPLITS = ("given", "random", "scaffold")
MEASURES = {"regression": ("mae", "rmse")}


def run(args, training):
    """Do one training run."""
    make_config = partial(model_config, args, scratch=True)
    parts, fields, split = load(args, make_config)
    data = cut(parts, args)
    # Graphs of similar size are evaluated together: a batch is padded to its largest.
    data = {k: v if k == "train" else v.select(np.argsort(v.sizes, kind="stable")) for k, v in data.items()}
    labels = read_labels(data)
    targets = labels["train"]
    target_names = args.target.split(",") if args.target else [f"target {i + 1}" for i in range(targets.shape[1])]
    if (is_missing := np.isnan(targets).all(0)).any():
        raise GraphFilterError(f"{target_names[int(is_missing.argmax())]} has no number in the training part")
    fields["num_labels"] = targets.shape[1]
    config = make_config(**fields)
    standardize = TASKS[args.task].standardize if args.standardize is None else args.standardize
    if config.problem_type == "regression" and standardize:
        config.label_mean, spread = np.nanmean(targets, 0).tolist(), np.nanstd(targets, 0)
        config.label_std = np.where(spread > 0, spread, 1).tolist()
    check_labels(labels, config.problem_type == "multi_label_classification")
    set_seed(training.seed)
    model = GraphormerForGraphPrediction(config)
    patch(args, model)
    names = MEASURES.get(config.problem_type, ("roc_auc",))
    reported = target_names if "mae" in names and len(target_names) > 1 else ()
    for part in sorted({*data} - {"train"}) if "roc_auc" in names else ():
        if not any(len(np.unique(column[np.isfinite(column)])) > 1 for column in data[part].labels.T):
            note(f"the {part} part has graphs of one class only, and so no ROC-AUC")
    options = {"data_collator": GraphCollator(config), "compute_metrics": partial(score, names, apart=reported)}
    options["trainer_class"] = GraphTrainer
    outcome = fit(args, training, model, None, data, **options)
    rows = {part: len(graphs) for part, graphs in data.items()}
    read_parts = {"train"} if args.held_out else {*parts}  # of which `data` are made
    left_out = {part: len(graphs.skipped) for part, graphs in parts.items() if part in read_parts and graphs.skipped}
    return {**outcome, "split": split, "rows": rows, "left_out": left_out, "task_type": "graph-ml"}


def read_labels(data):
    """Return the labels of each part, (graphs, targets)."""
    labels = {}
    for part, graphs in data.items():
        try:
            labels[part] = graphs.labels
        except GraphFilterError as error:
            raise GraphFilterError(f"the {part} part: {error}; without them it cannot be evaluated") from error
    return labels


def check_labels(labels_by_part, yes_or_no):
    """Raise before training for labels with which a part could not be evaluated after it."""
    width = labels_by_part["train"].shape[1]
    for part, labels in labels_by_part.items():
        if (found := labels.shape[1]) != width:
            raise GraphFilterError(f"the {part} part has {found} labels per graph, and the train part {width}")
        known = labels[np.isfinite(labels)]
        if yes_or_no and len(wrong := known[~np.isin(known, (0, 1))]):
            raise GraphFilterError(f"the {part} part has the label {wrong[0]:g}: yes is 1, no is 0")


class GraphTrainer(Trainer):
    """A Trainer that can group graphs by their size, which transformers does for rows of ``datasets`` alone."""

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(dataset)
        rows_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(rows_per_step, lengths=dataset.sizes.tolist())

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)


def score(names, prediction, apart=()):
    """Return the metrics, each the mean over the targets, and those of each target that ``apart`` names.

    Graphs without a target do not count for it. A target that cannot be scored in this part (one class, or no number)
    is left out. Those of a diverged model, which predicts no numbers, have no score.
    """
    columns = list(zip(np.atleast_2d(prediction.predictions).T, np.atleast_2d(prediction.label_ids).T, strict=True))
    scores, by_target = [], {}
    for number, (predicted, labels) in enumerate(columns):
        is_labelled = np.isfinite(labels)
        if not np.isfinite(predicted[is_labelled]).all():
            return dict.fromkeys(names, np.nan)
        if len(np.unique(labels[is_labelled])) >= (2 if "roc_auc" in names else 1):
            scores.append(metrics.score(names, predicted[is_labelled], labels[is_labelled]))
            if apart:
                by_target |= {f"{apart[number]}_{name}".replace(" ", "_"): value for name, value in scores[-1].items()}
    means = {name: float(np.mean([values[name] for values in scores])) if scores else np.nan for name in names}
    return means | by_target


def check(args, training):
    """Raise for what can be known to be wrong before any data is read."""
    if args.model != "graphormer":
        raise GraphFilterError(f"--model {args.model}: this recipe trains graphormer; --from_scratch sets its sizes")
    if args.split not in (None, *SPLITS):
        raise GraphFilterError(f"--split {args.split}: it is one of {', '.join(SPLITS)}")
    kind = TASKS[args.task]
    if args.split is not None and not (kind.files or args.task.startswith("molecule")):
        raise GraphFilterError(f"--split {args.split}: the parts of {args.task} are given")
    if args.target is not None and kind.target is not None and not kind.files:
        raise GraphFilterError(f"--target {args.target}: {args.task} has one target, {kind.target}")
    if args.bad_graphs not in ("skip", "error"):
        raise GraphFilterError(f"--bad_graphs {args.bad_graphs}: it is skip or error")
    if str(problem := parse_options(args.from_scratch).get("problem_type")).endswith("classification"):
        raise GraphFilterError(
            f"--from_scratch problem_type={problem}: the task sets it; molecule-classes and graph-classes have yes/no "
            "targets (multi_label_classification), the others are regressions"
        )


RECIPE = Recipe(
    name="graphs",
    metrics={name: task.metric for name, task in TASKS.items()},
    run=run,
    defaults={
        "model": "graphormer",
        "num_train_epochs": 100,
        "per_device_train_batch_size": 64,
        "per_device_eval_batch_size": 256,
        "learning_rate": 1e-3,
    },
    description=__doc__,
    places={name: task.files for name, task in TASKS.items()},
    from_scratch=True,
    arguments=(GraphArguments, Seq2SeqTrainingArguments),
    check=check,
)

if __name__ == "__main__":
    runs.main(RECIPE)
