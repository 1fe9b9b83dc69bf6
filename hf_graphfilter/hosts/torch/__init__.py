"""The host for PyTorch's own attention: ``torch.nn.MultiheadAttention`` in any module, and ``GraphFilterAttention``.

A patched ``MultiheadAttention`` gets a subclass of its class whose ``forward`` runs the filter; no class of PyTorch is
changed. ``nn.TransformerEncoderLayer`` has a fast path that reads the weights of its attention and calls no forward. It
leaves that path where a module inside has a hook, and every patched module has one (``hosts.watching``).

Attention that calls ``scaled_dot_product_attention`` itself has no module to find. Its author writes
``GraphFilterAttention`` in place of the call, which this host then finds as a module of its own.
"""

from .attaching import attach, backend, detach, kind, leads_to_filter
from .finding import find, relative_name, saved_names
from .keeping import base_model, model_type, pipeline_tag, read_record, usage, write_record

LIBRARY = "pytorch"

__all__ = [
    "LIBRARY",
    "attach",
    "backend",
    "base_model",
    "detach",
    "find",
    "kind",
    "leads_to_filter",
    "model_type",
    "pipeline_tag",
    "read_record",
    "relative_name",
    "saved_names",
    "usage",
    "write_record",
]
