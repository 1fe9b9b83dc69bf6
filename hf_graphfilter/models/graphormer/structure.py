"""What Graphormer adds to a Transformer: the embedding of nodes, and the bias of every pair of nodes."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration import GraphormerConfig


def first_rows(sizes: list[int]) -> list[int]:
    """Return the first row of each feature in a table with one row per value of all features.

    Example:
        >>> first_rows([28, 4, 2])
        [0, 28, 32]
    """
    return [0, *accumulate(sizes)][: len(sizes)]


class NodeEmbedding(nn.Module):
    """Centrality encoding (Graphormer, Eq. 5): features of a node, its in-degree and its out-degree.

    The virtual node, which every node is connected with, comes first and has an embedding of its own.
    """

    def __init__(self, config: GraphormerConfig):
        super().__init__()
        self.first, self.max_degree = first_rows(list(config.node_feature_sizes)), config.max_degree
        self.features = nn.Embedding(sum(config.node_feature_sizes), config.hidden_size)
        self.in_degree = nn.Embedding(config.max_degree + 1, config.hidden_size)
        self.out_degree = nn.Embedding(config.max_degree + 1, config.hidden_size)
        self.virtual_node = nn.Embedding(1, config.hidden_size)

    def forward(self, node_features: Tensor, in_degree: Tensor, out_degree: Tensor) -> Tensor:
        """Map (batch, nodes, features) and twice (batch, nodes) to (batch, 1 + nodes, hidden size)."""
        rows = node_features + torch.tensor(self.first, device=node_features.device)
        nodes = self.features(rows).sum(-2)
        nodes = nodes + self.in_degree(in_degree.clamp(max=self.max_degree))
        nodes = nodes + self.out_degree(out_degree.clamp(max=self.max_degree))
        virtual = self.virtual_node(in_degree.new_zeros(len(in_degree), 1))
        return torch.cat([virtual, nodes], 1)


class PairBias(nn.Module):
    """Spatial and edge encoding (Graphormer, Eq. 6 and 7): a bias per head and pair of nodes.

    Pairs with the same distance and the same edges on their path share a bias. So it is computed once per *kind* of
    pair, and each pair looks up its kind.
    """

    def __init__(self, config: GraphormerConfig):
        super().__init__()
        heads, self.max_distance = config.num_attention_heads, config.max_distance
        self.first, self.edge_values = first_rows(list(config.edge_feature_sizes)), sum(config.edge_feature_sizes)
        encoding = config.edge_encoding if self.edge_values else "none"
        self.distance = nn.Embedding(config.max_distance + 2, heads)  # the last one: no path
        self.virtual_distance = nn.Embedding(1, heads)
        self.edges: nn.Module | None
        self.register_module("edges", None if encoding == "none" else nn.Embedding(self.edge_values, heads))
        hops = nn.Parameter(torch.empty(config.max_hops, heads, heads)) if encoding == "path" else None
        self.hops: nn.Parameter | None
        self.register_parameter("hops", hops)
        self.spread = config.initializer_range

    def reset_parameters(self) -> None:
        if self.hops is not None:
            init.normal_(self.hops, std=self.spread)

    def forward(self, pair_kinds: Tensor, kind_distances: Tensor, kind_edges: Tensor, present: Tensor) -> Tensor:
        """Return the bias to add to the attention scores; the virtual node comes first.

        Args:
            pair_kinds: (batch, nodes, nodes), the kind of the path from node i to node j.
            kind_distances: (batch, kinds), the length of the path; -1 for no path.
            kind_edges: (batch, kinds, hops, features), the features of its first edges; -1 for no edge.
            present: (batch, nodes), bool, False for padding.

        Returns:
            (batch, heads, 1 + nodes, 1 + nodes) in the dtype of the weights, with the lowest number where the key is
            padding.
        """
        batch, kinds = kind_distances.shape
        rows = kind_distances.clamp(max=self.max_distance)
        bias = self.distance(torch.where(kind_distances < 0, self.max_distance + 1, rows))
        if self.edges is not None:
            bias = bias + self._edge_bias(kind_distances, kind_edges)
        virtual = self.virtual_distance(pair_kinds.new_zeros(1))
        hidden = torch.full_like(virtual, torch.finfo(virtual.dtype).min)
        table = torch.cat([virtual, hidden, bias.flatten(0, 1)])  # (2 + batch * kinds, heads)
        first = 2 + kinds * torch.arange(batch, device=pair_kinds.device)
        # torch.compile takes the value of F.pad as a constant, so the virtual node has the same row in every batch: 0
        rows = F.pad(pair_kinds + first[:, None, None], (1, 0, 1, 0))
        keys = F.pad(present, (1, 0), value=True)
        rows = torch.where(keys[:, None, :], rows, 1)
        looked_up = table.t().index_select(1, rows.flatten())
        return looked_up.unflatten(1, rows.shape).transpose(0, 1).contiguous()

    def _edge_bias(self, distances: Tensor, edges: Tensor) -> Tensor:
        """Return the edge encoding of each kind, (batch, kinds, heads)."""
        assert self.edges is not None
        table = self.edges(torch.arange(self.edge_values, device=edges.device))
        table = F.pad(table, (0, 0, 1, 0))  # row 0: no edge
        rows = edges + torch.tensor(self.first, device=edges.device) + 1
        rows = torch.where(edges < 0, 0, rows)
        if self.hops is None:  # the edge between adjacent nodes
            adjacent = distances == 1
            return F.embedding(rows[:, :, 0], table).mean(-2) * adjacent.unsqueeze(-1)
        # x_e (w_n)^T of Eq. 7 for all values of the features at once: rows of hop n begin at n * len(table)
        by_hop = torch.einsum("vh,nhk->nvk", table, self.hops.to(table.dtype)).flatten(0, 1)
        hops = rows.shape[2]
        begin = torch.arange(hops, device=rows.device)[:, None] * len(table)
        summed = F.embedding((rows + begin).flatten(2), by_hop).sum(-2)
        return summed / (len(self.first) * distances.clamp(1, hops).unsqueeze(-1))
