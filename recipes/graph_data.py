"""The graphs of the graph recipe: ZINC, tables of molecules, and folders of graphs in JSON lines."""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import datasets
import numpy as np

from hf_graphfilter import GraphFilterError
from hf_graphfilter.graphs import GraphDataset
from hf_graphfilter.graphs.reading import NAMES, find, read_table
from hf_graphfilter.models.graphormer.configuration import GraphormerConfig
from recipes.data import load_from_hub
from recipes.errors import line, note
from recipes.files import FILES, first_file, read_rows
from recipes.molecules import read_molecules

STRUCTURE = ("node_feature_sizes", "edge_feature_sizes", "edge_encoding", "max_hops", "max_nodes", "directed")
FORMAT = 2  # of the cached files; raise it where prepare_graph gives other numbers, or a split other rows
ZINC_SIZES = {"node_feature_sizes": [28], "edge_feature_sizes": [4]}
MOST_VALUES = 2**20  # of a feature, each of which has its own embedding
SMOKE_FACTOR = 10  # a smoke test reads so many times the graphs that it uses: some may not be usable
POINTERS = ("node_ptr", "edge_ptr")
SPELLINGS = {"edge_index": ("edge_index",), **NAMES}


@dataclass(frozen=True)
class GraphTask:
    """Where graphs are read from, and what is predicted.

    Args:
        target: the column of the target; None: --target names it.
        metric: by which runs are compared.
        files: names that the table may have below --data.
        split: how a table is split if nothing is said: ``given``, ``random`` or ``scaffold``; None: by the first column
            that names parts, else at random.
        ranges: rows of the training and the validation part, for tables whose order is their split.
        hub: the data set of the Hub with the same graphs.
        fields: of the model's config, where the data decide them.
        standardize: whether the network predicts standardised targets.
        page: where the table is.
    """

    target: str | None = None
    metric: str = "test/mae"
    files: tuple[str, ...] = ()
    split: str | None = None
    ranges: tuple[int, ...] = ()
    hub: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    standardize: bool = True
    page: str = ""


OGB = {"files": ("data.csv.gz", "raw/data.csv.gz"), "page": "https://ogb.stanford.edu/docs/lsc"}
_PCQM4M = partial(GraphTask, "homolumogap", "validation/mae", split="given", standardize=False, **OGB)
CLASSES = (("problem_type", "multi_label_classification"),)
TASKS = {
    "zinc": GraphTask("y", fields=tuple(ZINC_SIZES.items()), standardize=False),
    "zinc-full": GraphTask("y", hub="graphs-datasets/ZINC", fields=tuple(ZINC_SIZES.items()), standardize=False),
    # OGB's tables: their order is the official split, whose test labels are hidden
    "pcqm4m": _PCQM4M(ranges=(3_045_360, 380_670)),
    "pcqm4mv2": _PCQM4M(ranges=(3_378_606, 73_545)),
    "qm9-gap": GraphTask("gap_eV", files=("qm9.csv.gz", "qm9.csv"), split="random"),
    "esol": GraphTask("y", files=("esol.csv",), split="scaffold"),
    "aqsoldb": GraphTask("y", files=("aqsoldb.csv",), split="scaffold"),
    "hiv": GraphTask("y", "test/roc_auc", ("hiv.csv.gz", "hiv.csv"), "scaffold", fields=CLASSES),
    "molecules": GraphTask(),
    "molecule-classes": GraphTask(metric="test/roc_auc", fields=CLASSES),
    "graphs": GraphTask("labels"),
    "graph-classes": GraphTask("labels", "test/roc_auc", fields=CLASSES),
}


def load(args: Any, config: Callable[..., GraphormerConfig]) -> tuple[dict[str, GraphDataset], dict[str, Any], str]:
    """Return (parts, fields of the config that the data decide, how they were split)."""
    task = TASKS[args.task]
    if args.target is None and task.target is None:
        raise GraphFilterError(f"--task {args.task} needs --target, the column to predict; several by commas")
    settings = (args.task, args.data, args.target or task.target, args.split or task.split, args.bad_graphs)
    fields = dict(task.fields)
    structure = {**fields, **({} if "node_feature_sizes" in fields else _find_feature_sizes(settings))}
    graph_config = config(**{k: v for k, v in structure.items() if k in STRUCTURE})
    limits = [n for n in (args.max_train_samples, args.max_eval_samples) if n]
    most = SMOKE_FACTOR * max(limits) if args.smoke and limits else None  # others choose among all graphs
    parts, split = _prepare(settings, json.dumps({k: getattr(graph_config, k) for k in STRUCTURE}), most)
    return dict(parts), structure, split


@lru_cache(maxsize=1)
def _find_feature_sizes(settings: tuple[str, ...]) -> dict[str, list[int]]:
    """Return the sizes of the features of most graphs in JSON lines; those of molecules are the config's own."""
    if settings[0] not in ("graphs", "graph-classes"):
        return {}
    sizes = {}
    rows = [row for part in _find_parts(settings)[0].values() for row in part()]
    for name in ("node_features", "edge_features"):
        tables = [table for row in rows if (table := _read_features(row, name)).size]
        if not tables and name == "node_features":
            raise GraphFilterError(
                f"--data {settings[1]}: no graph has usable node_features: give whole numbers from 0 to "
                f"{MOST_VALUES - 1:,}, a row per node"
            )
        widths = Counter(table.shape[1] for table in tables)
        width = widths.most_common(1)[0][0] if widths else None
        largest = [table.max(0) for table in tables if table.shape[1] == width]
        sizes[f"{name[:-1]}_sizes"] = (np.max(largest, 0) + 1).astype(int).tolist() if largest else []
    return sizes


def _read_features(row: Any, name: str) -> np.ndarray:
    """Return the features of a graph, a row each; none of one that ``GraphDataset`` will raise or count."""
    try:
        table = read_table(find(row, name), name)
    except GraphFilterError:
        return np.zeros(0)
    is_usable = table.ndim in (1, 2) and np.isfinite(table).all() and (table >= 0).all() and (table < MOST_VALUES).all()
    return table.reshape(len(table), -1) if is_usable and table.size else np.zeros(0)


@lru_cache(maxsize=1)
def _prepare(settings: tuple[str, ...], structure: str, most: int | None) -> tuple[dict[str, GraphDataset], str]:
    """Return the graphs with their paths, found once and kept beside the other caches of ``datasets``.

    With ``most`` they are found for the first graphs of each part alone.
    """
    readers, split, files = _find_parts(settings)
    marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    identity = (FORMAT, settings, structure, marks, split, *([most] if most else []))
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_graphfilter"
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for part, rows in readers.items():
        cached = folder / f"{settings[0]}-{part}-{key}.safetensors"
        if (loaded := _load_cached(cached)) is not None:
            parts[part] = loaded
        else:
            config = GraphormerConfig(**json.loads(structure))
            try:
                on_error = "raise" if settings[4] == "error" else "skip"
                parts[part] = GraphDataset(islice(rows(), most), config, on_error=on_error)
            except GraphFilterError as error:
                hint = "; --bad_graphs skip leaves such graphs out" if settings[4] == "error" else ""
                raise GraphFilterError(f"{settings[0]}, {part} part: {error}{hint}") from error
            parts[part].save(cached)
        if parts[part].skipped:
            note(f"{settings[0]}, {part} part: {len(parts[part])} graphs{parts[part].describe_skipped()}")
    return parts, split


def _load_cached(file: Path) -> GraphDataset | None:
    """Return the prepared graphs of a file; None where there is none, or none that is whole, which is said."""
    try:
        return GraphDataset.load(file) if file.is_file() else None
    except GraphFilterError as error:
        note(f"ignored: {line(error)}")
        return None


Rows = Callable[[], Iterable[Any]]


def _find_parts(settings: tuple[str, ...]) -> tuple[dict[str, Rows], str, list[Path]]:
    """Return (what yields the graphs of each part, how they were split, the files)."""
    name, data, target, split, bad_graphs = settings
    task = TASKS[name]
    if data is None:
        if task.hub is None:
            expected = "the folder of zinc12k_graphs.npz" if name == "zinc" else "a table or a folder of graphs"
            source = f"; it is at {task.page}" * bool(task.page)
            raise GraphFilterError(f"--task {name} needs --data, {expected}{source}")
        parts = load_from_hub(task.hub, SPELLINGS)
        return {k: parts[v].__iter__ for k, v in _name_parts(parts).items()}, "official", []
    if task.hub is not None:
        raise GraphFilterError(f"--task {name} is read from the Hub: leave out --data")
    root = Path(data)
    if name == "zinc":
        file = first_file(root, ["zinc12k_graphs.npz"])
        return read_zinc(file), "official validation and test parts, another training part of 10,000", [file]
    if name in ("graphs", "graph-classes"):
        files = {part: first_file(root, [f"{v}.jsonl", f"{part}.jsonl"]) for part, v in FILES.items()}
        return {part: (lambda f=f: read_rows(f)) for part, f in files.items()}, "given", [*files.values()]
    file = root if root.is_file() else first_file(root, list(task.files) or [f"{root.name}.csv"])
    parts, split_name = read_molecules(file, target, split, task.ranges, bad_graphs == "error")
    return parts, split_name, [file]


def _name_parts(parts: Iterable[str]) -> dict[str, str]:
    return {"train": "train", "validation": "validation" if "validation" in parts else "val", "test": "test"}


def read_zinc(file: Path) -> dict[str, Rows]:
    """Return what yields the graphs of each part.

    The arrays hold all graphs, one behind the other: ``atom_type`` (nodes), ``edge_index`` (2, edges) with node numbers
    within each graph, ``bond_type`` (edges), ``node_ptr`` and ``edge_ptr`` (graphs + 1) where each graph begins, ``y``
    (graphs), and ``split`` (graphs): 0 for training, 1 for validation, 2 for test.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            z = {name: content[name] for name in ("split", "y", "atom_type", "edge_index", "bond_type", *POINTERS)}
    except (ValueError, OSError, KeyError, BadZipFile, zlib.error) as error:
        raise GraphFilterError(f"{file} is damaged or holds something else: {line(error)}") from error

    def read(part: int) -> Iterator[dict[str, Any]]:
        for i in np.flatnonzero(z["split"] == part):
            (a, b), (c, d) = (z[name][i : i + 2] for name in POINTERS)
            graph = {"node_features": z["atom_type"][a:b], "edge_index": z["edge_index"][:, c:d]}
            yield graph | {"edge_features": z["bond_type"][c:d], "labels": z["y"][i]}

    return {part: (lambda number=number: read(number)) for number, part in enumerate(FILES)}
