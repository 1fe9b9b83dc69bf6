"""The earlier name of ``hf_graphfilter.fitting``."""

from ..fitting import TransferReport, transfer_attention

__all__ = ["TransferReport", "transfer_attention"]
