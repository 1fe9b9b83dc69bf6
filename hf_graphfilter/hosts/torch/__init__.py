"""The host for PyTorch's own attention: ``torch.nn.MultiheadAttention`` in any module, and ``GraphFilterAttention``.

A patched ``MultiheadAttention`` gets a subclass of its class whose ``forward`` runs the filter; no class of PyTorch is
changed. ``nn.TransformerEncoderLayer`` has a fast path that reads the weights of its attention and calls no forward. It
does not use that path if a module inside has a hook, and every patched module has one (``hosts.watching``).

If your model calls ``scaled_dot_product_attention`` itself, there is no attention module to find. Write
``GraphFilterAttention`` instead of the call; this host finds it as a module.
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
