"""An earlier name of ``hf_graphfilter.fitting``, kept for programs that import it."""

from ..fitting import TransferReport, transfer_attention

__all__ = ["TransferReport", "transfer_attention"]
