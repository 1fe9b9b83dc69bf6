"""Attention as a linear operator over tokens."""

from ..ops.heads import repeat_heads
from .attention import AttentionCall, AttentionShift
from .operator import DenseShift, PastRows, ShiftOperator

__all__ = ["AttentionCall", "AttentionShift", "DenseShift", "PastRows", "ShiftOperator", "repeat_heads"]
