"""The graph filters. Every module in this package is imported here: a new filter is one new file."""

from importlib import import_module
from pkgutil import iter_modules

from .core.base import FilterConfig, GraphFilter
from .core.build import as_config, register_filter
from .core.registry import available_filters, get_filter, import_filters
from .core.replacing import ReplacingConfig, ReplacingFilter
from .core.site import AttentionSite

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "AttentionSite",
    "FilterConfig",
    "GraphFilter",
    "ReplacingConfig",
    "ReplacingFilter",
    "as_config",
    "available_filters",
    "get_filter",
    "import_filters",
    "register_filter",
]
