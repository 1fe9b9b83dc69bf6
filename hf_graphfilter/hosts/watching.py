"""A check that the forward of a patched module reaches its filter."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn

from ..errors import GraphFilterError
from .base import describe_site

_runs = threading.local()  # latest: id of the module whose filter ran last in this thread, until its forward ends
_RAN = "_graph_filter_ran"  # of a patched module: whether its filter ran in compiled code, which knows no threads
_NOTICE = "graph_filter"  # the key of the two hooks
REPLACED = "its forward was replaced"  # beginning of the reason for refusing such a module


def running_forward(module: nn.Module) -> Any:
    """Return the function that runs as the forward of a module, without what wraps it (accelerate's hooks ...)."""
    forward = inspect.unwrap(vars(module).get("forward", type(module).forward))
    return getattr(forward, "__func__", forward)


def watch(module: nn.Module) -> None:
    """Make a forward of a patched module raise unless it runs the filter."""
    object.__setattr__(module, _RAN, False)
    module._forward_pre_hooks[_NOTICE] = _begin  # type: ignore[index]  # by name: the same in a model that was pickled
    module._forward_hooks[_NOTICE] = _notice  # type: ignore[index]


def unwatch(module: nn.Module) -> None:
    """Undo ``watch``."""
    module._forward_pre_hooks.pop(_NOTICE, None)  # type: ignore[call-overload]
    module._forward_hooks.pop(_NOTICE, None)  # type: ignore[call-overload]
    vars(module).pop(_RAN, None)


def has_other_hooks(module: nn.Module) -> bool:
    """Return whether a hook that is not ours receives what the forward of a patched module returns."""
    return not module._forward_hooks.keys() <= {_NOTICE}


def note_filter_runs(module: nn.Module) -> None:
    """Record that the filter of a module runs."""
    if torch.compiler.is_compiling():
        object.__setattr__(module, _RAN, True)  # past nn.Module's, which takes a microsecond
    else:
        _runs.latest = id(module)


def _begin(module: Any, args: Any) -> None:
    """Forget a run whose forward did not end in ``_notice``: an exception, or a call of ``forward`` itself."""
    if not torch.compiler.is_compiling():
        _runs.latest = None


def _notice(module: Any, args: Any, output: Any) -> None:
    """Raise if the filter did not run in the forward of ``module`` that ends here."""
    if not torch.compiler.is_compiling():
        ran, _runs.latest = getattr(_runs, "latest", None) == id(module), None
        if ran:
            return
    if not getattr(module, _RAN, False):  # where only the forward is compiled, this hook asks from outside
        raise GraphFilterError(
            f"{describe_site(module)} ran without its graph filter, since its forward or its class was replaced: put "
            "the original back, or call unpatch_model"
        )
    object.__setattr__(module, _RAN, False)


def refuse_script(module: Any) -> nn.Module:
    """Raise for ``torch.jit.script``, which cannot compile a graph filter."""
    raise GraphFilterError(
        f"{module.graph_filter.site_name}: torch.jit.script cannot compile a graph filter; use torch.compile, "
        "torch.export or torch.jit.trace"
    )


def as_written(module: Any) -> bool:
    """Return whether the forward of an unpatched module's class is the one that its file defines."""
    forward, cls = running_forward(module), type(module)
    defined = forward.__module__, forward.__qualname__
    return "forward" not in vars(module) and defined == (cls.__module__, f"{cls.__qualname__}.forward")
