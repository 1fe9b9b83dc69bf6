"""Batches of graphs for ``GraphormerModel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BatchFeature

from ..errors import GraphFilterError
from ..models.graphormer.configuration import GraphormerConfig
from ..models.graphormer.inputs import count_hops
from .paths import prepare_graph
from .reading import check_config

PADDING = {
    "node_features": 0,
    "in_degree": 0,
    "out_degree": 0,
    "pair_kinds": 0,
    "kind_distances": -1,
    "kind_edges": -1,
}
OTHER_CONFIG = (
    "was prepared with another config than the model's (node_feature_sizes, edge_feature_sizes, max_hops, "
    "edge_encoding or directed differ): prepare it again"
)


@dataclass
class GraphCollator:
    """Make a batch from graphs, as the ``data_collator`` of a Trainer or the ``collate_fn`` of a DataLoader.

    It takes graphs in any form that ``prepare_graph`` reads, and also prepared graphs. With a Trainer, set
    ``remove_unused_columns=False`` for graphs that are not prepared.

    Args:
        config: The config of the model.

    Raises:
        GraphFilterError: A graph raises an error of ``prepare_graph`` (the message gives its place in the batch); a
            prepared graph lacks an array; or labels are missing in some graphs, have another number than
            ``num_labels``, or are all NaN.

    Example:
        >>> config = GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4])
        >>> graph = {"node_features": [6, 8], "edge_index": [[0], [1]], "edge_features": [1], "labels": 0.5}
        >>> {name: tuple(x.shape) for name, x in GraphCollator(config)([graph, graph]).items()}["pair_kinds"]
        (2, 2, 2)
    """

    config: GraphormerConfig

    def __post_init__(self) -> None:
        check_config(self.config)

    def __call__(self, graphs: Sequence[Any]) -> BatchFeature:
        """Return the arguments of ``GraphormerModel.forward``; ``to(device)`` moves them all.

        Args:
            graphs: A list of graphs, or a ``Batch`` of PyTorch Geometric.
        """
        graphs = graphs.to_data_list() if hasattr(graphs, "to_data_list") else graphs
        ready = [self._prepare(graph, number) for number, graph in enumerate(graphs)]
        if not ready:
            raise GraphFilterError("a batch needs one graph or more")
        batch = {name: _pad([graph[name] for graph in ready], fill) for name, fill in PADDING.items()}
        self._check_sizes(ready, batch)
        sizes = torch.tensor([len(graph["in_degree"]) for graph in ready])
        batch["attention_mask"] = (torch.arange(int(sizes.max())) < sizes[:, None]).long()
        labels = [graph.get("labels") for graph in ready]
        if any(label is not None for label in labels):
            batch["labels"] = self._stack_labels(labels)
        return BatchFeature(batch)

    def _prepare(self, graph: Any, number: int) -> Mapping[str, Any]:
        try:
            if isinstance(graph, Mapping) and "pair_kinds" in graph:  # arrays, or lists from ``datasets``
                entries = {name: x for name, x in graph.items() if name in PADDING or name in ("labels", "directed")}
                if (missing := next((name for name in PADDING if entries.get(name) is None), None)) is not None:
                    raise GraphFilterError(f"it is a prepared graph without {missing}: prepare it again")
                return {name: x if x is None else np.asarray(x) for name, x in entries.items()}
            return prepare_graph(graph, self.config)
        except GraphFilterError as error:
            raise GraphFilterError(f"graph {number} of the batch: {error}") from error

    def _check_sizes(self, ready: list[Mapping[str, Any]], batch: Mapping[str, Tensor]) -> None:
        """Raise an error for graphs prepared for another model, such as features without an embedding in this one."""
        # A Trainer removes the entry ``directed``, which forward does not take; the degrees of its nodes remain.
        is_directed = (batch["in_degree"] != batch["out_degree"]).any(1)
        for number, graph in enumerate(ready):
            differs = graph.get("directed", self.config.directed) != self.config.directed
            if differs or (is_directed[number] and not self.config.directed):
                raise GraphFilterError(f"graph {number} of the batch {OTHER_CONFIG}")
        hops, sizes = count_hops(self.config), {"node_features": self.config.node_feature_sizes}
        if hops:
            sizes["kind_edges"] = self.config.edge_feature_sizes
        for name, limits in sizes.items():
            shape = (hops, len(limits)) if name == "kind_edges" else (len(limits),)
            for number, graph in enumerate(ready):
                if graph[name].shape[1:] != shape:
                    raise GraphFilterError(f"graph {number} of the batch {OTHER_CONFIG}")
            is_invalid = (batch[name] >= torch.tensor(limits)).flatten(1).any(1)
            if name == "kind_edges":  # a graph whose edges all lack features was prepared without edge features
                is_invalid |= (batch["in_degree"] > 0).any(1) & (batch[name] < 0).flatten(1).all(1)
            if is_invalid.any():
                raise GraphFilterError(f"graph {int(is_invalid.int().argmax())} of the batch {OTHER_CONFIG}")

    def _stack_labels(self, labels: list[Any]) -> Tensor:
        targets = int(self.config.num_labels or 1)
        classes = self.config.problem_type == "single_label_classification"
        expected = 1 if classes else targets
        rows = [np.asarray([] if label is None else label, dtype=float).reshape(-1) for label in labels]
        for number, row in enumerate(rows):
            if len(row) != expected:
                class_note = ", the number of its class" if classes else ""
                raise GraphFilterError(
                    f"graph {number} of the batch has {len(row)} labels, and the model takes {expected}{class_note}"
                )
        values = np.stack(rows)
        missing = np.isnan(values)
        wrong = np.isinf(values).any(1) | missing.all(1)
        if wrong.any():
            raise GraphFilterError(f"{_name_label(values, wrong)}: leave it out")
        if self.config.problem_type == "multi_label_classification":
            wrong = ~(missing | np.isin(values, (0, 1))).all(1)
            if wrong.any():
                raise GraphFilterError(f"{_name_label(values, wrong)}: yes is 1, no is 0")
        if classes:
            numbers = values[:, 0]
            wrong = (numbers != np.trunc(numbers)) | (numbers < 0) | (numbers >= targets)
            if wrong.any():
                raise GraphFilterError(f"{_name_label(values, wrong)}, and the model has classes 0 to {targets - 1}")
            return torch.from_numpy(numbers).long()
        return torch.from_numpy(values).float()


def _name_label(values: NDArray[np.float64], wrong: NDArray[np.bool_]) -> str:
    """Return a text that names the first graph with wrong labels, and these labels."""
    number = int(wrong.argmax())
    return f"graph {number} of the batch has the label{'s' * (values.shape[1] > 1)} {values[number].tolist()}"


def _pad(arrays: list[Any], fill: int) -> Tensor:
    """Return arrays of different sizes as one tensor (batch, ...), filled up at the ends."""
    shapes = np.array([array.shape for array in arrays])
    padded = np.full((len(arrays), *shapes.max(0)), fill, dtype=np.int64)
    mask = np.ones((len(arrays), *[1] * shapes.shape[1]), dtype=bool)
    for axis, size in enumerate(padded.shape[1:], 1):
        axis_mask = np.arange(size) < shapes[:, axis - 1, None]
        mask = mask & np.expand_dims(axis_mask, [a for a in range(1, padded.ndim) if a != axis])
    padded[mask] = np.concatenate(arrays, axis=None)
    return torch.from_numpy(padded)
