"""Training patched models with the ordinary Trainer."""

from .optimizer import filter_optimizer, parameter_groups

__all__ = ["filter_optimizer", "parameter_groups"]
