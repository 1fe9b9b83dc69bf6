"""The shortest paths of a graph, as kinds of pairs of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.graphormer.configuration import GraphormerConfig
from ..models.graphormer.inputs import count_hops
from .reading import Graph, find, read_graph, read_table


def prepare_graph(graph: Any, config: GraphormerConfig) -> dict[str, Any]:
    """Return the inputs of ``GraphormerModel`` for one graph, as NumPy arrays.

    If there are several shortest paths, it takes the one whose edge features come first in dictionary order. So the
    result does not depend on the order of nodes or edges.

    Args:
        graph: A mapping with ``node_features`` (nodes, features), ``edge_index`` (2, edges), ``edge_features`` (edges,
            features) and perhaps ``labels``. The names of PyTorch Geometric (``x``, ``edge_attr``, ``y``) and of OGB
            (``node_feat``, ``edge_feat``) work too. So do PyTorch Geometric's ``Data`` objects, and the pairs of graph
            and label of OGB's data sets. Self-loops are ignored.
        config: The config of the model.

    Returns:
        ``node_features`` (nodes, features), ``in_degree`` and ``out_degree`` (nodes,), ``pair_kinds`` (nodes, nodes),
        ``kind_distances`` (kinds,) and ``kind_edges`` (kinds, hops, features), all integers; also ``directed`` from the
        config, and ``labels`` if the graph has them.

    Raises:
        GraphFilterError: A part is missing, has another shape, or holds values that ``config`` has no embedding for.

    Example:
        >>> config = GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4])
        >>> chain = {"node_features": [6, 6, 8], "edge_index": [[0, 1], [1, 2]], "edge_features": [1, 2]}
        >>> ready = prepare_graph(chain, config)
        >>> ready["kind_distances"][ready["pair_kinds"]].tolist()
        [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
    """
    if isinstance(graph, tuple) and len(graph) == 2 and isinstance(graph[0], Mapping):  # of a data set of OGB
        graph = {**graph[0], "labels": graph[1]}
    checked = read_graph(graph, config)
    count = len(checked.nodes)
    ready = {
        "node_features": checked.nodes,
        "in_degree": np.bincount(checked.target, minlength=count),
        "out_degree": np.bincount(checked.source, minlength=count),
        **find_paths(checked, count_hops(config)),
        "directed": config.directed,
    }
    labels = find(graph, "labels")
    if labels is not None:
        ready["labels"] = read_table(labels, "labels", float).reshape(-1)  # None becomes NaN
    return ready


def find_paths(graph: Graph, hops: int) -> dict[str, NDArray[np.int16]]:
    """Return the kind of each pair of nodes, and the distance and first ``hops`` edges of each kind.

    The search proceeds by distance: the best path of length d is a best path of length d - 1 plus one edge. The
    dictionary order of paths is that of the pairs (rank of the shorter path, edge), so no path is written out twice.
    """
    count = len(graph.nodes)
    values, codes = np.unique(graph.edges, axis=0, return_inverse=True)
    codes, base = codes.reshape(-1), max(len(values), 1)
    distance, kinds, ranks = (np.full((count, count), start) for start in (-1, 0, 0))
    np.fill_diagonal(distance, 0)
    np.fill_diagonal(kinds, 1)
    paths = np.full((1, max(hops, 1)), -1)  # paths of the pairs at this distance, one row per rank
    lengths, edges = [np.array([-1, 0])], [paths, paths]
    length = kind_count = 0
    while True:
        start, edge = np.nonzero((distance == length)[:, graph.source] & (distance[:, graph.target] < 0))
        if not len(start):
            break
        length, kind_count = length + 1, sum(map(len, lengths))
        keys = ranks[start, graph.source[edge]]
        if length <= hops:
            keys = keys * base + codes[edge]
        best_keys = np.full(count * count, np.iinfo(np.int64).max)
        np.minimum.at(best_keys, start * count + graph.target[edge], keys)
        pairs = np.flatnonzero(best_keys < np.iinfo(np.int64).max)
        unique_keys, rank = np.unique(best_keys[pairs], return_inverse=True)
        if length <= hops:
            paths = paths[unique_keys // base]
            paths[:, length - 1] = unique_keys % base
        else:
            paths = paths[unique_keys]
        distance.flat[pairs], ranks.flat[pairs], kinds.flat[pairs] = length, rank, kind_count + rank
        lengths.append(np.full(len(unique_keys), length))
        edges.append(paths)
    features = np.concatenate([values, np.full((1, values.shape[1]), -1)])  # -1: no edge
    if not features.shape[1]:
        features = np.full((len(features), 1), -1)
    edge_features = features[np.concatenate(edges)]
    return {
        "pair_kinds": kinds.astype(np.int16 if edge_features.shape[0] < 2**15 else np.int32),
        "kind_distances": np.concatenate(lengths).astype(np.int16),
        "kind_edges": edge_features.astype(np.int16 if edge_features.max(initial=0) < 1 << 15 else np.int32),
    }
