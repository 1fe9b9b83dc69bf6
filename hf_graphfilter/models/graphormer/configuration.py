"""The config of the Graphormer models; importing this file registers it with ``AutoConfig``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args

from transformers import AutoConfig
from transformers.activations import ACT2FN

from ...errors import GraphFilterError, has_type, is_number, nearest, shown
from ..configuration import CheckedConfig

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
CHOICES = {
    "edge_encoding": ("path", "direct", "none"),
    "pooling": ("virtual", "mean"),
    "problem_type": get_args(ProblemType),
    "loss": ("l1", "mse"),
    "hidden_act": tuple(ACT2FN),
}
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_hops",
    "max_distance",
    "max_degree",
    "max_nodes",
)
ATOMS, BONDS = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)  # of OGB's molecules and of ``graphs.from_smiles``


class GraphormerConfig(CheckedConfig):
    """Config of ``GraphormerModel`` and ``GraphormerForGraphPrediction``.

    The defaults are Graphormer-slim, which GFSA's paper trains on ZINC (section 4.4 and appendix H), for molecules
    with the features of the Open Graph Benchmark.

    Attributes:
        node_feature_sizes: Number of values of each categorical feature of a node. A feature is an integer from 0 to
            its size - 1.
        edge_feature_sizes: The same for edges; an empty list for edges without features.
        hidden_size: Features per node.
        num_hidden_layers, num_attention_heads, intermediate_size, hidden_act: Sizes and activation of the encoder.
        edge_encoding: ``"path"`` adds the mean of the edges on the shortest path, weighted by their place on it
            (Graphormer, Eq. 7). ``"direct"`` adds the features of the edge between adjacent nodes only. ``"none"``
            leaves edge features out.
        max_hops: Number of first edges of a path that ``"path"`` reads; later ones are ignored.
        max_distance: Longest shortest-path distance with its own bias. Longer ones share it. Nodes in unconnected
            parts have a bias of their own.
        max_degree: Largest degree with its own embedding. Larger ones share it.
        max_nodes: Largest graph that ``graphs.prepare_graph`` accepts.
        directed: Whether edges have a direction. If not, ``edge_index`` holds each edge once or in both directions.
        pooling: ``"virtual"`` predicts from the virtual node, as the paper does; ``"mean"`` from the mean of all nodes.
        problem_type: ``"regression"``, ``"single_label_classification"`` or ``"multi_label_classification"``.
        loss: The loss of a regression: ``"l1"`` (mean absolute error, as in the papers) or ``"mse"``.
        label_mean, label_std: Per target of a regression, the output is multiplied by ``label_std``, then
            ``label_mean`` is added. So the network predicts standardised numbers, and its logits have the unit of the
            labels. None means 0 and 1.
        dropout: Dropout rate of the outputs of attention and feed-forward network.
        attention_dropout, activation_dropout: Dropout rates of the attention matrix and of the hidden features of the
            feed-forward network.
        initializer_range: Standard deviation of all initial weights.

    Raises:
        GraphFilterError: An unknown choice, or a number out of range.

    Example:
        >>> GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[4]).max_hops
        5
    """

    model_type = "graphormer"
    attribute_map: ClassVar[dict[str, str]] = {  # the names that the encoder layer of mBART reads
        "d_model": "hidden_size",
        "encoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    }

    node_feature_sizes: list[int] | tuple[int, ...] = ATOMS
    edge_feature_sizes: list[int] | tuple[int, ...] = BONDS
    hidden_size: int = 80
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 80
    hidden_act: str = "gelu"
    edge_encoding: str = "path"
    max_hops: int = 5
    max_distance: int = 20
    max_degree: int = 64
    max_nodes: int = 512
    directed: bool = False
    pooling: str = "virtual"
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = (
        "regression"
    )
    loss: str = "l1"
    label_mean: list[float] | None = None
    label_std: list[float] | None = None
    dropout: float | int = 0.0
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.1
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: object) -> None:
        if "num_labels" not in kwargs and self.id2label is None:
            kwargs["num_labels"] = 1
        if self.problem_type is None:
            self.problem_type = "regression"
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                # there a similar word means something else: mae is l1, not mse
                hint = "" if name in ("loss", "problem_type") else nearest(value, choices)
                raise GraphFilterError(
                    f"GraphormerConfig: {name}={shown(value)}{hint}: use one of {', '.join(map(repr, choices))}"
                )
        for name in SIZES:
            if type(value := getattr(self, name)) is not int or value < 1:
                raise GraphFilterError(f"GraphormerConfig: {name} must be an integer >= 1, got {shown(value)}")
        for name, least in (("node_feature_sizes", 1), ("edge_feature_sizes", 0)):
            sizes = () if (sizes := getattr(self, name)) is None else sizes
            sizes = list(sizes) if isinstance(sizes, Iterable) else sizes
            if not has_type(sizes, list[int]) or len(sizes) < least or any(size < 1 for size in sizes):
                raise GraphFilterError(
                    f"GraphormerConfig: {name} must list the number of values of each feature, got {shown(sizes)}"
                )
            setattr(self, name, sizes)
        if self.hidden_size % self.num_attention_heads:
            raise GraphFilterError(
                f"GraphormerConfig: hidden_size={self.hidden_size} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not 0 <= value < 1:
                raise GraphFilterError(f"GraphormerConfig: {name} must be in [0, 1), got {shown(value)}")
        value = self.initializer_range
        if not isinstance(value, float | int) or not 0 <= value < math.inf:
            raise GraphFilterError(f"GraphormerConfig: initializer_range must be a number >= 0, got {shown(value)}")
        if not isinstance(self.directed, bool):
            raise GraphFilterError(f"GraphormerConfig: directed must be True or False, got {shown(self.directed)}")
        if "num_labels" in kwargs:
            if not is_number(targets := kwargs["num_labels"], whole=True) or not targets:
                raise GraphFilterError(f"GraphormerConfig: num_labels must be an integer >= 1, got {shown(targets)}")
            kwargs["num_labels"] = int(targets)  # type: ignore[call-overload]
        super().__post_init__(**kwargs)
        if not self.num_labels:
            raise GraphFilterError("GraphormerConfig: num_labels must be an integer >= 1")
        for name, above in (("label_mean", -math.inf), ("label_std", 0.0)):
            values = getattr(self, name)
            if hasattr(values, "tolist"):  # an array
                setattr(self, name, values := values.tolist())
            if values is not None and self.problem_type != "regression":
                raise GraphFilterError(
                    f"GraphormerConfig: {name} needs problem_type='regression', got {self.problem_type!r}"
                )
            if values is not None and (
                not has_type(values, list[float])
                or len(values) != self.num_labels
                or not all(above < x < math.inf for x in values)
            ):
                raise GraphFilterError(
                    f"GraphormerConfig: {name} must be a list of {self.num_labels} finite "
                    f"number{'s' * (self.num_labels != 1)}, one per target"
                    f"{', above 0' * (name == 'label_std')}; got {shown(values)}"
                )

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the entries to save, always with the labels, whose default is not transformers' default of two."""
        return super().to_diff_dict() | {"id2label": self.id2label, "label2id": self.label2id}


AutoConfig.register(GraphormerConfig.model_type, GraphormerConfig, exist_ok=True)
