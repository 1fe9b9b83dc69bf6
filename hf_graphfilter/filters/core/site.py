"""The place of a filter: what it may know about its attention module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class AttentionSite:
    """A self-attention module that can get a filter.

    Attributes:
        name: path of the module in the model.
        module: the attention module.
        heads: number of query heads.
        causal: whether a token sees only itself and earlier tokens.
        stack: ``"encoder"`` or ``"decoder"``.
        group: path of the list of layers, such as ``decoder.block``.
        index: number of the layer in its group, from 0.
        hidden_size: number of features of the module's input; None if the module does not pass its input on.
        head_dim: number of features of a query head.
        key_heads: number of key and value heads; 0 stands for ``heads``.
        tokens_first: whether the module and its layer take (tokens, batch, features).
        value_dim: number of features of a value head (fewer in latent attention); 0 stands for ``head_dim``.
        position_bias: whether the module adds a learned bias of positions to its scores (T5).
        sliding_window: number of tokens that a token sees; None for all.
        in_windows: whether the module attends within windows of an image, whose tokens have another order in other
            layers.
        stack_module: the module that runs the layers of the group and passes extra keyword arguments on to the
            attention of each; None if there is none.
        other_scores: what besides query and key determines the scores (talking heads ...); "" for nothing else.
    """

    name: str
    module: nn.Module
    heads: int
    causal: bool
    stack: str
    group: str
    index: int
    hidden_size: int | None = None
    head_dim: int = 0
    position_bias: bool = False
    sliding_window: int | None = None
    in_windows: bool = False
    other_scores: str = ""
    stack_module: nn.Module | None = None
    value_dim: int = 0
    key_heads: int = 0
    tokens_first: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_heads", self.key_heads or self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
