"""Attention transfer: fit every filter to the attention that it replaces, on unlabelled data."""

from .call import transfer_attention
from .report import TransferReport

__all__ = ["TransferReport", "transfer_attention"]
