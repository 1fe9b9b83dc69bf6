"""Graph filters in place of self-attention, for pretrained Hugging Face models.

    from hf_graphfilter import patch_model
    patch_model(model, "gfsa", K=3)        # in place; starts as the original attention

Importing the package is cheap (no torch) and changes nothing for models without a filter; it lets ``from_pretrained``
load patched checkpoints.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import typing

from .errors import GraphFilterError

if typing.TYPE_CHECKING:
    from .card import create_model_card as create_model_card
    from .filters import FilterConfig as FilterConfig
    from .filters import GraphFilter as GraphFilter
    from .filters import available_filters as available_filters
    from .filters import register_filter as register_filter
    from .filters.agf import AGFConfig as AGFConfig
    from .filters.gfsa import GFSAConfig as GFSAConfig
    from .hosts import AttentionSite as AttentionSite
    from .hosts.timm import load_timm_model as load_timm_model
    from .hub import load_filter as load_filter
    from .hub import save_filter as save_filter
    from .patching import filter_parameters as filter_parameters
    from .patching import filter_status as filter_status
    from .patching import patch_model as patch_model
    from .patching import unpatch_model as unpatch_model
    from .remote_code import export_remote_code as export_remote_code
    from .shift import AttentionShift as AttentionShift
    from .shift import DenseShift as DenseShift
    from .shift import ShiftOperator as ShiftOperator
    from .testing import check_filter as check_filter
    from .training import BlendSchedule as BlendSchedule
    from .training import CoefficientCallback as CoefficientCallback
    from .training import OrthogonalityCallback as OrthogonalityCallback
    from .training import drop_blend as drop_blend
    from .training import filter_optimizer as filter_optimizer
    from .training import orthogonality_loss as orthogonality_loss
    from .training import parameter_groups as parameter_groups
    from .training import set_blend as set_blend
    from .training import transfer_attention as transfer_attention

__version__ = "0.1.0"

_EXPORTS = {
    "patching": ("patch_model", "unpatch_model", "filter_status", "filter_parameters"),
    "filters": ("FilterConfig", "GraphFilter", "available_filters", "register_filter"),
    "filters.gfsa": ("GFSAConfig",),
    "filters.agf": ("AGFConfig",),
    "shift": ("ShiftOperator", "AttentionShift", "DenseShift"),
    "training": (
        "filter_optimizer",
        "parameter_groups",
        "transfer_attention",
        "BlendSchedule",
        "set_blend",
        "drop_blend",
        "OrthogonalityCallback",
        "CoefficientCallback",
        "orthogonality_loss",
    ),
    "hub": ("save_filter", "load_filter"),
    "hosts": ("AttentionSite",),
    "testing": ("check_filter",),
    "remote_code": ("export_remote_code",),
    "hosts.timm": ("load_timm_model",),
    "card": ("create_model_card",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "patch_model",
    "unpatch_model",
    "filter_status",
    "filter_parameters",
    "GFSAConfig",
    "AGFConfig",
    "FilterConfig",
    "GraphFilter",
    "available_filters",
    "register_filter",
    "check_filter",
    "AttentionSite",
    "ShiftOperator",
    "AttentionShift",
    "DenseShift",
    "parameter_groups",
    "filter_optimizer",
    "transfer_attention",
    "BlendSchedule",
    "set_blend",
    "drop_blend",
    "OrthogonalityCallback",
    "CoefficientCallback",
    "orthogonality_loss",
    "save_filter",
    "load_filter",
    "export_remote_code",
    "load_timm_model",
    "create_model_card",
    "GraphFilterError",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _InstallWithTransformers(importlib.abc.MetaPathFinder):
    """Installs the seam right after ``transformers.modeling_utils`` is first imported, and then leaves."""

    TARGET = "transformers.modeling_utils"

    def find_spec(self, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        if name != self.TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: typing.Any) -> None:
                execute(module)
                _install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    from .hosts import transformers

    transformers.install()
    if modules := os.environ.get("HF_GRAPHFILTER_IMPORT"):  # hf-graphfilter run --import
        from .filters import import_filters

        import_filters(modules.split(os.pathsep))


if _InstallWithTransformers.TARGET in sys.modules:
    _install()
else:
    sys.meta_path.insert(0, _InstallWithTransformers())
