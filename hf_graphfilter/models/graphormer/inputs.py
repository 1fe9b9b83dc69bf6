"""What the Graphormer models take, and the check of it: other code than ``graphs.GraphCollator`` may make a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import GraphFilterError
from .configuration import GraphormerConfig

PARTS = ("node_features", "in_degree", "out_degree", "pair_kinds", "kind_distances", "kind_edges")
HOPS = {"direct": 1, "none": 0}  # number of edges that are read per path; "path" reads max_hops
MAKE = "make the batch with hf_graphfilter.graphs.GraphCollator(model.config), as the data_collator of a Trainer"


def count_hops(config: GraphormerConfig) -> int:
    """Return how many edges the model reads from the start of each path."""
    return HOPS.get(config.edge_encoding, config.max_hops) if config.edge_feature_sizes else 0


def check_inputs(
    config: GraphormerConfig, parts: tuple[Tensor | None, ...], attention_mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the parts of a batch of graphs that the model has embeddings for.

    Args:
        config: Of the model.
        parts: The tensors of ``PARTS``, in this order.
        attention_mask: (batch, nodes), or None.

    Raises:
        GraphFilterError: A part is missing, has another shape or dtype, or was made for another config. Values are
            checked on a CPU alone, since a GPU would have to wait for them, and not while the model is compiled.
    """
    given = {name: part for name, part in zip(PARTS, parts, strict=True) if part is not None}
    if len(given) < len(PARTS):
        raise GraphFilterError(f"a graph needs {', '.join(PARTS[:-1])} and {PARTS[-1]}: {MAKE}")
    for name, part in given.items():
        if part.dtype not in (torch.int64, torch.int32):
            raise GraphFilterError(f"{name} must hold 64-bit integers, got {part.dtype}: {MAKE}")
    node_features, edges = given["node_features"], given["kind_edges"]
    batch, nodes = node_features.shape[:2]
    shapes = {"pair_kinds": (batch, nodes, nodes), "in_degree": (batch, nodes), "out_degree": (batch, nodes)}
    masks = {} if attention_mask is None else {"attention_mask": attention_mask}
    for name, part in (given | masks).items():
        shape = (batch, nodes) if name in masks else shapes.get(name, part.shape)
        if part.shape != shape:
            raise GraphFilterError(
                f"{batch} graphs of {nodes} nodes need {name} of shape {shape}, got {tuple(part.shape)}: {MAKE}"
            )
    sizes = {"node_features": config.node_feature_sizes}
    if hops := count_hops(config):
        sizes["kind_edges"] = config.edge_feature_sizes
        if config.edge_encoding == "path" and edges.shape[2] != hops:
            raise GraphFilterError(
                f"these graphs were prepared with {edges.shape[2]} hops, and the model has max_hops={hops}: prepare "
                "them with the config of the model"
            )
    is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing() or type(node_features) is not Tensor
    can_read = node_features.device.type == "cpu" and not is_recorded
    for name, limits in sizes.items():
        values = given[name]
        if values.shape[-1] != len(limits) or (can_read and (values >= values.new_tensor(limits)).any()):
            setting = "node_feature_sizes" if name == "node_features" else "edge_feature_sizes"
            raise GraphFilterError(
                f"{name} was made for another config than the model's ({setting}={list(limits)}): {MAKE}"
            )
    return tuple(given.values())
