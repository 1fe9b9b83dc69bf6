"""The attention implementation that a config names: ours in a patched module's, the user's in the model's."""

from __future__ import annotations

from typing import Any

import torch

IMPLEMENTATION = "hf_graphfilter"
# written into config.json: without this package, transformers quotes it in its error. It must not contain "flash",
# "sdpa", "flex_attention" or "/", which have a meaning for transformers
CURE = (
    f"{IMPLEMENTATION} (pip install -U hf-graphfilter, then import hf_graphfilter before loading; any other value "
    "loads the model without its graph filter)"
)
BASE_CONFIG = "_graph_filter_base_config"  # of a patched module's config: that of its model
CHOSEN = "_attn_implementation_internal"  # in a config: what ``_attn_implementation`` returns
ENGINES = ("vllm", "sglang")  # what their transformers backends write into the configs they find
SERVING = (
    "vLLM and SGLang, whose attention writes the cache at every call, cannot serve patched models: use generate() or "
    "transformers serve"
)
PAGED = "paged attention (continuous batching) cannot be filtered; use generate()"


def read_fields(config: Any, *names: str) -> Any:
    """Return ``config.first.second ...`` without the ``__getattribute__`` of configs, which takes microseconds.

    A compiler reads the fields only once, so it uses ``getattr``.
    """
    read: Any = getattr if torch.compiler.is_compiling() else object.__getattribute__
    for name in names:
        config = read(config, name)
    return config


def backend(module: Any) -> str:
    """Return the attention implementation that the user chose, read at each call from the model's own config."""
    return getattr(module.config, BASE_CONFIG, module.config)._attn_implementation or "eager"


def kind(module: Any) -> type:
    """Return the class of the model's config, from which the config of a patched module is derived."""
    config = getattr(module, "config", None)
    return type(getattr(config, BASE_CONFIG, config))
