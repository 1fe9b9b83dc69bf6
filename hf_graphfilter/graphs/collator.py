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
from .paths import count_hops, prepare_graph

PADDING = {
    "node_features": 0,
    "in_degree": 0,
    "out_degree": 0,
    "pair_kinds": 0,
    "kind_distances": -1,
    "kind_edges": -1,
}
OTHER_CONFIG = (
    "was prepared with another config than the model's (node_feature_sizes, edge_feature_sizes, max_hops or "
    "edge_encoding differ): prepare it again"
)


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

    def _prepare(self, graph: Any, place: int) -> Mapping[str, Any]:
        try:
            if isinstance(graph, Mapping) and "pair_kinds" in graph:
                ready = {name: np.asarray(value) for name, value in graph.items() if name in PADDING}
                return ready if graph.get("labels") is None else ready | {"labels": np.asarray(graph["labels"])}
            return prepare_graph(graph, self.config)
        except GraphFilterError as error:
            raise GraphFilterError(f"graph {place} of the batch: {error}") from error

    def _check_sizes(self, ready: list[Mapping[str, Any]], batch: Mapping[str, Tensor]) -> None:
        """Raise for graphs that were prepared with features that the model has no embedding for."""
        hops, sizes = count_hops(self.config), {"node_features": self.config.node_feature_sizes}
        if hops:
            sizes["kind_edges"] = self.config.edge_feature_sizes
        for name, most in sizes.items():
            shape = (hops, len(most)) if name == "kind_edges" else (len(most),)
            for place, graph in enumerate(ready):
                if graph[name].shape[1:] != shape:
                    raise GraphFilterError(f"graph {place} of the batch {OTHER_CONFIG}")
            beyond = (batch[name] >= torch.tensor(most)).flatten(1).any(1)
            if beyond.any():
                raise GraphFilterError(f"graph {int(beyond.int().argmax())} of the batch {OTHER_CONFIG}")

    def _stack_labels(self, labels: list[Any]) -> Tensor:
        targets = int(self.config.num_labels or 1)
        classes = self.config.problem_type == "single_label_classification"
        expected = 1 if classes else targets
        for place, label in enumerate(labels):
            values = np.asarray([] if label is None else label, dtype=float).reshape(-1)
            if len(values) != expected:
                of_classes = ", the number of its class" if classes else ""
                raise GraphFilterError(
                    f"graph {place} of the batch has {len(values)} labels, and the model takes {expected}{of_classes}"
                )
            if np.isinf(values).any() or np.isnan(values).all():
                raise GraphFilterError(f"graph {place} of the batch has the label {values.tolist()}: leave it out")
            if (
                self.config.problem_type == "multi_label_classification"
                and not np.isin(values[~np.isnan(values)], (0, 1)).all()
            ):
                raise GraphFilterError(
                    f"graph {place} of the batch has the labels {values.tolist()}: yes is 1, no is 0"
                )
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
