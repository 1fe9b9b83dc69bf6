"""Prepared graphs in memory, as few flat arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..errors import GraphFilterError, shown
from ..files import read_state, write_state
from ..models.graphormer.configuration import GraphormerConfig
from ..models.graphormer.inputs import PARTS
from .paths import prepare_graph
from .reading import check_config

LISTED = 5  # number of skipped graphs that a message lists


class GraphDataset(Dataset[dict[str, Any]]):
    """Graphs with their shortest paths, for a Trainer or a DataLoader with ``GraphCollator``.

    The arrays of all graphs are stored one after the other, so a graph is read in microseconds. (To decode a row of a
    ``datasets.Dataset`` takes longer than to find the paths.)

    Args:
        graphs: Graphs in any form that ``prepare_graph`` reads. They are read once, one at a time.
        config: The config of the model.
        on_error: What happens to a graph that cannot be read. ``"raise"`` raises an error with its number. ``"skip"``
            leaves it out and lists it in ``skipped``.

    Attributes:
        skipped: (number, reason) of each graph that was left out.

    Raises:
        GraphFilterError: A graph raises an error of ``prepare_graph``, lacks the labels of others or has another number
            of them than most; or no graph is left.

    Example:
        >>> config = GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4])
        >>> chain = {"node_features": [6, 6, 8], "edge_index": [[0, 1], [1, 2]], "edge_features": [1, 2], "labels": 1.5}
        >>> graphs = GraphDataset([chain, chain], config)
        >>> len(graphs), graphs[1]["labels"].tolist()
        (2, [1.5])
    """

    def __init__(
        self, graphs: Iterable[Any], config: GraphormerConfig, *, on_error: Literal["raise", "skip"] = "raise"
    ):
        if on_error not in ("raise", "skip"):
            raise GraphFilterError(f"on_error={shown(on_error)}: use 'raise' or 'skip'")
        check_config(config)
        self.skipped: list[tuple[int, str]] = []

        def leave_out(number: int, reason: str, cause: GraphFilterError | None = None) -> None:
            if on_error == "raise":
                raise GraphFilterError(f"graph {number}: {reason}") from cause
            self.skipped.append((number, reason))

        readable: list[tuple[int, dict[str, Any]]] = []
        for number, graph in enumerate(graphs):
            try:
                if isinstance(graph, GraphFilterError):  # stands for a molecule that could not be read
                    raise graph
                prepared = prepare_graph(graph, config)
                if prepared.get("labels") is not None:
                    check_labels(np.asarray(prepared["labels"], dtype=float))
                readable.append((number, prepared))
            except GraphFilterError as error:
                leave_out(number, str(error), error)
        widths = Counter(len(graph["labels"]) for _, graph in readable if graph.get("labels") is not None)
        width = widths.most_common(1)[0][0] if widths else None
        ready: list[dict[str, Any]] = []
        for number, graph in readable:
            if (problem := _compare_labels(graph.get("labels"), width)) is None:
                ready.append(graph)
            else:
                leave_out(number, problem)
        self.skipped.sort()
        if not ready:
            raise GraphFilterError(f"no graph could be read{self.describe_skipped() or ': there are none'}")
        self._arrays = {name: np.concatenate([graph[name].reshape(-1) for graph in ready]) for name in PARTS}
        nodes, kinds = (np.array([len(graph[name]) for graph in ready]) for name in ("in_degree", "kind_distances"))
        self._arrays |= {"nodes": nodes, "kinds": kinds}
        if width is not None:
            self._arrays["labels"] = np.array([graph["labels"] for graph in ready], dtype=float)
        shapes = (ready[0]["node_features"].shape[1], *ready[0]["kind_edges"].shape[1:])
        self._arrays["shapes"] = np.array(shapes)
        self._arrays["directed"] = np.array([config.directed])
        self._set_rows(np.arange(len(ready)))

    def _set_rows(self, rows: NDArray[np.int64]) -> None:
        nodes, kinds = self._arrays["nodes"], self._arrays["kinds"]
        features, hops, edge_features = self._arrays["shapes"].tolist()
        sizes = (nodes * features, nodes, nodes, nodes**2, kinds, kinds * hops * edge_features)
        self._ends = np.stack([np.concatenate([[0], x.cumsum()]) for x in sizes], 1)  # (graphs + 1, parts)
        self._shapes = features, hops, edge_features
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        row = self._rows[place]
        nodes = int(self._arrays["nodes"][row])
        features, hops, edge_features = self._shapes
        shapes = ((nodes, features), nodes, nodes, (nodes, nodes), -1, (-1, hops, edge_features))
        bounds = zip(*self._ends[row : row + 2].tolist(), strict=True)
        graph = {
            name: self._arrays[name][start:end].reshape(shape)
            for name, shape, (start, end) in zip(PARTS, shapes, bounds, strict=True)
        }
        if "labels" in self._arrays:
            graph["labels"] = self._arrays["labels"][row]
        if "directed" in self._arrays:  # not in files of earlier versions
            graph["directed"] = bool(self._arrays["directed"][0])
        return graph

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of nodes of each graph."""
        return self._arrays["nodes"][self._rows]

    @property
    def labels(self) -> NDArray[np.float64]:
        """The labels, (graphs, targets)."""
        if "labels" not in self._arrays:
            raise GraphFilterError("these graphs have no labels")
        return self._arrays["labels"][self._rows]

    def select(self, places: Sequence[int] | NDArray[np.bool_]) -> GraphDataset:
        """Return some of the graphs without copying arrays; ``places`` holds indices, or True or False per graph."""
        subset, selector = object.__new__(type(self)), np.asarray(places)
        if selector.size and selector.dtype.kind not in "biu":
            raise GraphFilterError(f"graphs are selected by whole numbers, or by True and False, got {shown(places)}")
        subset.__dict__ |= self.__dict__
        subset._rows = self._rows[selector if selector.dtype == bool else selector.astype(np.int64)]
        return subset

    def shuffle(self, seed: int) -> GraphDataset:
        """Return the graphs in another order."""
        return self.select(np.random.default_rng(seed).permutation(len(self)).tolist())

    def describe_skipped(self) -> str:
        """Return the end of a message: how many graphs were skipped, and why the first ones; empty if none were."""
        if not self.skipped:
            return ""
        reasons = "; ".join(f"{number}: {reason}" for number, reason in self.skipped[:LISTED])
        ellipsis = "; ..." * (len(self.skipped) > LISTED)
        return f", {len(self.skipped)} left out ({reasons}{ellipsis})"

    def save(self, file: str | Path) -> None:
        """Write all graphs to ``file``, as safetensors.

        Raises:
            GraphFilterError: ``file`` is a folder.
        """
        if Path(file).is_dir():
            raise GraphFilterError(f"{file} is a folder: give the name of a file in it")
        arrays = {**self._arrays, "rows": self._rows}
        skipped = {"skipped": self.skipped}
        write_state(Path(file), skipped, {name: torch.from_numpy(array) for name, array in arrays.items()})

    @classmethod
    def load(cls, file: str | Path) -> GraphDataset:
        """Read what ``save`` wrote.

        Raises:
            GraphFilterError: The file is damaged or holds something else.
        """
        content, tensors = read_state(Path(file))
        if content is None or not {"rows", "shapes", *PARTS} <= tensors.keys():
            raise GraphFilterError(f"{file} holds no prepared graphs: name a file of GraphDataset.save")
        dataset = object.__new__(cls)
        dataset._arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        dataset.skipped = [(number, reason) for number, reason in content["skipped"]]
        dataset._set_rows(dataset._arrays.pop("rows"))
        return dataset


def _compare_labels(labels: NDArray[np.float64] | None, width: int | None) -> str | None:
    """Return how the labels of a graph differ from the ``width`` labels of most graphs, or None."""
    found = None if labels is None else len(labels)
    if found == width:
        return None
    if found is None:
        return "it has no label, and other graphs have one"
    return f"it has {found} label{'s' * (found != 1)}, and most graphs have {width}"


def check_labels(labels: NDArray[np.float64]) -> None:
    """Raise if a graph has no label, or an infinite one."""
    if np.isnan(labels).all():
        raise GraphFilterError("it has no label (NaN)")
    if np.isinf(labels).any():
        raise GraphFilterError(f"it has the label{'s' * (labels.size > 1)} {labels.tolist()}")
