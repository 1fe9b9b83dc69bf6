"""The base of this package's configs."""

from __future__ import annotations

import inspect
from typing import Any, Self

from transformers import PreTrainedConfig


class CheckedConfig(PreTrainedConfig):
    """A config that also checks what ``from_pretrained`` overrides.

    transformers sets overrides after the config was checked: a wrong one would pass, and several that belong together
    would be checked as if they came alone.
    """

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Return the config of a dictionary, with the overrides among ``kwargs``."""
        parents = [parent for parent in cls.__mro__ if issubclass(parent, CheckedConfig)]
        names = {name for parent in parents for name in inspect.get_annotations(parent)}
        overrides = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        return super().from_dict(config_dict | overrides, **kwargs)
