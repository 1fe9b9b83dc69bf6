"""Read one graph in any of the usual layouts, and check it against a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GraphFilterError, shown
from ..models.graphormer.configuration import GraphormerConfig

Integers = NDArray[np.int64]
NAMES = {  # ours, PyTorch Geometric's, and OGB's
    "node_features": ("node_features", "x", "node_feat"),
    "edge_features": ("edge_features", "edge_attr", "edge_feat"),
    "labels": ("labels", "label", "y"),
}


@dataclass(frozen=True)
class Graph:
    """A checked graph without self-loops: every edge once per direction.

    Attributes:
        nodes: (nodes, node features).
        source, target: (edges,), the nodes of each edge.
        edges: (edges, edge features).
    """

    nodes: Integers
    source: Integers
    target: Integers
    edges: Integers


def check_config(config: Any) -> None:
    """Raise if this is no config of Graphormer, such as the model itself."""
    if not isinstance(config, GraphormerConfig):
        raise GraphFilterError(f"config must be a GraphormerConfig, such as model.config, got {type(config).__name__}")


def find(graph: Any, name: str) -> Any:
    """Return a part of a graph under any of its usual names, or None.

    Example:
        >>> find({"x": [[6]], "edge_index": [[], []]}, "node_features")
        [[6]]
    """
    for spelling in NAMES[name]:
        value = graph.get(spelling) if isinstance(graph, Mapping) else getattr(graph, spelling, None)
        if value is not None:
            return value
    return None


def read_graph(graph: Any, config: GraphormerConfig) -> Graph:
    """Return a graph that ``config`` has embeddings for.

    Args:
        graph: a mapping or an object (PyTorch Geometric's ``Data``) with node features, ``edge_index`` of shape
            (2, edges), and edge features.
        config: its feature sizes, ``directed`` and ``max_nodes``.

    Raises:
        GraphFilterError: A part is missing, has another shape, or holds values out of range.
    """
    check_config(config)
    if isinstance(graph, str):
        raise GraphFilterError(f"a graph is needed, got the text {shown(graph)}: read a molecule with from_smiles")
    if hasattr(graph, "to_data_list"):
        raise GraphFilterError("a graph is needed, got a Batch of graphs: give its to_data_list()")
    nodes = _features(find(graph, "node_features"), "node", config.node_feature_sizes)
    if not len(nodes):
        raise GraphFilterError("the graph is empty: leave out graphs without nodes")
    if len(nodes) > config.max_nodes:
        raise GraphFilterError(
            f"the graph has {len(nodes)} nodes, and max_nodes is {config.max_nodes}: raise max_nodes"
        )
    index = graph.get("edge_index") if isinstance(graph, Mapping) else getattr(graph, "edge_index", None)
    if index is None:
        raise GraphFilterError(
            "the graph has no edge_index: give [[], []] where it has no edges, and give a Trainer "
            "remove_unused_columns=False"
        )
    ends = _integers(index, "edge_index")
    ends = ends if ends.size else ends.reshape(2, -1)
    if ends.ndim != 2 or len(ends) != 2:
        raise GraphFilterError(f"edge_index must have the shape (2, edges), got {ends.shape}")
    if ends.size and not (ends.min() >= 0 and ends.max() < len(nodes)):
        raise GraphFilterError(
            f"edge_index names node {ends.max() if ends.min() >= 0 else ends.min()}, and the graph has nodes 0 to "
            f"{len(nodes) - 1}"
        )
    edges = _edge_features(graph, config, ends.shape[1])
    keep = ends[0] != ends[1]
    return _check_directions(nodes, ends[:, keep], edges[keep], config.directed)


def read_table(value: Any, name: str, dtype: type | None = None) -> NDArray[Any]:
    """Return numbers in any container as an array; None gives an empty one.

    Raises:
        GraphFilterError: ``value`` does not hold numbers, or holds rows of different lengths.
    """
    try:
        array = np.asarray([] if value is None else value, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:  # of tensors with gradients, sparse ones, ragged lists
        raise GraphFilterError(
            f"{name} must be a rectangular table of numbers: {' '.join(str(error).split())}"
        ) from error
    if not array.size and array.dtype == object:  # of ``datasets`` in NumPy's format
        array = array.astype(float)
    if array.dtype.kind not in "iufb":
        raise GraphFilterError(f"{name} must be a rectangular table of numbers, got {shown(value)}")
    return array


def _integers(value: Any, name: str) -> Integers:
    array = read_table(value, name)
    if array.dtype.kind in "fu":
        values = array.astype(np.float64)
        wrong = array[~((values == np.trunc(values)) & (abs(values) < 2**63))]  # NaN equals nothing
        if wrong.size:
            raise GraphFilterError(f"{name} must hold 64-bit integers, found {shown(wrong[0].item())} among them")
    return array.astype(np.int64)


def _features(value: Any, kind: str, sizes: Any) -> Integers:
    if value is None:
        raise GraphFilterError(f"the graph has no {kind}_features (nor {' or '.join(NAMES[f'{kind}_features'][1:])})")
    table = _integers(value, f"{kind}_features")
    if table.ndim == 1:
        table = table[:, None] if len(table) else table.reshape(0, len(sizes))
    if table.ndim != 2 or table.shape[1] != len(sizes):
        raise GraphFilterError(
            f"{kind}_features must have the shape ({kind}s, {len(sizes)}), as {kind}_feature_sizes={list(sizes)} says; "
            f"got {table.shape}"
        )
    wrong = (table < 0) | (table >= np.asarray(sizes))
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        raise GraphFilterError(
            f"feature {column} of {kind} {row} is {table[row, column]}, and {kind}_feature_sizes allows 0 to "
            f"{sizes[column] - 1}"
        )
    return table


def _edge_features(graph: Any, config: GraphormerConfig, edges: int) -> Integers:
    if not config.edge_feature_sizes or config.edge_encoding == "none":
        return np.zeros((edges, 0), np.int64)
    value = find(graph, "edge_features")
    if not edges and not read_table(value, "edge_features").size:
        return np.zeros((0, len(config.edge_feature_sizes)), np.int64)
    table = _features(value, "edge", config.edge_feature_sizes)
    if len(table) != edges:
        raise GraphFilterError(f"edge_index has {edges} edges, and edge_features has {len(table)} rows")
    return table


def _check_directions(nodes: Integers, ends: Integers, edges: Integers, directed: bool) -> Graph:
    """Return the graph with each edge once, or once per direction if the graph is undirected."""
    count = len(nodes)
    rows = np.unique(np.concatenate([ends, edges.T]).T, axis=0)
    codes = rows[:, 0] * count + rows[:, 1]
    repeated = codes[1:][codes[1:] == codes[:-1]]
    if len(repeated):
        first, second = divmod(int(repeated[0]), count)
        raise GraphFilterError(f"the edge from node {first} to node {second} is given twice, with different features")
    if not directed and len(rows):
        has_reverse = np.isin(codes, rows[:, 1] * count + rows[:, 0])
        if has_reverse.any() and not has_reverse.all():
            raise GraphFilterError(
                f"edge_index holds {int(has_reverse.sum())} edges in both directions and {int((~has_reverse).sum())} "
                "in one: give an undirected graph each edge once or always twice, or set directed=True"
            )
        flipped = rows[:, [1, 0, *range(2, rows.shape[1])]]
        if not has_reverse.any():
            rows = np.concatenate([rows, flipped])
        elif (np.unique(flipped, axis=0) != rows).any():
            raise GraphFilterError("edge features differ between the two directions of an edge: set directed=True")
    return Graph(nodes, rows[:, 0], rows[:, 1], rows[:, 2:])
