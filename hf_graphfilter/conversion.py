"""The earlier name of ``hf_graphfilter.fitting``."""

from .fitting import *  # noqa: F403
