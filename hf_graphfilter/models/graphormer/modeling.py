"""The Graphormer models; importing this file registers them with the Auto classes.

Source: Ying et al., "Do Transformers Really Perform Badly for Graph Representation?" (NeurIPS 2021), which GFSA's
section 4.4 builds on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.models.mbart.modeling_mbart import MBartAttention, MBartEncoderLayer
from transformers.utils import can_return_tuple
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...errors import GraphFilterError
from .configuration import GraphormerConfig
from .inputs import check_inputs
from .structure import NodeEmbedding, PairBias


class GraphormerPreTrainedModel(PreTrainedModel):
    """The base of the Graphormer models: their initial weights, and what transformers may do with them."""

    config: GraphormerConfig
    config_class = GraphormerConfig
    base_model_prefix = "graphormer"
    main_input_name = "node_features"
    supports_gradient_checkpointing = True
    first_tokens = 1  # the virtual node, before the nodes that ``attention_mask`` is about
    accepts_loss_kwargs = False  # the loss is a mean, which the Trainer divides by its steps of accumulation
    _supports_sdpa = True
    _no_split_modules = ["MBartEncoderLayer", "PairBias"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": MBartEncoderLayer,
        "attentions": OutputRecorder(MBartAttention, index=1),
    }

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that transformers initialises our modules as it does its own."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PairBias):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class GraphormerModel(GraphormerPreTrainedModel):
    """Graphormer: a pre-norm Transformer encoder over the nodes of a graph and a virtual node.

    A bias per head and pair of nodes enters the attention scores; the encoder layers are those of transformers. So
    every graph filter that keeps the attention matrix can replace its self-attention. ``graphs.GraphCollator`` makes
    the inputs.

    Raises:
        GraphFilterError: Inputs that are missing or do not fit each other.

    Example:
        >>> from hf_graphfilter.graphs import GraphCollator
        >>> config = GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4], num_hidden_layers=2)
        >>> graph = {"node_features": [[6], [8]], "edge_index": [[0], [1]], "edge_features": [[1]]}
        >>> model = GraphormerModel(config)
        >>> model(**GraphCollator(config)([graph])).last_hidden_state.shape  # the virtual node comes first
        torch.Size([1, 3, 80])
    """

    def __init__(self, config: GraphormerConfig):
        super().__init__(config)
        self.embeddings = NodeEmbedding(config)
        self.position_bias = PairBias(config)
        layer: Any = MBartEncoderLayer  # the config has all that it reads
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.features

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.features = value  # type: ignore[assignment]

    @capture_outputs
    def forward(
        self,
        node_features: Tensor,
        in_degree: Tensor | None = None,
        out_degree: Tensor | None = None,
        pair_kinds: Tensor | None = None,
        kind_distances: Tensor | None = None,
        kind_edges: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode a batch of graphs.

        Args:
            node_features: (batch, nodes, features), integers.
            in_degree: (batch, nodes).
            out_degree: (batch, nodes).
            pair_kinds: (batch, nodes, nodes), the kind of the path from node i to node j.
            kind_distances: (batch, kinds), the length of such a path, -1 for none.
            kind_edges: (batch, kinds, hops, features), the features of its first edges, -1 for none.
            attention_mask: (batch, nodes), 0 for padding; None for no padding.
            kwargs: Options of transformers' encoder layers, such as ``output_hidden_states``.

        Returns:
            ``last_hidden_state`` (batch, 1 + nodes, hidden size), the virtual node first.
        """
        parts = (node_features, in_degree, out_degree, pair_kinds, kind_distances, kind_edges)
        node_features, *structure = check_inputs(self.config, parts, attention_mask)
        degrees, pairs = structure[:2], structure[2:]
        if attention_mask is None:
            attention_mask = torch.ones_like(degrees[0])
        hidden = self.embeddings(node_features, *degrees)
        bias = self.position_bias(*pairs, attention_mask.bool()).to(hidden.dtype)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        for layer in self.layers:
            hidden = layer(hidden, bias, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class GraphormerForGraphPrediction(GraphormerPreTrainedModel):
    """Graphormer with a head that predicts one or several targets per graph.

    ``forward`` takes the inputs of ``GraphormerModel`` and ``labels``: (batch, targets) floats for a regression and for
    several yes/no targets, (batch,) integers for classes. NaN marks a target that a graph does not have, which the loss
    leaves out. The loss of a regression is the mean absolute error unless the config says ``loss="mse"``. With several
    targets, ``label_std`` of the config also scales their errors, so that none counts for more because of its unit.

    Example:
        >>> config = GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4], num_hidden_layers=2)
        >>> from hf_graphfilter.graphs import GraphCollator
        >>> graph = {"node_features": [[6], [8]], "edge_index": [[0], [1]], "edge_features": [[1]], "labels": 0.5}
        >>> out = GraphormerForGraphPrediction(config)(**GraphCollator(config)([graph]))
        >>> out.logits.shape, out.loss.shape
        (torch.Size([1, 1]), torch.Size([]))
    """

    def __init__(self, config: GraphormerConfig):
        super().__init__(config)
        self.num_labels = int(config.num_labels or 1)
        self.graphormer = GraphormerModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        node_features: Tensor,
        in_degree: Tensor | None = None,
        out_degree: Tensor | None = None,
        pair_kinds: Tensor | None = None,
        kind_distances: Tensor | None = None,
        kind_edges: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        inputs = (node_features, in_degree, out_degree, pair_kinds, kind_distances, kind_edges, attention_mask)
        out = self.graphormer(*inputs, **{**kwargs, "return_dict": True})
        logits = self._predict(self._pool(out.last_hidden_state, attention_mask))
        config = self.config
        if config.label_std is not None or config.label_mean is not None:  # half precision would round to their digits
            logits = logits.float() if logits.element_size() < 4 else logits
        if config.label_std is not None:
            logits = logits * logits.new_tensor(config.label_std)
        if config.label_mean is not None:
            logits = logits + logits.new_tensor(config.label_mean)
        loss = None if labels is None else self._loss(logits.float() if logits.element_size() < 4 else logits, labels)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions
        )

    def _pool(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.config.pooling == "virtual":
            return hidden[:, 0]
        nodes = hidden[:, 1:]
        if attention_mask is None:
            return nodes.mean(1)
        present = attention_mask.to(nodes.dtype).unsqueeze(-1)
        return (nodes * present).sum(1) / present.sum(1).clamp(min=1)

    def _predict(self, pooled: Tensor) -> Tensor:
        """Return the output of the head in the precision of its weights, since autocast would round its digits."""
        weight = self.classifier.weight
        with maybe_autocast(pooled.device.type, enabled=False):
            return self.classifier(pooled.to(weight.dtype) if weight.is_floating_point() else pooled)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        is_class = self.config.problem_type == "single_label_classification"
        graphs, targets = logits.shape
        per_graph = 1 if is_class else targets
        if labels.shape != (graphs, per_graph) and not (per_graph == 1 and labels.shape == (graphs,)):
            raise GraphFilterError(
                f"{graphs} graphs need labels of shape {(graphs, per_graph)}, got {tuple(labels.shape)}"
            )
        if is_class:
            if labels.is_floating_point():
                raise GraphFilterError(f"labels must hold the number of each graph's class, got {labels.dtype}")
            return F.cross_entropy(logits, labels.reshape(-1).long())
        labels = labels.reshape(logits.shape).to(logits.dtype)
        has_label = ~labels.isnan()
        target = labels.nan_to_num()
        if self.config.problem_type == "multi_label_classification":
            losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        else:
            errors = logits - target
            if self.num_labels > 1 and self.config.label_std is not None:
                std = logits.new_tensor(self.config.label_std)
                errors = errors * (std.mean() / std)  # equal units; the loss keeps its size
            losses = errors.abs() if self.config.loss == "l1" else errors.square()
        return (losses * has_label).sum() / has_label.sum().clamp(min=1)


AutoModel.register(GraphormerConfig, GraphormerModel, exist_ok=True)
