"""The attention interface of transformers, as the forward of a module uses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import GraphFilterError
from ..watching import running_forward

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a forward names that computes attention through the interface


def uses_interface(forward: Any) -> bool:
    """Return whether a function computes attention through the attention interface."""
    return INTERFACE in getattr(getattr(forward, "__code__", None), "co_names", ())


def leads_to_filter(module: nn.Module) -> bool:
    """Return whether the forward of a patched module, as it is now, is known to run the filter."""
    return uses_interface(running_forward(module))


@functools.cache
def _interface_of(module_class: Any) -> tuple[dict[str, Any], str]:
    """Return (globals of the file, name of the eager function in it) of a module's ``forward``."""
    forwards: list[Any] = [inspect.unwrap(cls.forward) for cls in module_class.__mro__ if hasattr(cls, "forward")]
    # a library may have replaced the module's class by one that calls it: this finds the module's own forward
    forward = next((forward for forward in forwards if uses_interface(forward)), None)
    if forward is None:
        raise GraphFilterError(
            f"the forward of {module_class.__name__}, a module with a graph filter, was replaced: put the original "
            "back, or call unpatch_model"
        )
    names = forward.__code__.co_names
    eager = next((n for n in names if n.endswith("eager_attention_forward")), "eager_attention_forward")
    return forward.__globals__, eager


def attention_function(module_class: Any, implementation: str) -> Callable[..., Any]:
    """Return the function that the module's own ``forward`` would call.

    It comes from the interface of the module's file, or is the eager function that the file names.
    """
    compiling = torch.compiler.is_compiling()  # which looks into functions and warns of a cache
    namespace, eager = _interface_of.__wrapped__(module_class) if compiling else _interface_of(module_class)
    return namespace[INTERFACE].get_interface(implementation, namespace.get(eager))  # type: ignore[no-any-return]


@functools.cache
def honours_softcap(attend: Callable[..., Any]) -> bool:
    """Return whether an attention function takes ``softcap``."""
    return "softcap" in inspect.signature(attend).parameters


# copies differ in the name of the file and in the line, and not in these
_CODE_FIELDS = ("co_code", "co_consts", "co_names", "co_varnames")


@functools.cache
def is_textbook(attend: Callable[..., Any]) -> bool:
    """Return whether an eager function is a copy of BERT's: ``dropout(softmax(scale Q K^T + mask)) V`` and no more.

    transformers copies BERT's function into the files of many models. In other files, functions of this name do more.
    """
    from transformers.models.bert import modeling_bert  # at the top of the file, this import would be circular

    code, textbook = getattr(attend, "__code__", None), modeling_bert.eager_attention_forward.__code__
    if code is None or textbook.co_filename != modeling_bert.__file__:  # somebody has replaced BERT's
        return False
    return all(getattr(code, part) == getattr(textbook, part) for part in _CODE_FIELDS)
