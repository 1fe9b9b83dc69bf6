"""Check the inputs of the Graphormer models, which other code than ``graphs.GraphCollator`` may make."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import GraphFilterError
from .configuration import GraphormerConfig

MAKE = "make the batch with hf_graphfilter.graphs.GraphCollator(model.config), as the data_collator of a Trainer"


def check_inputs(
    config: GraphormerConfig,
    node_features: Tensor,
    structure: tuple[Tensor | None, ...],
    attention_mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the structure of a batch of graphs that the model has embeddings for.

    Args:
        config: Of the model.
        node_features: (batch, nodes, features).
        structure: In- and out-degree, ``pair_kinds``, ``kind_distances`` and ``kind_edges``.
        attention_mask: (batch, nodes), or None.

    Raises:
        GraphFilterError: A part is missing, has another shape or dtype, or was made for another config. Values are
            checked on a CPU alone, since a GPU would have to wait for them, and not while the model is compiled.
    """
    parts = tuple(part for part in structure if part is not None)
    if len(parts) < len(structure):
        raise GraphFilterError(
            "a graph needs node_features, in_degree, out_degree, pair_kinds, kind_distances and kind_edges: " + MAKE
        )
    in_degree, out_degree, pair_kinds, _, edges = parts
    for name, part in (("node_features", node_features), ("pair_kinds", pair_kinds), ("kind_edges", edges)):
        if part.dtype not in (torch.int64, torch.int32):
            raise GraphFilterError(f"{name} must hold 64-bit integers, got {part.dtype}: {MAKE}")
    batch, nodes = node_features.shape[:2]
    shapes = {"pair_kinds": (batch, nodes, nodes), "in_degree": (batch, nodes), "out_degree": (batch, nodes)}
    found = {"pair_kinds": pair_kinds, "in_degree": in_degree, "out_degree": out_degree}
    if attention_mask is not None:
        shapes["attention_mask"], found["attention_mask"] = (batch, nodes), attention_mask
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise GraphFilterError(
                f"{batch} graphs of {nodes} nodes need {name} of shape {shape}, got {tuple(found[name].shape)}: {MAKE}"
            )
    reads_edges = bool(config.edge_feature_sizes) and config.edge_encoding != "none"
    sizes = {"node_features": (node_features, config.node_feature_sizes)}
    if reads_edges:
        sizes["kind_edges"] = (edges, config.edge_feature_sizes)
        if config.edge_encoding == "path" and edges.shape[2] != config.max_hops:
            raise GraphFilterError(
                f"these graphs were prepared with {edges.shape[2]} hops, and the model has "
                f"max_hops={config.max_hops}: prepare them with the config of the model"
            )
    is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing() or type(node_features) is not Tensor
    can_read = node_features.device.type == "cpu" and not is_recorded
    for name, (values, limits) in sizes.items():
        setting = name.replace("kind_edges", "edge_features").replace("features", "feature_sizes")
        message = f"{name} was made for another config than the model's ({setting}={list(limits)}): {MAKE}"
        if values.shape[-1] != len(limits):
            raise GraphFilterError(message)
        if can_read and (values >= values.new_tensor(limits)).any():
            raise GraphFilterError(message)
    return parts
