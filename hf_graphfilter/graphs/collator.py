"""Batches of graphs for ``GraphormerModel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature

from ..errors import GraphFilterError
from ..models.graphormer.configuration import GraphormerConfig
from .paths import prepare_graph

PADDING = {
    "node_features": 0,
    "in_degree": 0,
    "out_degree": 0,
    "pair_kinds": 0,
    "kind_distances": -1,
    "kind_edges": -1,
}


@dataclass
class GraphCollator:
    """Make a batch from graphs: the ``data_collator`` of a Trainer, the ``collate_fn`` of a DataLoader.

    It takes graphs as ``prepare_graph`` does, and those that ``prepare_graph`` has prepared. With a Trainer, set
    ``remove_unused_columns=False`` for graphs that are not prepared.

    Args:
        config: The config of the model.

    Raises:
        GraphFilterError: A graph that ``prepare_graph`` refuses, with its place in the batch; labels that some graphs
            lack, that are not ``num_labels``, or that are all NaN.

    Example:
        >>> config = GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4])
        >>> graph = {"node_features": [6, 8], "edge_index": [[0], [1]], "edge_features": [1], "labels": 0.5}
        >>> {name: tuple(x.shape) for name, x in GraphCollator(config)([graph, graph]).items()}["pair_kinds"]
        (2, 2, 2)
    """

    config: GraphormerConfig

    def __call__(self, graphs: Sequence[Any]) -> BatchFeature:
        """Return the arguments of ``GraphormerModel.forward``; ``to(device)`` moves them all."""
        ready = [self._prepare(graph, place) for place, graph in enumerate(graphs)]
        batch = {name: _pad([graph[name] for graph in ready], fill) for name, fill in PADDING.items()}
        sizes = torch.tensor([len(graph["in_degree"]) for graph in ready])
        batch["attention_mask"] = (torch.arange(int(sizes.max())) < sizes[:, None]).long()
        labels = [graph.get("labels") for graph in ready]
        if any(label is not None for label in labels):
            batch["labels"] = self._stack_labels(labels)
        return BatchFeature(batch)

    def _prepare(self, graph: Any, place: int) -> Mapping[str, Any]:
        try:
            if isinstance(graph, Mapping) and "pair_kinds" in graph:
                return {name: np.asarray(value) for name, value in graph.items() if name in PADDING or name == "labels"}
            return prepare_graph(graph, self.config)
        except GraphFilterError as error:
            raise GraphFilterError(f"graph {place} of the batch: {error}") from error

    def _stack_labels(self, labels: list[Any]) -> Tensor:
        targets = int(self.config.num_labels or 1)
        classes = self.config.problem_type == "single_label_classification"
        expected = 1 if classes else targets
        for place, label in enumerate(labels):
            values = np.asarray([] if label is None else label, dtype=float).reshape(-1)
            if len(values) != expected:
                raise GraphFilterError(
                    f"graph {place} of the batch has {len(values)} labels, and the model predicts {targets} targets"
                )
            if np.isinf(values).any() or np.isnan(values).all():
                raise GraphFilterError(f"graph {place} of the batch has the label {values.tolist()}: leave it out")
            if classes and not (values[0].is_integer() and 0 <= values[0] < targets):
                raise GraphFilterError(
                    f"graph {place} of the batch has the class {values[0]:g}, and the model has 0 to {targets - 1}"
                )
        stacked = np.stack([np.asarray(label, dtype=float).reshape(-1) for label in labels])
        return torch.tensor(stacked[:, 0]).long() if classes else torch.tensor(stacked, dtype=torch.float32)


def _pad(arrays: list[Any], fill: int) -> Tensor:
    """Return arrays of different sizes as one tensor (batch, ...), filled up at the ends."""
    shape = np.max([array.shape for array in arrays], axis=0)
    padded = np.full((len(arrays), *shape), fill, dtype=np.int64)
    for row, array in zip(padded, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return torch.from_numpy(padded)
